"""Examples in docstrings (``>>>``) as blocks of code: without it Markdown reads them as prose."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)


class Doctests(Extension):
    """Puts a fence around each example."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for each object that has a docstring, among others."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
