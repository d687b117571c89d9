"""Renderer: messages to ids with a model's own template. `rendering.factory` makes them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..conversation.forms import Adapted, Change, MessageForm, adapt
from ..conversation.messages import Messages, check_messages, check_tools
from ..conversation.place import Place
from ..conversation.values import plain_json
from ..errors import InputError, RendererError, TemplateError, TokentraceError
from ..formats.dialects import with_parsers
from ..formats.grammar import TurnGrammar
from ..parsing.compiled import Compiled
from ..parsing.parser import StreamingParser, called_functions, parse
from ..parsing.proof import MISREAD, PROOFS, misread
from ..parsing.response import ParsedResponse, ReadAs
from ..parsing.unreadable import Unreadable, find_unreadable
from ..parsing.values import Tools as ToolSchemas
from ..parsing.values import schemas_of
from ..settings import choose, flag
from ..study.derive import template_grammar
from ..study.forms import TemplateForms
from ..study.inner import inner_tokens
from ..study.prefixes import missing_turns, turns_by_prefix
from ..study.probes import USER
from ..study.seams import STAND_IN_TOOL, BridgeRefusal
from ..study.skeleton import Skeleton
from ..study.turns import PromptTails, Sampling, Section, TurnFacts, find_sampled, find_turn_facts, sections
from ..template.chat_template import Template, wrap_tools, wrap_variables
from ..template.origin import Origin
from ..template.trace import Rendering
from ..template.traced import TracedList
from ..tokens.encoding import ControlPolicy, Encoded, ForgedControl, encode_spans
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids, Tokenizer
from .bridged import BridgedTokens, check_tail
from .bridging import Bridger, History, Truncation
from .collector import no_collection
from .history import compare_turns, keep_reasoning, last_user, parsed_arguments, patch_history
from .lost import LostPolicy, find_lost, report_lost
from .prefill import left_open, with_mark
from .rendered import RenderedTokens
from .trust import TRUSTED, forged_error, trust_of, unencodable_error


@dataclass(slots=True)
class _Learned:
    """What a renderer found out about one template, with tools or without: how it prompts, ends turns, what it reads.

    It is found out with a stand-in for the tools, so that it does not depend on what was rendered first.
    """

    name: str
    template: Template
    tails: PromptTails
    stand_in: TracedList | None
    facts: TurnFacts | None = None
    bridger: Bridger | None = None
    compiled: Compiled | None = None
    forms: TemplateForms | None = None


class Renderer:
    """Renders conversations to ids with origins and an exact loss mask. Make one with `create_renderer`.

    Immutable as far as callers can see, and safe to share between threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, Template],
        *,
        family: str = "default",
        preserve_all_thinking: bool = False,
        preserve_thinking_between_tool_calls: bool = False,
        use_patched: bool = False,
        control_tokens: ControlPolicy = ControlPolicy.LITERAL,
        history: History = History.TRAIN,
        truncation: Truncation = Truncation.CLOSE,
        tool_parser: Any = None,
        reasoning_parser: Any = None,
        trusted: Iterable[str] = TRUSTED,
        messages: MessageForm = MessageForm.ADAPT,
        lost: LostPolicy = LostPolicy.WARN,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.preserve_all_thinking = preserve_all_thinking
        self.preserve_thinking_between_tool_calls = preserve_thinking_between_tool_calls
        self.use_patched = use_patched
        self.control_tokens = control_tokens
        self.history = history
        self.truncation = truncation
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        with_parsers(TurnGrammar(), tool_parser, reasoning_parser)  # says at once what is wrong with them
        self.trusted = frozenset(trusted)
        self.messages = messages
        self.lost = lost
        self.template_kwargs = dict(variables or {})
        self._variables = {**tokenizer.variables, **wrap_variables(self.template_kwargs)}
        stand_ins = {False: None, True: wrap_tools([STAND_IN_TOOL])}
        self._learned: dict[tuple[str, bool], _Learned] = {
            (name, with_tools): _Learned(name, template, PromptTails(template.constants), stand_in)
            for name, template in templates.items()
            for with_tools, stand_in in stand_ins.items()
        }
        self._grammars: dict[tuple[str, frozenset[int]], TurnGrammar] = {}
        self._inner: dict[str, frozenset[int]] = {}
        self._tools: dict[str, TracedList] = {}
        self.kept: dict[Hashable, Any] = {}
        """What others have found out about this renderer, for as long as it lives."""
        self._refused = threading.local()

    # -- rendering

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> RenderedTokens:
        """Render a conversation: ids, origins and the loss mask, in one render.

        `add_generation_prompt` ends it with the prompt for a new reply, `continue_final_message` leaves the last
        message, an assistant's, open after its content. Either way it is a prompt: nothing of the turn that the model
        is about to write counts as sampled, not what it was given of it either.

        Raises InputError (naming message and field) for a conversation that is none, TemplateError where the
        template refuses it, ControlTokenError where untrusted text spells a control token and the policy is
        ``reject``. Given text that reaches no token is in `lost` of the result; a `LostTextWarning` says so, or, with
        ``lost="error"``, a LostTextError.
        """
        prompt = flag("add_generation_prompt", add_generation_prompt)
        continued = flag("continue_final_message", continue_final_message)
        with no_collection():
            rendered = self._render(messages, tools, prompt, continued)
        if self.lost is not LostPolicy.IGNORE:
            report_lost(rendered.lost, self.lost)
        return rendered

    def render_batch(
        self, conversations: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[RenderedTokens]:
        """Render several conversations. `tools` are one list for all of them, or one (or None) for each.

        Errors are those of `render` and say which conversation it was.
        """
        if isinstance(conversations, (str, bytes, Mapping)) or not isinstance(conversations, Sequence):
            raise InputError(f"must be a list of conversations, not a {type(conversations).__name__}")
        rendered = []
        for at, (conversation, own) in enumerate(zip(conversations, _tools_of(conversations, tools), strict=True)):
            try:
                rendered.append(self.render(conversation, tools=own, add_generation_prompt=add_generation_prompt))
            except TokentraceError as error:
                raise error.of_conversation(at) from error.__cause__
        return rendered

    def _render(self, messages: Any, tools: Any, prompt: bool, continued: bool = False) -> RenderedTokens:
        if prompt and continued:
            raise InputError(
                "continue_final_message leaves the last message open, add_generation_prompt begins a new one; "
                "ask for one of them"
            )
        learned = self._for(tools)
        checked = self._check(learned, messages)
        wrapped = self._wrap_tools(tools)
        adapted = self._adapt(learned, checked)
        given = with_mark(adapted.messages) if continued else adapted.messages
        shown, rendering = self._first(learned, given, wrapped, prompt)
        if prompt:
            self._settle_tail(learned, rendering, shown, wrapped)
        sampled = _with_calls_of(given, checked) if self.use_patched else given
        rendering, changes, notes = self._with_history(learned, rendering, given, shown, wrapped, sampled)
        if continued:
            rendering = left_open(rendering, len(checked) - 1)
        _credit_content(rendering, adapted)
        rendered = self.encode_rendering(
            rendering, checked, tools=tools, shown=shown, prompted=prompt, continued=continued
        )
        rendered.changes, rendered.notes = [*adapted.changes, *changes], [*notes, *rendered.notes]
        held = adapted.messages if continued else shown
        if adapted.wrapped:
            held = [checked[at] if at in adapted.wrapped else message for at, message in enumerate(held)]
        rendered._find_lost = functools.partial(find_lost, rendering, held, self._forms(learned), tools=wrapped or ())
        return rendered

    def encode_rendering(
        self,
        rendering: Rendering,
        messages: Messages,
        *,
        tools: Any = None,
        shown: Messages | None = None,
        prompted: bool = False,
        continued: bool = False,
    ) -> RenderedTokens:
        """A text with its spans as ids, origins and mask: what `render` does after the template has run.

        `messages` are those it was rendered from, checked; `shown` what the template was given of them, if that is
        known. `prompted` says that it ends with a generation prompt, `continued` that its last turn was left open.
        """
        learned, wrapped = self._for(tools), self._wrap_tools(tools)
        shown = self._adapt(learned, messages).messages if shown is None else shown
        encoded = self._encode(rendering, shown, tools)
        sampling = self._find_sampled(learned, encoded, shown, wrapped)
        if continued:
            sampling.turns = [turn for turn in sampling.turns if turn.message != len(messages) - 1]
        mask = sampling.mask(len(encoded.ids))
        tagged = _compare_generation(encoded, mask) if rendering.generation else []
        return RenderedTokens(
            tokenizer=self.tokenizer,
            encoded=encoded,
            conversation=messages,
            turns=sampling.turns,
            mask=mask,
            prompted=prompted,
            notes=[*sampling.notes, *tagged],
        )

    def say_lost(self, rendered: RenderedTokens, messages: Any, *, tools: Any = None) -> None:
        """Find what a rendering that was put together lost of these messages, and say it as `render` does."""
        held = self.adapt_messages(messages, tools=tools).messages
        found = functools.partial(find_lost, rendered.rendering, held, self._forms(self._for(tools)))
        rendered.find_lost_with(functools.partial(found, tools=self._wrap_tools(tools) or ()))
        report_lost(rendered.lost, self.lost)

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        """The ids alone."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def render_text(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> Rendering:
        """The text alone, as spans: nothing is encoded."""
        learned = self._for(tools)
        adapted = self._adapt(learned, self._check(learned, messages))
        wrapped = self._wrap_tools(tools)
        shown, rendering = self._first(learned, adapted.messages, wrapped, add_generation_prompt)
        rendering = self._with_history(learned, rendering, adapted.messages, shown, wrapped)[0]
        _credit_content(rendering, adapted)
        return rendering

    def preserving(self) -> Renderer:
        """This renderer with `preserve_all_thinking`; what was learned of the template is shared."""
        if self.preserve_all_thinking:
            return self
        other = copy.copy(self)
        other.preserve_all_thinking = True
        other.kept = {}
        other._learned = {
            key: dataclasses.replace(learned, bridger=None, compiled=None) for key, learned in self._learned.items()
        }
        return other

    # -- copying: a shallow copy shares what was learned; others, and pickles, have the settings and learn it anew

    def __copy__(self) -> Renderer:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: Any) -> Renderer:
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        templates = {learned.name: learned.template for learned in self._learned.values()}
        names = inspect.signature(Renderer.__init__).parameters
        settings = {name: getattr(self, name) for name in names if name in self.__dict__ and name != "tokenizer"}
        return {
            "tokenizer": self.tokenizer,
            "templates": templates,
            "variables": self.template_kwargs,
            **settings,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def with_variables(self, variables: Mapping[str, Any]) -> Renderer:
        """This renderer with other template variables beside its own; nothing that was learned is shared."""
        return Renderer(**{**self.__getstate__(), "variables": {**self.template_kwargs, **variables}})

    def switches(self) -> list[tuple[str, bool]]:
        """Template variables that the templates read, each with a truth value that it does not have now."""
        read = {name for learned in self._learned.values() for name in learned.template.variables}
        own = sorted(read - set(self.tokenizer.variables))
        return [(name, value) for name in own for value in (False, True) if self.template_kwargs.get(name) is not value]

    def silent(self) -> Renderer:
        """This renderer, saying nothing of lost text: for renders that nobody asked for. What was learned is shared."""
        if self.lost is LostPolicy.IGNORE:
            return self
        other = copy.copy(self)
        other.lost = LostPolicy.IGNORE
        return other

    def check_messages(self, messages: Any, *, tools: Any = None) -> list[Mapping[str, Any]]:
        """The messages as mappings, in any role that the template knows; InputError names what is wrong with them."""
        return self._check(self._for(tools), messages)

    def adapt_messages(self, messages: Any, *, tools: Any = None) -> Adapted:
        """The messages in the form that the template reads, and what was changed for it: what `render` begins with."""
        learned = self._for(tools)
        return self._adapt(learned, self._check(learned, messages))

    def template_digests(self) -> dict[str, str]:
        """A hash of each template, by its name."""
        return {learned.name: learned.template.digest for learned in self._learned.values()}

    def turn_stop_ids(self) -> frozenset[int]:
        """The ids that the template ends an assistant's turn with, with tools or without.

        The model's configuration is not asked.
        """
        return self._facts(self._for(None)).stops | self._facts(self._for([STAND_IN_TOOL])).stops

    def get_stop_token_ids(self) -> list[int]:
        """The ids at which generation has to stop: what ends a turn, and what the model's configuration adds."""
        return list(dict.fromkeys([*sorted(self.turn_stop_ids()), *sorted(self._eos)]))

    # -- bridging

    def bridge_to_next_turn(
        self,
        prev_prompt_ids: Any,
        prev_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        messages: Any = None,
    ) -> BridgedTokens | None:
        """The next prompt: the stream so far, id for id, then the new messages and a generation prompt.

        None where that cannot be proven; `bridge_refusal` then says why. Raises InputError for messages or ids that
        are none, as `render` does. Give the tools that the first prompt was rendered with. `messages`, the
        conversation before the completion, is looked at only where the template makes what follows depend on it.
        """
        bridged = self.bridge(prev_prompt_ids, prev_completion_ids, new_messages, tools=tools, messages=messages)
        if isinstance(bridged, BridgeRefusal):
            self._refused.last = bridged
            return None
        self._refused.last = None
        return bridged

    @property
    def bridge_refusal(self) -> BridgeRefusal | None:
        """Why the last call of `bridge_to_next_turn` in this thread gave None."""
        return getattr(self._refused, "last", None)

    def bridge(
        self,
        prev_prompt_ids: Any,
        prev_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        messages: Any = None,
    ) -> BridgedTokens | BridgeRefusal:
        """As `bridge_to_next_turn`, with the reason in place of None."""
        learned = self._for(tools)
        empty = isinstance(new_messages, Sequence) and not len(new_messages)
        adapted = Adapted(()) if empty else self._adapt(learned, self._check(learned, new_messages))
        before = None if messages is None else self._adapt(learned, self._check(learned, messages)).messages
        check_tools(tools)
        completion = check_ids(prev_completion_ids, "prev_completion_ids")
        check_tail(prev_prompt_ids, "prev_prompt_ids")
        bridger = self._bridger(learned)
        bridged = bridger.bridge(
            prev_prompt_ids, completion, prev_completion_ids, list(adapted.messages), tools, before
        )
        if isinstance(bridged, BridgedTokens):
            bridged.changes = list(adapted.changes)
            report_lost(bridged.lost, self.lost)
        return bridged

    def _bridger(self, learned: _Learned) -> Bridger:
        if learned.bridger is None:
            learned.bridger = Bridger(
                self.tokenizer,
                functools.partial(self._make, learned),
                self._facts(learned),
                Skeleton(self.tokenizer, lambda some, prompt: self._run(learned, some, None, prompt)),
                functools.partial(self._called, learned),
                words=learned.tails.words,
                ends=self._eos,
                history=self.history,
                truncation=self.truncation,
                forms=self._forms(learned),
            )
        return learned.bridger

    def _make(
        self, learned: _Learned, messages: Messages, at: int, tools: Any, prompt: bool
    ) -> tuple[Encoded, list[Section]]:
        """A small conversation, encoded, with its turns; that of message `at` is found if it can be."""
        wrapped = self._wrap_tools(tools)
        shown, rendering = self._first(learned, messages, wrapped, prompt)
        if any(message["role"] == "assistant" for message in messages[at + 1 :]):
            rendering = self._with_history(learned, rendering, messages, shown, wrapped)[0]
        turns = sections(rendering)
        if at in missing_turns(rendering, turns, messages):
            run = functools.partial(self._run, learned, tools=wrapped)
            found, _ = turns_by_prefix(
                rendering, [at], messages, lambda some, asked: run(some, prompt=asked), self.tokenizer
            )
            turns = sorted((*turns, *found), key=lambda section: section.start)
        return self._encode(rendering, messages, tools), turns

    # -- parsing

    def parse_response(
        self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None, reading: str = "strict"
    ) -> ParsedResponse:
        """What a completion says: reasoning, content and tool calls, each with its tokens.

        `tools` say what bare values mean, and which calls are of no tool. `prompt_ids` tell what the prompt wrote of
        the turn already, an opened ``<think>`` above all; without them it is taken to be what the template prompts
        with. Any ids can be parsed: what is malformed is in the result, with its status.

        `reading` is ``"strict"``: a call counts where the grammar has one, and what vLLM or SGLang would take for one
        elsewhere is in `ParsedResponse.attempts`. Or ``"server"``: such a call counts, as it does in production.
        """
        read_as = choose(ReadAs, "reading", reading)
        compiled, schemas, prompt = self._parsing(tools, prompt_ids)
        return parse(compiled, check_ids(token_ids, "token_ids").tolist(), schemas, prompt, read_as)

    def streaming_parser(
        self, *, tools: Any = None, prompt_ids: Any = None, reading: str = "strict"
    ) -> StreamingParser:
        """A parser for a completion that is still arriving; see `parse_response`. It reads strictly.

        RendererError for ``reading="server"``: whether reasoning stays open, for one, is known only at the end.
        """
        if choose(ReadAs, "reading", reading) is ReadAs.SERVER:
            raise RendererError(
                "reading='server' needs the whole completion: whether reasoning is closed is known only at its end; "
                "use parse_response(..., reading='server') when it has arrived"
            )
        return StreamingParser(*self._parsing(tools, prompt_ids))

    def grammar(self, tools: Any = None) -> TurnGrammar:
        """What the model writes in its turns, as derived from the template (and `tool_parser`, `reasoning_parser`)."""
        return self._compiled(self._for(tools)).grammar

    def find_unreadable(self, messages: Any, *, tools: Any = None) -> list[Unreadable]:
        """What of the assistant messages cannot be read back from their tokens, and why: see `parsing.unreadable`."""
        rendered = self._render(messages, tools, False)
        learned = self._for(tools)
        compiled = self._compiled(learned)
        spelled = compiled.delimiters(self._spellable(learned))
        conversation = self.adapt_messages(messages, tools=tools).messages
        return find_unreadable(rendered.rendering, conversation, compiled.grammar, check_tools(tools), spelled)

    def _parsing(self, tools: Any, prompt_ids: Any) -> tuple[Compiled, ToolSchemas, bytes | None]:
        schemas = schemas_of(check_tools(tools))
        compiled = self._compiled(self._for(tools))
        prompt = None
        if prompt_ids is not None:
            check_tail(prompt_ids, "prompt_ids")
            prompt = compiled.prompt_bytes(prompt_ids)
        return compiled, schemas, prompt

    def _called(self, learned: _Learned, prompt: Sequence[int] | Ids, completion: Ids) -> list[str] | None:
        return called_functions(self._compiled(learned), completion, prompt)

    def _compiled(self, learned: _Learned) -> Compiled:
        if learned.compiled is None:
            facts = self._facts(learned)
            stops = [*sorted(facts.stops), *sorted(self._eos - facts.stops)]
            derived = self._derived(learned)
            grammar = with_parsers(derived, self.tool_parser, self.reasoning_parser)
            compiled = Compiled(grammar, self.tokenizer, stops)
            if grammar is derived and learned.name == "default":
                found = ", ".join(self._misread(compiled))
                notes = [f"{MISREAD}: {found}"] if found else []
                compiled.grammar = grammar.replace(notes=(*grammar.notes, *notes))
            learned.compiled = compiled
        return learned.compiled

    def _derived(self, learned: _Learned) -> TurnGrammar:
        """The grammar as the template shows it. Tools are not shown to it, but they may change what ends a turn."""
        facts = self._facts(learned)
        ends = facts.stops | facts.closers | self._eos
        key = (learned.name, ends)
        if key not in self._grammars:
            self._grammars[key] = template_grammar(learned.template, self._variables, self.tokenizer, ends)
        return self._grammars[key]

    def _misread(self, compiled: Compiled) -> Iterator[str]:
        """Where a grammar does not read back what its own template writes."""
        for name, fields in PROOFS.items():
            try:
                rendered = self._render([USER, {"role": "assistant", **fields}], None, False)
            except TokentraceError:
                continue
            for turn in rendered.turns[:1]:
                prompt = compiled.prompt_bytes(rendered.ids[: turn.start])
                parsed = parse(compiled, rendered.ids[turn.start : turn.stop].tolist(), prompt=prompt)
                yield from misread(name, rendered.rendering, parsed, compiled.grammar)

    # -- stages

    def _for(self, tools: Any) -> _Learned:
        """The template that serves: models may ship one of its own for tools."""
        named = "tool_use" if tools is not None and ("tool_use", True) in self._learned else "default"
        if tools is not None and not isinstance(tools, Sequence):
            check_tools(tools)  # says what is wrong with them
        learned = self._learned.get((named, bool(tools)))
        if learned is None:
            known = ", ".join(sorted({name for name, _ in self._learned}))
            raise RendererError(f"this tokenizer has no default chat template, only {known}; pass chat_template=")
        return learned

    def _check(self, learned: _Learned, messages: Any) -> list[Mapping[str, Any]]:
        return check_messages(
            messages, more_roles=learned.template.constants, any_role=functools.partial(self._prints_role, learned)
        )

    def _prints_role(self, learned: _Learned, role: str) -> bool:
        """Whether a role that nobody has heard of is fine: the template prints it, and it is a word like others."""
        control = self.tokenizer.vocabulary.control_pattern
        return self._forms(learned).prints_roles and (control is None or not control.search(role))

    def _adapt(self, learned: _Learned, messages: Messages) -> Adapted:
        """The messages in the form that the template reads."""
        return Adapted(messages) if self.messages is MessageForm.AS_GIVEN else adapt(messages, self._forms(learned))

    def _forms(self, learned: _Learned) -> TemplateForms:
        if learned.forms is None:
            tool = wrap_tools([STAND_IN_TOOL])
            learned.forms = TemplateForms(
                lambda some, has_tools: self._run(learned, some, tool if has_tools else None, False)
            )
        return learned.forms

    def _wrap_tools(self, tools: Any) -> TracedList | None:
        checked = check_tools(tools)
        if checked is None:
            return None
        try:
            key = json.dumps(checked)
        except (TypeError, ValueError, RecursionError):
            if self.messages is MessageForm.ADAPT:
                checked = [plain_json(tool, Place(field=f"tools.{at}")) for at, tool in enumerate(checked)]
            return wrap_tools(checked)
        wrapped = self._tools.get(key)
        if wrapped is None:
            if len(self._tools) >= 64:
                self._tools.clear()
            wrapped = self._tools[key] = wrap_tools(checked)
        return wrapped

    def _first(
        self, learned: _Learned, messages: Messages, tools: TracedList | None, prompt: bool
    ) -> tuple[Messages, Rendering]:
        """The template's own rendering, and the messages as it was shown them: patched, with parsed arguments."""
        if self.use_patched:
            parsed = parsed_arguments(messages)
            try:
                return parsed, self._run(learned, parsed, tools, prompt)
            except TemplateError:
                pass  # a template that takes arguments as JSON strings only
        return messages, self._run(learned, messages, tools, prompt)

    def _run(self, learned: _Learned, messages: Messages, tools: TracedList | None, prompt: bool) -> Rendering:
        return learned.template.render(messages, tools, add_generation_prompt=prompt, variables=self._variables)

    def _settle_tail(
        self, learned: _Learned, rendering: Rendering, messages: Messages, tools: TracedList | None
    ) -> None:
        """Find where the generation prompt begins if the last message was written outside every turn."""
        if rendering.tail < rendering.last_field:
            without = self._run(learned, messages, tools, False).text
            rendering.begin_tail(len(without) if rendering.text.startswith(without) else rendering.last_field)

    def _with_history(
        self,
        learned: _Learned,
        rendering: Rendering,
        given: Messages,
        shown: Messages,
        tools: TracedList | None,
        sampled: Messages | None = None,
    ) -> tuple[Rendering, list[Change], list[str]]:
        """The rendering with the history that the settings ask for; `sampled` are the messages as they were written."""
        changes: list[Change] = []
        notes: list[str] = []
        render = functools.partial(self._run, learned, tools=tools, prompt=False)
        if self.use_patched:
            rendering, notes = patch_history(rendering, shown, render, given if sampled is None else sampled)
            rendering, _, more = keep_reasoning(rendering, shown, render)
            notes += more
            try:
                changes = compare_turns(render(given), rendering, given)
            except TemplateError as refusal:
                notes.append(f"the shipped template refuses this conversation as it was given ({refusal.problem})")
        elif self.preserve_all_thinking:
            rendering, changes, notes = keep_reasoning(rendering, shown, render)
        elif self.preserve_thinking_between_tool_calls:
            rendering, changes, notes = keep_reasoning(rendering, shown, render, since=last_user(shown))
        return rendering, changes, notes

    def _encode(self, rendering: Rendering, messages: Messages, tools: Any = None) -> Encoded:
        learned = self._for(tools)
        trust = trust_of(rendering.origins, messages, self.trusted, learned.template.constants)
        inner = functools.partial(self._inner_tokens, learned)
        try:
            return encode_spans(self.tokenizer, rendering, trust, self.control_tokens, inner)
        except ForgedControl as forged:
            raise forged_error(forged, rendering.origins[forged.span], messages, tools) from None
        except UnicodeEncodeError as error:
            raise unencodable_error(rendering) from error

    def _inner_tokens(self, learned: _Learned) -> frozenset[int]:
        """The control tokens that live inside an assistant's turn, with tools or without."""
        name = learned.name
        if name not in self._inner:
            both = [self._learned[name, with_tools] for with_tools in (False, True)]
            grammar = with_parsers(self._derived(both[0]), self.tool_parser, self.reasoning_parser)
            draws = [functools.partial(self._drawn, some) for some in both]
            facts = [self._facts(some) for some in both]
            constants = learned.template.constants
            self._inner[name] = inner_tokens(self.tokenizer, draws, facts, self._eos, grammar, constants)
        return self._inner[name]

    def _drawn(self, learned: _Learned, messages: Messages, prompt: bool) -> Rendering:
        return self._run(learned, messages, learned.stand_in, prompt)

    def _spellable(self, learned: _Learned) -> frozenset[int]:
        """The control tokens that come of an assistant's text where it spells them."""
        if self.control_tokens is ControlPolicy.HF_COMPAT:
            return frozenset(self.tokenizer.vocabulary.added)
        return self._inner_tokens(learned) if "assistant" in self.trusted else frozenset()

    def _find_sampled(
        self, learned: _Learned, encoded: Encoded, messages: Messages, tools: TracedList | None
    ) -> Sampling:
        if not any(message["role"] == "assistant" for message in messages):
            return Sampling()

        def render(some: Messages, prompt: bool) -> Rendering:
            return self._run(learned, some, tools, prompt)

        turns = sections(encoded.rendering)
        notes: list[str] = []
        missing = missing_turns(encoded.rendering, turns, messages)
        if missing:
            found, notes = turns_by_prefix(encoded.rendering, missing, messages, render, self.tokenizer)
            turns = sorted((*turns, *found), key=lambda section: section.start)
        sampling = find_sampled(
            encoded,
            turns,
            messages,
            facts=self._facts(learned),
            tails=learned.tails,
            has_tools=bool(tools),
            render=render,
            tokenizer=self.tokenizer,
        )
        sampling.notes += notes
        return sampling

    def _facts(self, learned: _Learned) -> TurnFacts:
        if learned.facts is None:
            tools = None if learned.stand_in is None else [STAND_IN_TOOL]
            facts = find_turn_facts(
                self.tokenizer,
                functools.partial(self._drawn, learned),
                lambda rendering, messages: self._encode(rendering, messages, tools),
                self._eos,
            )
            if tools and not facts.seen:  # it refuses the stand-in
                facts = self._facts(self._learned[learned.name, False])
            learned.facts = facts
        return learned.facts

    @functools.cached_property
    def _eos(self) -> frozenset[int]:
        """The ends of generation that the model's own files name."""
        named = self.tokenizer.token_id(self.tokenizer.variables.get("eos_token", ""))
        return frozenset({*self.tokenizer.eos_ids, *(() if named is None else (named,))})

    def __repr__(self) -> str:
        return f"Renderer({self.tokenizer.name!r}, family={self.family!r})"


def _credit_content(rendering: Rendering, adapted: Adapted) -> None:
    """Text that was put into a part for the template's sake is the content that was given."""
    if adapted.wrapped:
        rendering.origins = [
            Origin.of(origin.message, "content")
            if origin is not None and origin.message in adapted.wrapped and origin.field == "content"
            else origin
            for origin in rendering.origins
        ]


def _tools_of(conversations: Sequence[Any], tools: Any) -> Sequence[Any]:
    """The tools of each of several conversations."""
    lists = isinstance(tools, Sequence) and not isinstance(tools, (str, bytes))
    if lists and tools and all(own is None or isinstance(own, (list, tuple)) for own in tools):
        if len(tools) != len(conversations):
            raise InputError(
                f"must be one list of tools, or one for each of {len(conversations)} conversations, not {len(tools)}",
                field="tools",
            )
        return tools  # type: ignore[no-any-return]
    return [tools] * len(conversations)


def _with_calls_of(messages: Messages, given: Messages) -> Messages:
    """Messages in the template's form with the calls as given: arguments that were JSON text stay that text."""
    return [
        {**message, "tool_calls": own["tool_calls"]} if message.get("tool_calls") else message
        for message, own in zip(messages, given, strict=True)
    ]


def _compare_generation(encoded: Encoded, mask: Any) -> list[str]:
    """Hold the template's own generation tags against the derived mask."""
    tagged = np.zeros(len(mask), np.bool_)
    for start, end in encoded.rendering.generation:
        first, stop = encoded.tokens_touching(start, end)
        tagged[first:stop] = True
    if np.array_equal(tagged, mask):
        return []
    only_tagged, only_derived = int((tagged & ~mask).sum()), int((mask & ~tagged).sum())
    where = int(np.flatnonzero(tagged != mask)[0])
    return [
        f"the template's generation tags disagree with what is sampled: {only_tagged} tokens are tagged but not "
        f"sampled, {only_derived} sampled but not tagged; the first at token {where}"
    ]
