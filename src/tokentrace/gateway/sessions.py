"""Sessions by id: read from the store when they are asked for, kept in memory while they are in use."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ..diagnose.message_keys import Meaning
from ..engines.protocol import EngineError, SamplingParams
from ..errors import shown
from ..store.store import SessionInfo, State, Store, StoreError, is_storable
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES
from .matching import MEANINGS, Matcher, load_matcher
from .requests import Body, RequestError, one_of
from .session import SessionRecord

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@~-]{0,127}")
"""What a session may be called."""
_BUDGETS: Final = ("max_turns", "max_sampled_tokens", "max_prompt_tokens")
_VERSION_LENGTH: Final = 200
_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "min_p", *PENALTIES)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session differs from others. `sampling` is used whatever the agent asks for."""

    matcher: str = Matcher.NORMAL
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    max_sampled_tokens: int | None = None
    """How many tokens may be sampled in all."""
    max_prompt_tokens: int | None = None
    """How long a prompt may be."""
    version: str | int | None = None
    """Which weights sample, where the engine does not say so."""

    @classmethod
    def read(cls, value: Any) -> SessionSettings:
        """Settings as JSON has them; RequestError names what is wrong."""
        said = Body(value, "settings")
        settings = cls(
            one_of("settings.matcher", said.get("matcher", str, "a string", Matcher.NORMAL), tuple(MEANINGS)),
            _sampling(said.get("sampling", Mapping, "an object", {})),
            **{name: said.whole(name, 0, 2**53) for name in _BUDGETS},
            version=read_version(said),
        )
        if said.unread:
            known = ", ".join(field.name for field in fields(cls))
            raise RequestError(f"may have {known}, not {', '.join(said.unread)}", field="settings")
        return settings


def read_version(body: Body) -> str | int | None:
    """The name of the weights in a body's ``version``, None if there is none. RequestError if it cannot be recorded."""
    version: str | int | None = body.get("version", (str, int), "a string or an integer")
    if isinstance(version, str) and not (0 < len(version) <= _VERSION_LENGTH and is_storable(version)):
        problem = f"must have 1 to {_VERSION_LENGTH} characters, no NUL and no lone surrogate, not {shown(version)}"
        raise body.wrong("version", problem)
    if isinstance(version, int) and not -(2**63) <= version < 2**63:
        raise body.wrong("version", f"must be an integer of 64 bits, not {shown(version)}")
    return version


def _sampling(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not set(value) <= set(_SAMPLING):
        raise RequestError(f"may have {', '.join(_SAMPLING)}, not {shown(value)}", field="settings.sampling")
    hottest = value.get("temperature")
    if isinstance(hottest, int | float) and hottest > 2:
        raise RequestError(f"must be a number from 0 to 2, not {shown(hottest)}", field="settings.sampling.temperature")
    try:
        SamplingParams(**{"max_tokens": 1, **value})
    except EngineError as error:
        raise RequestError(str(error), field="settings.sampling") from error
    return dict(value)


def _dropped(id: str) -> RequestError:
    return RequestError(f"session {id} was dropped", status=404, code="no_session")


@dataclass(slots=True, eq=False)
class Live:
    """A session in memory, and the lock that is held by whoever reads or writes it."""

    info: SessionInfo
    settings: SessionSettings
    session: SessionRecord
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stale: bool = False
    """Whether what is in memory may differ from what is in the store: nobody may use it any more."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the page's list had of it when it was last free."""


class Sessions:
    """The sessions of one gateway. What is in memory is what is in the store, or a beginning of it."""

    def __init__(
        self,
        store: Store,
        vocab_size: int | None,
        *,
        matcher: str | None = None,
        create: bool = False,
        kept: int = 1000,
    ) -> None:
        self.store, self.create, self.kept = store, create, kept
        self._vocab_size = vocab_size
        self._name = matcher or ""
        self._default: Meaning | None = None if matcher is None else load_matcher(matcher)
        self._live: OrderedDict[str, Live] = OrderedDict()

    async def find(self, id: str) -> SessionInfo | None:
        """What the store says of a session; None where there is none of that name."""
        return await self.store.session(id) if ID.fullmatch(id) else None

    async def known(self, id: str) -> SessionInfo:
        """What the store says of a session, which is not made by asking for it."""
        info = await self.find(id)
        if info is None:
            raise RequestError(f"there is no session {shown(id)}", status=404, code="no_session")
        return info

    async def existing(self, id: str) -> Live:
        """A session, as it is in the store now; it is not made by asking for it."""
        await self.known(id)
        return await self.get(id)

    async def info(self, id: str) -> SessionInfo:
        """What the store says of a session; made if it is not there and that is allowed."""
        info = await self.find(id)
        if info is None and self.create and ID.fullmatch(id):
            info = await self.store.create(SessionInfo(id, State.OPEN, time.time()))
        if info is None:
            raise RequestError(
                f"there is no session {shown(id)}; make one with POST /sessions", status=404, code="no_session"
            )
        return info

    async def get(self, id: str) -> Live:
        """A session, as it is in the store now."""
        info = await self.info(id)
        if info.state is State.DROPPED:
            raise _dropped(id)
        live = self._live.get(id)
        if live is not None and live.info.settings != info.settings:  # they were changed, maybe at another gateway
            self.forget(live)
            live = None
        if live is None:
            settings = SessionSettings.read(info.settings)
            means = MEANINGS[Matcher(settings.matcher)]
            if self._default is not None and settings.matcher == Matcher.NORMAL:
                means = self._default
            matcher = str(settings.matcher) if means is not self._default else f"custom:{self._name}"
            session = SessionRecord(Trajectory(name=id, vocab_size=self._vocab_size), means, matcher)
            live = self._live.setdefault(id, Live(info, settings, session))
        self._live.move_to_end(id)
        while len(self._live) > self.kept:
            self._live.popitem(last=False)
        if len(live.session.turns) < info.turns:
            async with live.lock:
                await self._catch_up(live, info)
        if info.turns >= live.info.turns:  # else a turn was added here while it was read
            live.info = info
        return live

    @contextlib.asynccontextmanager
    async def held(self, id: str, live: Live | None = None) -> AsyncIterator[Live]:
        """A session, as it is in the store now, for whoever reads or writes it: one at a time.

        A `live` one that was read a moment ago is not read again, unless somebody else has it.
        """
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

    async def _catch_up(self, live: Live, info: SessionInfo) -> None:
        """Read the turns that are in the store and not in memory. Its lock is held meanwhile."""
        if live.stale or len(live.session.turns) >= info.turns:
            return
        try:
            async for turn in self.store.turns(info.id, len(live.session.turns)):
                live.session.replay(turn)
            if len(live.session.turns) < info.turns and (await self.info(info.id)).state is not State.DROPPED:
                raise StoreError(f"session {info.id} is damaged: some of its {info.turns} turns are not in the store")
        except BaseException:
            self.forget(live)
            raise
        if len(live.session.turns) < info.turns:
            self.forget(live)
            raise _dropped(info.id)

    def peek(self, id: str) -> Live | None:
        """A session, if it is in memory."""
        return self._live.get(id)

    def forget(self, live: Live) -> None:
        """Take a session out of memory; it is read anew when it is asked for, by those too who wait for it now."""
        live.stale = True
        if self._live.get(live.info.id) is live:
            del self._live[live.info.id]

    def __len__(self) -> int:
        return len(self._live)
