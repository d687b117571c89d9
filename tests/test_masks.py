"""The loss mask: a token is sampled iff it lies after its turn's generation prompt, up to its stop token."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.assets import FAMILIES
from tests.conversations import CONVERSATIONS, HI, Conversation
from tests.oracle import Refusal, hf_jinja
from tests.support import (
    FULL,
    PYTHON_FORMATS,
    SPECIAL,
    load_family,
    make_renderer,
    over_bytes,
    rendered,
    rotating,
    some,
    templates_of_trl,
    tokenizer_json_for,
)
from tokentrace import RenderedTokens, Renderer, create_renderer

# -- compared with the generation tags of TRL's training templates

SEPARATOR = "the tags cover the newline after the stop token, which the template writes and nobody samples"
PROMPT = "the tags cover (part of) the generation prompt, which is given to the model"
HEAD = "the tags cover the head of a system turn, which no model samples to end its own"
END_OF_TEXT = "the tags cover what the template writes after the last stop token, at the end of all"
RESULT_HEAD = "the tags leave out the head of the tool's turn, at which the model stops after a call"

EXCEPTIONS: dict[str, set[str]] = {
    **{name: {SEPARATOR} for name in ("gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "smolvlm")},
    **{name: {SEPARATOR} for name in ("qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl")},
    **{name: {SEPARATOR, PROMPT} for name in ("qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")},
    **{f"nemotron_3_{name}": {SEPARATOR, PROMPT} for name in ("5_lightning", "nano", "super", "ultra")},
    **{name: {PROMPT} for name in ("deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer")},
    **{name: {SEPARATOR, END_OF_TEXT} for name in ("phi3", "phi3_5")},
    "diffusion_gemma": {SEPARATOR, RESULT_HEAD},
    "glm4moe": {HEAD},
}
"""How the tags of a training template differ from our mask. Templates that are not listed agree everywhere."""

TRAINING = sorted(name.removesuffix("_training") for name in templates_of_trl() if name.endswith("_training"))


def tagged(tokenizer: Any, source: str, conversation: Conversation) -> tuple[str, list[bool]] | None:
    """The text and the tagged tokens according to transformers; None if the template refuses."""
    result = hf_jinja(source, conversation.messages, conversation.tools, return_assistant_tokens_mask=True, **SPECIAL)
    if isinstance(result, Refusal):
        return None
    text, ranges = result
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    inside = np.zeros(len(text) + 1, np.int64)
    for start, end in ranges:
        inside[start + 1 : end + 1] = 1
    covered = np.cumsum(inside)[np.asarray(offsets, np.int64).reshape(-1, 2)]
    return text, (covered[:, 1] > covered[:, 0]).tolist()


def runs(ours: Sequence[bool], theirs: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Half-open ranges in which two masks differ in the same way."""
    start = 0
    for at in range(1, len(ours) + 1):
        if at == len(ours) or (ours[at], theirs[at]) != (ours[start], theirs[start]):
            if ours[start] != theirs[start]:
                yield start, at
            start = at


def kind_of(tokens: RenderedTokens, renderer: Renderer, conversation: Conversation, start: int, stop: int) -> str:
    """The kind of a difference, one of those above, by its position; else its text."""
    text = tokens.decode(slice(start, stop))
    by_stop = {turn.stop: turn for turn in tokens.turns}
    by_start = {turn.start: turn for turn in tokens.turns}
    if tokens.sampled[start]:
        if stop in by_stop and stop - start == 1 and text == "<|tool_response>":
            return RESULT_HEAD
    elif start in by_stop and text == "\n":
        return SEPARATOR
    elif start in by_stop and by_stop[start].stop_token is None and text == "<|system|>":
        return HEAD
    elif start in by_stop and stop == len(tokens) and text == "\n</s>":
        return END_OF_TEXT
    elif stop in by_start and text in prompt_of(renderer, conversation, by_start[stop].message):
        return PROMPT
    return repr(text)


def prompt_of(renderer: Renderer, conversation: Conversation, message: int) -> str:
    """The last 60 characters of the prompt of a message: a generation prompt is shorter."""
    before = Conversation(conversation.messages[:message] or [HI], conversation.tools)
    return str(rendered(renderer, before, prompt=True).text[-60:])


@pytest.mark.parametrize("name", TRAINING)
def test_sampled_is_what_training_templates_tag(name: str) -> None:
    plain, source = (templates_of_trl()[one] for one in (name, f"{name}_training"))
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json_for(plain, source))
    renderer = over_bytes(plain, controls=source, control_tokens="hf_compat", messages="as_given")
    differences: dict[str, str] = {}
    compared = sampled = 0
    for key, conversation in rotating(CONVERSATIONS.items(), name, 6):
        tokens = rendered(renderer, conversation)
        theirs = tagged(tokenizer, source, conversation)
        if not isinstance(tokens, RenderedTokens) or theirs is None or tokens.text != theirs[0]:
            continue
        compared += 1
        sampled += any(tokens.sampled)
        for start, stop in runs(tokens.sampled, theirs[1]):
            differences.setdefault(kind_of(tokens, renderer, conversation, start, stop), key)
    expected = EXCEPTIONS.get(name, set())
    assert set(differences) == expected if FULL else set(differences) <= expected, differences
    assert compared > (5 if FULL else 0)
    assert sampled > (3 if FULL else 0) or name == "llava_next"


# -- compared with prompts


def test_turn_is_sampled_from_the_end_of_its_prompt(any_family: str) -> None:
    """If the ids of a turn's prompt are a prefix of the whole rendering, sampling begins exactly at their end."""
    renderer = make_renderer(any_family)
    failures: list[str] = []
    checked = 0
    for key, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        if not isinstance(tokens, RenderedTokens):
            continue
        first = {turn.message: turn for turn in reversed(tokens.turns)}
        for message, turn in first.items():
            if not message:
                continue
            before = Conversation(conversation.messages[:message], conversation.tools)
            prompt = rendered(renderer, before, prompt=True)
            if not isinstance(prompt, RenderedTokens) or tokens.token_ids[: len(prompt)] != prompt.token_ids:
                continue
            checked += 1
            if turn.start != len(prompt):
                sampled_text = tokens.decode(slice(max(0, len(prompt) - 20), turn.stop))
                failures.append(f"{key}, message {message}: from {turn.start}, not {len(prompt)}: {sampled_text!r}")
    assert not failures, some(failures)
    assert checked > 0


def test_mask_does_not_depend_on_what_was_rendered_before(any_family: str) -> None:
    """Renderers cache the prompts that they have rendered; a new renderer must give the same mask."""
    used = make_renderer(any_family)
    tokenizer = load_family(any_family)
    for conversation in CONVERSATIONS.values():
        rendered(used, conversation)
    failures = []
    for key, conversation in rotating(CONVERSATIONS.items(), any_family, 8):
        again = rendered(used, conversation, again=True)
        if isinstance(again, RenderedTokens):
            fresh = create_renderer(tokenizer, "default", chat_template=PYTHON_FORMATS.get(any_family))
            if rendered(fresh, conversation).sampled != again.sampled:
                failures.append(key)
    assert not failures, some(failures)


# -- stop tokens

STOPS: dict[str, set[str]] = {
    "qwen": {"<|im_end|>"},
    "qwq": {"<|im_end|>"},
    "glm": {"<|user|>", "<|observation|>"},
    "minimax": {"[e~["},
    "deepseek": {"<｜end▁of▁sentence｜>"},
    "kimi": {"<|im_end|>"},
    "llama": {"<|eot_id|>"},
    "gpt-oss": {"<|return|>", "<|call|>"},
    "mistral": {"</s>"},
    "nemotron": {"<|im_end|>"},
    "gemma": {"<end_of_turn>"},
}
"""The publicly known stop tokens, by the prefix of the family's name."""

NEVER_STOPS = {"<|end|>", "<|im_start|>", "<|assistant|>", "</think>", "<tool_call>", "</tool_call>"}
"""Tokens that occur inside turns, or begin an assistant's turn: generation must not stop at them."""


def known_stops(family: str) -> set[str]:
    return next(stops for name, stops in STOPS.items() if family.startswith(name))


def test_stop_tokens_are_the_known_ones(any_family: str) -> None:
    tokenizer = load_family(any_family)
    eos = {tokenizer.variables.get("eos_token")}
    stops = {tokenizer.decode([stop]) for stop in make_renderer(any_family).get_stop_token_ids()}
    assert known_stops(any_family) <= stops
    assert stops <= known_stops(any_family) | eos
    assert not stops & NEVER_STOPS


GLM_UNSTOPPED = {(None, "<|system|>"), (None, "<|assistant|>")}
"""No token separates an assistant's turn from a system's or another assistant's turn after it."""

UNSTOPPED: dict[str, set[tuple[str | None, str]]] = {
    **{name: GLM_UNSTOPPED for name in FAMILIES if name.startswith("glm")},
    # the template leaves a single call without content open
    "deepseek-v3": {(None, "<｜tool▁outputs▁begin｜>")},
    # the template writes <|end|> in place of the <|return|> of a turn that is past
    "gpt-oss": {("<|end|>", "<|start|>")},
}
"""Turns that end without a stop token, as (last token, the token after it)."""


def test_assistants_alone_sample_and_every_turn_ends_with_its_stop_token(any_family: str) -> None:
    """Except a last turn, which some templates leave open, and the turns in `UNSTOPPED`."""
    renderer = make_renderer(any_family)
    tokenizer = load_family(any_family)
    stops = set(renderer.get_stop_token_ids())
    failures: list[str] = []
    seen: set[str] = set()
    for key, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        if not isinstance(tokens, RenderedTokens):
            continue
        assert {tokens.role(message) for message in set(tokens.messages[tokens.mask].tolist())} <= {"assistant"}, key
        for turn in tokens.turns:
            if turn.stop_token is not None:
                assert tokens.token_ids[turn.stop - 1] == turn.stop_token
                seen.add(tokenizer.decode([turn.stop_token]))
            if turn.stop_token in stops or (turn.stop_token is None and turn.stop == len(tokens)):
                continue
            following = tokenizer.decode(tokens.token_ids[turn.stop : turn.stop + 1])
            ending = None if turn.stop_token is None else tokenizer.decode([turn.stop_token])
            if (ending, following) not in UNSTOPPED.get(any_family, set()):
                failures.append(f"{key}, message {turn.message}: ends with {ending!r} before {following!r}")
    assert not failures, some(failures)
    assert seen - {"<|end|>"} == known_stops(any_family)


def test_header_of_a_turn_is_never_sampled(any_family: str) -> None:
    """The first control token after a user's turn. Only gpt-oss samples it, between reasoning and answer."""
    renderer = make_renderer(any_family)
    prompt = renderer.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    stops = renderer.get_stop_token_ids()
    content = int(prompt.select(field="content").nonzero()[0][-1])
    control = [int(prompt.ids[at]) for at in range(content + 1, len(prompt)) if prompt.control[at]]
    header = next(token for token in control if token not in stops)
    header_is_sampled: set[bool] = set()
    for conversation in CONVERSATIONS.values():
        tokens = rendered(renderer, conversation)
        for turn in tokens.turns if isinstance(tokens, RenderedTokens) else ():
            sampled = tokens.token_ids[turn.start : turn.stop]
            assert sampled[:1] != [header]
            header_is_sampled.add(header in sampled)
    assert (True in header_is_sampled) == (any_family == "gpt-oss")
