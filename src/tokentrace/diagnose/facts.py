"""What there is to know of a template beside what it does to the past: each fact found out by running it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study.probes import (
    ANSWER,
    ASSISTANT_TURNS,
    OTHER_TURNS,
    RETURNED,
    SYSTEM,
    THOUGHT,
    USER,
    Probe,
    calling,
    result,
    role_turn,
)
from ..study.seams import searched_words
from ..study.study import TemplateStudy
from .cases import ANSWER as TEXT
from .cases import THINK, TOOLS
from .field_texts import is_written
from .lines import EventKind, LineTracer

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token at which generation stops."""

    id: int
    text: str
    trained: bool
    """Whether some turn of a rendered conversation ends with it, as a sampled token."""
    from_template: bool
    """Whether the template ends turns with it; if not, only the model's configuration names it."""
    is_next_head: bool
    """Whether it is the head of the turn that follows."""


@dataclass(frozen=True, slots=True)
class Stops:
    """How turns end."""

    tokens: tuple[StopToken, ...]
    untrained_end: bool
    """Whether a turn that is the last has no stop token in a row, so that its end is not trained."""
    untrained_inside: bool
    """Whether a turn has none though something follows it."""


@dataclass(frozen=True, slots=True)
class Prompting:
    """How a reply is asked for."""

    prompt: str
    prefill: str
    """What the prompt writes after the head of the turn."""
    opens_reasoning: bool


@dataclass(frozen=True, slots=True)
class Forging:
    """What a user's text can become under transformers' own rendering."""

    control: tuple[str, ...]
    """Control tokens of the template's scaffold that a user message makes by spelling them."""
    other: int
    """How many more control tokens the vocabulary has, all of which text makes by spelling them."""
    words: tuple[str, ...]
    """Words that the template looks for in what messages say."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Which forms of messages are read."""

    roles: Mapping[str, str]
    content: Mapping[str, tuple[str, ...]]
    arguments: tuple[str, ...]
    no_content: tuple[str, ...]
    reasoning: bool
    inline_reasoning: str
    """What becomes of reasoning inside content: it is read as reasoning, kept as text, left out, or refused."""
    calls: bool


def find_stops(renderer: Renderer) -> Stops:
    study, with_tools = renderer.study(), renderer.study(TOOLS)
    endings = study.endings(False), with_tools.endings(True)
    own = endings[0].stops | endings[1].stops
    trained: set[int] = set()
    untrained = inside = False
    for messages in ([USER, ANSWER, USER, ANSWER], [USER, calling(), result(), ANSWER]):
        try:
            rendered = renderer.silent().render(messages, tools=TOOLS if len(messages[1]) > 2 else None)
        except TokentraceError:
            continue
        trained |= {turn.stop_token for turn in rendered.turns if turn.stop_token is not None}
        ended = [turn.stop_token is not None for turn in rendered.turns]
        untrained |= not all(ended[-1:])
        inside |= not all(ended[:-1])
    heads = endings[0].heads | endings[1].heads
    name = renderer.tokenizer.decode
    tokens = [
        StopToken(index, name([index]), index in trained, index in own, index in heads)
        for index in renderer.get_stop_token_ids()
    ]
    return Stops(tuple(tokens), untrained, inside)


def find_prompting(study: TemplateStudy) -> Prompting:
    grammar = study.grammar(True)
    prompt = grammar.prompt
    prefill = prompt[len(grammar.head) :] if prompt.startswith(grammar.head) else ""
    return Prompting(prompt, prefill, grammar.opens_reasoning)


def find_forging(study: TemplateStudy, tracer: LineTracer) -> Forging:
    """Each control token that the template writes, spelled in a user message and encoded as transformers does it."""
    vocabulary = study.tokenizer.vocabulary
    written: dict[int, None] = {}
    for probe, tools, prompt in itertools.product((*ASSISTANT_TURNS, *OTHER_TURNS), (False, True), (False, True)):
        rendering = study.readable(probe, tools, prompt)
        if rendering is not None:
            encoded = study.encode(rendering)
            written |= dict.fromkeys(encoded.ids[encoded.control].tolist())
    forged = []
    for index in written:
        text = vocabulary.added[index].text
        rendering = study.probe([{"role": "user", "content": f"a {text} b"}])
        if rendering is not None and index in _ids_in_content(study, rendering):
            forged.append(text)
    return Forging(tuple(forged), len(vocabulary.added) - len(forged), tuple(_words(study, tracer)))


def _words(study: TemplateStudy, tracer: LineTracer) -> Iterator[str]:
    """Of the words that a template may look for in texts, those whose being there some condition turns on."""

    def answers(text: str) -> Iterator[list[tuple[int, Any]] | None]:
        for probe in ((SYSTEM, USER), (USER, ANSWER), RETURNED):
            said = [{**one, "content": text} for one in probe]
            run = tracer.run(said, add_generation_prompt=True, variables=study.variables)
            yield None if run is None else [(one.place, one.value) for one in run.events if one.kind is EventKind.TEST]

    words = searched_words(study.template)
    for word in words:
        if any(
            list(answers(f"{one} a {other}")) != list(answers(f"{plain} a {rest}"))
            for beside in ("b", *words)
            for (one, other), (plain, rest) in (((word, beside), ("c", beside)), ((beside, word), (beside, "c")))
        ):
            yield word


def _ids_in_content(study: TemplateStudy, rendering: Any) -> set[int]:
    encoded = study.encode(rendering)
    content = [at for at, origin in enumerate(rendering.origins) if origin is not None and origin.field == "content"]
    return {int(index) for index, span in zip(encoded.ids, encoded.spans, strict=True) if int(span) in content}


def find_reading(study: TemplateStudy) -> Reading:
    forms = study.forms
    roles = {role: _role(study, role) for role in _ROLES}
    forms_of = {
        role: tuple(name for name in ("text", "parts", "mapping") if getattr(forms.content(role), name))
        for role, known in roles.items()
        if known in ("written", "rewritten")
    }
    arguments = [*(["object"] if forms.calls.mapping else []), *(["JSON text"] if forms.calls.text else [])]
    return Reading(
        roles,
        forms_of,
        tuple(arguments) if forms.calls.are_shown else (),
        tuple(map(str, forms.calls.silence)),
        forms.shows_reasoning(False, False) or forms.shows_reasoning(True, False),
        _inline(study),
        forms.calls.are_shown,
    )


def reasoning_tags(study: TemplateStudy) -> tuple[str, str]:
    """What reasoning stands between."""
    frame = study.grammar(True).reasoning
    return (frame.open, frame.close) if frame is not None and frame.open and frame.close else THINK


def _inline(study: TemplateStudy) -> str:
    """What becomes of reasoning inside the content of the last turn."""
    first, last = reasoning_tags(study)
    said = f"{first}{THOUGHT['reasoning_content']}{last}{THOUGHT['content']}"
    rendering = study.readable((USER, {**ANSWER, "content": said}))
    if rendering is None:
        return "refused"
    written = study.readable((USER, THOUGHT))
    if written is not None and THOUGHT["reasoning_content"] in written.text and written.text == rendering.text:
        return "read as reasoning"
    return "kept as text" if THOUGHT["reasoning_content"] in rendering.text else "left out"


def _role(study: TemplateStudy, role: str) -> str:
    """What becomes of a message of a role."""
    if role in ("tool", "function", "ipython"):
        probe: Probe = (*RETURNED[:2], {**RETURNED[2], "role": role})
        at = 2
    elif role in ("system", "developer"):
        probe, at = ({"role": role}, USER), 0
    else:
        probe, at = role_turn(role), 1
        if role == "assistant":
            probe = (USER, ANSWER)
        elif role == "user":
            probe, at = (USER,), 0
    rendering = study.readable([{**one, "content": TEXT} if n == at else one for n, one in enumerate(probe)])
    if rendering is None:
        return "refused"
    own = [origin is not None and origin.message == at and origin.field == "content" for origin in rendering.origins]
    texts = [text for (text, _, _), mine in zip(rendering.spans(), own, strict=True) if mine]
    return "dropped" if not texts else "written" if is_written(TEXT, "".join(texts)) else "rewritten"
