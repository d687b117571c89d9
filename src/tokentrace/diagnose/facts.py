"""Facts about a template beside its matrix: stops, prompt, roles, defaults, dates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study import probes
from ..study.probes import ANSWER, CONTINUED, RETURNED, SYSTEM, THOUGHT, USER, calling, result
from ..study.study import TemplateStudy
from ..study.turns import turn_spans
from ..template.trace import Rendering
from .cases import ANSWER as TEXT
from .cases import TOOLS, Request, reasoning_tags
from .field_texts import Altered, contains_text, find_altered, text_from
from .lines import EventKind, run_traced

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_FORMS: Final = ("text", "parts", "mapping")
_TIMES: Final = datetime(2001, 2, 3, 4, 5, 6), datetime(2031, 12, 24, 18, 55, 59)
_DATED: Final = ((USER,), (SYSTEM, USER), CONTINUED, RETURNED, (SYSTEM, *RETURNED, THOUGHT, USER))
"""Conversations that may show a date."""
_VALUE: Final = "PROBEVALUE"


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token at which generation stops.

    `trained`: turns of a row end with it. Unless `from_template`, the configuration names it.
    """

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
class TemplateFacts:
    """What a template does beside appending.

    `prefill` is what the generation prompt writes after the head of the turn. `roles` are written, rewritten, dropped
    or refused; `content` and `arguments` are the forms that the template reads; `inline_reasoning` is reasoning inside
    content. Users can forge some control tokens under transformers. `date` names the line that writes the
    date of the day, if any. Texts of `altered` fields do not arrive unchanged.
    """

    prompt: str
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
    inline_reasoning: str
    forgeable_under_transformers: tuple[str, ...]
    added_system_prompt: str
    date: str
    random: bool
    altered: tuple[Altered, ...]


def find_facts(renderer: Renderer, study: TemplateStudy) -> TemplateFacts:
    """Return what a renderer's template does."""
    grammar, forms, calls = study.grammar(True), study.forms, study.forms.calls
    roles = {role: _role(study, role) for role in _ROLES}
    read = [role for role, outcome in roles.items() if outcome in ("written", "rewritten")]
    arguments = {"object": calls.are_shown and calls.mapping, "JSON text": calls.are_shown and calls.text}
    tokens, last, past = _stops(renderer)
    date, random = _changes(study)
    return TemplateFacts(
        prompt=grammar.prompt,
        prefill=grammar.prompt.removeprefix(grammar.head) if grammar.prompt.startswith(grammar.head) else "",
        opens_reasoning=grammar.opens_reasoning,
        stop_tokens=tokens,
        last_turn_without_stop=None in last,
        past_turn_without_stop=None in past,
        roles=roles,
        content={role: tuple(form for form in _FORMS if getattr(forms.content(role), form)) for role in read},
        arguments=tuple(form for form, accepted in arguments.items() if accepted),
        calls=calls.are_shown,
        reasoning=forms.shows_reasoning(False, False) or forms.shows_reasoning(True, False),
        inline_reasoning=_inline(study),
        forgeable_under_transformers=_forgeable(study),
        added_system_prompt=_system(study),
        date=date,
        random=random,
        altered=find_altered(renderer, study),
    )


def _stops(renderer: Renderer) -> tuple[tuple[StopToken, ...], set[int | None], set[int | None]]:
    """Return the stop tokens, and those of last and past turns; None for a turn that has none."""
    endings = renderer.study().endings(False), renderer.study(TOOLS).endings(True)
    stops, heads = endings[0].stops | endings[1].stops, endings[0].heads | endings[1].heads
    last, past = set[int | None](), set[int | None]()
    for messages, tools in (([USER, ANSWER, USER, ANSWER], None), ([USER, calling(), result(), ANSWER], TOOLS)):
        try:
            turns = renderer.render(messages, tools=tools).turns
        except TokentraceError:
            continue
        last |= {turn.stop_token for turn in turns[-1:]}
        past |= {turn.stop_token for turn in turns[:-1]}
    tokens = (
        StopToken(one, renderer.tokenizer.decode([one]), one in last | past, one in stops, one in heads)
        for one in renderer.get_stop_token_ids()
    )
    return tuple(tokens), last, past


def probe_renderings(study: TemplateStudy) -> Iterator[Rendering | None]:
    """Render the probes, with and without tools and prompt; None where refused."""
    for probe in (*probes.ASSISTANT_TURNS, *probes.OTHER_TURNS):
        yield from (study.readable(probe, tools, prompt) for tools in (False, True) for prompt in (False, True))


def _forgeable(study: TemplateStudy) -> tuple[str, ...]:
    """Return the scaffold's control tokens that a user message can spell."""
    encoded = [study.encode(rendering) for rendering in probe_renderings(study) if rendering is not None]
    scaffold = dict.fromkeys(index for one in encoded for index in one.ids[one.control].tolist())
    texts = {index: study.tokenizer.vocabulary.added[index].text for index in scaffold}
    return tuple(text for index, text in texts.items() if _forges(study, index, text))


def _forges(study: TemplateStudy, index: int, text: str) -> bool:
    rendering = study.probe([{"role": "user", "content": f"a {text} b"}])
    if rendering is None:
        return False
    encoded = study.encode(rendering)
    origins = [rendering.origins[int(span)] for span in encoded.spans[encoded.ids == index]]
    return any(origin is not None and origin.field == "content" for origin in origins)


def _inline(study: TemplateStudy) -> str:
    """Say what happens to reasoning inside the content of the last turn."""
    first, last = reasoning_tags(study)
    thought = THOUGHT["reasoning_content"]
    rendering = study.readable((USER, {**ANSWER, "content": f"{first}{thought}{last}{THOUGHT['content']}"}))
    if rendering is None:
        return "refused"
    separate = study.readable((USER, THOUGHT))
    if separate is not None and thought in separate.text and separate.text == rendering.text:
        return "read as reasoning"
    return "kept as text" if thought in rendering.text else "left out"


def _role(study: TemplateStudy, role: str) -> str:
    """Say what happens to a message of a role."""
    is_result, message = role in ("tool", "function", "ipython"), {"role": role, "content": TEXT}
    before = RETURNED[:2] if is_result else (USER,) if role == "assistant" else ()
    after = (USER,) if role in ("system", "developer") else ()
    rendering = study.readable([*before, {**result(), **message} if is_result else message, *after])
    if rendering is None:
        return "refused"
    text = text_from(rendering, len(before), "content")
    return "dropped" if not text else "written" if contains_text(TEXT, text) else "rewritten"


def printed_variables(study: TemplateStudy) -> set[str]:
    """Return the variables that the template prints."""
    names = study.template.variables - set(study.tokenizer.variables)
    texts = ((name, study.probe((USER,), tools, True, {name: _VALUE})) for name in names for tools in (False, True))
    return {name for name, rendering in texts if rendering is not None and _VALUE in rendering.text}


def _system(study: TemplateStudy) -> str:
    """Return the text before a lone question, without control tokens."""
    rendering = study.probe((USER,))
    turns = turn_spans(rendering) if rendering is not None else []
    if rendering is None or not turns:
        return ""
    head, pattern = rendering.text[: turns[0].start], study.tokenizer.vocabulary.control_pattern
    words = " ".join((head if pattern is None else pattern.sub(" ", head)).split())
    return words if any(char.isalpha() for char in words) else ""


def _changes(study: TemplateStudy) -> tuple[str, bool]:
    """Return where the template writes the date, and whether it draws at random."""
    date, random = "", False
    for messages, tools in itertools.product(_DATED, (False, True)):
        if study.probe(messages, tools, True) is None:
            continue
        one, other = (run_traced(study, Request(messages, tools, True), now=now) for now in _TIMES)
        random |= any(run is not None and run.random for run in (one, other))
        if date or (one and one.text) == (other and other.text):
            continue
        events = zip(one.events, other.events, strict=False) if one and other else ()
        changed = (event.part for event, later in events if event[:2] != later[:2])
        part = next((one for one in changed if one.kind in (EventKind.SET, EventKind.WRITE)), None)
        date = "an unknown line" if part is None else f"line {part.line}: `{part.text}`"
    return date, random
