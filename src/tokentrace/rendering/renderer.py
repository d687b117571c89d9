"""Renderer: messages to ids with a model's own template. `rendering.factory` makes them.

`Renderer.render` is the whole path: check, adapt, run the template, put history back, encode, mask, account for what is
lost. Each stage has a module; what is known of the template comes from its `TemplateStudy`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..conversation.forms import Adapted, MessageForm, adapt, reads_unchanged
from ..conversation.messages import Messages, check_messages, check_tools
from ..conversation.remarks import conversation_remarks
from ..errors import InputError, RendererError, TokentraceError, kind_of
from ..formats.dialects import with_parsers
from ..formats.grammar import TurnGrammar
from ..parsing.compiled import Compiled
from ..parsing.parser import StreamingParser
from ..parsing.readback import Unreadable, find_unreadable
from ..parsing.response import CallReading, ParsedResponse
from ..settings import choose, flag
from ..study.memory import Memory
from ..study.probes import STAND_IN_TOOL
from ..study.sampling import find_sampled
from ..study.seams import BridgeRefusal, Written
from ..study.study import TemplateStudy, study_of
from ..study.turns import find_turns
from ..template.chat_template import Template
from ..template.trace import Rendering
from ..tokens.encoded import Encoded
from ..tokens.encoding import ControlPolicy
from ..tokens.ids import check_ids, check_last
from ..tokens.tokenizer import Tokenizer
from .bridged import BridgedTokens
from .bridging import Bridger, Stream
from .closing import Truncation
from .inputs import ToolCache, credit_content, tools_of_each, with_original_text
from .lost import LostPolicy, find_lost, report_lost
from .masks import compiled_grammar, mask_notes
from .past import Past, after_prompt, write_conversation
from .prefill import left_open, with_mark
from .rendered import RenderedTokens
from .trust import TRUSTED, encode_trusted

Made = TypeVar("Made")


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
        past: Past = Past.TEMPLATE,
        control_tokens: ControlPolicy = ControlPolicy.LITERAL,
        truncation: Truncation = Truncation.CLOSE,
        tool_parser: Any = None,
        reasoning_parser: Any = None,
        calls: CallReading = CallReading.STRICT,
        trusted: Iterable[str] = TRUSTED,
        messages: MessageForm = MessageForm.ADAPT,
        lost: LostPolicy = LostPolicy.WARN,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.past = past
        self.control_tokens = control_tokens
        self.truncation = truncation
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        with_parsers(TurnGrammar(), tool_parser, reasoning_parser)  # says at once what is wrong with them
        self.calls = calls
        self.trusted = frozenset(trusted)
        self.messages = messages
        self.lost = lost
        self.template_kwargs = dict(variables or {})
        self._studies = {
            name: study_of(template, tokenizer, self.template_kwargs) for name, template in templates.items()
        }
        self._tools = ToolCache(as_json=messages is MessageForm.ADAPT)
        self._made = Memory()

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

        Raises InputError (naming message and field) for messages that are not a conversation, TemplateError where the
        template refuses it, ControlTokenError where untrusted text spells a control token and the policy is
        ``reject``. Given text that reaches no token is in `lost` of the result; a `LostTextWarning` says so, or, with
        ``lost="error"``, a LostTextError.
        """
        prompt = flag("add_generation_prompt", add_generation_prompt)
        continued = flag("continue_final_message", continue_final_message)
        rendered = self._render(messages, tools, prompt, continued)
        if self.lost is not LostPolicy.IGNORE:
            report_lost(rendered.lost, self.lost)
        return rendered

    def render_turn(self, messages: Any, *, tools: Any = None) -> RenderedTokens:
        """Render a conversation up to an assistant's turn, with the history that the prompt for that turn shows.

        Some templates change what comes before a turn once the turn is there: Harmony's drops the reasoning beside
        calls that are answered, Mistral's the system message. Raises what `render` raises.
        """
        rendered = self._render(messages, tools, False, as_prompted=True)
        report_lost(rendered.lost, self.lost) if self.lost is not LostPolicy.IGNORE else None
        return rendered

    def _render(
        self, messages: Any, tools: Any, prompt: bool, continued: bool = False, as_prompted: bool = False
    ) -> RenderedTokens:
        """The stages of `render`: check, adapt, write, encode, find the turns. Reports no lost text."""
        if prompt and continued:
            raise InputError(
                "continue_final_message leaves the last message open, add_generation_prompt begins a new one; "
                "ask for one of them"
            )
        study = self.study(tools)
        checked, adapted = self._read(study, messages, tools)
        schemas = self._tools.wrap(tools)
        run = functools.partial(study.run_with, schemas)
        shown = with_mark(adapted.messages) if continued else adapted.messages
        written = write_conversation(run, shown, prompt, self.past, originals=checked)
        rendering = left_open(written.rendering, len(checked) - 1) if continued else written.rendering
        if as_prompted:
            rendering = after_prompt(run, rendering, written.messages, self.past)
        credit_content(rendering, adapted)
        encoded = self.encode_text(rendering, written.messages, tools=tools)
        sampling = find_sampled(study, encoded, written.messages, schemas)
        if continued:  # the mask is 0 for the open turn, including any prefilled text
            sampling.turns = [turn for turn in sampling.turns if turn.message != len(checked) - 1]
        mask = sampling.mask(len(encoded.ids))
        originals = with_original_text(adapted.messages if continued else written.messages, adapted, checked)
        return RenderedTokens(
            tokenizer=self.tokenizer,
            encoded=encoded,
            conversation=checked,
            turns=sampling.turns,
            mask=mask,
            prompted=prompt,
            changes=[*adapted.changes, *written.changes],
            notes=[
                *written.notes,
                *sampling.notes,
                *mask_notes(encoded, mask),
                *conversation_remarks(checked, continued=continued),
            ],
            find_lost=functools.partial(find_lost, rendering, originals, study.forms, tools=schemas or ()),
        )

    def render_batch(
        self, conversations: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[RenderedTokens]:
        """Render several conversations. `tools` are one list for all of them, or one (or None) for each.

        Errors are those of `render` and say which conversation it was.
        """
        if isinstance(conversations, (str, bytes, Mapping)) or not isinstance(conversations, Sequence):
            raise InputError(f"must be a list of conversations, not {kind_of(conversations)}")
        rendered = []
        for at, (conversation, own) in enumerate(zip(conversations, tools_of_each(conversations, tools), strict=True)):
            try:
                rendered.append(self.render(conversation, tools=own, add_generation_prompt=add_generation_prompt))
            except TokentraceError as error:
                raise error.of_conversation(at) from error.__cause__
        return rendered

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        """The ids alone."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def render_text(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> Rendering:
        """The text alone, as spans: nothing is encoded."""
        study = self.study(tools)
        adapted = self.adapt_messages(messages, tools=tools)
        schemas = self._tools.wrap(tools)
        run = functools.partial(study.run_with, schemas)
        rendering = write_conversation(run, adapted.messages, add_generation_prompt, self.past).rendering
        credit_content(rendering, adapted)
        return rendering

    def encode_text(self, rendering: Rendering, messages: Messages, *, tools: Any = None) -> Encoded:
        """The ids of a text with its spans, under this renderer's policy for control tokens."""
        roles, inner = self.study(tools).template.constants, functools.partial(self.inner_token_ids, tools)
        return encode_trusted(
            self.tokenizer, rendering, messages, tools, self.control_tokens, self.trusted, roles, inner
        )

    # -- stages

    def study(self, tools: Any = None) -> TemplateStudy:
        """What is known of the template that serves: models may ship one of its own for tools."""
        if type(tools) is not list and tools is not None and not isinstance(tools, Sequence):
            check_tools(tools)  # says what is wrong with them
        study = self._studies.get("tool_use") if tools is not None else None
        study = study or self._studies.get("default")
        if study is None:
            known = ", ".join(sorted(self._studies))
            raise RendererError(f"this tokenizer has no default chat template, only {known}; pass chat_template=")
        return study

    def check_messages(self, messages: Any, *, tools: Any = None) -> list[Mapping[str, Any]]:
        """The messages as mappings, in any role that the template knows; InputError names what is wrong with them."""
        study = self.study(tools)
        if reads_unchanged(messages, study.forms):
            return list(messages)

        def prints(role: str) -> bool:
            """Whether a role that is not known is fine: the template prints it, and it spells no control token."""
            control = self.tokenizer.vocabulary.control_pattern
            return study.forms.prints_roles and (control is None or not control.search(role))

        return check_messages(messages, more_roles=study.template.constants, any_role=prints)

    def adapt_messages(self, messages: Any, *, tools: Any = None) -> Adapted:
        """The messages in the form that the template reads, and what was changed for it: what `render` begins with."""
        return self._read(self.study(tools), messages, tools)[1]

    def _read(self, study: TemplateStudy, messages: Any, tools: Any) -> tuple[list[Mapping[str, Any]], Adapted]:
        """The messages, checked, and in the form that the template reads."""
        if self.messages is MessageForm.ADAPT and reads_unchanged(messages, study.forms):
            return (checked := list(messages)), Adapted(checked)
        checked = self.check_messages(messages, tools=tools)
        return checked, Adapted(checked) if self.messages is MessageForm.AS_GIVEN else adapt(checked, study.forms)

    # -- what the template tells

    def template_digests(self) -> dict[str, str]:
        """A hash of each template, by its name."""
        return {name: study.template.digest for name, study in self._studies.items()}

    def switches(self) -> list[tuple[str, bool]]:
        """Template variables that the templates read, each with a truth value that it does not have now."""
        read = {name for study in self._studies.values() for name in study.template.variables}
        own = sorted(read - set(self.tokenizer.variables))
        return [(name, value) for name in own for value in (False, True) if self.template_kwargs.get(name) is not value]

    def turn_stop_ids(self) -> frozenset[int]:
        """The ids that the template ends an assistant's turn with, with tools or without.

        The model's configuration is not asked.
        """
        return self.study().endings(False).stops | self.study([STAND_IN_TOOL]).endings(True).stops

    def get_stop_token_ids(self) -> list[int]:
        """The ids at which generation has to stop: what ends a turn, and what the model's configuration adds."""
        return list(dict.fromkeys([*sorted(self.turn_stop_ids()), *sorted(self.study().eos)]))

    def inner_token_ids(self, tools: Any = None) -> frozenset[int]:
        """The control tokens that live inside an assistant's turn: its text may hold them, if it is trusted."""
        study = self.study(tools)
        return study.inner_tokens(with_parsers(study.grammar(False), self.tool_parser, self.reasoning_parser))

    # -- bridging

    def bridge(
        self,
        prev_prompt_ids: Any,
        prev_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        messages: Any = None,
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt: the stream so far, id for id, then the new messages and a generation prompt.

        A `BridgeRefusal`, which is false and says why, where that cannot be proven. Raises InputError for messages or
        ids that are not valid, as `render` does. Give the tools that the first prompt was rendered with. `messages`,
        the conversation before the completion, is looked at only where the template makes what follows depend on it.
        """
        study = self.study(tools)
        empty = not new_messages if type(new_messages) is list else _is_empty(new_messages)
        adapted = Adapted(()) if empty else self._read(study, new_messages, tools)[1]
        before = None if messages is None else self.adapt_messages(messages, tools=tools).messages
        completion = check_ids(prev_completion_ids, "prev_completion_ids")
        check_last(prev_prompt_ids, "prev_prompt_ids", 1)
        stream = Stream(prev_prompt_ids, completion, prev_completion_ids)
        bridger, key = self._bridger(study, bool(tools)), self._tools.key(tools)
        bridged = bridger.bridge(stream, list(adapted.messages), tools, key, before)
        if isinstance(bridged, BridgedTokens):
            if adapted.changes:
                bridged.changes = list(adapted.changes)
            if bridged.lost:
                report_lost(bridged.lost, self.lost)
        return bridged

    def bridge_to_next_turn(
        self,
        prev_prompt_ids: Any,
        prev_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        messages: Any = None,
    ) -> BridgedTokens | None:
        """As `bridge`, with None for every refusal."""
        bridged = self.bridge(prev_prompt_ids, prev_completion_ids, new_messages, tools=tools, messages=messages)
        return bridged if type(bridged) is BridgedTokens else None

    def bridge_after(
        self, prompt_ids: Any, completion_ids: Any, messages: Messages, message: int, *, tools: Any = None
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt for a whole conversation (adapted), with exact ids up to the turn of one of its messages.

        What comes after that turn is rendered with all that came before it.
        """
        stream = Stream(prompt_ids, check_ids(completion_ids, "completion_ids"), completion_ids)
        return self._bridger(self.study(tools), bool(tools)).bridge_after(stream, messages, message, tools)

    def _bridger(self, study: TemplateStudy, has_tools: bool) -> Bridger:
        def make() -> Bridger:
            return Bridger(
                study,
                functools.partial(self._written, study),
                functools.partial(self._compiled, study, has_tools),
                has_tools=has_tools,
                as_inference=self.past is Past.INFERENCE,
                truncation=self.truncation,
            )

        return self._made.once(("bridger", id(study), has_tools), make)

    def _written(self, study: TemplateStudy, messages: Messages, at: int, tools: Any, prompt: bool) -> Written:
        """A small conversation, encoded, with its turns; that of message `at` is found if it can be."""
        run = functools.partial(study.run_with, self._tools.wrap(tools))
        has_past = any(message["role"] == "assistant" for message in messages[at + 1 :])
        rendering = write_conversation(run, messages, prompt, self.past if has_past else Past.TEMPLATE).rendering
        turns, _ = find_turns(rendering, messages, run, self.tokenizer, only=at)
        return self.encode_text(rendering, messages, tools=tools), turns

    # -- parsing

    def decode(self, token_ids: Any) -> str:
        """The text of token ids, for people to read: never encode it again."""
        size = self.tokenizer.vocabulary.size
        return self.tokenizer.decode(check_ids(token_ids, "token_ids", vocab_size=size).tolist())

    def parse_response(
        self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None, calls: str | None = None
    ) -> ParsedResponse:
        """Read a completion: reasoning, content and tool calls, each with its tokens. See `parsing.response`.

        `tools` say what bare values mean, and which names are tools. `prompt_ids` show what the prompt already wrote of
        the turn, above all an opened ``<think>``; without them the template's own generation prompt is assumed. A
        malformed call is in the result with its status. Ids just past the vocabulary, which a model with a padded
        embedding can sample, read as U+FFFD; larger ones raise InputError.

        `calls` is ``"strict"`` (a call counts where the grammar has one; others are in `ParsedResponse.attempts`) or
        ``"lenient"`` (attempts count too, as in vLLM and SGLang). By default it is the renderer's setting.
        """
        ids = check_ids(token_ids, "token_ids")
        size = self.tokenizer.vocabulary.size
        if len(ids) and int(ids.max()) >= 2 * size:  # no embedding is padded to twice its vocabulary
            check_ids(ids, "token_ids", vocab_size=size)
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
        return StreamingParser(compiled, self._tools.schemas(tools), prompt, reading)

    def grammar(self, tools: Any = None) -> TurnGrammar:
        """What the model writes in its turns, as derived from the template (and `tool_parser`, `reasoning_parser`)."""
        return self._compiled(self.study(tools), bool(tools)).grammar

    def find_unreadable(self, messages: Any, *, tools: Any = None) -> list[Unreadable]:
        """The fields of assistant messages that are not read back from their tokens: see `parsing.readback`."""
        rendered = self._render(messages, tools, False)
        conversation = self.adapt_messages(messages, tools=tools).messages
        turns: dict[int, list[ParsedResponse]] = {}
        for turn in rendered.turns:
            ids, prompt = rendered.ids[turn.start : turn.stop], rendered.ids[: turn.start]
            turns.setdefault(turn.message, []).append(
                self.parse_response(ids, tools=tools, prompt_ids=prompt, calls="strict")
            )
        return [
            unreadable
            for index, message in enumerate(conversation)
            if message["role"] == "assistant"
            for unreadable in find_unreadable(index, message, turns.get(index, ()))
        ]

    def _compiled(self, study: TemplateStudy, has_tools: bool) -> Compiled:
        def make() -> Compiled:
            tools = [STAND_IN_TOOL] if study.shows_tools(has_tools) else None
            render = functools.partial(self._render, tools=tools, prompt=False)
            proven = render if study is self._studies.get("default") else None
            return compiled_grammar(study, has_tools, self.tool_parser, self.reasoning_parser, proven)

        return self._made.once(("compiled", id(study), has_tools), make)

    # -- copies

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Something that others make for this renderer, made once and shared by its shallow copies; bounded."""
        return self._made.once(("other", key), make)

    def with_past(self, past: Past) -> Renderer:
        """This renderer with another `past`. Shares what is known of the template."""
        if self.past is past:
            return self
        other = copy.copy(self)
        other.past = past
        other._made = Memory()
        return other

    def silent(self) -> Renderer:
        """This renderer, saying nothing of lost text: for renders that the user did not ask for."""
        if self.lost is LostPolicy.IGNORE:
            return self
        other = copy.copy(self)
        other.lost = LostPolicy.IGNORE
        return other

    def with_variables(self, variables: Mapping[str, Any]) -> Renderer:
        """This renderer with other template variables beside its own."""
        return Renderer(**{**self.__getstate__(), "variables": {**self.template_kwargs, **variables}})

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
        """The settings: what was learned stays behind."""
        names = inspect.signature(Renderer.__init__).parameters
        settings = {name: getattr(self, name) for name in names if name in self.__dict__}
        templates = {name: study.template for name, study in self._studies.items()}
        return {**settings, "templates": templates, "variables": self.template_kwargs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Renderer({self.tokenizer.name!r}, family={self.family!r})"


def _is_empty(messages: Any) -> bool:
    return isinstance(messages, Sequence) and not len(messages)
