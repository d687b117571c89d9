"""Sessions by id. The most recent ones stay in memory."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from ..errors import TrajectoryError, brief
from ..store.store import SessionInfo, State, Store, StoreError
from ..trajectory.trajectory import Trajectory
from .matching import MEANINGS, load_matcher
from .requests import SAMPLING, RequestError, check_sampling, convert
from .session import SessionRecord

if TYPE_CHECKING:
    from .http import Body
    from .requests import Request

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@~-]{0,127}")
ID_RULE = "letters, digits and . _ : @ ~ -, at most 128 characters, starting with a letter or digit"

_Name = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00\ud800-\udfff]+\Z")]
Version = _Name | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A store cannot keep NUL or lone surrogates."""
_IN_MEMORY = 1000
Count = Annotated[int, Meta(ge=0, le=2**53)]


class SessionSettings(Struct, frozen=True, forbid_unknown_fields=True):
    matcher: Literal["strict", "normal"] = "normal"
    sampling: dict[str, Any] = {}
    max_turns: Count | None = None
    max_sampled_tokens: Count | None = None
    max_prompt_tokens: Count | None = None
    version: Version | None = None

    @classmethod
    def read(cls, value: Any) -> SessionSettings:
        settings = convert(value, cls, "settings")
        names = ("max_tokens", *SAMPLING)
        if not settings.sampling.keys() <= set(names):
            problem = f"allows only {', '.join(names)}, not {brief(settings.sampling)}"
            raise RequestError(problem, field="settings.sampling")
        check_sampling(settings.sampling, "settings.sampling.")
        return settings


@dataclass(slots=True, eq=False)
class LiveSession:
    info: SessionInfo
    settings: SessionSettings
    session: SessionRecord
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stale: bool = False
    last: dict[str, tuple[Body, Request]] = field(default_factory=dict)


class Sessions:
    """A session in memory may lack the newest stored turns."""

    def __init__(self, store: Store, vocab_size: int | None, *, matcher: str | None, create: bool) -> None:
        self.store, self.create, self._vocab_size = store, create, vocab_size
        self._matcher = "normal" if matcher is None else matcher
        self._means = load_matcher(self._matcher)
        self.live: OrderedDict[str, LiveSession] = OrderedDict()

    async def find(self, id: str) -> SessionInfo | None:
        return await self.store.session(id) if ID.fullmatch(id) else None

    async def info(self, id: str, *, create: bool = False) -> SessionInfo:
        info = await self.find(id)
        if info is None and create and self.create and ID.fullmatch(id):
            info = await self.store.create(SessionInfo(id, State.OPEN, time.time()))
        if info is None:
            problem = f"there is no session {brief(id)}; create it with POST /sessions"
            raise RequestError(problem, status=404, code="no_session")
        return info

    async def get(self, id: str) -> LiveSession:
        info = await self.info(id, create=True)
        if info.state is State.DROPPED:
            raise dropped(id)
        live = self.live.get(id)
        # another gateway may have changed the settings
        if live is not None and live.info.settings != info.settings:
            self.forget(live)
            live = None
        if live is None:
            settings = SessionSettings.read(info.settings)
            matcher: str = settings.matcher
            means = MEANINGS[matcher]
            if matcher == "normal" and self._means is not means:
                means, matcher = self._means, f"custom:{self._matcher}"
            trajectory = Trajectory(name=id, vocab_size=self._vocab_size)
            live = self.live[id] = LiveSession(info, settings, SessionRecord(trajectory, means, matcher))
        self.live.move_to_end(id)
        while len(self.live) > _IN_MEMORY:
            self.live.popitem(last=False)
        if len(live.session.turns) < info.turns:
            async with live.lock:
                await self._catch_up(live, info)
        if info.turns >= live.info.turns:  # otherwise a turn was added here meanwhile
            live.info = info
        return live

    @contextlib.asynccontextmanager
    async def locked(self, id: str, live: LiveSession | None = None) -> AsyncIterator[LiveSession]:
        """Lock an up-to-date session. After a wait, a `live` one is read again."""
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
        """Read turns that only the store has. The caller holds the lock."""
        if live.stale or len(live.session.turns) >= info.turns:
            return
        try:
            async for turn in self.store.turns(info.id, len(live.session.turns)):
                live.session.replay(turn)
            if len(live.session.turns) < info.turns:
                if (await self.info(info.id)).state is State.DROPPED:
                    raise dropped(info.id)
                problem = f"the store lacks some of its {info.turns} turns"
                raise StoreError(f"session {info.id} is damaged: {problem}")
        except BaseException as error:
            self.forget(live)
            if isinstance(error, ValueError | TrajectoryError):
                raise StoreError(f"session {info.id} is damaged: {error}") from error
            raise

    def forget(self, live: LiveSession) -> None:
        """Remove a session from memory, so that it is read again."""
        live.stale = True
        if self.live.get(live.info.id) is live:
            del self.live[live.info.id]


def dropped(id: str) -> RequestError:
    return RequestError(f"session {id} was dropped: its tokens are gone", status=404, code="no_session")
