"""What the code of a compiled template asks for where it has no plain form at hand: look-ups, slices, JSON, printing.

Each takes a pair (a value, and what stands beside it), answers at once where the value is plain and the answer
certain, and else hands the boxed value to the operation of the environment that has always had the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from jinja2.sandbox import ImmutableSandboxedEnvironment

from .budget import check_items
from .jsonify import plain_dumps
from .origin import Origin
from .pairs import PLAIN, SMALL, Beside, Each, box, inside, keeps_items, paid, pieces
from .sources import DICT_ATTRIBUTES
from .strings import TracedStr
from .trace import join_buffer
from .traced import TracedDict, text_of, wrap

_MISSING: Final = object()


class PairEnvironment(ImmutableSandboxedEnvironment):
    """The part of the environment that takes pairs."""

    def sliced(self, value: Any) -> Any:
        raise NotImplementedError

    def method(self, context: Any, obj: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def joined(self, written: list[Any]) -> TracedStr:
        """What a macro or a set block wrote."""
        return join_buffer(pieces(written))

    def shown(self, value: Any, origin: Beside) -> str:
        """What is printed of a value that may change before the template is done."""
        return text_of(box(value, origin))

    def field(self, value: Any, origin: Beside, name: str) -> Any:
        """``value.name``."""
        if type(value) is dict and origin is not None:
            return self._looked_up(value, origin, name)
        return self.getattr(box(value, origin), name)

    def item(self, value: Any, origin: Beside, key: Any) -> Any:
        """``value[key]``."""
        kind = type(value)
        if kind is list and type(key) is int:
            if not -len(value) <= key < len(value):
                return self.undefined(obj=value, name=key)  # type: ignore[arg-type]
            found = value[key]
            return found if origin is None or found is None or type(found) in PLAIN else box(value, origin)[key]
        known = kind is dict and origin is not None and isinstance(key, str)
        if known and (key in value or key not in DICT_ATTRIBUTES):
            return self._looked_up(value, origin, key)
        return self.getitem(box(value, origin), key)

    def _looked_up(self, value: dict[Any, Any], origin: Beside, key: str) -> Any:
        found = value.get(key, _MISSING)
        if found is _MISSING:
            return self.undefined(obj=value, name=key)
        return found if found is None or type(found) in PLAIN else wrap(found, cast(Origin, inside(origin, key)))

    def got(self, context: Any, value: Any, origin: Beside, key: str, default: Any, beside: Beside) -> Any:
        """``value.get(key, default)``."""
        if type(value) is dict and origin is not None:
            return self._looked_up(value, origin, key) if key in value else default
        return self.method(context, box(value, origin), "get", key, box(default, beside))

    def json(self, value: Any, origin: Beside, options: tuple[Any, ...]) -> str:
        """``value|tojson(…)``, with options that are constants."""
        if type(origin) is Origin and options[1] is None:
            text = plain_dumps(value, origin, options)
            if text is not None:
                return text
        elif type(value) is TracedDict and (memo := getattr(value, "memo", None)) is not None and options in memo:
            return cast(str, memo[options])
        ensure_ascii, indent, separators, sort_keys = options
        return cast(str, self.filters["tojson"](box(value, origin), ensure_ascii, indent, separators, sort_keys))

    def same(self, value: Any, origin: Beside, other: Any, beside: Beside) -> bool:
        """``value is sameas(other)``."""
        test: Callable[[Any, Any], bool] = self.tests["sameas"]  # type: ignore[assignment]
        if type(value) is type(other) and type(value) in PLAIN:
            return value is other or test(value, other)
        return test(box(value, origin), box(other, beside))

    def cut(self, value: Any, origin: Beside, which: slice) -> Any:
        """``value[start:stop]``."""
        if origin is not None:
            if type(value) is str:
                return (value if len(value) < SMALL else paid(value))[which]
            if type(value) is list and (type(origin) is Each or keeps_items(value)):
                check_items(len(value))
                return value[which]
        return self.sliced(box(value, origin))[which]
