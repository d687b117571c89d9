"""Make the pocket vocabulary: byte-level BPE of 4,096 tokens, trained on text that comes with Python.

    python training/pocket/make_tokenizer.py            # writes src/tokentrace/pocket/tokenizer*.json
    python training/pocket/make_tokenizer.py --check    # rebuilds it and compares

The corpus is the documentation and sources of Python's standard library, and generated dialogues with arithmetic,
look-ups and tools. The same versions of Python and ``tokenizers`` give the same file, byte for byte; another Python
version has other sources and gives another vocabulary. README.md records the versions that were used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 4096
SEED = 20260101
POCKET = Path(__file__).resolve().parents[2] / "src" / "tokentrace" / "pocket"

PATTERN = r"\n|\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
"""Pieces that are never merged with each other: a newline, a digit, a word, punctuation, white space.

A newline on its own keeps the template's newlines apart from those of a field: a message that begins with one
has the same tokens whether it was sampled or rendered.
"""

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|turn|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
RESERVED = tuple(f"<|reserved_{n}|>" for n in range(22))
CONTROL = (*SPECIAL, *TAGS, *RESERVED)
"""The last 32 ids. Tags are not ``special``: they survive ``decode(skip_special_tokens=True)``, as parsers expect."""


# -- the corpus


LEFT_OUT = (
    *("test", "idlelib", "lib2to3", "site-packages", "encodings", "ensurepip", "pydoc_data"),
    *("_sysconfigdata", "config-"),  # these depend on the machine that Python was built on
)


def library() -> Iterator[str]:
    """Docstrings and sources of the standard library; docstrings and the language reference three times, as prose."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if path.relative_to(root).parts[0].startswith(LEFT_OUT):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield from [doc for doc in docstrings(source) for _ in range(3)]
        yield source[:6000]
    topics: dict[str, Any] = {}
    source = (root / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    exec(compile(source, "topics", "exec"), topics)
    for _, text in sorted(topics["topics"].items()):
        yield from [" ".join(block.split()) for block in str(text).split("\n\n")] * 3


def docstrings(source: str) -> Iterator[str]:
    """Every docstring of a module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


CITIES = [
    "Paris",
    "Rome",
    "Berlin",
    "Madrid",
    "Lisbon",
    "Vienna",
    "Prague",
    "Warsaw",
    "Athens",
    "Dublin",
    "Oslo",
    "Stockholm",
    "Helsinki",
    "Copenhagen",
    "Tokyo",
    "Seoul",
    "Beijing",
    "Delhi",
    "Bangkok",
    "Jakarta",
    "Cairo",
    "Lagos",
    "Nairobi",
    "Lima",
    "Bogota",
    "Santiago",
    "Toronto",
    "Chicago",
    "Boston",
    "Sydney",
]
GOODS = [
    "apples",
    "pears",
    "books",
    "coins",
    "stamps",
    "tickets",
    "boxes",
    "bottles",
    "cards",
    "pencils",
    "lamps",
    "chairs",
    "keys",
    "stones",
]
NAMES = [
    "Ada",
    "Alan",
    "Grace",
    "Emmy",
    "Kurt",
    "Sofia",
    "Omar",
    "Mei",
    "Ivan",
    "Nora",
    "Paul",
    "Ruth",
    "Hugo",
    "Lena",
    "Max",
    "Zoe",
    "Tim",
    "Eva",
    "Sam",
    "Ida",
]
FACTS = [
    "population",
    "area",
    "capital",
    "currency",
    "language",
    "river",
    "mountain",
    "mayor",
    "founded",
    "timezone",
    "elevation",
    "weather",
]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "dry", "humid"]
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Think step by step, then answer briefly.",
    "Answer the question. Use the tools where they help; do not guess what a tool can tell you.",
    "You are a calculator. Give only the final number.",
)


DECLARATION = (
    "# Tools\n\nThese functions can be called. One JSON schema per line:\nA call names one of them and gives its "
    "arguments:\nA reply may end with several calls. Their results come back in the same order."
)
"""The chat template's text about tools, in every conversation with tools."""


def dialogues(random_: random.Random, count: int) -> Iterator[str]:
    """Generated conversations, as the texts of their parts, like those that pocket will see most."""
    for _ in range(count):
        a, b, c = (random_.randrange(10 ** random_.randrange(1, 4)) for _ in range(3))
        name, other = random_.sample(NAMES, 2)
        city, goods, fact = random_.choice(CITIES), random_.choice(GOODS), random_.choice(FACTS)
        sign, word = random_.choice((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
        expression = f"{a} {sign} {b}"
        yield random_.choice(SYSTEMS)
        yield random_.choice(
            (
                f"What is {expression}?",
                f"How much is {a} {word} {b}?",
                f"Please compute {expression} + {c}.",
                f"{name} has {a} {goods} and buys {b} more, then gives {c} to {other}. How many are left?",
                f"What is the {fact} of {city}?",
                f"Look up the {fact} of {city} and compare it with {random_.choice(CITIES)}.",
                f"Is it {random_.choice(SKIES)} in {city} today, and how many degrees?",
                f"Sort these numbers: {a}, {b}, {c}.",
                f"Which is larger, {a} or {b}?",
                f"Write a Python function that returns the sum of {a} and its argument.",
            )
        )
        yield random_.choice(
            (
                f"I need to find out {expression}. Let me use the calculator.",
                f"First, {a} + {b} = {a + b}. Then {a + b} - {c} = {a + b - c}. So the answer is {a + b - c}.",
                f"The user asks for the {fact} of {city}. I should look it up instead of guessing.",
                f"The result says {c}. That answers the question.",
                "The tool returned an error, so I will try again with another key.",
                f"Wait, that is wrong: {a} * {b} is {a * b}, not {a * b + 1}. Let me check again.",
            )
        )
        yield random_.choice(
            (
                json.dumps({"name": "calculator", "arguments": {"expression": expression}}),
                json.dumps({"name": "lookup", "arguments": {"key": city, "field": fact}}),
                json.dumps({"name": "get_weather", "arguments": {"city": city, "unit": "celsius"}}),
                json.dumps({"result": a * b, "ok": True, "error": None}),
                json.dumps({"city": city, fact: random_.choice((a, random_.choice(SKIES)))}),
                f"Error: no entry for {city}",
            )
        )
        yield random_.choice(
            (
                f"The answer is {a + b}.",
                f"{expression} = {a * b}",
                f"The {fact} of {city} is {c}.",
                f"It is {random_.choice(SKIES)} in {city}, {c % 40} degrees.",
                f"{name} has {a + b - c} {goods} left.",
                f"I could not find the {fact} of {city}.",
                f"Sorry, I made a mistake. The correct answer is {c}.",
            )
        )


def schemas() -> Iterator[str]:
    """Tool schemas: every conversation with tools repeats their words."""
    for name, description, keys in (
        ("calculator", "Evaluate an arithmetic expression.", ("expression",)),
        ("lookup", "Look up a field of an entry by its key.", ("key", "field")),
        ("get_weather", "Current weather of a city.", ("city", "unit")),
        ("search", "Search the documents for a query and return the best results.", ("query", "limit")),
        ("read_file", "Read a file and return its lines.", ("path", "start", "end")),
        ("run_code", "Run Python code and return what it prints.", ("code", "timeout")),
    ):
        for kind in ("string", "integer", "number", "boolean", "array", "object"):
            properties = {key: {"type": kind, "description": f"The {key} to use."} for key in keys}
            parameters = {"type": "object", "properties": properties, "required": list(keys)}
            function = {"name": name, "description": description, "parameters": parameters}
            yield json.dumps({"type": "function", "function": function})


def corpus() -> list[str]:
    """All texts, in a fixed order."""
    return [
        *library(),
        *dialogues(random.Random(SEED), 40_000),
        *(schema for schema in schemas() for _ in range(200)),
        *["system\ndeveloper\nuser\nassistant\ntool\n<tools>\n</tools>\n", DECLARATION] * 2000,
    ]


# -- training


def train(texts: list[str], size: int = SIZE) -> dict[str, Any]:
    """Train merges, and return the specification of a tokenizer: bytes, merges, control tokens."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    spec["model"]["vocab"] = dict(sorted(spec["model"]["vocab"].items(), key=lambda row: row[1]))
    spec["added_tokens"] = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text not in TAGS,
        }
        for index, text in enumerate(CONTROL, size - len(CONTROL))
    ]
    return spec


def written(spec: dict[str, Any]) -> str:
    """The specification as JSON with one token, merge or control token per line."""

    def lines(rows: list[str]) -> str:
        return ",\n".join(rows)

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    model = spec["model"]
    settings = [f"{dump(key)}: {dump(model[key])}" for key in model if key not in ("vocab", "merges")]
    vocab = lines([f"{dump(piece)}: {index}" for piece, index in model["vocab"].items()])
    merges = lines([dump(pair) for pair in model["merges"]])
    head = [f"{dump(key)}: {dump(spec[key])}" for key in spec if key not in ("added_tokens", "model")]
    added = lines([dump(row) for row in spec["added_tokens"]])
    return (
        "{\n"
        + lines([*head, f'"added_tokens": [\n{added}\n]'])
        + ',\n"model": {\n'
        + lines([*settings, f'"vocab": {{\n{vocab}\n}}', f'"merges": [\n{merges}\n]'])
        + "\n}\n}\n"
    )


def config() -> str:
    """The tokenizer_config.json that transformers reads."""
    return (
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 32768,
            },
            indent=2,
        )
        + "\n"
    )


def main() -> int:
    """Write the files, or compare them with the existing ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what is there; write nothing")
    parser.add_argument("--out", type=Path, default=POCKET, help="folder to write to")
    options = parser.parse_args()
    texts = corpus()
    text = written(train(texts))
    files = {"tokenizer.json": text, "tokenizer_config.json": config()}
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    print(f"python {platform.python_version()}, tokenizers {tokenizers.__version__}")
    print(f"corpus {sum(map(len, texts)):,} characters, sha256 {digest}")
    print(f"tokenizer.json {len(text.encode()):,} bytes, sha256 {hashlib.sha256(text.encode()).hexdigest()}")
    if options.check:
        changed = [name for name in files if (options.out / name).read_text(encoding="utf-8") != files[name]]
        print(f"differs: {', '.join(changed)}" if changed else "the same")
        return 1 if changed else 0
    for name, content in files.items():
        (options.out / name).write_text(content, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
