"""Template variables given to a renderer: a name that nobody reads is refused, with the one that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ..errors import RendererError, shown
from ..template.chat_template import Template

OF_RENDER: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What `render` is given with each conversation."""


def check_variables(given: Mapping[str, Any], templates: Iterable[Template], settings: Collection[str]) -> None:
    """Raise RendererError for a variable that is no setting and that none of the templates reads."""
    some = list(templates)
    read = frozenset[str]().union(*(template.reads for template in some)) - OF_RENDER
    for name in given:
        if name in read:
            continue
        if name in OF_RENDER:
            raise RendererError(f"{name} goes with each conversation: pass it to render(), not to the renderer")
        near = difflib.get_close_matches(name, [*settings, *read], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        reads = ", ".join(sorted(frozenset[str]().union(*(template.variables for template in some)))) or "no variables"
        raise RendererError(
            f"{shown(name)} is no setting of a renderer, and the chat template does not read it{meant} "
            f"(it reads {reads})"
        )
