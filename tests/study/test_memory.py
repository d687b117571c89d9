"""Threads that learn about one template at the same time do not wait for each other for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tokentrace import create_renderer
from tokentrace.computed import computed
from tokentrace.pocket import POCKET
from tokentrace.study.forms import TemplateForms
from tokentrace.tokens.loading import load_tokenizer

PATIENCE = 30
"""Seconds after which threads that wait for each other are a deadlock."""


def test_a_fact_may_ask_for_an_attribute_that_another_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    study = create_renderer(load_tokenizer(POCKET)).study()
    study.forms = TemplateForms(study)
    computing, learning = threading.Event(), threading.Event()
    probe = study.probe

    def meeting(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is first and not computing.is_set():
            computing.set()
            assert learning.wait(PATIENCE)
            study._facts.once("asked while an attribute is computed", lambda: None)
        return probe(*arguments, **options)

    def learn() -> Any:
        learning.set()
        assert computing.wait(PATIENCE)
        return study.forms.alone

    monkeypatch.setattr(study, "probe", meeting)
    first = threading.Thread(target=lambda: study.forms.alone, daemon=True)
    second = threading.Thread(target=lambda: study._facts.once("a fact", learn), daemon=True)
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert not first.is_alive()
    assert not second.is_alive()


def test_threads_that_compute_an_attribute_at_once_see_one_value() -> None:
    both = threading.Barrier(2)

    class Thing:
        @computed
        def value(self) -> object:
            both.wait(PATIENCE)
            return object()

    thing, values = Thing(), []
    threads = [threading.Thread(target=lambda: values.append(thing.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert values[0] is values[1] is thing.value
