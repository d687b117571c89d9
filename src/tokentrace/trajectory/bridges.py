"""Bridge: what a renderer puts after a stream to make the next prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError
from ..tokens.kinds import Kinds
from ..tokens.tokenizer import Ids
from .turns import MessageSpan


class Bridge(Protocol):
    """What is put after a stream to make the next prompt, as a renderer's bridge returns it."""

    @property
    def new_ids(self) -> Ids: ...
    @property
    def kinds(self) -> Kinds: ...
    @property
    def messages(self) -> npt.NDArray[np.int32]:
        """For each new token the new message it belongs to, counted from 0; -1 for none."""
        ...

    @property
    def new_count(self) -> int:
        """How many messages are new."""
        ...

    @property
    def stream_length(self) -> int:
        """The length of the stream it was made for."""
        ...

    @property
    def completion(self) -> Sequence[int] | Ids:
        """The end of that stream: what was sampled last."""
        ...


def bridge_spans(bridge: Bridge) -> list[MessageSpan]:
    """The runs of new tokens that belong to one new message, counted from the first new one."""
    owners = np.asarray(bridge.messages)
    if owners.dtype.kind not in "iu" or owners.shape != (len(bridge.new_ids),):
        raise TrajectoryError(
            f"bridge.messages must be {len(bridge.new_ids)} integers, one a new id, not {owners.dtype} of shape "
            f"{owners.shape}"
        )
    cuts = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(owners)]
    runs = [MessageSpan(start, stop, int(owners[start])) for start, stop in pairwise(cuts) if start < stop]
    return [run for run in runs if run.message != -1]
