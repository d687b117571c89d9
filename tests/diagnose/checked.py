"""Rows to check, and checkers to check them with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from tests.conversations import PARIS, SIMPLE, SUNNY, assistant, user
from tests.support import load_family, per_family
from tokentrace.data.sources import Row
from tokentrace.data.tokenizing import RowTokenizer, TokenizeSettings
from tokentrace.diagnose.rows import CheckedRow, RowChecker
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Sample

MESSAGES = [
    user("Is <|end|> a token, and what is 1+1?"),
    assistant("Two, I say.", reasoning="Let me think it over."),
    user("And the weather in Paris?"),
    assistant("Let me look.", PARIS, reasoning="A tool knows."),
    SUNNY,
    assistant("It is sunny in Paris."),
]
CONVERSATION: dict[str, Any] = {"messages": MESSAGES, "tools": SIMPLE}


def checker(family: str | None = None, **options: Any) -> RowChecker:
    return _checker(family or "pocket", **options)


@per_family
def _checker(family: str, **options: Any) -> RowChecker:
    return RowChecker(make_settings(None if family == "pocket" else family, **options))


def make_settings(family: str | None = None, **options: Any) -> TokenizeSettings:
    """Rows are of the matrix, as it is: what templates do to it is known, and what they lose of it."""
    chosen = {"messages": "as_given", "lost": "ignore", **options}
    return TokenizeSettings(tokenizer=str(POCKET) if family is None else load_family(family), **chosen)


@per_family
def _tokenizer(family: str, **options: Any) -> RowTokenizer:
    return RowTokenizer(make_settings(None if family == "pocket" else family, **options))


def samples_of(conversation: dict[str, Any], family: str | None = None, **options: Any) -> tuple[Sample, ...]:
    made = _tokenizer(family or "pocket", **options).tokenize(Row(1, None, conversation), "rows")
    assert made.bad is None, made.bad
    return made.samples


def sample_of(conversation: dict[str, Any] = CONVERSATION, family: str | None = None, **options: Any) -> Sample:
    return samples_of(conversation, family, **options)[0]


def row_of(ids: Any, mask: Any = None, conversation: dict[str, Any] = CONVERSATION, **more: Any) -> dict[str, Any]:
    masked = {} if mask is None else {"loss_mask": [int(value) for value in mask]}
    return {**conversation, "input_ids": [int(index) for index in ids], **masked, **more}


def checked(row: dict[str, Any], family: str | None = None, **options: Any) -> CheckedRow:
    return checker(family, **options).check(Row(1, None, json.loads(json.dumps(row))))


def changed(change: Callable[[dict[str, Any]], Any], conversation: dict[str, Any] = CONVERSATION) -> dict[str, Any]:
    other = copy.deepcopy(conversation)
    change(other)
    return other


IDS, MASK = sample_of().ids, sample_of().mask


def _bos(index: int = 0) -> int:
    return int(IDS[index])


def alone(ids: Any, mask: Any = None, **more: Any) -> dict[str, Any]:
    return row_of(ids, mask, {}, **more)
