"""Agents that are not ours, as something that a trainer runs: each rollout is a session of the recording gateway."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from ..data.sources import pyarrow
from ..data.tables import table_samples
from ..engines.protocol import EngineError, EngineUnavailable
from ..rollout.calling import in_thread
from ..rollout.checks import reward as checked_reward
from ..rollout.ends import End
from ..rollout.patience import Patience
from ..rollout.record import Task
from .finished import Finished


@dataclass(frozen=True, slots=True)
class Session:
    """Where an agent of one rollout sends its requests."""

    task: Task
    base_url: str
    """For Anthropic's clients; OpenAI's want `openai_base_url`."""
    openai_base_url: str
    key: str
    """Of this session alone."""


Client = Callable[[Session], float | Awaitable[float | None] | None]
"""Runs an agent to its end, and returns its reward, or None if the gateway is told it otherwise. A plain function runs
in a thread of its own."""


class GatewayAgent:
    """Runs an agent behind the gateway at `url`: a session for each rollout, sampled as `settings` say.

    `key` is an admin key of the gateway, None for one that was started with ``--dev``. What the agent asked for is
    not what is sampled with: ``settings["sampling"]`` is (temperature 1 by default). Seeds are the agent's affair.
    An agent that raises has failed: its rows are kept, and it has no reward.
    """

    def __init__(
        self, url: str, client: Client, *, key: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._settings = {"sampling": {"temperature": 1.0, "top_p": 1.0}, **(settings or {})}

    async def run(self, task: Task, *, seed: int | None = None, patience: Patience | None = None) -> Finished:
        """One rollout, from its session to its rows."""
        name = f"{task.name or 'rollout'}.{uuid.uuid4().hex[:12]}"
        end, notes, reward = End.ANSWER, [], None
        async with httpx2.AsyncClient(base_url=self._url, headers=self._headers, timeout=60) as http:
            made = await _ask(http, "POST", "/sessions", id=name, metadata=task.metadata, settings=self._settings)
            about = json.loads(made)
            session = Session(task, about["base_url"], about["openai_base_url"], about["key"])
            try:
                reward = checked_reward(await self._reward(session), "the reward")
            except Exception as error:
                end = End.FAILED
                notes.append(f"{type(error).__name__}: {error}")
            if reward is not None:
                await _ask(http, "POST", f"/sessions/{name}/rewards", reward=reward)
            await _ask(http, "POST", f"/sessions/{name}/seal")
            table = pyarrow().ipc.open_stream(await _ask(http, "GET", f"/sessions/{name}/rows?format=arrow")).read_all()
        samples = list(table_samples(table))
        messages = json.loads(table.column("messages")[-1].as_py()) if samples else list(task.messages)
        if end is not End.FAILED and samples:
            reward = samples[0].reward
        metrics = {"end": str(end), "reward": reward, "samples": len(samples)}
        return Finished(samples, messages, _given(messages), reward, metrics, notes)

    async def _reward(self, session: Session) -> float | None:
        if inspect.iscoroutinefunction(self._client) or inspect.iscoroutinefunction(type(self._client).__call__):
            found: Any = self._client(session)
        else:
            found = await in_thread(lambda: self._client(session))
        return await found if isinstance(found, Awaitable) else found


async def _ask(http: Any, method: str, path: str, **body: Any) -> bytes:
    try:
        answer = await http.request(method, path, json=body if method == "POST" else None)
    except httpx2.HTTPError as error:
        raise EngineUnavailable(f"the gateway does not answer: {type(error).__name__}: {error}") from error
    if answer.status_code >= 300:
        raise EngineError(f"the gateway refused {method} {path}: {answer.status_code} {answer.text[:500]}")
    content: bytes = answer.content
    return content


def _given(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages stand before the first of the model's."""
    return next((at for at, one in enumerate(messages) if one.get("role") == "assistant"), len(messages))
