"""Completions of real tokens, as whole replies and as the pieces of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conversations import user
from tests.gateway.recorded import tool
from tests.gateway.talking import pocket
from tests.parsing.forms import answered, ids_of
from tests.support import make_renderer
from tokentrace import Renderer
from tokentrace.engines.protocol import Completion, Delta, FinishReason
from tokentrace.gateway.answering import finish_reply
from tokentrace.gateway.dialect import Dialect, Head, ItemChange, ItemStream, Reply, encode_sse
from tokentrace.gateway.requests import AnswerOptions, Request
from tokentrace.parsing.response import PartKind

LOOK: Any = tool("look", "place")
CALL = '<tool_call>\n{"name": "look", "arguments": {"place":  "Zürich" }}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>'
QUOTED = '<tool_call>\n{"name": "look", "arguments": {"day": 1, "place": "He said "hi" there"}}\n</tool_call>'
NAMELESS = '<tool_call>\n{"arguments": {}}\n</tool_call>'
TWICE = '<tool_call>\n{"name": "look", "arguments": {"place": "a", "place": "b"}}\n</tool_call>'

COMPLETIONS = {
    "nothing": "",
    "content": "Well, naïve 東京 🗼\n\nyes.  ",
    "reasoning": "<think>\nHm. 🧮\n</think>\n\nSo it is.",
    "calls": f"Let me look.\n{CALL}\n{CALL}",
    "only a call": CALL,
    "everything": f"<think>\nWhich?\n</think>\n\n  Let me see.\n{CALL}\n{OTHER}",
    "a broken call": f"I try.\n{BROKEN}",
    "a broken call between others": f"{CALL}\n{BROKEN}\n{CALL}",
    "a quote that is not escaped": f"{QUOTED}\n{CALL}",
    "arguments that are no object": CALL.replace('{"place":  "Zürich" }', "[1, 2]"),
    "no arguments": '<tool_call>\n{"name": "look"}\n</tool_call>',
    "a call without a name": f"I try.\n{NAMELESS}",
    "an argument twice": TWICE,
}

CUT_OFF = {
    "in its content": "Well, naï",
    "in its reasoning": "<think>\nHm. 🧮",
    "in a call": f"I see.\n{CALL[:-20]}",
    "in a call's name": CALL[:25],
    "after a call's name": CALL[:29],
    "in a list": CALL.replace('"Zürich" }}\n</tool_call>', '[1, {"a": [2.5, "x'),
    "after a call": CALL,
}


def renderer_of(family: str) -> Renderer:
    return pocket() if family == "pocket" else make_renderer(family, trusted=[])


@dataclass(frozen=True)
class Sampled:
    reply: Reply
    pieces: list[tuple[list[ItemChange], Delta | None]]
    """The changes and tokens of each piece, as an encoder is fed them."""


def sampled(
    renderer: Renderer,
    ids: Sequence[int],
    options: AnswerOptions | None = None,
    *,
    size: int = 1,
    finish_reason: FinishReason = FinishReason.STOP,
    turn: str = "t",
    cached: int | None = None,
    stop: Sequence[str] = (),
) -> Sampled:
    """A completion in pieces of `size` tokens. Each logprob is that of one position only."""
    options = options or AnswerOptions()
    parser = renderer.streaming_parser(tools=[LOOK], prompt_ids=answered(renderer))
    stream = ItemStream(f"call{turn}{{}}".format, options, stop)
    numbers = np.asarray(ids, np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 64
    tops = [[(int(id), float(logprob)), (0, -50.0)] for id, logprob in zip(ids, logprobs, strict=True)]
    pieces: list[tuple[list[ItemChange], Delta | None]] = []
    for start in range(0, len(ids), size):
        cut = slice(start, start + size)
        delta = Delta(numbers[cut], logprobs[cut], channels={"top_logprobs": tops[cut]})
        pieces.append((stream.feed(parser.feed(ids[cut])), delta))
    completion = Completion(numbers, logprobs, finish_reason, cached_tokens=cached, channels={"top_logprobs": tops})
    reply, changes = finish_reply(parser, stream, completion)
    return Sampled(reply, [*pieces, (changes, None)])


def from_text(
    renderer: Renderer, text: str, options: AnswerOptions | None = None, *, stops: bool = True, **more: Any
) -> Sampled:
    ids = [*ids_of(renderer, (text,)), *(renderer.get_stop_token_ids()[:1] if stops else ())]
    return sampled(renderer, ids, options, finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH, **more)


def expected_message(choice: Sampled, turn: str = "t") -> dict[str, Any]:
    """The message that OpenAI's clients get: call attempts with a name are calls, all others are text."""
    response, texts, calls = choice.reply.response, list[str](), list[dict[str, Any]]()
    for part in response.parts:
        attempt = None if part.call is None else response.tool_calls[part.call]
        if attempt is not None and attempt.name is not None:
            id = f"call{turn}{attempt.index}" if attempt.late_id or not attempt.id else attempt.id
            function = {"name": attempt.name, "arguments": attempt.arguments_text}
            calls.append({"id": id, "type": "function", "function": function})
        elif part.kind is not PartKind.REASONING:
            texts.append(part.lead + part.text)
    content = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if response.reasoning_content:
        message["reasoning_content"] = response.reasoning_content
    return message | ({"tool_calls": calls} if calls else {})


def head_of(renderer: Renderer, request: Request | None = None, *, n: int = 1, **options: Any) -> Head:
    request = request or Request(messages=[user("Hi.")], tools=[LOOK], n=n, answer=AnswerOptions(**options))
    prompt_ids = np.asarray(answered(renderer), np.int32)
    return Head(request, "a1b2", 17, "m", prompt_ids, renderer.tokenizer.vocabulary.token_bytes)


def streamed(dialect: type[Dialect], head: Head, choices: Sequence[Sampled]) -> list[dict[str, Any]]:
    encoder = dialect(head)
    events = list(encoder.open())
    for step in range(max(len(choice.pieces) for choice in choices)):
        for at, choice in enumerate(choices):
            if step < len(choice.pieces):
                events += encoder.feed(at, *choice.pieces[step])
    return events + encoder.close([choice.reply for choice in choices])


def as_sse(dialect: type[Dialect], events: Sequence[dict[str, Any]]) -> str:
    return (b"".join(map(encode_sse, events)) + dialect.end).decode()


HARMONY_CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place":"Zürich"}<|call|>'
FAMILIES = {
    "qwen3": list(COMPLETIONS.values()),
    "gpt-oss": [
        "<|channel|>analysis<|message|>Hm. 🧮<|end|><|start|>assistant<|channel|>final<|message|>naïve 東京<|return|>",
        f"<|channel|>analysis<|message|>Which?<|end|><|start|>assistant{HARMONY_CALL}",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}",
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place":<|call|>',
    ],
    "kimi-k2": [
        "Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"place": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{a"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
}
