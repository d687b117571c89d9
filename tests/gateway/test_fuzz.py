"""Fuzzed requests: whatever is wrong with them, the answer is an error in the format of their API."""

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.gateway.server import Served, gateway_server
from tests.gateway.talking import counting, pocket
from tests.gateway.test_requests import CHAT_FIELDS, MESSAGES_FIELDS, RESPONSES_FIELDS
from tests.support import FULL
from tokentrace.engines import ScriptedEngine
from tokentrace.gateway.admission import Limits
from tokentrace.gateway.chat import ChatBody
from tokentrace.gateway.messages import MessagesBody
from tokentrace.gateway.responses import ResponsesBody

BODY_LIMIT = 2**20
CONTROLS = ["<|end|>", "<|turn|>", "<|bos|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
RAW = {
    "@@infinite": "1e999",
    "@@nan": "NaN",
    "@@digits": "9" * 5000,
    "@@many": "9" * 400,
    "@@deep": "[" * 5000 + "]" * 5000,
    "@@deep object": '{"a":' * 300 + "1" + "}" * 300,
    "@@half": '"\\ud800 x"',
    "@@other half": '"\\udfff"',
    "@@nul": '"\\u0000"',
    "@@twice": '{"type":"text","type":"image"}',
    "@@long": json.dumps("long " * 40_000),
    "@@odd": '"\u202e\u0301\U0001f469\u200d\U0001f680\\u2028"',
}
"""Valid JSON that Python's encoder does not write."""
NASTY = st.sampled_from([*RAW, *CONTROLS, "", " ", "\r\nx: y", "é", -1, 0, 2**31, 2**63, 2**64, -0.0, 1e308, [], {}])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(["auto", "none", "text", "function", "user", "assistant", "system", "enabled", "json_schema"])
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "function", "tool_calls", "id", "input", "arguments"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | KEYS, inner, max_size=3),
    max_leaves=8,
)
"""Any JSON, some of it with words that the APIs know."""
FIELDS = sorted({name for body in (ChatBody, MessagesBody, ResponsesBody) for name in body.__struct_fields__})
CALL = {"id": "c1", "type": "function", "function": {"name": "compute", "arguments": '{"formula": "1+1"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
    {"role": "assistant", "content": "I compute.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT_FIELDS, "messages": MESSAGES, "response_format": {"type": "text"}},
    "/v1/messages": {
        **MESSAGES_FIELDS,
        "output_config": {"effort": "low"},
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "compute", "input": {"formula": "1+1"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
    },
    "/v1/responses": {
        **RESPONSES_FIELDS,
        "text": {"format": {"type": "text"}},
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 1?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "compute", "arguments": '{"formula": "1+1"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
    },
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
}
ADMIN: dict[str, dict[str, Any]] = {
    "/sessions": {"metadata": {"task": 1}, "settings": {"max_turns": 3, "sampling": {"temperature": 1}}},
    "/sessions/adm/rewards": {"rewards": [{"reward": 1.0, "turn": 0}, {"grade": "good"}]},
    "/sessions/adm/seal": {},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    size = pocket().tokenizer.vocabulary.size
    engine = lambda: ScriptedEngine(counting, vocab_size=size, piece=3)  # noqa: E731
    with gateway_server(engine, limits=Limits(body_bytes=BODY_LIMIT)) as served:
        yield served


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def serialized(value: Any) -> bytes:
    """A body as JSON, in which the names in `RAW` are replaced by their raw text."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode("utf-8", "surrogatepass")


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places_in(item, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A valid body with a few values changed, added or removed."""
    body = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        places = places_in(body)
        *way, last = draw(st.sampled_from(places[1:])) if len(places) > 1 else ["x"]
        holder = body
        for key in way:
            holder = holder[key]
        match draw(st.sampled_from(["put", "put", "put", "take", "again", "add"])):
            case "put":
                holder[last] = draw(NASTY | JSON)
            case "take" if len(places) > 1:
                del holder[last]
            case "again" if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case _ if isinstance(holder, dict):
                name = draw(st.sampled_from(["", "x", "é", "\r\n", *CONTROLS, *FIELDS, "effort", "schema"]))
                holder[name] = draw(NASTY | JSON)
    return body


def check_answer(path: str, status: int, answer: Any) -> None:
    """Check that the API's own clients can read the answer or the error."""
    assert status < 500, (status, answer)
    if status >= 400:
        assert isinstance(answer["error"]["message"], str), answer
        assert answer["error"]["type"], answer
        assert (answer.get("type") == "error") == (path.startswith("/v1/messages")), answer
    elif path in GOOD and isinstance(answer, bytes):  # a stream
        last = [frame for frame in answer.decode().split("\n\n") if frame.strip()][-1]
        assert "[DONE]" in last or "message_stop" in last or "response." in last or "error" in last, last


examples = settings(
    max_examples=2000 if FULL else 30,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # each try is a request: no shrinking
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("path", GOOD)
def test_no_body_makes_the_gateway_fail(served: Served, caplog: pytest.LogCaptureFixture, path: str) -> None:
    def send(body: bytes) -> None:
        check_answer(path, *served.call("POST", f"/sessions/f{path}", body))
        assert not failures(caplog), (failures(caplog), body[:2000])

    good = GOOD[path]
    status, answer = served.call("POST", f"/sessions/f{path}", serialized(good))
    assert status == 200, answer
    for place in places_in(good)[1:]:  # each field once with each of these
        for value in (None, {"a": 1}, "@@half", CONTROLS[0]):
            body = copy.deepcopy(good)
            holder: Any = body
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            send(serialized(body))

    @examples
    @given(mutated(good))
    def mutate(body: Any) -> None:
        send(serialized(body))

    @examples
    @given(JSON | NASTY)
    def anything(body: Any) -> None:
        send(serialized(body))

    mutate()
    anything()
    odd = [b"", b"\xff\xfe", b"{", b'{"a"}', b"null", b"\xef\xbb\xbf{}", b"x" * 3]
    for body in (*odd, b"[" * 100_000, b"{" * BODY_LIMIT):
        send(body)


@pytest.mark.parametrize("path", ADMIN)
def test_no_body_makes_the_routes_of_administrators_fail(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    served.call("POST", "/sessions/adm/v1/chat/completions", {"messages": MESSAGES[:2], "max_tokens": 3})

    @settings(examples, max_examples=400 if FULL else 25)
    @given(mutated(ADMIN[path]) | JSON | NASTY)
    def mutate(body: Any) -> None:
        check_answer(path, *served.call("POST", path, serialized(body)))
        check_answer(path, *served.call("PATCH", "/sessions/adm", serialized(body)))
        check_answer(path, *served.call("GET", "/sessions/adm"))
        check_answer(path, *served.call("GET", "/sessions/adm/rows"))
        assert not failures(caplog), (failures(caplog), body)

    mutate()


def with_text(path: str, text: str) -> dict[str, Any]:
    """A valid body with a text in every place that users, tools and schemas write."""
    body = copy.deepcopy(GOOD[path])
    text_keys = {"text", "output", "description"}
    for place in places_in(body):
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        thought = isinstance(holder, dict) and holder.get("type") == "summary_text"  # the model's own reasoning
        trusted = thought or place[:1] == ("system",) or (place[:2] == ("messages", 0) and path.endswith("completions"))
        in_result = place[-1:] == ("content",) and isinstance(holder, dict) and holder.get("role") == "tool"
        in_result = in_result or (place[-1:] == ("content",) and holder.get("type") == "tool_result")
        if place and not trusted and (place[-1] in text_keys or in_result) and isinstance(holder[place[-1]], str):
            holder[place[-1]] = f"a {text} b"
    return body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_control_tokens_that_users_and_tools_type_stay_text(served: Served, path: str) -> None:
    controls = np.array(sorted(pocket().tokenizer.vocabulary.added), np.int32)

    def counts(text: str) -> tuple[int, list[int]]:
        before = len(served.prompts)
        status, answer = served.call("POST", f"/sessions/typed{path}", serialized(with_text(path, text)))
        assert status == 200, answer
        prompt = np.array(served.prompts[before], np.int32)
        return len(prompt), prompt[np.isin(prompt, controls)].tolist()

    length, plain = counts("plain")
    assert plain
    for text in CONTROLS:
        longer, actual = counts(text)
        assert actual == plain, text
        assert longer > length, text
