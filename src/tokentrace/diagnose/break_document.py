"""Documents of breaks."""

from __future__ import annotations

from collections.abc import Iterable

from ..show.document import Card, Contrasts, Document, Tokens
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted
from .breaks import Break
from .texts import DiffOp


class Differences(Contrasts):
    """Contrasts that breaks can be added to."""

    def add_break(self, name: str, found: Break, tokenizer: Tokenizer | None = None) -> str:
        """Add a break."""
        first = found.tokens[0].start if found.tokens else 0
        return self.add_parts(name, _parts(found), ("stream", "next prompt"), found.detail, first, tokenizer)


def _parts(found: Break) -> Iterable[tuple[Tokens, Tokens | None]]:
    op = DiffOp.EQUAL
    for part in found.tokens:
        tokens: Tokens = list(zip(part.ids, part.texts, strict=True))
        if part.op is DiffOp.SKIPPED:
            tokens = [(-1, f" … {counted(part.count)} … ")]
        else:
            op = part.op
        yield ([], tokens) if op is DiffOp.ADDED else (tokens, None if op is DiffOp.EQUAL else [])


def break_document(value: Break, tokenizer: Tokenizer | None = None) -> Document:
    """Return the document of a break: what the stream has, what the prompt has instead, why, and what to do."""
    differences = Differences()
    differences.add_break("stream → next prompt", value, tokenizer)
    return Document(
        f"Break: {value.cause}",
        "tokentrace check",
        summary=[value.detail, f"To do: {value.advice}"],
        cards=[
            Card("At token", f"{value.position:,}", f"of {value.stream_length:,}"),
            Card("Next prompt", f"{value.prompt_length:,}", "tokens"),
            Card("Where", value.region or "–"),
            Card("Further on", f"{len(value.later)}", ", ".join(dict.fromkeys(map(str, value.later)))),
        ],
        **differences.content(),
    )
