"""What a template does besides appending."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..conversation.forms import adapt
from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..show.visible import listed
from ..study import probes
from ..study.probes import ANSWER as REPLY
from ..study.probes import CONTINUED, RETURNED, SYSTEM, THOUGHT, USER, Message, Probe, call, calling, result
from ..study.study import TemplateStudy
from ..study.turns import turn_spans
from ..template.chat_template import wrap_tools
from ..template.trace import Rendering
from .appends import ANSWER, TOOLS, contains_text, text_from, with_ids
from .blame import SET, TEST, WRITE, Event, Request, flip_tests, run_traced

_RESULTS = ("tool", "function", "ipython")
_ROLES = ("system", "developer", "user", "assistant", *_RESULTS)
_FORMS = ("text", "parts", "mapping")
_TIMES = datetime(2001, 2, 3, 4, 5, 6), datetime(2031, 12, 24, 18, 55, 59)
_DATED = ((USER,), (SYSTEM, USER), CONTINUED, RETURNED, (SYSTEM, *RETURNED, THOUGHT, USER))


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token at which generation stops. `trained`: rendered turns end with it."""

    id: int
    text: str
    trained: bool
    from_template: bool
    is_next_head: bool

    def __str__(self) -> str:
        head = ", the head of the next turn" * self.is_next_head
        source = ", from the configuration only" * (not self.from_template)
        return f"{self.text} ({self.id}{head}{source}{', not trained' * (not self.trained)})"


@dataclass(frozen=True, slots=True)
class Altered:
    """A field whose text is changed or dropped, and the line."""

    roles: tuple[str, ...]
    field: str
    problem: str
    line: int | None
    source: str
    dropped: bool

    def __str__(self) -> str:
        where = "calls" if self.field == "arguments" else f"{listed(self.roles)} messages"
        by = f" (line {self.line}: `{self.source}`)" if self.line is not None else ""
        return f"{self.field} of {where} {self.problem}{by}"


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template does besides appending.

    `prefill` is the generation prompt after the turn's head. `roles` are written, rewritten,
    dropped or refused. `content` and `arguments` are forms that it reads, `date` the line that
    writes it.
    """

    prefill: str
    opens_reasoning: bool
    stop_tokens: tuple[StopToken, ...]
    last_turn_without_stop: bool
    past_turn_without_stop: bool
    roles: Mapping[str, str]
    content: Mapping[str, tuple[str, ...]]
    arguments: tuple[str, ...]
    calls: bool
    reasoning: bool
    forgeable_under_transformers: tuple[str, ...]
    added_system_prompt: str
    date: str
    random: bool
    altered: tuple[Altered, ...]


def find_facts(renderer: Renderer) -> TemplateFacts:
    study = renderer.study(TOOLS)
    grammar, forms, calls = study.grammar(True), study.forms, study.forms.calls
    roles = {role: _role(study, role) for role in _ROLES}
    read = [role for role, outcome in roles.items() if outcome in ("written", "rewritten")]
    arguments = {"object": calls.mapping, "JSON text": calls.text}
    return TemplateFacts(
        grammar.prompt.removeprefix(grammar.head) if grammar.prompt.startswith(grammar.head) else "",
        grammar.opens_reasoning,
        *_stops(renderer),
        roles,
        {role: tuple(form for form in _FORMS if getattr(forms.content(role), form)) for role in read},
        tuple(form for form, accepted in arguments.items() if accepted and calls.are_shown),
        calls.are_shown,
        any(forms.shows_reasoning(tools, False) for tools in (False, True)),
        tuple(_forgeable(study)),
        _system(study),
        *_changes(study),
        _find_altered(renderer),
    )


def _stops(renderer: Renderer) -> tuple[tuple[StopToken, ...], bool, bool]:
    """The stop tokens, and whether last and past turns may lack one."""
    last, past = set[int | None](), set[int | None]()
    for messages, tools in (((*CONTINUED, REPLY), None), ((*RETURNED, REPLY), TOOLS)):
        try:
            stops = [turn.stop_token for turn in renderer.render(messages, tools=tools).turns]
        except TokentraceError:
            continue
        last.update(stops[-1:])
        past.update(stops[:-1])
    trained, ends = last | past, renderer.turn_stop_ids()
    heads = renderer.study().endings(False).heads | renderer.study(TOOLS).endings(True).heads
    texts = [(one, renderer.decode([one])) for one in renderer.get_stop_token_ids()]
    tokens = (StopToken(one, text, one in trained, one in ends, one in heads) for one, text in texts)
    return tuple(tokens), None in last, None in past


def probe_renderings(study: TemplateStudy) -> Iterator[Rendering | None]:
    conversations = (*probes.ASSISTANT_TURNS, *probes.OTHER_TURNS)
    cases = itertools.product(conversations, (False, True), (False, True))
    return itertools.starmap(study.readable, cases)


def _forgeable(study: TemplateStudy) -> Iterator[str]:
    """The scaffold's control tokens that a user message can spell."""
    encodings = (study.encode(one) for one in probe_renderings(study) if one is not None)
    for index in dict.fromkeys(index for one in encodings for index in one.ids[one.control].tolist()):
        text = study.tokenizer.vocabulary.added[index].text
        rendering = study.probe([{"role": "user", "content": f"a {text} b"}])
        if rendering is not None:
            encoded = study.encode(rendering)
            origins = (rendering.origins[int(span)] for span in encoded.spans[encoded.ids == index])
            if any(origin is not None and origin.field == "content" for origin in origins):
                yield text


def _role(study: TemplateStudy, role: str) -> str:
    message = {**(result() if role in _RESULTS else {}), "role": role, "content": ANSWER}
    before = RETURNED[:2] if role in _RESULTS else (USER,) if role == "assistant" else ()
    rendering = study.readable([*before, message, *((USER,) if role in ("system", "developer") else ())])
    if rendering is None:
        return "refused"
    text = text_from(rendering, len(before), "content")
    return "dropped" if not text else "written" if contains_text(ANSWER, text) else "rewritten"


def _system(study: TemplateStudy) -> str:
    """The text before a lone question, without control tokens."""
    rendering, pattern = study.probe((USER,)), study.tokenizer.vocabulary.control_pattern
    if rendering is None or not (turns := turn_spans(rendering)):
        return ""
    head = rendering.text[: turns[0].start]
    words = " ".join((head if pattern is None else pattern.sub(" ", head)).split())
    return words if any(map(str.isalpha, words)) else ""


def _changes(study: TemplateStudy) -> tuple[str, bool]:
    """Where the template writes the date, and whether it uses randomness."""
    date, random = "", False
    for messages, tools in itertools.product(_DATED, (None, TOOLS)):
        one, other = (run_traced(study, Request(messages, tools, True), now=now) for now in _TIMES)
        if one is None or other is None:
            continue
        random |= one.random or other.random
        if not date and one.text != other.text:
            pairs = zip(one.events, other.events, strict=False)
            changed = (event.part for event, later in pairs if event[:2] != later[:2])
            lines = (f"line {part.line}: `{part.source}`" for part in changed if part.kind != TEST)
            date = next(lines, "an unknown line")
    return date, random


# texts that templates tend to alter: every field is tried with them
_TEXTS = (
    ANSWER,
    "First line\nsecond line\n\nthird line\n\n\nlast line",
    "one  two   three\tfour",
    "if a<b && c>\"d\": print('e', \\f) # <i>100%</i>, [g](h) {j} @k",
    "Ünïcödé 雨 ﬁ ½ e\u0301 İı",
    '{"Key": [1, 2.50, true, null], "more": {}}',
    " ".join(f"word{number}" for number in range(1, 1200)),
)
_SPELLED = "Line One\n\nline  \"two\" & 'three' \\four é 雨 <b>"
_ARGUMENTS: Sequence[Mapping[str, Any]] = (
    {"key": "value"},
    {"text": _SPELLED, "number": "12", "word": "true", "empty": "", "spaces": "  padded "},
    {"whole": 12, "part": 2.5, "truth": True, "none": None, "list": [1, "a"], "map": {}},
)
"""Arguments to read back: a plain one, strings, other values."""
_SIMPLE = "value"
_KEY = "someKey"
_LATER = "later system"


def _find_altered(renderer: Renderer) -> tuple[Altered, ...]:
    called, returned = with_ids((calling(), result()), renderer.study(TOOLS))
    altered: dict[Any, Altered] = {}
    reported: set[tuple[str, str]] = set()
    for role, field, at, messages in (
        ("system", "content", 0, (SYSTEM, USER)),
        ("user", "content", 0, (USER,)),
        ("user", "content", 0, (USER, REPLY, USER)),
        ("user", "content", 2, (USER, REPLY, USER)),
        ("tool", "content", 2, (USER, called, returned)),
        ("tool", "content", 2, (USER, called, returned, REPLY)),
        ("assistant", "content", 1, (USER, REPLY)),
        ("assistant", "content", 1, (USER, REPLY, USER)),
        ("assistant", "content", 1, (USER, called)),
        ("assistant", "reasoning_content", 1, (USER, REPLY)),
        ("assistant", "arguments", 1, (USER, called)),
        ("assistant", "arguments", 1, (USER, called, returned, REPLY)),
        (_LATER, "content", 2, (USER, REPLY, SYSTEM, USER)),
    ):
        if (role, field) in reported or (one := _alteration(renderer, role, field, at, messages)) is None:
            continue
        reported.add((role, field))
        key = role == "assistant", field, one.dropped, one.line
        roles = altered[key].roles if key in altered else ()
        if role != _LATER or "system" not in roles:
            altered[key] = replace(altered.get(key, one), roles=(*roles, role))
    return tuple(altered.values())


def _alteration(renderer: Renderer, role: str, field: str, at: int, messages: Probe) -> Altered | None:
    study, is_call = renderer.study(TOOLS), field == "arguments"
    verb = "are not {} verbatim" if is_call else "is not {} verbatim"

    def request(text: str) -> Request:
        change: Message = {field: text}
        if is_call:
            change = {"tool_calls": [{**call(1, {_KEY: text}), "id": messages[at]["tool_calls"][0]["id"]}]}
        rows = [*messages[:at], {**messages[at], **change}, *messages[at + 1 :]]
        tools = TOOLS if any(row.get("tool_calls") for row in rows) else None
        return Request(adapt(rows, study.forms).messages, tools)

    def output(text: str) -> str | None:
        try:
            conversation, tools, _ = request(text)
            rendering = study.run(wrap_tools(tools) if tools else None, conversation, False)
        except TokentraceError:
            return None
        return text_from(rendering, at, field)

    def alteration(event: Event | None, problem: str, *, dropped: bool = False) -> Altered:
        line, source = (None, "") if event is None else (event.part.line, event.part.source)
        return Altered((role,), field, problem, line, source, dropped)

    plain = output(_SIMPLE if is_call else ANSWER)
    if role == "assistant" and plain is not None and not plain.strip():
        return None
    for text in _TEXTS:
        actual = output(text)
        if actual is None or (contains_text(text, actual) and (not is_call or _KEY in actual)):
            continue
        if not actual.strip():
            problem = verb.format("written") if is_call else "reaches no token"
            return alteration(_dropping(study, text, request(text)), problem, dropped=True)
        return alteration(_writing(study, text, request), verb.format("written"))
    if is_call and (unread := _unread(renderer)):
        return alteration(_writing(study, ANSWER, request), f"{verb.format('read back')}: {unread}")
    return None


def _writing(study: TemplateStudy, text: str, request: Callable[[str], Request]) -> Event | None:
    """The first line whose value differs with a simple text."""
    run, simple = (run_traced(study, request(one)) for one in (text, _SIMPLE))
    if run is None or simple is None:
        return None
    pairs = zip(run.events, simple.events, strict=False)
    changed = [one for one, other in pairs if one.part.kind in (SET, WRITE) and one.value != other.value]
    texts = [one for one in changed if isinstance(one.value, str)]
    return next((one for one in texts if not contains_text(text, one.value)), texts[-1] if texts else None)


def _dropping(study: TemplateStudy, text: str, request: Request) -> Event | None:
    """The last condition that, flipped, would write the text."""
    run = run_traced(study, request)
    flips = flip_tests(study, request, run) if run is not None else ()
    tests = [test for test, flipped in flips if contains_text(text, flipped.text)]
    return tests[-1] if tests else None


def _unread(renderer: Renderer) -> str:
    """The first argument that cannot be read back."""
    for arguments in _ARGUMENTS:
        types = {
            key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()
        }
        schema = {"type": "object", "properties": types}
        function = {"name": "probe1", "description": "a tool", "parameters": schema}
        [message] = with_ids([calling(call(1, arguments))], renderer.study(TOOLS))
        tools, unread = [{"type": "function", "function": function}], []
        with contextlib.suppress(TokentraceError):
            unread = renderer.find_unreadable([USER, message], tools=tools)
        for one in unread:
            field = one.field.removeprefix("tool_calls.0.function.")
            if field.startswith("arguments") or field == "tool_calls":
                return "" if arguments is _ARGUMENTS[0] else f"{field}: {one.why}"
    return ""
