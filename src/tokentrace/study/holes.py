"""Holes: where a template prints given texts, and what else it does with them.

`observe` runs a chat template once with some texts of its messages *held*: the template gets objects in their place
that are no strings and can do nothing but what is written here. So all that the run did with a text is known (and with
`Watched` messages, which fields it looked up, whether they are there or not):

- what it printed: `pieces` are the template's own text and, for each hole, how its text is made of the given ones
  (as it is, stripped, as JSON);
- what it decided by it: `asked` are the questions it put to the texts (is there a ``</think>`` in it, is it empty) and
  the answers. With other texts that give the same answers, the template takes the same way and prints the same pieces.

Whatever else a template does with a text (counting its letters one by one, using it as a key) ends the run: `observe`
gives None, and nothing is claimed.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nativetypes import NativeCodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

_METHODS: Final = frozenset(
    {
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace", "lower", "upper", "title"),
        *("capitalize", "split", "rsplit", "splitlines", "startswith", "endswith", "find", "rfind", "count"),
    }
)
"""Methods of a string that can be followed: each gives text, a list of texts, a number or a truth value."""
_TYPE_TESTS: Final = frozenset(
    {
        *("string", "defined", "undefined", "none", "mapping", "sequence", "iterable", "number", "integer", "float"),
        *("boolean", "callable", "true", "false"),
    }
)
"""Tests whose answer is the same for every string."""


@dataclass(frozen=True, slots=True)
class Given:
    """A text that was given, by its number."""

    at: int

    def of(self, texts: Sequence[str]) -> Any:
        return texts[self.at]


@dataclass(frozen=True, slots=True)
class Made:
    """What a function makes of given texts and of constants."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def of(self, texts: Sequence[str]) -> Any:
        return self.function(*[one.of(texts) if isinstance(one, (Given, Made)) else one for one in self.arguments])


Recipe = Given | Made


def given_in(recipe: Any) -> set[int]:
    """The numbers of the given texts that something is made of."""
    if isinstance(recipe, Given):
        return {recipe.at}
    return set[int]().union(*map(given_in, recipe.arguments)) if isinstance(recipe, Made) else set()


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run of a template did with the texts that were held."""

    pieces: tuple[tuple[str, Recipe | None], ...]
    """Texts in the order in which they were printed, each with how it is made; None for the template's own."""
    asked: tuple[tuple[Recipe, Any], ...]
    """What was made of the texts to decide something, and what came out; no question twice."""


class _Unfollowed(BaseException):
    """The template does something with a text that cannot be followed. Nothing on the way may catch it."""


NOW: Final = -1
"""The number under which the time stands, which a template may print."""


class Held:  # noqa: PLW1641 - its hash would be a look at it, and is refused below
    """A text in a template's hands: `value` in this run, `recipe` in any."""

    __slots__ = ("_asked", "_parts", "_recipe", "_value")

    def __init__(self, value: str, recipe: Recipe, asked: dict[Recipe, Any], parts: Sequence[Any] = ()) -> None:
        self._value = value
        self._recipe = recipe
        self._asked = asked
        self._parts = parts
        """What it was put together of, one after another."""

    def _make(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function makes of this text: another one, texts, or an answer that decides something."""
        try:
            result = function(*[one._value if isinstance(one, Held) else one for one in arguments])
        except Exception:  # what a template makes of an error is another way, and with other texts there is none
            raise _Unfollowed from None
        recipe = Made(function, tuple(one._recipe if isinstance(one, Held) else one for one in arguments))
        if type(result) is str:
            return Held(result, recipe, self._asked)
        if type(result) is list:
            self._asked[Made(len, (recipe,))] = len(result)
            return [Held(item, Made(operator.getitem, (recipe, at)), self._asked) for at, item in enumerate(result)]
        try:
            self._asked[recipe] = result
        except TypeError:  # a list among the arguments
            raise _Unfollowed from None
        return result

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            if hasattr(str, name):
                raise _Unfollowed
            raise AttributeError(name)

        def method(*arguments: Any) -> Any:
            return self._make(getattr(str, name), self, *arguments)

        return method

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")
        if isinstance(key, slice):
            return self._make(_cut, self, key.start, key.stop, key.step)
        return self._make(operator.getitem, self, key)

    def __contains__(self, what: Any) -> bool:
        return bool(self._make(operator.contains, self, what))

    def __eq__(self, other: object) -> bool:
        return bool(self._make(operator.eq, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self._make(bool, self))

    def __len__(self) -> int:
        return int(self._make(len, self))

    def __add__(self, other: Any) -> Any:
        return _joined((self, other)) if isinstance(other, (str, Held)) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _joined((other, self)) if isinstance(other, str) else NotImplemented

    def _refuse(self, *_: Any) -> NoReturn:
        raise _Unfollowed

    __hash__ = __str__ = __repr__ = __format__ = __iter__ = __call__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __int__ = __float__ = __index__ = __bytes__ = __reversed__ = _refuse


class Watched(Mapping[str, Any]):
    """A message in a template's hands: which of its fields are looked up is put into `read`, with its number."""

    __slots__ = ("_at", "_message", "_read")

    def __init__(self, message: Mapping[str, Any], at: int, read: set[tuple[int, str]]) -> None:
        self._message = message
        self._at = at
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self._read.add((self._at, key))
        return self._message[key]

    def __bool__(self) -> bool:
        return bool(self._message)

    def _refuse(self, *_: Any) -> NoReturn:
        """What goes through all fields sees those that are not there as well."""
        raise _Unfollowed

    __hash__ = __iter__ = __len__ = __str__ = __repr__ = __eq__ = _refuse


def _cut(text: str, start: int | None, stop: int | None, step: int | None) -> str:
    return text[start:stop:step]


def _concatenated(*parts: str) -> str:
    return "".join(parts)


def _joined(parts: Iterable[Any]) -> Any:
    """What stands one after another, as text: also what a macro or a block wrote."""
    pieces = [part if isinstance(part, (str, Held)) else str(part) for part in parts]
    pieces = [part for part in pieces if isinstance(part, Held) or part]
    held = next((part for part in pieces if isinstance(part, Held)), None)
    if held is None:
        return "".join(str(part) for part in pieces)
    if len(pieces) == 1:
        return held
    made = held._make(_concatenated, *pieces)
    return Held(made._value, made._recipe, made._asked, pieces)


def _printed(piece: Any) -> Iterator[tuple[str, Recipe | None]]:
    """What is printed; text that was only put together in its parts."""
    if not isinstance(piece, Held):
        yield (piece if isinstance(piece, str) else str(piece)), None
    elif piece._parts:
        for part in piece._parts:
            yield from _printed(part)
    else:
        yield piece._value, piece._recipe


# -- the environment


class _Generator(NativeCodeGenerator):
    """Prints values as they are."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``, of which nothing is kept but that it is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers writes JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _default(value: Any, other: Any = "", boolean: Any = False) -> Any:
    """Either may be the text that is held: the value, or what stands in for one that is undefined."""
    if isinstance(value, jinja2.Undefined) or (boolean and not value):
        return other
    return value


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "trim": lambda text, chars=None: text.strip(chars),
    "string": lambda text: text,
    "safe": lambda text: text,
    "default": _default,
    "d": _default,
    "length": len,
    "count": len,
    "upper": lambda text: text.upper(),
    "lower": lambda text: text.lower(),
    "replace": lambda text, old, new: text.replace(old, new),
    "tojson": lambda text: text._make(tojson, text),
}
"""What filters do with a text. Others, and these with other arguments, are not followed."""
_TESTS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("eq", "equalto", "=="), operator.eq),
    **dict.fromkeys(("ne", "!="), operator.ne),
    "in": lambda one, other: one in other,
}


def _following(real: Callable[..., Any], own: Callable[..., Any] | None, by_type: bool = False) -> Callable[..., Any]:
    """A filter or a test of Jinja's that is replaced by `own` where it is given a text that is held."""
    skipped = int(hasattr(real, "jinja_pass_arg"))  # Jinja puts an environment or a context before its arguments

    @functools.wraps(real)
    def followed(*args: Any, **kwargs: Any) -> Any:
        held = [isinstance(one, Held) for one in args]
        if not any(held) and not any(isinstance(one, Held) for one in kwargs.values()):
            return real(*args, **kwargs)
        if by_type and held[skipped]:
            return real(*args[:skipped], "", *args[skipped + 1 :], **kwargs)
        if own is None:
            raise _Unfollowed
        return own(*args[skipped:], **kwargs)

    return followed


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> Any:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    pieces = [piece for item in value for piece in (d, item)]
    return _joined(pieces[1:])


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, printing values as they are."""

    code_generator_class = _Generator
    concat = staticmethod(_joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension])
        self.filters["tojson"] = tojson
        self.filters = {name: _following(real, _FILTERS.get(name)) for name, real in self.filters.items()}
        self.filters["join"] = _join
        self.tests = {
            name: _following(cast(Any, real), _TESTS.get(name), name in _TYPE_TESTS)
            for name, real in self.tests.items()
        }
        self.globals["raise_exception"] = _raise_exception


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError("refused")


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _Environment().from_string(source)


def observe(
    source: str, messages: Callable[[Callable[[int, str], Any]], Any], variables: Mapping[str, Any]
) -> Observed | None:
    """Run a template, with texts held; None where it does what cannot be followed, or fails.

    `messages` gives the conversation: it is told how to hold a text under a number.
    """
    asked: dict[Recipe, Any] = {}

    def hold(at: int, text: str) -> Held:
        return Held(text, Given(at), asked)

    def strftime_now(format: str) -> Held:
        return hold(NOW, datetime.now().strftime(format))

    try:
        template = _compiled(source)
        context = template.new_context({"strftime_now": strftime_now, **variables, "messages": messages(hold)})
        pieces = [part for piece in template.root_render_func(context) for part in _printed(piece)]
    except (_Unfollowed, Exception):
        return None
    return Observed(tuple(pieces), tuple(asked.items()))
