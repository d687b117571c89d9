"""TemplateStudy: what we learn about one template, once.

A study depends only on a template, its variables and a tokenizer, so renderers share it
(`study_of`). It renders each probe once and finds each fact on first use, in one thread.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from ..computed import computed
from ..conversation.messages import Messages
from ..errors import TemplateLimitError, TokentraceError
from ..formats.grammar import NO_CALLS, TurnGrammar
from ..template.chat_template import ChatTemplate, Template, wrap_tools, wrap_variables
from ..template.trace import Rendering
from ..template.traced import TracedList
from ..tokens.control import Trust
from ..tokens.encoding import ControlPolicy, Encoded, encode_spans
from ..tokens.tokenizer import Tokenizer
from ..values.plain import is_plain
from . import derive, endings
from .forms import TemplateForms
from .memory import Memory, learned
from .outline import TemplateOutline
from .probes import REASONED, STAND_IN_TOOL, Probe, stringified
from .prompts import GenerationPrompts

Changes = Mapping[str, Any] | None


class TemplateStudy:
    """What is known about one template with its variables."""

    def __init__(self, template: Template, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.variables = {**tokenizer.variables, **wrap_variables(variables)}
        self.cache = Memory()
        self.forms = TemplateForms(self)
        self.prompts = GenerationPrompts(self)
        self.outline = TemplateOutline(self)
        self._tool = wrap_tools([STAND_IN_TOOL])
        self._renderings = Memory()
        self._limit: TemplateLimitError | None = None
        """The limit that a probe ran into. No other probe is tried after that."""

    def run(self, tools: TracedList | None, messages: Messages, prompt: bool) -> Rendering:
        """Run the template on a conversation, without caching."""
        return self.template.render(messages, tools, add_generation_prompt=prompt, variables=self.variables)

    def probe(
        self, messages: Probe, tools: bool = False, prompt: bool = False, changes: Changes = None
    ) -> Rendering | None:
        """A probe, rendered once; None if the template refuses it. Do not modify the result.

        `tools` declares the stand-in tool. `changes` are other values of variables. After one
        TemplateLimitError, every probe raises it.
        """
        rendering = self._rendered(messages, tools, prompt, changes)
        if rendering is None and not tools and self.needs_tools():
            return self._rendered(messages, True, prompt, changes)
        return rendering

    def _rendered(
        self, messages: Probe, tools: bool, prompt: bool = False, changes: Changes = None
    ) -> Rendering | None:
        def render() -> Rendering | None:
            if self._limit is not None:
                raise self._limit
            variables = {**self.variables, **wrap_variables(changes or {})}
            declared = self._tool if tools else None
            try:
                return self.template.render(
                    messages, declared, add_generation_prompt=prompt, variables=variables
                )
            except TemplateLimitError as error:
                self._limit = error
                raise
            except TokentraceError:
                return None

        return self._renderings.once(json.dumps([messages, tools, prompt, changes or {}]), render)

    def readable(self, messages: Probe, tools: bool = False, prompt: bool = False) -> Rendering | None:
        """A probe, with arguments as JSON text if the template refuses mappings."""
        rendering = self.probe(messages, tools, prompt)
        if rendering is None and any(message.get("tool_calls") for message in messages):
            return self.probe([stringified(message) for message in messages], tools, prompt)
        return rendering

    def encode(self, rendering: Rendering) -> Encoded:
        """The ids of a probe, whose text may spell control tokens: it is ours."""
        return encode_spans(self.tokenizer, rendering, lambda _: Trust.ANY, ControlPolicy.HF_COMPAT)

    @computed
    def eos(self) -> frozenset[int]:
        """The tokens that end generation according to the model's own files."""
        named = self.tokenizer.token_id(self.tokenizer.variables.get("eos_token", ""))
        return frozenset({*self.tokenizer.eos_ids, *(() if named is None else (named,))})

    @property
    def toggles(self) -> list[dict[str, Any]]:
        """Other values of template variables."""
        return [{name: value} for name in sorted(self.template.variables) for value in (True, False)]

    @learned
    def needs_tools(self) -> bool:
        """True if the template refuses any answer without tools."""
        return self._rendered(REASONED, False) is None and self._rendered(REASONED, True) is not None

    @learned
    def endings(self, tools: bool) -> endings.TurnEndings:
        """How turns end with tools (if the template accepts one) or without."""
        turn_endings = endings.find_endings(self, tools)
        return self.endings(False) if tools and not turn_endings.has_end else turn_endings

    @learned
    def turn_tokens(self) -> frozenset[int]:
        return frozenset(endings.written_control_tokens(self).assistant)

    @learned
    def grammar(self, tools: bool) -> TurnGrammar:
        return self._derived(tools, self.shows_tools(tools))

    @learned
    def shows_tools(self, tools: bool) -> bool:
        """True if `grammar` is read off turns with a tool declared."""
        if self.needs_tools() or not tools or NO_CALLS not in self._derived(tools, False).notes:
            return self.needs_tools()
        return NO_CALLS not in self._derived(tools, True).notes

    def _derived(self, tools: bool, declared: bool) -> TurnGrammar:
        turn_endings = self.endings(tools)
        ends = turn_endings.stops | turn_endings.closers | self.eos
        return self.cache.once((ends, declared), lambda: derive.template_grammar(self, ends, declared))

    @learned
    def inner_tokens(self, grammar: TurnGrammar) -> frozenset[int]:
        return endings.inner_tokens(self, grammar)


_SHARED: weakref.WeakValueDictionary[Hashable, TemplateStudy] = weakref.WeakValueDictionary()


def study_of(
    template: Template, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None
) -> TemplateStudy:
    """The study of a template, shared for equal templates and variables while in use.

    Two threads that ask first at the same time may get one study each.
    """
    settings = dict(variables or {})
    wrap_variables(settings)  # raises for values that contain themselves
    if not is_plain(settings):
        return TemplateStudy(template, tokenizer, settings)
    identity = template.digest if isinstance(template, ChatTemplate) else id(template)
    key = (type(template), identity, id(tokenizer), repr(sorted(settings.items())))
    if (study := _SHARED.get(key)) is None:
        study = _SHARED.setdefault(key, TemplateStudy(template, tokenizer, copy.deepcopy(settings)))
    return study
