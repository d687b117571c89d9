"""What tests of stored trajectories share: trajectories, and records written by hand."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from tests.trajectory.walk import Walk
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import (
    Trajectory,
)


def walked(seed: int, steps: int, *, rewards: bool = True) -> Walk:
    walk = Walk(seed, rewards=rewards)
    for _ in range(steps):
        walk.step()
    return walk


def small() -> Trajectory:
    trajectory = Trajectory(name="small", metadata={"task": 3})
    trajectory.begin([1, 2, 3], messages=2, message_spans=[(0, 1, 0), (1, 3, 1)])
    trajectory.append_completion([4, 5], [-0.5, -1.5], finish_reason="stop", version=[("a", 0, 1), (2, 1, 2)])
    trajectory.append_context([6], Kind.CONTEXT, messages=1, message_spans=[(0, 1, 0)])
    trajectory.branch([1, 2, 3, 4, 9], cause="rewritten")
    trajectory.append_completion([7], [-0.25], finish_reason="length", sampling={"temperature": 1.0})
    return trajectory


def record(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<QB", len(payload), kind)
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))


def payload(value: Any, rest: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(text)) + text + rest
