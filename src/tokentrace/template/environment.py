"""The tracing Jinja environment: the semantics of transformers' chat templates, with the trace kept.

Compiled templates leave to it what they do not do themselves. The first half of its methods take
*pairs* (`pairs.py`), the others boxed values (`traced.py`). What does not keep the trace makes
values of unknown origin from traced ones.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from . import filters
from .budget import (
    attrs_of,
    check_bits,
    check_items,
    check_search,
    check_size,
    listed,
    step,
    weigh,
    weighed,
)
from .compiling import TracingGenerator, code_line
from .jsonify import one_field
from .origin import Origin
from .pairs import PLAIN, TEXT, Beside, box, inside, keeps_items, paid
from .strings import ASKING_METHODS, TRACED_METHODS, TracedStr, join_traced, plain_text, promoted
from .syntax import DICT_ATTRIBUTES, leaves
from .trace import Trace, join_output
from .traced import PLAIN_TYPES, TracedDict, TracedList, TracedMarkup, derived, opaque, text_of, wrap

_STR_METHODS = TRACED_METHODS | ASKING_METHODS
_BYTES = frozenset({"encode", "from_bytes", "to_bytes"})
"""Methods that templates cannot call, as bytes are not traced."""
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"*": operator.mul, "**": operator.pow, "-": operator.sub, "%": operator.mod},
    **{"/": operator.truediv, "//": operator.floordiv, "+": operator.add},
}
_JINJAS_ARGUMENTS = frozenset({"_block_vars", "_loop_vars", "caller"})
_MISSING = object()


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: its own scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if leaves(body):
            parser.fail("a {% generation %} block cannot break or continue the loop around it", line)
        start, end = code_line("trace.blocks.append(len(OUT))"), code_line("trace.end_block(OUT)")
        return nodes.Scope([start, *body, end], lineno=line)


class TracingContext(Context):
    trace: Trace


class Proven(functools.partial[Any]):
    """A function that keeps the trace itself."""


class TracingEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = TracingGenerator
    context_class = TracingContext
    joined = staticmethod(join_output)
    within = staticmethod(filters.within)
    intercepted_binops = frozenset({"*", "**", "%", "-", "/", "//"})
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self) -> None:
        tags = [_GenerationTag, LoopControlExtension]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags)
        self.filters |= {name: filters.traced_filter(name, one) for name, one in self.filters.items()}
        self.tests |= {name: filters.traced_test(name, cast(Any, one)) for name, one in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals |= {"dict": _TemplateDict(), "namespace": TemplateNamespace}

    @property
    def round(self) -> bool:
        """True, after a step for a round of a filtered loop."""
        step()
        return True

    def field(self, value: Any, origin: Beside, name: str) -> Any:
        if type(value) is TemplateNamespace and name in (attributes := attrs_of(value)):
            return attributes[name]
        if type(value) is dict and origin is not None:
            return self._lookup(value, origin, name)
        return self.getattr(box(value, origin), name)

    def item(self, value: Any, origin: Beside, key: Any) -> Any:
        if type(value) is list and type(key) is int:
            if not -len(value) <= key < len(value):
                return self.undefined(obj=value, name=key)  # type: ignore[arg-type]
            item = value[key]
            return (
                item if origin is None or item is None or type(item) in PLAIN else box(value, origin)[key]
            )
        is_field = type(value) is dict and origin is not None and isinstance(key, str)
        if is_field and (key in value or key not in DICT_ATTRIBUTES):
            return self._lookup(value, origin, key)
        return self.getitem(box(value, origin), key)

    def _lookup(self, value: dict[Any, Any], origin: Beside, key: str) -> Any:
        item = value.get(key, _MISSING)
        if item is _MISSING:
            return self.undefined(obj=value, name=key)
        return (
            item if item is None or type(item) in PLAIN else wrap(item, cast(Origin, inside(origin, key)))
        )

    def got(self, context: Any, value: Any, origin: Beside, key: str, default: Any, beside: Beside) -> Any:
        """``value.get(key, default)``."""
        if type(value) is dict and origin is not None:
            return self._lookup(value, origin, key) if key in value else default
        return self.method(context, box(value, origin), "get", key, box(default, beside))

    def json(self, value: Any, origin: Beside, options: tuple[Any, ...]) -> tuple[str, Beside]:
        return one_field(value, origin, options) or (
            self.filters["tojson"](box(value, origin), *options),
            None,
        )

    def cut(self, value: Any, origin: Beside, bounds: slice) -> Any:
        if origin is not None:
            if type(value) is str:
                return paid(value)[bounds]
            if type(value) is list and (type(origin) is not Origin or keeps_items(value)):
                check_items(len(value))
                return value[bounds]
        value = box(value, origin)
        if isinstance(value, (list, tuple)):
            check_items(len(value))
        return (paid(value) if type(value) is str else value)[bounds]

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is TracedDict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if isinstance(obj, str):
            return self._string_method(obj, attribute)
        is_ours = kind in PLAIN_TYPES and attribute not in dir(PLAIN_TYPES[kind])
        if is_ours or (attribute in _BYTES and isinstance(obj, int)):
            return self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        return opaque(value) if kind in PLAIN_TYPES and not callable(value) else value

    def _string_method(self, text: str, name: str) -> Any:
        is_markup = isinstance(text, TracedMarkup)
        if name in _STR_METHODS and not is_markup:
            return getattr(promoted(text), name)
        if name.startswith("_"):
            return super().getattr(plain_text(text), name)
        if name in _BYTES or name not in dir(Markup if is_markup else str):
            return self.undefined(obj=plain_text(text), name=name)
        if name in ("format", "format_map"):
            return Proven(lambda *args, **kwargs: filters.str_format(self, text, name, args, kwargs))
        method = getattr(Markup(plain_text(text)) if is_markup else plain_text(text), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = (abs(one) if isinstance(one, int) else weigh(one) for one in (*args, *kwargs.values()))
            check_size((len(text) + 1) * (1 + max(sizes, default=8)))
            return opaque(method(*args, **kwargs))

        return Proven(call)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str) and (isinstance(obj, str) or type(obj) in PLAIN_TYPES):
            return self.getattr(obj, argument)
        if isinstance(argument, tuple):
            weigh(argument)
        elif type(obj) is TracedDict and isinstance(argument, str) and argument in obj:
            return obj[argument]
        return super().getitem(obj, argument)

    def method(__self, __context: Any, __obj: Any, __name: str, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        if (kind is TracedStr or kind is str) and __name in _STR_METHODS:
            _check_arguments(__obj, args)
            return getattr(promoted(__obj), __name)(*args, **kwargs)
        return __self.call(__context, __self.getattr(__obj, __name), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        if kind is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        step()
        if __obj is TemplateNamespace:
            return TemplateNamespace(*args, **kwargs)
        owner = __obj.__self__ if isinstance(__obj, (MethodType, BuiltinMethodType)) else None
        _check_arguments(owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        hands_out = owner is not None and __obj.__name__ in _HANDING_OUT.get(type(owner), ())
        if hands_out or kind in _KEEPING_TRACE or __obj in (Cycler, Joiner):
            return result
        named = (value for name, value in kwargs.items() if name not in _JINJAS_ARGUMENTS)
        return derived(result, owner, *args, *named)

    @staticmethod
    def concat(parts: Iterable[Any]) -> TracedStr:
        return join_traced(map(text_of, parts))

    def add(self, *parts: Any) -> Any:
        """``a + b + …``, left to right, as in Python."""
        if all(type(part) in TEXT for part in parts):
            return join_traced(parts)
        return functools.reduce(functools.partial(self.call_binop, None, "+"), parts)

    def call_binop(self, context: Any, name: str, left: Any, right: Any) -> Any:
        if name == "%" and isinstance(left, str):
            return filters.percent_format(left, right)
        if name == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            check_items(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            check_bits(
                left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
            )
        elif name == "*":
            left, right = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(left, str) and isinstance(right, int):
                check_size(len(left) * right)
                left = promoted(left)
            elif isinstance(left, (list, tuple)) and isinstance(right, int):
                check_items(len(left) * right)
        result = _OPERATIONS[name](left, right)
        return derived(result, left, right) if isinstance(result, (int, float)) else result

    def call_unop(self, context: Any, name: str, value: Any) -> Any:
        return derived(super().call_unop(context, name, value), value)


def _check_arguments(owner: Any, args: tuple[Any, ...]) -> None:
    for value in args:
        weighed(value)
        if isinstance(value, str) and isinstance(owner, str):
            check_search(owner, value)
    if isinstance(owner, (list, tuple, dict)):
        check_items(len(owner))


def raise_exception(message: Any) -> None:
    raise TemplateError(str.__str__(text_of(message)))


def strftime_now(format: str, now: datetime | None = None) -> str:
    check_size(640 * len(format))  # a directive may print more than its own length
    return (now or datetime.now()).strftime(format)


class _TemplateDict:
    """``dict(…)``, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        weigh([*args, *kwargs.values()])
        if args and not hasattr(args[0], "keys"):  # Python's own test; an undefined value raises here
            args = ([(weighed(key), value) for key, value in args[0]], *args[1:])
        result = dict(*args, **kwargs)
        check_items(len(result))
        return result

    def fromkeys(self, keys: Any, value: Any = None, /) -> dict[Any, Any]:
        return dict.fromkeys(map(weighed, listed(keys)), value)


class TemplateNamespace(Namespace):
    """``namespace(…)``. Rejects names with a leading underscore, as transformers does."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name, value in list(attrs_of(args[0]).items()):
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a name in a namespace cannot start with an underscore: {name!r}")
        Namespace.__setitem__(self, name, value)


_KEEPING_TRACE = frozenset({Joiner, LoopContext, Proven, _TemplateDict})
"""Callables that return their arguments, or keep the trace themselves."""
_HANDING_OUT: dict[type, frozenset[str]] = {
    **dict.fromkeys((dict, TracedDict), frozenset({"copy", "fromkeys", "get", "items", "keys", "values"})),
    **dict.fromkeys((list, TracedList, tuple), frozenset({"copy", "count", "index"})),
    _TemplateDict: frozenset({"fromkeys"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
    TracedStr: _STR_METHODS,
}
"""Methods that return their input, or a count of it, or keep its trace."""
