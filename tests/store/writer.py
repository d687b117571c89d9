"""Writes turns until the process is killed: ``python -m tests.store.writer STORE ROUND``.

Each line on stdout is an acknowledgement of the store: ``begun SESSION REQUEST`` or ``stored SESSION NUMBER REQUEST``.
"""

import asyncio
import os
import sys

from tests.store.support import made_up_turn, session
from tokentrace.store.store import Store, open_store
from tokentrace.trajectory import Trajectory
from tokentrace.trajectory.storage import replay_records

SESSIONS = [f"s{at}" for at in range(20)]


async def write(store: Store, id: str, round: str) -> None:
    """Append turns to a session without end, after those that are stored."""
    await store.create(session(id))
    trajectory, number = Trajectory(), 0
    async for turn in store.turns(id):
        replay_records(trajectory, turn.records)
        number += 1
    while True:
        request = f"{round}-{number}"
        await store.begin(id, request, {})
        report(f"begun {id} {request}")
        await store.append(id, made_up_turn(trajectory, number, id), request=request, names=[f"n{number}"])
        report(f"stored {id} {number} {request}")
        number += 1


def report(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # unbuffered, in a single write


async def main(where: str, round: str) -> None:
    store = open_store(where)
    await asyncio.gather(*(write(store, id, round) for id in SESSIONS))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
