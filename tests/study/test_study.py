"""What is learned about a template is shared by all its renderers, and cached."""

from dataclasses import replace

import pytest

from tests.conversations import SIMPLE
from tokentrace import InputError, create_renderer
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


def test_memory_answers_after_it_is_full_and_keeps_no_errors() -> None:
    memory = Memory(most=8)
    for key in range(100):
        assert memory.once(key, lambda key=key: key * 2) == key * 2  # type: ignore[misc]

    def fail() -> int:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        memory.once("x", fail)
    assert memory.once("x", lambda: 1) == 1
    assert memory.once("y", lambda: 1, keep=lambda value: value > 1) == 1
    assert memory.once("y", lambda: 2) == 2


def test_a_study_is_shared_by_what_variables_are_not_by_how_they_look() -> None:
    class Loud(int):
        def __str__(self) -> str:
            return "loud"

        __repr__ = int.__repr__

    tokenizer = load_tokenizer(POCKET)
    source = "{{ x }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    studies = [study_of(ChatTemplate(source), tokenizer, {"x": x}) for x in (1, 1, True)]
    assert [study is studies[0] for study in studies] == [True, True, False]
    with pytest.raises(InputError, match="not valid JSON"):
        study_of(ChatTemplate(source), tokenizer, {"x": b"x"})
    value = {"a": [1]}
    renderers = [(create_renderer(tokenizer, chat_template=source, x=x), str(x)) for x in (value, 1, Loud(1))]
    value["a"].append(2)
    for renderer, text in renderers:
        assert renderer.render([{"role": "user", "content": "hi"}]).text.startswith(text)
