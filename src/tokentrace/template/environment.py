"""The tracing Jinja environment: the semantics of transformers' chat templates, with the trace kept.

Four things differ from a plain sandbox, none of them visible in the text:

- templates are compiled to code on plain values with origins beside them (`compiling.py`); what that code has no
  plain form for is done here, on boxed values;
- loops tell the trace whose turn is being written;
- what a filter, a call, a method or an operator makes out of traced values is of unknown origin, unless it is one of
  the few that are proven to keep the trace (`filters.py`, `method`, `call`);
- each is charged by the size of what it touches (`budget.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from . import filters, formatting
from .budget import (
    TooLarge,
    charge_method,
    check_bits,
    check_items,
    check_pieces,
    check_size,
    listed,
    looked_at,
    made,
    spend,
    weigh,
    weigh_key,
)
from .compiling import TracingGenerator, code_line
from .loops import leaves
from .markup import TracedMarkup, as_markup
from .origin import Origin
from .pair_environment import PairEnvironment
from .pairs import pieces
from .sources import DICT_ATTRIBUTES
from .strings import TracedStr, join_traced, plain_text, promoted, traced
from .trace import Trace, join_buffer
from .traced import (
    TRACED_TYPES,
    TracedBool,
    TracedBytes,
    TracedDict,
    TracedFloat,
    TracedInt,
    TracedList,
    TracedNone,
    TracedTuple,
    UnknownRange,
    doubted,
    is_traced,
    text_of,
)

_TRACED_METHODS: Final = frozenset(name for name in vars(TracedStr) if not name.startswith("_") and name != "runs")
"""Methods of strings that are written anew over runs."""
_ASKING_METHODS: Final = frozenset(
    (
        *("count", "endswith", "find", "index", "rfind", "rindex", "startswith"),
        *(name for name in dir(str) if name.startswith("is")),
    )
)
"""Methods of strings that tell a count, a place or a truth."""
_STR_METHODS: Final = _TRACED_METHODS | _ASKING_METHODS
_LOOP_ATTRIBUTES: Final = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem")
)
_PLAIN_TYPES: Final[dict[type, type]] = {
    TracedList: list,
    TracedTuple: tuple,
    TracedInt: int,
    TracedFloat: float,
    TracedBool: int,
    TracedNone: type(None),
    TracedBytes: bytes,
    UnknownRange: range,
}
_HANDING_OUT: Final[dict[type, frozenset[str]]] = {
    dict: frozenset({"copy", "fromkeys", "get", "items", "keys", "values"}),
    TracedDict: frozenset({"copy", "get", "items", "keys", "values"}),
    **dict.fromkeys((list, TracedList, tuple, TracedTuple), frozenset({"copy", "count", "index"})),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
"""Methods that hand out what went in, as it went in (or a count of it)."""
_NUMBERS: Final = frozenset({TracedInt, TracedFloat, TracedBool})
_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    **{"*": operator.mul, "**": operator.pow, "-": operator.sub},
    **{"/": operator.truediv, "//": operator.floordiv},
}
_MAX_WORDS: Final = 100_000
"""Words of placeholder text, and characters of a date's format."""
_BOUND: Final = (MethodType, BuiltinMethodType)
_SCALARS: Final = frozenset({int, float, bool, type(None), TracedInt, TracedBool, TracedFloat, TracedNone})
_MISSING: Final = object()
_PLAIN_TEXT: Final = frozenset({str, TracedStr})
"""Text that is joined as it is. Markup escapes what it is joined with."""


def _as_key(value: Any) -> Any:
    """`value`, about to become a key."""
    weigh_key(value)
    return value


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: a scope of its own, as in transformers, with a boundary at each end."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if leaves(body):
            parser.fail("a {% generation %} block cannot break off or continue the loop around it", line)
        return nodes.Scope(
            [code_line("budget.step(); OUT += (tt_begins, None)"), *body, code_line("OUT += (tt_ends, None)")],
            lineno=line,
        )


class TracingContext(Context):
    """A context that knows the trace of its run."""

    trace: Trace

    def derived(self, locals: dict[str, Any] | None = None) -> TracingContext:
        context = cast(TracingContext, super().derived(locals))
        context.trace = self.trace
        return context


class TracingEnvironment(PairEnvironment):
    """Compiles chat templates as transformers does; see the module's own words for what differs."""

    code_generator_class = TracingGenerator
    context_class = TracingContext
    concat = staticmethod(join_buffer)
    pieces = staticmethod(pieces)
    within = staticmethod(filters.within)
    key = staticmethod(_as_key)
    intercepted_binops = frozenset({"*", "**", "%", "-", "/", "//"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.filters.update(filters.traced_filters(self.filters))
        self.tests.update(filters.traced_tests(cast(Any, self.tests)))
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=strftime_now,
            dict=_TemplateDict(),
            namespace=TemplateNamespace,
            lipsum=_lipsum,
        )

    # -- what is charged for

    @property
    def round(self) -> bool:
        """A round of a filtered loop."""
        spend(1)
        return True

    @staticmethod
    def weighed(value: Any) -> Any:
        """`value`, about to be compared."""
        if type(value) not in _SCALARS:
            weigh(value)
        return value

    def sliced(self, value: Any) -> Any:
        """`value`, about to be sliced. Traced text pays for what is made of it."""
        if isinstance(value, str):
            looked_at(value)
        elif isinstance(value, (list, tuple)):
            check_items(len(value))
        return value

    # -- access

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is TracedDict:
            if attribute not in DICT_ATTRIBUTES:
                value = dict.get(obj, attribute, _MISSING)
                kind = type(value)
                if kind in TRACED_TYPES:
                    return value
                if kind is str:
                    value = traced(value, Origin(obj.origin + (attribute,)))
                    dict.__setitem__(obj, attribute, value)
                    return value
                return self.undefined(obj=obj, name=attribute) if value is _MISSING else obj[attribute]
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is TemplateNamespace:
            value = attributes_of(obj).get(attribute, _MISSING)
            if value is not _MISSING:
                return value
        elif kind is TracedMarkup and (attribute in _STR_METHODS or attribute in ("unescape", "striptags")):
            return Proven(lambda *args, **kwargs: obj.method(attribute, args, kwargs))
        elif kind is TracedStr or kind is str or isinstance(obj, TracedStr):
            if attribute in _STR_METHODS:
                return getattr(promoted(obj), attribute)
            if attribute in ("format", "format_map"):
                return self._formatter(obj, attribute)
            return self._no_attribute(obj, attribute, str)
        elif kind in _PLAIN_TYPES:
            return self._no_attribute(obj, attribute, _PLAIN_TYPES[kind])
        return super().getattr(obj, attribute)

    def _no_attribute(self, obj: Any, attribute: str, base: type) -> Any:
        """Nothing of ours (``runs``, ``origin``) may be seen: only what the plain type has."""
        if attribute in dir(base):
            source = obj.source if isinstance(obj, UnknownRange) else obj
            value = super().getattr(source, attribute)
            return value if callable(value) else doubted(value)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is TracedDict and isinstance(argument, str):
            if argument in obj:
                return obj[argument]
            if argument not in DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        elif type(obj) is TracedList and type(argument) is int:
            try:
                return obj[argument]
            except IndexError:
                return self.undefined(obj=obj, name=argument)  # type: ignore[arg-type]
        elif isinstance(argument, str) and (isinstance(obj, str) or type(obj) in _PLAIN_TYPES):
            return self.getattr(obj, argument)
        elif isinstance(argument, tuple):
            weigh_key(argument)
        return super().getitem(obj, argument)

    def _formatter(self, text: str, name: str) -> Any:
        """``str.format``, sandboxed."""
        if isinstance(text, TracedMarkup):
            markup = Markup(plain_text(text))
            return Proven(lambda *args, **kwargs: as_markup(formatting.markup_format(self, markup, name, args, kwargs)))
        return Proven(lambda *args, **kwargs: formatting.str_format(self, text, name, args, kwargs))

    # -- calls

    def method(__self, __context: Any, __obj: Any, __name: str, *args: Any, **kwargs: Any) -> Any:
        """``obj.name(…)`` in a template."""
        kind = type(__obj)
        if kind is TracedStr or kind is str:
            if __name in _STR_METHODS:
                if len(__obj) > 4096 or (args and type(args[0]) is tuple):
                    charge_method(__obj, __name, args)
                return getattr(__obj if kind is TracedStr else traced(__obj, None), __name)(*args, **kwargs)
        elif kind is TracedDict and __name in _HANDING_OUT[TracedDict]:
            for value in args:
                weigh_key(value)
            return getattr(__obj, __name)(*args, **kwargs)
        return __self.call(__context, __self.getattr(__obj, __name), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        if kind is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        spend(1)
        if __obj is TemplateNamespace:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return TemplateNamespace(*args, **kwargs)
        if kind in _HANDING_OUT_WHEN_CALLED or __obj is Cycler or __obj is Joiner:
            return super().call(__context, __obj, *args, **kwargs)
        owner = __obj.__self__ if isinstance(__obj, _BOUND) else None
        given = (owner, *args, *(value for name, value in kwargs.items() if name not in _JINJAS_OWN))
        if owner is not None:
            charge_method(owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, int):
            check_bits(result.bit_length())
        if owner is not None and _hands_out(owner, __obj.__name__):
            return result
        if __obj is __self.globals["range"]:
            spend(1 + len(result) // 16)
            return UnknownRange(result) if any(map(is_traced, args)) else result
        return doubted(result) if isinstance(owner, bytes) or any(map(is_traced, given)) else result

    # -- operators

    def spelled(self, size: int, value: Any) -> Any:
        """A container of the template's own, of so many bytes."""
        made(size)
        return value

    def add(self, *parts: Any) -> Any:
        """``a + b + …``, left to right, as Python has it."""
        if all(type(part) in _PLAIN_TEXT for part in parts):
            return join_traced(parts)
        total = parts[0]
        for part in parts[1:]:
            total = _computed(total + part, total, part)
            if isinstance(total, (list, tuple)):
                check_items(len(total))
            elif isinstance(total, (str, bytes)):
                check_size(len(total))
        return total

    def call_binop(self, context: Any, name: str, left: Any, right: Any) -> Any:
        if name == "%":
            if isinstance(left, TracedMarkup):
                formatting.percent_format(plain_text(left), right)  # knows what is too large
                return left % right
            if isinstance(left, str):
                return formatting.percent_format(left, right)
            if isinstance(left, bytes):
                formatting.percent_format(left.decode("latin-1"), _as_text(right))  # knows what is too large
                return doubted(left % right)
            return _computed(left % right, left, right)
        if name == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple, bytes)) and isinstance(other, int):
                    (check_items if isinstance(one, (list, tuple)) else check_size)(len(one) * other)
                    spend(1 + max(0, len(one) * other) // 4096 + max(0, other) // 64)
                    return promoted(one) * other if isinstance(one, str) else one * other
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length())
        return _computed(_OPERATIONS[name](left, right), left, right)


def _computed(result: Any, left: Any, right: Any) -> Any:
    """What was computed of two values: of unknown origin if one was a traced number. Where a float or a boolean of the
    template's own stands on the left, Python does not ask the other."""
    if type(result) in (int, float) and (type(left) in _NUMBERS or type(right) in _NUMBERS):
        return doubted(result)
    return result


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str.__str__(text_of(message)))


def strftime_now(format: str, now: datetime | None = None) -> str:
    if len(format) > _MAX_WORDS:
        raise TooLarge(f"the template asked for a date in a format of {len(format)} characters")
    return (now or datetime.now()).strftime(format)


def _lipsum(*args: Any, **kwargs: Any) -> str:
    from jinja2.utils import generate_lorem_ipsum

    asked = 20 * 100  # Jinja's own numbers, where none are given
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            asked *= max(1, abs(value))
    if asked > 20 * 100 * _MAX_WORDS:
        raise TooLarge("the template asked for too much placeholder text")
    spend(asked // 100)
    text = generate_lorem_ipsum(*args, **kwargs)
    return as_markup(str(text)) if isinstance(text, Markup) else text


class Proven:
    """A function of ours that keeps the trace of what it is given, or gives it up, by itself."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


_JINJAS_OWN: Final = frozenset({"_block_vars", "_loop_vars", "caller"})


def _hands_out(owner: Any, name: str) -> bool:
    """Whether a bound method is one of the few that keep the trace."""
    kind = type(owner)
    return name in (_TRACED_METHODS if kind is TracedStr else _HANDING_OUT.get(kind, ()))


def _as_text(values: Any) -> Any:
    """What bytes are formatted with, as text of the same size."""
    if isinstance(values, bytes):
        return bytes.decode(values, "latin-1")
    return tuple(map(_as_text, values)) if isinstance(values, tuple) else values


class _TemplateDict:
    """``dict(…)`` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if args and not hasattr(args[0], "keys"):  # as Python asks; what is undefined says so
            args = ([(_as_key(key), value) for key, value in listed(args[0])], *args[1:])
        result = dict(*args, **kwargs)
        check_pieces(len(result))
        return result

    def fromkeys(self, keys: Any, value: Any = None, /) -> dict[Any, Any]:
        return dict.fromkeys(map(_as_key, listed(keys)), value)


class TemplateNamespace(Namespace):
    """``namespace(…)``; names with a leading underscore are refused, as in transformers."""

    __slots__ = ("_attributes",)

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, arguments = args[0], args[1:]
        attributes = dict(*arguments, **kwargs) if arguments else kwargs
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)
        _set_attributes(self, object.__getattribute__(self, "_Namespace__attrs"))

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


attributes_of: Final[Callable[[TemplateNamespace], dict[str, Any]]] = TemplateNamespace._attributes.__get__  # type: ignore[attr-defined]
"""What a namespace holds; a name of the template's own hides nothing of it."""
_set_attributes: Final = TemplateNamespace._attributes.__set__  # type: ignore[attr-defined]


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: leading underscore")


_HANDING_OUT_WHEN_CALLED: Final = frozenset({BlockReference, Joiner, LoopContext, Proven, _TemplateDict})
"""Callables that hand out what they were given, as it was given, or keep the trace by themselves."""
_HANDING_OUT[_TemplateDict] = frozenset({"fromkeys"})
