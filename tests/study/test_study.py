"""What is learned about a template is shared by all its renderers, and cached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conversations import SIMPLE
from tokentrace import create_renderer
from tokentrace.pocket import POCKET
from tokentrace.rendering.past import Past
from tokentrace.study.memory import Memory
from tokentrace.study.study import study_of
from tokentrace.template import ChatTemplate
from tokentrace.tokens.loading import load_tokenizer


def test_renderers_of_one_template_share_its_study() -> None:
    tokenizer = load_tokenizer(POCKET)
    renderer = create_renderer(tokenizer)
    study = renderer.study()
    assert create_renderer(tokenizer, use_patched=True, history="inference").study() is study
    assert replace(renderer, past=Past.PRESERVE).study() is study
    assert renderer.silent().study() is study
    assert renderer.study(SIMPLE) is study
    assert create_renderer(tokenizer, enable_thinking=False).study() is not study
    assert create_renderer(load_tokenizer(POCKET)).study().tokenizer is not tokenizer


def test_variables_that_are_not_json_are_not_shared() -> None:
    tokenizer = load_tokenizer(POCKET)
    template = ChatTemplate("{{ made }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert study_of(template, tokenizer, {"made": 1}) is study_of(template, tokenizer, {"made": 1})
    assert study_of(template, tokenizer, {"made": 1}) is not study_of(template, tokenizer, {"made": True})
    one = study_of(template, tokenizer, {"made": b"x"})
    assert study_of(template, tokenizer, {"made": b"x"}) is not one


def test_memory_answers_after_it_is_full_and_keeps_no_errors() -> None:
    memory = Memory(most=8)
    for key in range(100):
        assert memory.once(key, lambda key=key: key * 2) == key * 2  # type: ignore[misc]

    def fail() -> int:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        memory.once("x", fail)
    assert memory.once("x", lambda: 1) == 1
    assert memory.once("y", lambda: 1, keep=lambda found: found > 1) == 1
    assert memory.once("y", lambda: 2) == 2


def test_a_study_is_shared_by_what_variables_are_not_by_how_they_look() -> None:
    class Loud(int):
        def __str__(self) -> str:
            return "loud"

        __repr__ = int.__repr__

    tokenizer = load_tokenizer(POCKET)
    template = "{{ x }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"

    def text(x: object) -> str:
        return create_renderer(tokenizer, chat_template=template, x=x).render([{"role": "user", "content": "hi"}]).text

    value = {"a": [1]}
    first = create_renderer(tokenizer, chat_template=template, x=value)
    value["a"].append(2)
    assert text({"a": [1]}).startswith("{'a': [1]}")
    assert first.render([{"role": "user", "content": "hi"}]).text.startswith("{'a': [1]}")
    kept = create_renderer(tokenizer, chat_template=template, x=1)
    assert text(Loud(1)).startswith("loud")
    assert kept.render([{"role": "user", "content": "hi"}]).text.startswith("1")
