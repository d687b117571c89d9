"""Exact ids in place of their rendering, for servers that receive whole message lists."""

from __future__ import annotations

from typing import Any

import pytest

from tests.assets import FAMILIES
from tests.conversations import CONVERSATIONS, assistant, call, result, system, tool, user
from tests.support import FULL, make_renderer, rendered, rotating, some
from tokentrace import InputError, RenderedTokens, Renderer, create_renderer
from tokentrace.diagnose.splicing import splice_prefix
from tokentrace.pocket import POCKET
from tokentrace.rendering.bridged import BridgedTokens
from tokentrace.study.seams import BridgeRefusal, RefusalReason
from tokentrace.tokens.kinds import Kind

DEPLOY = tool("deploy", "Deploy a service.", {"dry_run": {"type": "boolean"}}, [])
ODD = "<tool_call>\n<function=deploy>\n<parameter=dry_run>\nfalse\n</parameter>\n</function>\n</tool_call><|im_end|>"
"""A call that the template would spell with ``False``."""
CALLED = assistant("", call("deploy", {"dry_run": False}))
Coder = tuple[Renderer, list[int], list[int]]


def prompt_of(renderer: Renderer, *messages: dict[str, Any], tools: Any = None) -> list[int]:
    return renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)


def sampled(renderer: Renderer, text: str) -> list[int]:
    return [int(index) for index in renderer.tokenizer.encode(text)]


def spliced(result: BridgedTokens | BridgeRefusal) -> BridgedTokens:
    assert isinstance(result, BridgedTokens), str(result)
    return result


@pytest.fixture(scope="module")
def coder() -> Coder:
    """A renderer, a prompt, and a sampled call that the template would spell otherwise."""
    renderer = make_renderer("qwen3-coder")
    return renderer, prompt_of(renderer, user("Go."), tools=[DEPLOY]), sampled(renderer, ODD)


def test_exact_ids_replace_what_the_template_spells_otherwise(coder: Coder) -> None:
    renderer, prompt, completion = coder
    messages = [user("Go."), CALLED, result("done")]
    again = prompt_of(renderer, *messages, tools=[DEPLOY])
    assert again[: len(prompt + completion)] != prompt + completion
    tokens = spliced(splice_prefix(renderer, messages, prompt, completion, tools=[DEPLOY]))
    assert tokens.token_ids[: tokens.stream_length] == prompt + completion
    assert tokens.token_ids[tokens.stream_length :] == again[-len(tokens.new_ids) :]


def test_messages_may_carry_the_ids(coder: Coder) -> None:
    renderer, prompt, completion = coder
    carrying = CALLED | {"prompt_token_ids": prompt, "generation_token_ids": completion}
    messages = [user("Go."), carrying, result("done"), assistant("It is up."), user("Thanks.")]
    tokens = spliced(splice_prefix(renderer, messages, tools=[DEPLOY]))
    explicit = splice_prefix(renderer, messages, prompt, completion, message=1, tools=[DEPLOY])
    assert tokens == spliced(explicit)
    assert tokens.token_ids[: tokens.stream_length] == prompt + completion


@pytest.mark.parametrize("family", ["glm-4.5", "gpt-oss"])
def test_it_needs_no_end_of_sequence_token_in_the_history(family: str) -> None:
    """Counting those is how others find the place; here there are none, or the sampled one stands nowhere else."""
    renderer = make_renderer(family)
    text = {
        "glm-4.5": "\n<think>hm</think>\nFour, of  course.<|user|>",
        "gpt-oss": "<|channel|>final<|message|>Four, of  course.<|return|>",
    }[family]
    prompt, completion = prompt_of(renderer, user("2+2?")), sampled(renderer, text)
    messages = [user("2+2?"), assistant("Four, of  course."), user("Sure?")]
    tokens = spliced(splice_prefix(renderer, messages, prompt, completion))
    assert tokens.token_ids[: tokens.stream_length] == prompt + completion
    tail = {"glm-4.5": "\nSure?<|assistant|>", "gpt-oss": "<|start|>user<|message|>Sure?<|end|><|start|>assistant"}
    assert renderer.tokenizer.decode(tokens.new_ids) == tail[family]


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_a_turn_that_was_cut_off_is_closed(coder: Coder, cut: int) -> None:
    renderer, prompt, completion = coder[0], coder[1], coder[2][:cut]
    messages = [user("Go."), assistant(renderer.tokenizer.decode(completion)), user("Go on.")]
    tokens = spliced(splice_prefix(renderer, messages, prompt, completion, tools=[DEPLOY], check=False))
    assert tokens.token_ids[: tokens.stream_length] == prompt + completion
    assert tokens.closed
    assert renderer.tokenizer.decode(tokens.new_ids[tokens.kinds == Kind.SYNTHETIC]).endswith("<|im_end|>")


@pytest.mark.parametrize(
    ("history", "tools"),
    [
        ([user("Go."), assistant("", call("invalid", {"tool": "deploy"})), result("no")], [DEPLOY]),
        ([system("Be quick."), user("Go."), CALLED, result("done")], [DEPLOY]),
        ([user("Something else."), CALLED, result("done")], [DEPLOY]),
        ([user("Go."), CALLED, result("done")], [DEPLOY, tool("stop", "Stop.", {}, [])]),
    ],
    ids=["another call", "another system message", "another question", "other tools"],
)
def test_messages_that_say_something_else_are_refused(coder: Coder, history: list[dict[str, Any]], tools: Any) -> None:
    renderer, prompt, completion = coder
    tokens = splice_prefix(renderer, history, prompt, completion, tools=tools)
    assert isinstance(tokens, BridgeRefusal)
    assert tokens.reason is RefusalReason.REWRITES_PAST
    assert isinstance(splice_prefix(renderer, history, prompt, completion, tools=tools, check=False), BridgedTokens)


PICKY = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last message must be of a user or a tool') }}"
    "{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("source", [PICKY, None], ids=["rejects a last assistant", "pocket"])
def test_a_rewritten_past_is_refused_whatever_message_the_template_wants_last(source: str | None) -> None:
    renderer = create_renderer(POCKET, chat_template=source)
    prompt, completion = prompt_of(renderer, user("2+2?")), sampled(renderer, "Four, of  course.<|end|>")
    same = [user("2+2?"), assistant("Four, of  course."), user("Sure?")]
    tokens = spliced(splice_prefix(renderer, same, prompt, completion))
    assert tokens.token_ids[: tokens.stream_length] == prompt + completion
    for history in (
        [user("3+3?"), assistant("Four, of  course."), user("Sure?")],
        [user("2+2?"), assistant("I will not tell you that."), user("Sure?")],
    ):
        refused = splice_prefix(renderer, history, prompt, completion)
        assert isinstance(refused, BridgeRefusal), history
        assert refused.reason is RefusalReason.REWRITES_PAST
        assert isinstance(splice_prefix(renderer, history, prompt, completion, check=False), BridgedTokens)


def test_bad_calls_are_named() -> None:
    renderer = make_renderer("qwen3-coder")
    with pytest.raises(InputError, match="no assistant message carries prompt_token_ids"):
        splice_prefix(renderer, [user("a"), assistant("b"), user("c")])
    with pytest.raises(InputError, match="message 0: is not an assistant's message"):
        splice_prefix(renderer, [user("a"), assistant("b")], [1], [2], message=0)
    with pytest.raises(InputError, match="prompt_token_ids"):
        splice_prefix(renderer, [user("a"), assistant("b")], ["x"], [2])
    empty = splice_prefix(renderer, [user("a"), assistant("b")], [], [2])
    assert isinstance(empty, BridgeRefusal)
    assert empty.reason is RefusalReason.EMPTY_STREAM


def test_canonical_ids_give_the_rendering_itself_where_it_extends_them(any_family: str) -> None:
    """For every family: what is spliced is what the template writes, id for id, wherever it keeps the past."""
    renderer = make_renderer(any_family)
    equal, failures = 0, []
    for name, conversation in rotating(CONVERSATIONS.items(), any_family, 3):
        messages, tools = conversation.messages, conversation.tools
        whole = rendered(renderer, conversation, prompt=True)
        replies = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at]
        if not isinstance(whole, RenderedTokens) or not replies:
            continue
        turns = [turn for turn in whole.turns if turn.message == replies[0]]
        prompt = renderer.render(messages[: replies[0]], tools=tools, add_generation_prompt=True)
        if not turns or whole.token_ids[: turns[0].start] != prompt.token_ids:
            continue
        completion = whole.ids[turns[0].start : turns[0].stop]
        tokens = splice_prefix(renderer, messages, prompt.ids, completion, message=replies[0], tools=tools, check=False)
        if isinstance(tokens, BridgeRefusal) or tokens != whole.token_ids:
            failures.append(f"{name}: {tokens}")
        equal += 1
    assert not failures, some(failures)
    assert equal >= (FEW.get(any_family, 40) if FULL else FEW.get(any_family, 40) // 6), "the test compared too little"


FEW = dict.fromkeys(["qwen3-thinking-2507", "qwen3.5", "qwen3.6", "glm-4.7", "glm-4.7-flash", "glm-5", "minimax-m2"], 9)
"""Templates that write few past turns after the prompt that asked for them: it opens reasoning, the past has none."""
FEW |= {"nemotron-3-nano": 8, "qwq-32b": 1, "deepseek-r1": 0}
assert set(FEW) <= set(FAMILIES)
