"""Requests that are being answered, so that one that comes again waits for the answer and is not sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from .dialect import Head, Reply
from .requests import RequestError

Answered: TypeAlias = tuple[Head, list[Reply]]
UnderWay: TypeAlias = dict[tuple[str, str], "asyncio.Future[Answered]"]
"""Answers that are being sampled, by session and the names of their requests."""


def _future() -> asyncio.Future[Answered]:
    future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to wait for it
    return future


@dataclass(slots=True, eq=False)
class Claim:
    """One request that is being answered. Whoever makes a claim has to `end` it, whatever happens."""

    under_way: UnderWay
    keys: list[tuple[str, str]]
    future: asyncio.Future[Answered] = field(default_factory=_future)

    @classmethod
    def make(cls, under_way: UnderWay, session: str, names: Iterable[str]) -> Claim:
        """Say that the request of these names is being answered from now on."""
        claim = cls(under_way, [(session, name) for name in names])
        under_way.update(dict.fromkeys(claim.keys, claim.future))
        return claim

    def end(self, answered: Answered | None = None) -> None:
        """Give the answer to those who wait; without one they look for themselves. Only the first time counts."""
        if self.future.done():
            return
        for key in self.keys:
            if self.under_way.get(key) is self.future:
                del self.under_way[key]
        if answered is None:
            self.future.set_exception(RequestError("the first request was given up"))
        else:
            self.future.set_result(answered)
