"""Renderer: messages to ids with a model's own template. `Renderer._render` is the whole path."""

from __future__ import annotations

import functools
import marshal
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, NamedTuple, Never

from ..conversation.forms import Adapted, MessageForm, adapt
from ..conversation.messages import Messages, check_messages, check_tools
from ..errors import InputError, RendererError, TokentraceError, brief
from ..formats.dialects import with_parsers
from ..formats.grammar import TurnGrammar
from ..parsing.compiled import Compiled
from ..parsing.marked import MarkedBytes
from ..parsing.parser import StreamingParser, read_turn
from ..parsing.readback import MISREAD, Unreadable, find_unreadable, misread_parts
from ..parsing.response import CallReading, ParsedResponse
from ..settings import choose, flag
from ..study.memory import Memory, learned
from ..study.probes import ASSISTANT_TURNS, STAND_IN_TOOL
from ..study.sampling import find_sampled
from ..study.seams import BridgeRefusal, EncodedTurns
from ..study.study import TemplateStudy, study_of
from ..study.turns import find_turns
from ..template.chat_template import Template, wrap_tools
from ..template.continued import left_open, with_mark
from ..template.origin import Origin
from ..template.trace import Rendering
from ..template.traced import TracedList
from ..tokens.encoding import ControlPolicy, Encoded, ForgedControl, encode_spans
from ..tokens.ids import check_ids, check_last, check_sampled
from ..tokens.tokenizer import Tokenizer
from ..values.place import Place
from ..values.plain import is_plain, plain_json
from ..values.schema import Tools
from .bridged import BridgedTokens, Stream, Truncation
from .bridging import Bridger
from .lost import LostPolicy, find_lost, report_lost
from .past import Past, after_prompt, write_conversation
from .rendered import RenderedTokens
from .trust import TRUSTED, forged_error, trust_of, unencodable_error

OF_RENDER = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(eq=False, repr=False)
class Renderer:
    """Renders conversations to ids, origins and an exact loss mask. Threads may share it."""

    tokenizer: Tokenizer
    templates: Mapping[str, Template]
    _: KW_ONLY
    family: str = "default"
    past: Past = Past.TEMPLATE
    control_tokens: ControlPolicy = ControlPolicy.LITERAL
    truncation: Truncation = Truncation.CLOSE
    tool_parser: Any = None
    reasoning_parser: Any = None
    calls: CallReading = CallReading.STRICT
    trusted: frozenset[str] = TRUSTED
    messages: MessageForm = MessageForm.ADAPT
    lost: LostPolicy = LostPolicy.WARN
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with_parsers(TurnGrammar(), self.tool_parser, self.reasoning_parser)  # raises if they are wrong
        templates, variables = self.templates.items(), self.template_kwargs
        self._studies = {key: study_of(template, self.tokenizer, variables) for key, template in templates}
        self.cache, self._tools = Memory(), Memory(most=256)  # the copy that `silent` makes shares them

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Never,
    ) -> RenderedTokens:
        """Render a conversation: ids, origins and the loss mask.

        `add_generation_prompt` ends it with the prompt for a new reply. `continue_final_message`
        leaves the assistant's last message open, with mask 0.

        Raises InputError (naming message and field), TemplateError if the template refuses the
        conversation, and ControlTokenError if untrusted text spells a control token and the
        policy is ``reject``. Text that reaches no token (`lost`) is a warning, or an error.
        """
        if variables:
            problem = "not an argument of render; pass settings and template variables to create_renderer"
            raise InputError(problem, field=next(iter(variables)))
        prompt = flag("add_generation_prompt", add_generation_prompt)
        continued = flag("continue_final_message", continue_final_message)
        if prompt and continued:
            raise InputError("choose either continue_final_message or add_generation_prompt")
        return self._render(messages, tools, prompt, continued)

    def render_turn(self, messages: Any, *, tools: Any = None) -> RenderedTokens:
        """Like `render`, with the history as the prompt for the last turn shows it."""
        return self._render(messages, tools, as_prompted=True)

    def _render(
        self,
        messages: Any,
        tools: Any,
        prompted: bool = False,
        continued: bool = False,
        as_prompted: bool = False,
    ) -> RenderedTokens:
        """Check, adapt, write, encode, find the turns, report lost text."""
        study, checked = self.study(tools), self.check_messages(messages, tools=tools)
        adapted, traced_tools = self._adapt(checked, study), self._prepare(tools).wrapped
        run = functools.partial(study.run, traced_tools)
        conversation = with_mark(adapted.messages) if continued else adapted.messages
        text = write_conversation(run, conversation, prompted, self.past, originals=checked)
        rendering = left_open(text.rendering, len(checked) - 1) if continued else text.rendering
        if as_prompted:
            rendering = after_prompt(run, rendering, text.messages, self.past)
        wrapped = adapted.wrapped
        _credit_content(rendering, wrapped)
        encoded = self.encode_text(rendering, text.messages, tools=tools)
        sampling = find_sampled(study, encoded, text.messages, traced_tools)
        if continued:
            sampling.turns = [turn for turn in sampling.turns if turn.message != len(checked) - 1]
        expected = list(adapted.messages if continued else text.messages)
        for at in wrapped:
            expected[at] = checked[at]
        changes, notes = [*adapted.changes, *text.changes], [*text.notes, *sampling.notes]
        lost = functools.partial(find_lost, rendering, expected, study.forms, tools=traced_tools or ())
        turns, mask = sampling.turns, sampling.mask(len(encoded.ids))
        rendered = RenderedTokens(
            self.tokenizer, encoded, checked, turns, mask, prompted, continued, changes, notes, lost
        )
        if self.lost is not LostPolicy.IGNORE:
            report_lost(rendered.lost, self.lost)
        return rendered

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False, **variables: Never
    ) -> list[int]:
        """The ids alone."""
        settings: Any = {"add_generation_prompt": add_generation_prompt, **variables}
        return self.render(messages, tools=tools, **settings).token_ids

    def encode_text(
        self, rendering: Rendering, messages: Messages, *, tools: Any = None, stand_ins: int = 0
    ) -> Encoded:
        """Encode text, control tokens only where allowed. Raises ControlTokenError or InputError."""
        constants = self.study(tools).template.constants
        inner = functools.partial(self.inner_token_ids, tools)
        trust = functools.partial(trust_of, messages=messages, trusted=self.trusted, constants=constants)
        try:
            return encode_spans(self.tokenizer, rendering, trust, self.control_tokens, inner, stand_ins)
        except ForgedControl as forged:
            raise forged_error(forged.token, rendering.origins[forged.span], messages, tools) from None
        except UnicodeEncodeError as error:
            raise unencodable_error(rendering, tools) from error

    def study(self, tools: Any = None) -> TemplateStudy:
        """The study of the template in use: a model may ship a separate one for tools."""
        if tools is not None and type(tools) is not list and not isinstance(tools, Sequence):
            check_tools(tools)  # raises InputError
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if (study := self._studies.get(name)) is not None:
                return study
        names = ", ".join(sorted(self._studies))
        raise RendererError(f"this tokenizer has no default template, only {names}; pass chat_template=")

    def check_messages(self, messages: Any, *, tools: Any = None) -> list[Mapping[str, Any]]:
        """The messages as mappings. Raises InputError, also for an unknown role."""
        study, control = self.study(tools), self.tokenizer.vocabulary.control_pattern

        def is_role(role: str) -> bool:
            is_printed = study.forms.prints_roles and not (control and control.search(role))
            return is_printed or role in study.template.constants

        return check_messages(messages, is_role=is_role)

    def adapt_messages(self, messages: Any, *, tools: Any = None) -> Adapted:
        """The messages as the template reads them, and the changes."""
        return self._adapt(self.check_messages(messages, tools=tools), self.study(tools))

    def _prepare(self, tools: Any) -> PreparedTools:
        """Tools, cached by content, since callers may change a list."""
        prepare = functools.partial(PreparedTools.of, tools, as_json=self.messages is MessageForm.ADAPT)
        try:
            # marshal writes a shared value once, so equal tools may have several graphs
            graph = marshal.dumps(tools)
        except ValueError:  # too deep, or objects of other types, such as functions
            return prepare()
        return self._tools.once(graph, prepare, keep=lambda _: is_plain(tools))

    def _adapt(self, checked: Messages, study: TemplateStudy) -> Adapted:
        return Adapted(checked) if self.messages is MessageForm.AS_GIVEN else adapt(checked, study.forms)

    def template_digests(self) -> dict[str, str]:
        """A hash of each template, by its name."""
        return {name: study.template.digest for name, study in self._studies.items()}

    @learned
    def turn_stop_ids(self) -> frozenset[int]:
        """The ids that end an assistant's turn, with tools or without."""
        return self.study().endings(False).stops | self.study([STAND_IN_TOOL]).endings(True).stops

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn, then those that the model's configuration adds."""
        return list(dict.fromkeys([*sorted(self.turn_stop_ids()), *sorted(self.study().eos)]))

    def inner_token_ids(self, tools: Any = None) -> frozenset[int]:
        """The control tokens that a trusted assistant's text may hold."""
        study = self.study(tools)
        grammar = with_parsers(study.grammar(False), self.tool_parser, self.reasoning_parser)
        return study.inner_tokens(grammar)

    def bridge(
        self,
        prev_prompt_ids: Any,
        prev_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        messages: Any = None,
        call_ids: Sequence[str] = (),
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt: the stream so far, id for id, then the new messages and a generation prompt.

        Returns a `BridgeRefusal`, falsy and with a reason, if that cannot be proven. Raises
        InputError. Pass the tools of the first prompt. `messages` is the conversation before the
        completion, for templates whose new text depends on it. `call_ids` are the ids of its
        calls, if their results may come in another order.
        """
        study = self.study(tools)
        has_new = not isinstance(new_messages, (list, tuple)) or len(new_messages)
        adapted = self.adapt_messages(new_messages, tools=tools) if has_new else Adapted(())
        has_past = messages is not None and (not isinstance(messages, (list, tuple)) or len(messages))
        before = self.adapt_messages(messages, tools=tools).messages if has_past else ()
        size = self.tokenizer.vocabulary.size
        completion = check_sampled(prev_completion_ids, "prev_completion_ids", size)
        check_last(prev_prompt_ids, "prev_prompt_ids", 1)
        stream = Stream(prev_prompt_ids, completion)
        bridger, key = self._bridger(study, bool(tools)), self._prepare(tools).key
        bridged = bridger.bridge(stream, list(adapted.messages), tools, key, before, call_ids)
        if isinstance(bridged, BridgedTokens):
            bridged.changes = list(adapted.changes)
            report_lost(bridged.lost, self.lost)
        return bridged

    def bridge_to_next_turn(
        self, prev_prompt_ids: Any, prev_completion_ids: Any, new_messages: Any, **settings: Any
    ) -> BridgedTokens | None:
        """Like `bridge`, with the same settings, but returns None for a refusal."""
        bridged = self.bridge(prev_prompt_ids, prev_completion_ids, new_messages, **settings)
        return bridged if type(bridged) is BridgedTokens else None

    @learned
    def _bridger(self, study: TemplateStudy, has_tools: bool) -> Bridger:
        write = functools.partial(self._render_small, study)
        compiled = functools.partial(self._compiled, study, has_tools)
        as_inference = self.past is Past.INFERENCE
        return Bridger(study, study.endings(has_tools), write, compiled, self.truncation, as_inference)

    def _render_small(
        self, study: TemplateStudy, messages: Messages, at: int, tools: Any, prompted: bool
    ) -> EncodedTurns:
        """A small conversation, encoded, and its turns: at least that of message `at`."""
        run = functools.partial(study.run, self._prepare(tools).wrapped)
        has_past = any(message["role"] == "assistant" for message in messages[at + 1 :])
        past = self.past if has_past else Past.TEMPLATE
        rendering = write_conversation(run, messages, prompted, past).rendering
        turns, _ = find_turns(rendering, messages, run, self.tokenizer, only=at)
        return self.encode_text(rendering, messages, tools=tools, stand_ins=at % len(messages) + 1), turns

    def decode(self, token_ids: Any) -> str:
        """The text of token ids. Never encode it again."""
        ids = check_ids(token_ids, "token_ids", vocab_size=self.tokenizer.vocabulary.size)
        return self.tokenizer.decode(ids)

    def parse_response(
        self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None, calls: str | None = None
    ) -> ParsedResponse:
        """Read a completion: reasoning, content and tool calls, each with its tokens.

        `tools` say what bare values mean, and which names are tools. `prompt_ids` show which
        part of the turn the prompt already wrote (``<think>``), by default the generation prompt.
        Ids just past the vocabulary read as U+FFFD; larger ones raise InputError. `calls`
        overrides the renderer's.
        """
        ids = check_sampled(token_ids, "token_ids", self.tokenizer.vocabulary.size)
        parser = self.streaming_parser(tools=tools, prompt_ids=prompt_ids, calls=calls)
        parser.feed(ids)
        return parser.response

    def streaming_parser(
        self, *, tools: Any = None, prompt_ids: Any = None, calls: str | None = None
    ) -> StreamingParser:
        """A parser for a completion that is still arriving; see `parse_response`."""
        reading = self.calls if calls is None else choose(CallReading, "calls", calls)
        compiled = self._compiled(self.study(tools), bool(tools))
        prompt = None if prompt_ids is None else compiled.prompt_bytes(prompt_ids)
        lenient = reading is CallReading.LENIENT
        return StreamingParser(compiled, self._prepare(tools).schemas, prompt, lenient=lenient)

    def grammar(self, tools: Any = None) -> TurnGrammar:
        """What the model writes in its turns."""
        return self._compiled(self.study(tools), bool(tools)).grammar

    def find_unreadable(self, messages: Any, *, tools: Any = None) -> list[Unreadable]:
        """The fields of assistant messages that parsing their tokens does not give back."""
        rendered = self.silent().render(messages, tools=tools)
        parse, ids = functools.partial(self.parse_response, tools=tools, calls="strict"), rendered.ids
        parsed: dict[int, list[ParsedResponse]] = {}
        for turn in rendered.turns:
            response = parse(ids[turn.start : turn.stop], prompt_ids=ids[: turn.start])
            parsed.setdefault(turn.message, []).append(response)
        unreadable: list[Unreadable] = []
        for index, message in enumerate(self.adapt_messages(messages, tools=tools).messages):
            if message["role"] == "assistant":
                unreadable += find_unreadable(index, message, parsed.get(index, []))
        return unreadable

    @learned
    def _compiled(self, study: TemplateStudy, has_tools: bool) -> Compiled:
        """The grammar of completions, with a note on fields that it misreads."""
        endings, derived = study.endings(has_tools), study.grammar(has_tools)
        grammar = with_parsers(derived, self.tool_parser, self.reasoning_parser)
        stops = [*sorted(endings.stops), *sorted(study.eos - endings.stops)]
        compiled = Compiled(grammar, MarkedBytes(study.tokenizer.vocabulary), stops)
        if grammar is derived and study is self._studies.get("default"):
            tools = [STAND_IN_TOOL] if study.shows_tools(has_tools) else None
            misread = ", ".join(dict.fromkeys(self._misread(compiled, tools)))
            notes = [f"{MISREAD}: {misread}"] if misread else []
            compiled.grammar = grammar.replace(notes=(*grammar.notes, *notes))
        return compiled

    def _misread(self, compiled: Compiled, tools: Any) -> Iterator[str]:
        for messages in ASSISTANT_TURNS:
            try:
                rendered = self.silent().render(messages, tools=tools)
            except TokentraceError:
                continue
            for turn in rendered.turns[:1]:
                parsed = read_turn(
                    compiled, rendered.ids[turn.start : turn.stop], rendered.ids[: turn.start]
                )
                yield from misread_parts(rendered.rendering, parsed, compiled.grammar)

    def silent(self) -> Renderer:
        if self.lost is LostPolicy.IGNORE:
            return self
        other = object.__new__(type(self))
        vars(other).update(vars(self), lost=LostPolicy.IGNORE)
        return other

    def with_variables(self, variables: Mapping[str, Any]) -> Renderer:
        """A copy with other template variables. Raises RendererError for an unread one."""
        if not isinstance(variables, Mapping):
            raise RendererError(f"template variables must be a mapping, not {brief(variables)}")
        for name in variables:
            if problem := unread_variable(name, self.templates.values()):
                raise RendererError(f"{brief(name)} cannot be set: {problem}")
        return replace(self, template_kwargs={**self.template_kwargs, **variables})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, without what was learned."""
        return functools.partial(
            type(self), **{one.name: getattr(self, one.name) for one in fields(self)}
        ), ()

    def __repr__(self) -> str:
        return f"Renderer({self.tokenizer.name!r}, family={self.family!r})"


def unread_variable(name: str, templates: Collection[Template]) -> str:
    """The problem if no template reads a variable, else an empty string."""
    if name not in OF_RENDER and any(name in template.reads for template in templates):
        return ""
    reads = ", ".join(sorted(frozenset[str]().union(*(template.variables for template in templates))))
    return f"the chat template does not read it (it reads {reads or 'no variables'})"


def _credit_content(rendering: Rendering, wrapped: set[int]) -> None:
    """Give text that was wrapped in a content part the origin of its content."""
    if wrapped:
        rendering.origins = [
            Origin.of(origin.message, "content")
            if origin is not None and origin.message in wrapped and origin.field == "content"
            else origin
            for origin in rendering.origins
        ]


class PreparedTools(NamedTuple):
    """Tools, checked, as templates and parsers read them. Equal tools have equal keys."""

    key: Hashable
    wrapped: TracedList | None
    schemas: Tools

    @classmethod
    def of(cls, tools: Any, *, as_json: bool) -> PreparedTools:
        """Copy tools. Raises InputError, `as_json` also for what JSON cannot express."""
        checked = check_tools(tools)
        if as_json and checked is not None:
            checked = [plain_json(tool, Place(field=f"tools.{at}")) for at, tool in enumerate(checked)]
        if not is_plain(checked):
            return cls(repr(checked), wrap_tools(checked or ()), Tools(checked))
        key = marshal.dumps(checked, 2)  # version 2 writes equal values in one way
        copy = marshal.loads(key)
        return cls(key, None if copy is None else wrap_tools(copy), Tools(copy))
