"""Rows made of a prompt and a response."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.oracle import hf_tokenizer
from tests.samples.family_rows import (
    make_renderer,
)
from tokentrace.errors import SampleError
from tokentrace.samples import build_prompt_response_sample
from tokentrace.tokens.kinds import Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""The tests of that warning catch it themselves."""
# -- a prompt and a response


SEED = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "How are you?"}]
REPLY = "I'm good, thank you!"


def test_prompt_and_response_are_encoded_apart_as_transformers_would() -> None:
    tokenizer = hf_tokenizer("qwen2.5")
    prompt_str = tokenizer.apply_chat_template(SEED, tokenize=False, add_generation_prompt=True)
    response_str = REPLY + tokenizer.eos_token
    prompt_ids = tokenizer.encode(prompt_str, add_special_tokens=False)
    response_ids = tokenizer.encode(response_str, add_special_tokens=False)
    renderer = make_renderer("qwen2.5")
    for prompt in (SEED, prompt_str):
        sample = build_prompt_response_sample(renderer, prompt, REPLY)
        assert sample.token_ids == prompt_ids + response_ids
        assert sample.labels.tolist() == [-100] * len(prompt_ids) + response_ids
        assert sample.attention_mask.tolist() == [1] * len(sample)
        assert not sample.notes
        assert sample.parts is not None
        own = sample.parts[len(prompt_ids) :].tolist()
        assert own == [Part.CONTENT] * (len(response_ids) - 1) + [Part.STOP]
    assert set(sample.messages[len(prompt_ids) :].tolist()) == {1}


def test_eos_that_ends_no_turn_of_the_template_is_told() -> None:
    renderer = make_renderer("qwen2.5")
    sample = build_prompt_response_sample(renderer, SEED, REPLY, eos="<|endoftext|>")
    assert sample.token_ids[-1] == renderer.tokenizer.token_id("<|endoftext|>")
    assert sample.loss_mask[-1] == 1
    (note,) = sample.notes
    assert "'<|endoftext|>'" in note
    assert "'<|im_end|>'" in note


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"response": ["no"]}, "the response is a string, not a list"),
        ({"eos": "<|no such token|>"}, "is not a control token"),
        ({"eos": "word"}, "is not a control token"),
    ],
)
def test_prompt_and_response_that_are_none_are_refused(changed: dict[str, Any], problem: str) -> None:
    given_: dict[str, Any] = {"prompt": SEED, "response": REPLY} | changed
    with pytest.raises(SampleError, match=re.escape(problem)):
        build_prompt_response_sample(make_renderer("qwen2.5"), **given_)
