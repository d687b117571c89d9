"""Agents for tests: each has its own conversation, in any dialect, streamed or whole, and records the answers."""

import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.parsing.forms import ids_of
from tokentrace import Renderer, create_renderer
from tokentrace.engines import SamplingParams
from tokentrace.pocket import POCKET

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


class Unfinished(Exception):  # noqa: N818
    """Raised if an answer breaks off."""


class Refused(Exception):  # noqa: N818
    """Raised if the answer is an error."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        super().__init__(f"{status} {body}")


@dataclass(frozen=True)
class Answer:
    id: str
    text: str
    tokens: int


@cache
def pocket() -> Renderer:
    return create_renderer(POCKET)


def counting(prompt: Any, sampling: SamplingParams) -> list[int]:
    return answer_ids(f"That is {int(np.asarray(prompt, np.int64) @ np.arange(1, len(prompt) + 1)) % 1_000_003}.")


def answer_ids(text: str) -> list[int]:
    return [*ids_of(pocket(), (text,)), *pocket().get_stop_token_ids()[:1]]


@dataclass
class Agent:
    """Asks one question after another, each with the conversation before it."""

    name: str
    session: str
    dialect: str = "chat"
    stream: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    max_tokens: int = 12
    previous: bool = False
    """Whether it sends `previous_response_id` instead of repeating the conversation."""

    def ask(self, url: str, text: str | None = None, **headers: str) -> Answer:
        """Send a question; returns the answer. Only answered questions become part of the conversation."""
        text = text or f"{self.name}, question {len(self.answers)}: what is {len(self.answers)} + 4?"
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = self._send(url, self._body(messages), headers)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        return answer

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "pocket", "stream": self.stream}
        if self.dialect == "responses":
            body |= {"input": messages, "max_output_tokens": self.max_tokens}
            if self.previous and self.answers:
                body |= {"input": messages[-1:], "previous_response_id": f"resp_{self.answers[-1].id}"}
            return body
        if self.dialect == "chat" and self.stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, "messages": messages, "max_tokens": self.max_tokens}

    def _send(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        try:
            path = f"/sessions/{self.session}{PATHS[self.dialect]}"
            fields = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
            connection.request("POST", path, json.dumps(body), fields)
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(response.status, json.loads(response.read()))
            return self._streamed(_events(response)) if self.stream else self._whole(json.loads(response.read()))
        finally:
            connection.close()

    def _whole(self, answer: dict[str, Any]) -> Answer:
        id, usage = _bare(answer["id"]), answer["usage"]
        if self.dialect == "chat":
            return Answer(id, answer["choices"][0]["message"]["content"] or "", usage["completion_tokens"])
        items = answer["content"] if self.dialect == "messages" else answer["output"]
        parts = [part for item in items for part in (item.get("content", ()) if item["type"] == "message" else [item])]
        return Answer(id, "".join(part.get("text", "") for part in parts), usage["output_tokens"])

    def _streamed(self, events: Iterator[Any]) -> Answer:
        id, text, tokens = "", "", -1
        for event in events:
            if event == "[DONE]":
                return Answer(id, text, tokens)
            if "error" in event or event.get("type") in ("error", "response.failed"):
                raise Refused(200, event)
            match event.get("type"):
                case None:
                    id = _bare(event["id"])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                case "message_start":
                    id = _bare(event["message"]["id"])
                case "content_block_delta":
                    text += event["delta"].get("text", "")
                case "message_delta":
                    tokens = event["usage"]["output_tokens"]
                case "message_stop":
                    return Answer(id, text, tokens)
                case "response.created":
                    id = _bare(event["response"]["id"])
                case "response.completed" | "response.incomplete":
                    return self._whole(event["response"])
        raise Unfinished(id)


def _bare(id: str) -> str:
    return id.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("resp_")


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events, as they arrive; an incomplete frame is dropped."""
    data = ""
    for raw in response:
        line = raw.decode()
        if line.startswith("data:"):
            data = line[5:].strip()
        elif line in ("\n", "\r\n") and data:
            yield data if data == "[DONE]" else json.loads(data)
            data = ""


def every_kind(sessions: Sequence[str], count: int, **options: Any) -> list[Agent]:
    """Agents of all dialects, streamed and whole, spread over sessions."""
    dialects = list(PATHS)
    return [
        Agent(f"agent {at}", sessions[at % len(sessions)], dialects[at % 3], bool(at // 3 % 2), **options)
        for at in range(count)
    ]
