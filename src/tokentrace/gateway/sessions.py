"""Sessions by id: read from the store when they are needed, in memory while they are in use."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from ..diagnose.message_keys import Meaning
from ..errors import brief
from ..store.store import SessionInfo, State, Store, StoreError
from ..trajectory.trajectory import Trajectory
from .matching import MEANINGS, Matcher, load_matcher
from .requests import SAMPLING, RequestError, check_sampling, convert
from .session import SessionRecord

if TYPE_CHECKING:
    from .http import Body
    from .requests import Request

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@~-]{0,127}")
ID_RULE: Final = "letters, digits and . _ : @ ~ -, at most 128 of them, the first a letter or a digit"

_Name: TypeAlias = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00\ud800-\udfff]+\Z")]
Version: TypeAlias = _Name | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""The name of weights: no NUL and no lone surrogate, which a store cannot keep."""
_IN_MEMORY: Final = 1000
Budget: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]


class SessionSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a session differs from others. `sampling` overrides what the agent asks for."""

    matcher: Matcher = Matcher.NORMAL
    sampling: dict[str, Any] = {}
    max_turns: Budget | None = None
    max_sampled_tokens: Budget | None = None
    max_prompt_tokens: Budget | None = None
    version: Version | None = None

    @classmethod
    def read(cls, value: Any) -> SessionSettings:
        """Settings as JSON has them. Raises RequestError that names what is wrong."""
        settings = convert(value, cls, "settings")
        names = ("max_tokens", *SAMPLING)
        if not settings.sampling.keys() <= set(names):
            problem = f"may have {', '.join(names)}, not {brief(settings.sampling)}"
            raise RequestError(problem, field="settings.sampling")
        check_sampling(settings.sampling, "settings.sampling.")
        return settings


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session in memory, and the lock for whoever reads or writes it."""

    info: SessionInfo
    settings: SessionSettings
    session: SessionRecord
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stale: bool = False
    """True if memory may differ from the store: nobody may use it any more."""
    last: dict[str, tuple[Body, Request]] = field(default_factory=dict)
    """The last request of each dialect: most of its history comes again."""


class Sessions:
    """The sessions of one gateway. Memory has what the store has, or a beginning of it."""

    def __init__(self, store: Store, vocab_size: int | None, *, matcher: str | None, create: bool) -> None:
        self.store, self.create, self._vocab_size = store, create, vocab_size
        self._matcher = matcher or ""
        self._default: Meaning | None = None if matcher is None else load_matcher(matcher)
        self._live: OrderedDict[str, LiveSession] = OrderedDict()

    async def find(self, id: str) -> SessionInfo | None:
        """What the store has about a session; None if there is none of that name."""
        return await self.store.session(id) if ID.fullmatch(id) else None

    async def info(self, id: str, *, create: bool = False) -> SessionInfo:
        """What the store has about a session. Raises RequestError if there is none and none may be created."""
        info = await self.find(id)
        if info is None and create and self.create and ID.fullmatch(id):
            info = await self.store.create(SessionInfo(id, State.OPEN, time.time()))
        if info is None:
            fix = "make one with POST /sessions"
            raise RequestError(f"there is no session {brief(id)}", fix=fix, status=404, code="no_session")
        return info

    async def get(self, id: str) -> LiveSession:
        """A session as it is in the store now. It is created if that is allowed."""
        info = await self.info(id, create=True)
        if info.state is State.DROPPED:
            raise dropped(id)
        live = self._live.get(id)
        if live is not None and live.info.settings != info.settings:  # they changed, perhaps at another gateway
            self.forget(live)
            live = None
        if live is None:
            settings = SessionSettings.read(info.settings)
            means, matcher = MEANINGS[settings.matcher], str(settings.matcher)
            if self._default is not None and settings.matcher is Matcher.NORMAL and self._default is not means:
                means, matcher = self._default, f"custom:{self._matcher}"
            trajectory = Trajectory(name=id, vocab_size=self._vocab_size)
            live = self._live[id] = LiveSession(info, settings, SessionRecord(trajectory, means, matcher))
        self._live.move_to_end(id)
        while len(self._live) > _IN_MEMORY:
            self._live.popitem(last=False)
        if len(live.session.turns) < info.turns:
            async with live.lock:
                await self._catch_up(live, info)
        if info.turns >= live.info.turns:  # otherwise a turn was added here meanwhile
            live.info = info
        return live

    @contextlib.asynccontextmanager
    async def locked(self, id: str, live: LiveSession | None = None) -> AsyncIterator[LiveSession]:
        """A session as it is in the store, for one user at a time. A free `live` one is not read again."""
        while True:
            live = live or await self.get(id)
            waits = live.lock.locked()
            async with live.lock:
                if waits and not live.stale:  # another gateway may have written to it meanwhile
                    live.info = await self.info(id)
                    await self._catch_up(live, live.info)
                if not live.stale:
                    yield live
                    return
            live = None

    async def _catch_up(self, live: LiveSession, info: SessionInfo) -> None:
        """Read the turns that are in the store and not in memory. The caller has the lock."""
        if live.stale or len(live.session.turns) >= info.turns:
            return
        try:
            async for turn in self.store.turns(info.id, len(live.session.turns)):
                live.session.replay(turn)
            if len(live.session.turns) < info.turns:
                if (await self.info(info.id)).state is State.DROPPED:
                    raise dropped(info.id)
                raise StoreError(f"session {info.id} is damaged: some of its {info.turns} turns are not in the store")
        except BaseException:
            self.forget(live)
            raise

    def peek(self, id: str) -> LiveSession | None:
        return self._live.get(id)

    def forget(self, live: LiveSession) -> None:
        """Remove a session from memory. Whoever needs it, or waits for it now, reads it again."""
        live.stale = True
        if self._live.get(live.info.id) is live:
            del self._live[live.info.id]

    def __len__(self) -> int:
        return len(self._live)


def dropped(id: str) -> RequestError:
    return RequestError(f"session {id} was dropped: its tokens are gone", status=404, code="no_session")
