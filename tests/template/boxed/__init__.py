"""The oracle of the template engine: every value in a box of its own, all the way.

This is how templates were run before they were compiled to plain values with origins beside them. It is slower and
simpler: each value carries its trace wherever it goes. `rendered` gives what a template's own `render` must give.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from tests.template.boxed.environment import TracingEnvironment
from tests.template.boxed.trace import Trace, collect
from tokentrace.template.budget import RenderBudget, charging
from tokentrace.template.chat_template import told, wrap_messages
from tokentrace.template.trace import Rendering
from tokentrace.template.traced import TracedList


@functools.cache
def environment() -> TracingEnvironment:
    return TracingEnvironment()


@functools.lru_cache(maxsize=256)
def compiled(source: str) -> jinja2.Template:
    with charging(RenderBudget(steps=1_000, made=64 * 1024)):
        return environment().from_string(source)


def rendered(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: TracedList | None = None,
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Rendering:
    """What the template makes of the conversation, as the boxed run has it."""
    template, trace = compiled(source), Trace(len(messages))
    context = template.new_context(
        {
            "messages": wrap_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
    )
    context.trace = trace  # type: ignore[attr-defined]
    with told(trace, template), charging(trace.budget):
        return collect(template.root_render_func(context))
