"""The grammar of a template's turns, as a document and as JSON."""

import json
import re

import pytest

from tests.diagnose.brute import source_of
from tests.support import over_bytes
from tokentrace.formats.dialects import DIALECTS
from tokentrace.show.grammar import describe_grammar, grammar_document
from tokentrace.show.terminal import plain_view


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("qwen3-coder", ["before calls ⏎⏎"]),
        ("glm-4.5", ["stop <|observation|> or <|user|> or </s>"]),
        ("deepseek-v3", ["function<｜tool▁sep｜>⟨name⟩"]),
        ("kimi-k2.5", ["reasoning ⟨reasoning⟩</think>"]),
        ("gpt-oss", ["content <|start|>assistant<|channel|>final<|message|>⟨content⟩"]),
        ("gemma-3", ["shows no tool calls", f"pass --tool-parser (tool_parser=): {', '.join(DIALECTS)}"]),
    ],
)
def test_json_and_the_printed_turn_have_the_grammar(family: str, lines: list[str]) -> None:
    renderer = over_bytes(source_of(family))
    data = json.loads(json.dumps(describe_grammar(renderer)))
    assert data["grammar"]["prompt"] == renderer.grammar().prompt
    assert data["stop_tokens"] == [renderer.tokenizer.decode([index]) for index in data["stop_token_ids"]] != []
    printed = re.sub(r" \d+", "", " ".join(plain_view(grammar_document(renderer)).split()))
    assert [line for line in lines if line not in printed] == [], printed


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_dialect_can_be_printed(name: str) -> None:
    renderer = over_bytes(source_of("qwen3-coder"), tool_parser=name)
    assert f"dialect {name}" in plain_view(grammar_document(renderer))
    json.dumps(describe_grammar(renderer))
