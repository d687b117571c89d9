"""The grammar of a template's turns, as a document and as JSON."""

import json
import re

import pytest

from tests.diagnose.brute import source_of
from tests.support import over_bytes
from tokentrace.diagnose.grammar import describe_grammar, grammar_document
from tokentrace.formats.dialects import DIALECTS
from tokentrace.show.terminal import plain_view


@pytest.mark.parametrize("family", ["qwen3-coder", "glm-4.5", "deepseek-v3", "gpt-oss", "minimax-m3"])
def test_json_has_the_grammar_its_stops_and_delimiters(family: str) -> None:
    renderer = over_bytes(source_of(family))
    data = json.loads(json.dumps(describe_grammar(renderer)))
    assert data["grammar"]["prompt"] == renderer.grammar().prompt
    assert data["stop_tokens"] == [renderer.tokenizer.decode([index]) for index in data["stop_token_ids"]] != []
    for row in data["delimiters"]:
        names = [renderer.tokenizer.decode([index]) for index in row["ids"]]
        assert all(name in renderer.tokenizer.vocabulary.control and name in row["text"] for name in names)
        assert not row["control"] or "".join(names) == "".join(row["text"].split())


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("qwen3-coder", ["before calls ⏎⏎", "<tool_call> calls.open control token"]),
        ("glm-4.5", ["stop <|observation|> or <|user|> or </s>"]),
        ("deepseek-v3", ["function<｜tool▁sep｜> calls.head[0] control token and text"]),
        ("kimi-k2.5", ["reasoning ⟨reasoning⟩</think>"]),
        ("gpt-oss", ["content <|start|>assistant<|channel|>final<|message|>⟨content⟩"]),
        ("mistral-nemo", ["[TOOL_CALLS][ calls.section_open control token and text"]),
        ("gemma-3", ["shows no tool calls", f"pass --tool-parser (tool_parser=): {', '.join(DIALECTS)}"]),
    ],
)
def test_the_turn_is_printed_part_by_part(family: str, lines: list[str]) -> None:
    words = " ".join(plain_view(grammar_document(over_bytes(source_of(family)))).split())
    printed = re.sub(r" \d+", "", words)
    assert [line for line in lines if line not in printed] == [], printed


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_dialect_can_be_printed(name: str) -> None:
    renderer = over_bytes(source_of("qwen3-coder"), tool_parser=name)
    assert f"dialect {name}" in plain_view(grammar_document(renderer))
    json.dumps(describe_grammar(renderer))
