"""Run any agent's rollouts through the gateway."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from ..data.sources import pyarrow
from ..data.tables import table_samples
from ..engines.errors import EngineError, EngineUnavailable
from ..rollout.calling import called
from ..rollout.ends import End
from ..rollout.patience import EngineDown, Patience
from ..rollout.record import Task, checked_reward
from .rows import FinishedRollout


@dataclass(frozen=True, slots=True)
class Session:
    """Where an agent sends requests. `base_url` is for Anthropic's clients."""

    task: Task
    base_url: str
    openai_base_url: str
    key: str
    id: str


Client = Callable[[Session], float | Awaitable[float | None] | None]
"""Runs an agent and may return its reward. A plain function runs in a thread."""


class GatewayAgent:
    """Runs an agent behind the gateway at `url`, each rollout in a session with `settings`.

    `key` is an admin key. ``settings["sampling"]`` (temperature 1 by default) replaces the
    agent's. The rows of an agent that raises stay, without a reward.
    """

    def __init__(
        self, url: str, client: Client, *, key: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._url, self._client = url.rstrip("/"), client
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._settings = {"sampling": {"temperature": 1.0, "top_p": 1.0}, **(settings or {})}

    async def run(
        self, task: Task, *, seed: int | None = None, patience: Patience | None = None
    ) -> FinishedRollout:
        async with httpx2.AsyncClient(base_url=self._url, headers=self._headers, timeout=60) as http:
            try:
                return await self._run(task, _Gateway(http, patience))
            except EngineDown:
                raise
            except EngineError as error:
                metrics = {"end": str(End.ENGINE), "reward": None, "samples": 0}
                return FinishedRollout(
                    [], list(task.messages), len(task.messages), None, metrics, [str(error)]
                )

    async def _run(self, task: Task, gateway: _Gateway) -> FinishedRollout:
        # what session ids allow
        readable = re.sub(r"[^A-Za-z0-9._:@~-]", "-", task.name)[:100].lstrip("._:@~-") or "rollout"
        id = f"{readable}.{uuid.uuid4().hex[:12]}"
        end, notes, reward, about = End.ANSWER, [], None, {**task.metadata, "task": task.name}
        request = {"id": id, "metadata": about, "settings": self._settings}
        created = json.loads(await gateway.ask("POST", "/sessions", **request))
        session = Session(task, created["base_url"], created["openai_base_url"], created["key"], id)
        try:
            reward = checked_reward(await called(self._client, session), "the reward")
        except Exception as error:
            end = End.FAILED
            notes.append(f"{type(error).__name__}: {error}")
        if reward is not None:
            await gateway.ask("POST", f"/sessions/{id}/rewards", reward=reward)
        await gateway.ask("POST", f"/sessions/{id}/seal")
        rows = await gateway.ask("GET", f"/sessions/{id}/rows?format=arrow")
        table = pyarrow().ipc.open_stream(rows).read_all()
        samples, messages = list(table_samples(table)), list(task.messages)
        prompt = len(messages)
        if samples:
            last, messages = samples[-1], json.loads(table.column("messages")[-1].as_py())
            prompt = int(last.messages[last.completions[0].start])
            reward = reward if end is End.FAILED else samples[0].reward
        metrics = {"end": str(end), "reward": reward, "samples": len(samples)}
        return FinishedRollout(samples, messages, prompt, reward, metrics, notes)


@dataclass(frozen=True, slots=True)
class _Gateway:
    http: Any
    patience: Patience | None

    async def ask(self, method: str, path: str, **body: Any) -> bytes:
        if self.patience is None:
            return await self._once(method, path, body)
        once, check = partial(self._once, method, path, body), partial(self._once, "GET", "/healthz", {})
        return await self.patience.ask(once, check)

    async def _once(self, method: str, path: str, body: Mapping[str, Any]) -> bytes:
        try:
            answer = await self.http.request(method, path, json=body if method == "POST" else None)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            # nothing was sent, so a retry is safe
            kind = type(error).__name__
            raise EngineUnavailable(f"the gateway cannot be reached: {kind}: {error}") from error
        except httpx2.HTTPError as error:
            raise EngineError(
                f"the gateway does not answer {method} {path}: {type(error).__name__}"
            ) from error
        if answer.status_code >= 300:
            raise EngineError(
                f"the gateway refused {method} {path}: {answer.status_code} {answer.text[:500]}"
            )
        return bytes(answer.content)
