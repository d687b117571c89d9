"""What a renderer derives for its settings: masks compared with generation tags, grammars compiled and proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError, place
from ..formats.dialects import with_parsers
from ..parsing.compiled import Compiled
from ..parsing.marked import MarkedBytes
from ..parsing.parser import parse
from ..parsing.readback import MISREAD, PROOFS, misread_parts
from ..study.probes import USER
from ..study.study import TemplateStudy
from ..tokens.encoded import Encoded
from .rendered import RenderedTokens, field_name


def mask_notes(encoded: Encoded, mask: npt.NDArray[np.bool_]) -> list[str]:
    """Notes on generation tags that disagree with the mask, and on control tokens that stayed text."""
    return [*compare_generation_tags(encoded, mask), *_literal_tokens(encoded)]


def _literal_tokens(encoded: Encoded) -> Iterator[str]:
    """A note for each control token that a field spells and does not hold: transformers would make it one."""
    origins = encoded.rendering.origins if encoded.forged else []
    for origin, token in dict.fromkeys((origins[span], token) for span, token in encoded.forged):
        message = None if origin is None else origin.message
        yield (
            f"{place(message, field_name(origin))}spells the control token {token!r}, which stays text "
            "(control_tokens='literal')"
        )


def compare_generation_tags(encoded: Encoded, mask: npt.NDArray[np.bool_]) -> list[str]:
    """A note where the template's own generation tags do not agree with the derived mask."""
    if not encoded.rendering.generation:
        return []
    tagged = np.zeros(len(mask), np.bool_)
    begins, ends = zip(*encoded.rendering.generation, strict=True)
    for first, stop in zip(encoded.first_touching(begins), encoded.first_after(ends), strict=True):
        tagged[first:stop] = True
    differ = tagged != mask
    count = int(np.count_nonzero(differ))
    if not count:
        return []
    only_tagged = int(np.count_nonzero(tagged & differ))
    only_derived, where = count - only_tagged, int(differ.argmax())
    return [
        f"the template's generation tags disagree with what is sampled: {only_tagged} tokens are tagged but not "
        f"sampled, {only_derived} sampled but not tagged; the first at token {where}"
    ]


def compiled_grammar(
    study: TemplateStudy,
    has_tools: bool,
    tool_parser: Any,
    reasoning_parser: Any,
    render: Callable[[Any], RenderedTokens] | None,
) -> Compiled:
    """The grammar that completions are parsed with.

    If it is the template's own, and `render` is given, a note says where it does not read back what is rendered.
    """
    endings, derived = study.endings(has_tools), study.grammar(has_tools)
    grammar = with_parsers(derived, tool_parser, reasoning_parser)
    marked = MarkedBytes(study.tokenizer.vocabulary)
    compiled = Compiled(grammar, marked, [*sorted(endings.stops), *sorted(study.eos - endings.stops)])
    if grammar is derived and render is not None:
        misread = ", ".join(f"{part} of {name}" for part, name in _misread(compiled, render))
        compiled.grammar = grammar.replace(notes=(*grammar.notes, *([f"{MISREAD}: {misread}"] if misread else [])))
    return compiled


def _misread(compiled: Compiled, render: Callable[[Any], RenderedTokens]) -> Iterator[tuple[str, str]]:
    """Where a grammar does not read back what its own template writes."""
    for name, fields in PROOFS.items():
        try:
            rendered = render([USER, {"role": "assistant", **fields}])
        except TokentraceError:
            continue
        for turn in rendered.turns[:1]:
            prompt = compiled.prompt_bytes(rendered.ids[: turn.start])
            parsed = parse(compiled, rendered.ids[turn.start : turn.stop], prompt=prompt)
            parts = misread_parts(rendered.rendering, parsed, compiled.grammar)
            yield from ((part, name) for part in parts)
