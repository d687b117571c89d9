"""``tojson`` with a trace: the text of ``json.dumps``, each scalar credited to its own field."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from json import encoder as json_encoder
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final

from .budget import MAX_PIECES, TooLarge, check_pieces, check_size, made
from .origin import KEY, Origin
from .spans import known_runs
from .strings import TracedStr, traced, with_runs
from .traced import (
    TracedBool,
    TracedDict,
    TracedFloat,
    TracedInt,
    TracedList,
    TracedNone,
    TracedTuple,
    is_traced,
    plain,
)

_MAX_INDENT: Final = 1_000
_SMALL: Final = 1024
"""Text up to this size is paid for by the step that makes it (see `strings`)."""


def dumps(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``json.dumps(value, …)``, character for character, as a traced string.

    Punctuation belongs to the container it punctuates; a container built by the template is scaffold. Separators and
    indents that come from a field stay that field's, so a text made with them is not remembered for others.
    """
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_INDENT:
        raise TooLarge("an indent is too large")
    options = (ensure_ascii, indent, separators and tuple(separators), sort_keys)
    own_options = (indent is not None or separators is not None) and is_traced(options)
    memo = None
    if not own_options:
        memo = getattr(value, "memo", None) if type(value) in (TracedDict, TracedList) else None
        if memo is not None and options in memo:
            return memo[options]  # type: ignore[no-any-return]
        whole = _arguments(value, options)
        if whole is not None:
            return whole
    writer = _Writer(*options, whole_arguments=indent is None and not own_options)
    writer.value(value, "\n", None)
    check_pieces(len(writer.texts))
    runs = tuple(writer.runs) if memo is None else known_runs(writer.runs)
    result = with_runs("".join(writer.texts), runs)
    if memo is not None:
        memo[options] = result
    return result


def plain_dumps(value: Any, origin: Origin, options: tuple[Any, ...]) -> str | None:
    """The JSON of a plain value, where all of it has the value's origin: a text, or the arguments of a call."""
    if type(value) is str and value:  # an empty text has no origin: its quotes are whose they are
        text: str = (encode_basestring_ascii if options[0] else encode_basestring)(value)
    elif type(value) is dict and origin[-1] == "arguments":
        try:
            text = _encoder(options)(value)
        except (TypeError, RecursionError):
            return None
    else:
        return None
    if len(text) > _SMALL:
        check_size(len(text))
        made(len(text))
    return text


def _arguments(value: Any, options: tuple[Any, ...]) -> str | None:
    """The arguments of a tool call are one field: one run, made by the C encoder."""
    if type(value) is not TracedDict or value.origin[-1] != "arguments":
        return None
    try:
        return traced(_encoder(options)(value.raw), value.origin)
    except (TypeError, RecursionError):  # not plain JSON all the way down; the walk reduces it, or says why not
        return None


@functools.lru_cache(maxsize=64)
def _encoder(options: tuple[Any, ...]) -> Callable[[Any], str]:
    """``json.dumps`` with its options settled once. Where the C encoder can do it, that is kept ready too."""
    ensure_ascii, indent, separators, sort_keys = options
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    c_make_encoder = getattr(json_encoder, "c_make_encoder", None)
    if c_make_encoder is None or indent is not None:
        return encoder.encode
    escape = encode_basestring_ascii if ensure_ascii else encode_basestring
    colon, comma = encoder.key_separator, encoder.item_separator
    chunks = c_make_encoder(None, encoder.default, escape, None, colon, comma, sort_keys, False, True)
    return lambda value: "".join(chunks(value, 0))


class _Writer:
    def __init__(
        self, ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool, *, whole_arguments: bool
    ) -> None:
        self.escape: Any = encode_basestring_ascii if ensure_ascii else encode_basestring
        self.indent: str | None = " " * indent if isinstance(indent, int) else indent
        comma, colon = separators or (", " if indent is None else ",", ": ")
        self.comma: str = str(comma)
        self.colon: str = str(colon)
        self.sort_keys = sort_keys
        self.options = (ensure_ascii, indent, separators, sort_keys)
        self.whole_arguments = whole_arguments
        self.texts: list[str] = []
        self.runs: list[tuple[int, Origin | None]] = []
        self.at = 0

    def write(self, text: str, origin: Origin | None) -> None:
        if not text:
            return
        if isinstance(text, TracedStr):
            start = 0
            for end, own in text.runs:
                self.write(str.__getitem__(text, slice(start, end)), origin if own is None else own)
                start = end
            return
        self.texts.append(text)
        self.at += len(text)
        check_size(self.at)
        if len(self.texts) > MAX_PIECES:
            check_pieces(len(self.texts))
        runs = self.runs
        if runs and runs[-1][1] == origin:
            runs[-1] = (self.at, origin)
        else:
            runs.append((self.at, origin))

    def string(self, value: str, origin: Origin | None) -> None:
        """A JSON string. Escaping works character by character, so each run is escaped on its own."""
        if not isinstance(value, TracedStr):
            self.write(self.escape(value), origin)
            return
        runs = value.runs
        if len(runs) <= 1:
            self.write(self.escape(value), runs[0][1] if runs else origin)
            return
        self.write('"', origin)
        start = 0
        for end, run_origin in runs:
            self.write(self.escape(str.__getitem__(value, slice(start, end)))[1:-1], run_origin)
            start = end
        self.write('"', origin)

    def value(self, value: Any, newline: str, origin: Origin | None) -> None:
        if isinstance(value, str):
            self.string(value, origin)
        elif value is None or isinstance(value, TracedNone):
            self.write("null", getattr(value, "origin", origin))
        elif isinstance(value, (bool, TracedBool)):
            self.write("true" if value else "false", getattr(value, "origin", origin))
        elif isinstance(value, int):
            self.write(int.__repr__(value), value.origin if type(value) is TracedInt else origin)
        elif isinstance(value, float):
            self.write(_float(value), value.origin if type(value) is TracedFloat else origin)
        elif isinstance(value, dict):
            if self.whole_arguments:
                whole = _arguments(value, self.options)
                if whole is not None:
                    self.write(whole, value.origin)  # type: ignore[attr-defined]
                    return
            self.mapping(value, newline, value.origin if type(value) is TracedDict else origin)
        elif isinstance(value, (list, tuple)):
            own = isinstance(value, (TracedList, TracedTuple))
            self.sequence(value, newline, value.origin if own else origin)  # type: ignore[union-attr]
        else:
            raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    def mapping(self, value: dict[Any, Any], newline: str, origin: Origin | None) -> None:
        keys: Any = dict.__iter__(value)
        for key in self.entries("{}", sorted(keys) if self.sort_keys else keys, newline, origin):
            name = _key(key)
            key_origin = getattr(key, "origin", origin)
            self.string(name, Origin(value.origin + (name, KEY)) if type(value) is TracedDict else key_origin)
            self.write(self.colon, origin)
            self.value(value[key], self.inner(newline), origin)

    def sequence(self, value: list[Any] | tuple[Any, ...], newline: str, origin: Origin | None) -> None:
        for item in self.entries("[]", value, newline, origin):
            self.value(item, self.inner(newline), origin)

    def inner(self, newline: str) -> str:
        return newline + self.indent if self.indent is not None else newline

    def entries(self, brackets: str, items: Iterable[Any], newline: str, origin: Origin | None) -> Iterator[Any]:
        """The items of a container, to be written one after another; what stands around and between them is written."""
        inner = self.inner(newline) if self.indent is not None else ""
        written = False
        for item in items:
            self.write((self.comma if written else brackets[0]) + inner, origin)
            written = True
            yield item
        if not written:
            self.write(brackets, origin)
        else:
            self.write((newline if self.indent is not None else "") + brackets[1], origin)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if type(key) is int:
        return int.__repr__(key)
    if key is None or isinstance(key, (bool, int, float, TracedNone)):
        dumped = json.dumps({plain(key): 0})
        return str(json.loads(dumped).popitem()[0])
    raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")


def _float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float.__repr__(value)
