"""``tojson`` with a trace: the text of ``json.dumps``, each scalar credited to its field.

A call's arguments, or a tool's schema, are one field: one run, written by Python's encoder.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple

from .budget import SMALL, TooLarge, charge, check_items, check_size, weigh
from .origin import KEY, Origin
from .strings import TracedStr, join_traced, runs_of, traced
from .traced import TracedDict, TracedList, TracedNone, is_traced, opaque, plain

_MAX_INDENT = 1_000


class JsonOptions(NamedTuple):
    ensure_ascii: bool = False
    indent: int | str | None = None
    separators: tuple[str, str] | None = None
    sort_keys: bool = False


DEFAULTS = JsonOptions()


def dumps(value: Any, options: JsonOptions = DEFAULTS) -> str:
    """``json.dumps(value, …)``, traced. Punctuation belongs to its container."""
    if (options.indent if isinstance(options.indent, int) else len(options.indent or "")) > _MAX_INDENT:
        raise TooLarge("an indent is too large")
    if options != DEFAULTS and is_traced(tuple(options)):  # separators or indents that come from a field
        indent = plain(options.indent)
        separators = options.separators and tuple(map(plain, options.separators))
        return opaque(dumps(value, options._replace(indent=indent, separators=separators)))  # type: ignore[no-any-return]
    field = one_field(value, None, options)
    if field is not None:
        return traced(*field)
    weigh(value)
    pieces: list[str] = []
    size = 0
    for piece in _Writer(options).value(value, "\n", None):
        size += len(piece)
        check_size(size)
        pieces.append(piece)
    check_items(len(pieces))
    return join_traced(pieces)


def one_field(value: Any, origin: Any, options: tuple[Any, ...]) -> tuple[str, Origin] | None:
    """The JSON of a text or container that is one field, and its origin; None for others."""
    boxed = value if type(value) is TracedDict or type(value) is TracedList else None
    texts: dict[Any, str] = {}
    if boxed is not None:
        value, origin, texts = boxed.raw, boxed.origin, getattr(boxed, "texts", texts)
        if options in texts:
            return texts[options], origin
    if type(origin) is not Origin:
        return None
    if type(value) is str and value:  # the quotes of an empty text belong to nobody
        text = _escape(options)(value)
    elif type(value) in (dict, list) and (origin[-1] == "arguments" or origin[0] == "tools"):
        try:
            text = _encoder(options)(value)
        except (TypeError, RecursionError):  # not plain JSON: `_Writer` converts it, or raises
            return None
    else:
        return None
    if len(text) > SMALL:
        check_size(len(text))
        charge(len(text))
    if boxed is not None and origin[0] == "tools":  # tools are rendered again and again
        boxed.texts = {**texts, options: text}
    return text, origin


@functools.lru_cache(maxsize=64)
def _encoder(options: tuple[Any, ...]) -> Callable[[Any], str]:
    """``json.dumps`` with fixed options, and one C encoder if there are no indents."""
    encoder = json.JSONEncoder(**JsonOptions(*options)._asdict())
    indent, sort_keys = options[1], options[3]
    make_encoder = getattr(json.encoder, "c_make_encoder", None)
    if make_encoder is None or indent is not None:
        return encoder.encode
    colon, comma = encoder.key_separator, encoder.item_separator
    chunks = make_encoder(
        None, encoder.default, _escape(options), None, colon, comma, sort_keys, False, True
    )
    return lambda value: "".join(chunks(value, 0))


def _escape(options: tuple[Any, ...]) -> Callable[[str], str]:
    return encode_basestring_ascii if options[0] else encode_basestring


class _Writer:
    def __init__(self, options: JsonOptions) -> None:
        indent = options.indent
        self._options = options
        self._indent: str | None = " " * indent if isinstance(indent, int) else indent
        self._comma, self._colon = options.separators or (", " if indent is None else ",", ": ")

    def value(self, value: Any, newline: str, origin: Origin | None) -> Iterator[str]:
        origin = getattr(value, "origin", origin)
        inner = newline + (self._indent or "")
        if isinstance(value, str):
            yield self._string(value, origin)
        elif value is None or isinstance(value, (bool, int, float, TracedNone)):
            yield traced(json.dumps(plain(value)), origin)
        elif not isinstance(value, (dict, list, tuple)):
            raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
        elif self._indent is None and (field := one_field(value, None, self._options)) is not None:
            yield traced(*field)
        elif isinstance(value, dict):
            keys = sorted(dict.keys(value)) if self._options.sort_keys else dict.keys(value)
            entries = (self._entry(value, key, inner, origin) for key in keys)
            yield from self._container("{}", entries, newline, origin)
        else:
            items = (self.value(item, inner, origin) for item in value)
            yield from self._container("[]", items, newline, origin)

    def _container(
        self, brackets: str, entries: Iterable[Iterator[str]], newline: str, origin: Origin | None
    ) -> Iterator[str]:
        is_empty = True
        for entry in entries:
            yield traced(brackets[0] if is_empty else self._comma, origin)
            if self._indent is not None:
                yield traced(newline + self._indent, origin)
            yield from entry
            is_empty = False
        if is_empty:
            yield traced(brackets, origin)
        else:
            yield traced(brackets[1] if self._indent is None else newline + brackets[1], origin)

    def _entry(self, value: dict[Any, Any], key: Any, newline: str, origin: Origin | None) -> Iterator[str]:
        name = key if isinstance(key, str) else next(iter(json.loads(json.dumps({plain(key): 0}))))
        is_field = type(value) is TracedDict
        yield self._string(name, value.origin.at(name, KEY) if is_field else origin)  # type: ignore[attr-defined]
        yield traced(self._colon, origin)
        yield from self.value(value[key], newline, origin)

    def _string(self, value: str, origin: Origin | None) -> str:
        """A JSON string: escaping goes by character, so each run is escaped on its own."""
        escape = _escape(self._options)
        runs = value.runs if isinstance(value, TracedStr) else ()
        if len(runs) <= 1:
            return traced(escape(value), runs[0][1] if runs else origin)
        quote = traced('"', origin)
        parts = (traced(escape(text)[1:-1], part_origin) for text, part_origin in runs_of(value))  # type: ignore[arg-type]
        return join_traced((quote, *parts, quote))
