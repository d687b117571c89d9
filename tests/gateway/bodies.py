"""Bodies that no client means to send."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

import tokentrace.gateway
from tokentrace.gateway.dialect import Dialect
from tokentrace.gateway.problems import RequestError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "text", "function", "user", "assistant", "system", "enabled", "json_schema"])
)
KEYS = st.text(max_size=4) | st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "name",
        "function",
        "tool_calls",
        "id",
        "input",
        "arguments",
        "schema",
        "effort",
    ]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
"""Any JSON, some of it with words that mean something."""


def words_of(module: str) -> list[str]:
    """Every short string that a dialect's modules and those of all write: the fields that it knows are among them."""
    folder = Path(str(tokentrace.gateway.__file__)).parent
    sources = [path.read_text(encoding="utf-8") for path in (*folder.glob(f"{module}*.py"), folder / "requests.py")]
    nodes = [node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return sorted({word for word in nodes if isinstance(word, str) and word.isidentifier()})


def fields_of(good: Mapping[str, Any], module: str) -> st.SearchStrategy[dict[str, Any]]:
    """A good body with some of the fields that a module reads, whatever they hold."""
    fields = st.dictionaries(st.sampled_from(words_of(module)), JSON, max_size=3)
    return st.builds(lambda more: {**good, **more}, fields)


def check_read(dialect: Dialect, body: Any) -> None:
    """A body is read, or refused with a status of its sender's and in words that JSON can hold; nothing else."""
    refused, options = None, {}
    try:
        options = msgspec.to_builtins(dialect.read(body, {}).answer)
    except RequestError as error:
        refused = error
    assert json.loads(json.dumps(options, allow_nan=False)) == options
    if refused is not None:
        assert 400 <= refused.status < 500
        assert json.loads(json.dumps(dialect.error(refused)))["error"]["message"]
