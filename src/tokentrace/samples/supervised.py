"""Supervised samples: conversations to rows with an exact loss mask, in one render.

A row of several turns can show the model what inference never shows it. A template that drops past reasoning writes
every turn but the last without it, so the row trains answers that follow no reasoning; a row that keeps the reasoning
shows later turns a past that such a template would not show them. `Past` is that choice. By default the template
decides, and `HistoryWarning` says where that makes a difference.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..conversation.messages import ROLES, Messages
from ..errors import SampleError, kind_of, shown
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..settings import choose, flag, instance, items, whole
from ..tokens.kinds import Kind, Part
from .parts import PartFinder
from .pasts import PastTurns, Remark, listed
from .sample import Later, Sample

FLAGS: Final = ("train", "weight")
"""Keys of a message that say whether it carries loss: ``train`` is true or false, ``weight`` (OpenAI's) 1 or 0."""
_FLAGS: Final = frozenset(FLAGS)


class Turns(StrEnum):
    """Which assistant turns carry loss."""

    ALL = "all"
    LAST = "last"
    FLAGGED = "flagged"
    """All but messages with ``"train": false`` or ``"weight": 0``."""


ROW_PASTS: Final = (Past.TEMPLATE, Past.PRESERVE, Past.EXPAND)
"""How rows may show turns that are not the last."""

TRAINED_PARTS: Final = (Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP)
"""All that an assistant samples."""
TRAINED_ROLES: Final = ("assistant",)
_ALL_PARTS: Final = frozenset(TRAINED_PARTS)
_ALL_ROLES: Final = frozenset(TRAINED_ROLES)


@dataclass(frozen=True, slots=True, init=False)
class SampleSettings:
    """What carries loss in a sample, and how past turns are shown. See `build_supervised_sample`, which takes the same.

    Names stand for the enums; a name that does not exist is a RendererError or SampleError that lists those that do.
    """

    turns: Turns
    parts: frozenset[Part]
    roles: frozenset[str]
    past: Past | None
    final_stop: bool

    def __init__(
        self,
        *,
        turns: str = Turns.ALL,
        parts: Iterable[Part | str] = TRAINED_PARTS,
        roles: Iterable[str] = TRAINED_ROLES,
        past: str | None = None,
        final_stop: bool = False,
    ) -> None:
        given = [parts] if isinstance(parts, str) else items("parts", parts, SampleError)
        whose = [roles] if isinstance(roles, str) else items("roles", roles, SampleError)
        if not all(isinstance(role, str) for role in whose):
            raise SampleError(f"roles must be a list of strings, not {shown(whose)}")
        checked = {
            "turns": choose(Turns, "turns", turns),
            "parts": frozenset(_part(one) for one in given),
            "roles": frozenset(whose),
            "past": None if past is None else _row_past(past),
            "final_stop": flag("final_stop", final_stop, SampleError),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def is_usual(self) -> bool:
        """Whether all parts of assistants' turns carry loss, and nothing else does."""
        return self.parts == _ALL_PARTS and self.roles == _ALL_ROLES

    def described(self) -> dict[str, Any]:
        """The settings as JSON can hold them; ``SampleSettings(**described)`` gives them back."""
        return {
            "turns": str(self.turns),
            "parts": sorted(part.name.lower() for part in self.parts),
            "roles": sorted(self.roles),
            "past": None if self.past is None else str(self.past),
            "final_stop": self.final_stop,
        }


def _settings(turns: Any, parts: Any, roles: Any, past: Any, final_stop: Any) -> SampleSettings:
    """The settings of a call, checked: once, where parts and roles are those that nearly all calls have."""
    given = {"turns": turns, "past": past, "final_stop": final_stop}
    if parts is TRAINED_PARTS and roles is TRAINED_ROLES and all(type(one) in _HASHABLE for one in given.values()):
        return _usual_settings(**given)
    return SampleSettings(parts=parts, roles=roles, **given)


_HASHABLE: Final = frozenset({str, Turns, Past, bool, type(None)})


@functools.lru_cache(maxsize=64, typed=True)
def _usual_settings(turns: Any, past: Any, final_stop: Any) -> SampleSettings:
    return SampleSettings(turns=turns, past=past, final_stop=final_stop)


def _row_past(past: Any) -> Past:
    chosen = choose(Past, "past", past)
    if chosen not in ROW_PASTS:
        raise SampleError(f"past of rows is one of {', '.join(ROW_PASTS)}; make the renderer with past={chosen!s}")
    return chosen


_BY_NAME: Final = {part.name.lower(): part for part in TRAINED_PARTS}


def _part(given: Any) -> Part:
    part = given if isinstance(given, Part) else _BY_NAME.get(given) if isinstance(given, str) else None
    if part not in TRAINED_PARTS:
        raise SampleError(f"parts are some of {', '.join(map(repr, _BY_NAME))}, not {shown(given)}")
    return part


def build_supervised_sample(
    renderer: Renderer,
    messages: Any,
    *,
    tools: Any = None,
    turns: str = "all",
    parts: Iterable[Any] = TRAINED_PARTS,
    roles: Iterable[str] = TRAINED_ROLES,
    past: str | None = None,
    final_stop: bool = False,
    since: int = 0,
) -> Sample:
    """A conversation as one row: ids, loss mask, labels, and where each token came from, in one render.

    - `turns`: which assistant turns carry loss: ``"all"``, ``"last"``, or ``"flagged"`` (all but those whose message
      says ``"train": false`` or ``"weight": 0``); and none before message `since`.
    - `parts`: which of their parts do: ``"reasoning"``, ``"content"``, ``"tool_calls"`` (with delimiters), ``"stop"``.
    - `roles`: whose messages do. For roles other than the assistant only the text carries loss, no scaffold.
    - `past`: ``"template"`` or ``"preserve"`` (all reasoning kept); see `Past`. By default as the renderer
      does it, with a `HistoryWarning` where that trains turns as inference never shows them.
      `build_supervised_samples` also takes ``"expand"``.
    - `final_stop`: where the template leaves the last turn without the token that the model ends it with (GLM's next
      role marker), add that token.

    Raises what `render` raises, and SampleError for unknown settings. A conversation without an assistant turn gives
    a row that trains nothing.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> renderer = create_renderer(POCKET)
    >>> sample = build_supervised_sample(renderer, messages)
    >>> renderer.tokenizer.decode(sample.ids[sample.mask])
    '4<|end|>'
    >>> ids, mask = sample
    """
    settings = _settings(turns, parts, roles, past, final_stop)
    if settings.past is Past.EXPAND:
        raise SampleError("past='expand' makes several rows: call build_supervised_samples")
    return _built(renderer, settings, messages, tools, since)[0]


def build_supervised_samples(
    renderer: Renderer, messages: Any, *, tools: Any = None, since: int = 0, **settings: Any
) -> list[Sample]:
    """As `build_supervised_sample`, for any `past`: with ``"expand"`` as many rows as needed.

    Each assistant turn then is trained exactly once, in a row that shows what the model would have seen before it. A
    row continues with the next turn as long as that turn's history is the row so far.
    """
    return _built(renderer, SampleSettings(**settings), messages, tools, since)


def _built(renderer: Renderer, settings: SampleSettings, messages: Any, tools: Any, since: int) -> list[Sample]:
    """The rows, after the first warning of each kind was given to the caller of the public function."""
    builder = renderer.once(settings, lambda: SampleBuilder(renderer, settings))  # it learns about the template
    samples = builder.build(messages, tools, since, keep=False)
    first: dict[type[Warning], Warning] = {}
    for sample in samples:
        for warning in sample.warnings:
            first.setdefault(type(warning), warning)
    for warning in first.values():
        warnings.warn(warning, stacklevel=3)
    return samples


def build_prompt_response_sample(
    renderer: Renderer, prompt: Any, response: str, *, tools: Any = None, eos: str | None = None
) -> Sample:
    """A row of one turn: the prompt, the response, the end-of-sequence token; loss on the last two.

    `prompt` is a list of messages, rendered with a generation prompt, or a string that is the prompt already. Prompt
    and response are encoded apart, as at inference. `eos` is the tokenizer's own by default; a note says where the
    template ends turns with a different token.
    """
    tokenizer = renderer.tokenizer
    if not isinstance(response, str):
        raise SampleError(f"the response is a string, not {kind_of(response)}")
    end = tokenizer.variables.get("eos_token") if eos is None else instance("eos", eos, str, SampleError)
    end_id = tokenizer.token_id(end) if end else None
    if end_id is None:
        named = tokenizer.name or "the tokenizer"
        raise SampleError(f"{end!r} is not a control token of {named}; name one with eos=")
    if isinstance(prompt, str):
        head = tokenizer.encode(prompt)
        owners, kinds = np.zeros(len(head), np.int32), np.full(len(head), Kind.CONTEXT, np.uint8)
        count, notes = 1, list[str]()
    else:
        rendered = renderer.render(prompt, tools=tools, add_generation_prompt=True)
        head, owners, kinds = rendered.ids, rendered.messages, PartFinder(renderer).arrays(rendered)["kinds"]
        count, notes = len(prompt), list(rendered.notes)
    stops = renderer.turn_stop_ids()
    if stops and end_id not in stops:
        shown = ", ".join(repr(tokenizer.decode([index])) for index in sorted(stops))
        notes.append(f"the row ends in {end!r}, and the template ends turns with {shown}")
    body = np.append(tokenizer.encode(response), np.int32(end_id)).astype(np.int32)
    parts = np.full(len(body), Part.CONTENT, np.uint8)
    parts[-1] = Part.STOP
    return Sample(
        ids=np.concatenate((head, body)),
        mask=np.concatenate((np.zeros(len(head), np.bool_), np.ones(len(body), np.bool_))),
        messages=np.concatenate((owners, np.full(len(body), count, np.int32))),
        kinds=np.concatenate((kinds, np.full(len(body), Kind.SAMPLED, np.uint8))),
        parts=np.concatenate((np.zeros(len(head), np.uint8), parts)),
        notes=tuple(notes),
    )


class SampleBuilder:
    """Builds rows with one renderer and one choice of what carries loss; what it learns about the template is kept."""

    def __init__(self, renderer: Renderer, settings: SampleSettings | None = None) -> None:
        self.settings = settings or SampleSettings()
        self.renderer = renderer.with_past(Past.PRESERVE) if self.settings.past is Past.PRESERVE else renderer
        self._finder = PartFinder(self.renderer)
        self._pasts = PastTurns(self.renderer)

    def build(self, messages: Any, tools: Any = None, since: int = 0, *, keep: bool = True) -> list[Sample]:
        """The rows of one conversation: one, or several where it is expanded. With what they were rendered from, unless
        that is not to be kept."""
        checked = self.renderer.check_messages(messages, tools=tools)
        chosen, notes = self._chosen(checked, whole("since", since, error=SampleError))
        if self.settings.turns is Turns.FLAGGED:
            checked = [{key: value for key, value in row.items() if key not in FLAGS} for row in checked]
        if self.settings.past is Past.EXPAND:
            return self._expanded(checked, tools, chosen, notes, keep)
        rendered = self.renderer.render(checked, tools=tools)
        is_chosen = self.settings.past is not None  # by the user: how the past is shown
        remarks = self._pasts.remarks(rendered, checked, tools, chosen, of_history=not is_chosen)
        return [self._sample(rendered, checked, tools, chosen, [*notes, *remarks], keep)]

    def _chosen(self, messages: Messages, since: int) -> tuple[list[int], list[str]]:
        """The messages that carry loss, assistant's and others'."""
        strange = sorted(self.settings.roles - ROLES - {row["role"] for row in messages})
        if strange:
            raise SampleError(
                f"roles names {strange[0]!r}, which is neither a role of this conversation nor a known one"
            )
        whose = [at for at, row in enumerate(messages) if row["role"] in self.settings.roles and at >= since]
        own = [at for at in whose if messages[at]["role"] == "assistant"]
        marked = [at for at in whose if not _FLAGS.isdisjoint(messages[at])]
        flagged = {at: said for at in marked if (said := _flag(at, messages[at])) is not None}
        if self.settings.turns is Turns.FLAGGED:
            return [at for at in whose if flagged.get(at, True)], []
        if self.settings.turns is Turns.LAST:
            return [at for at in whose if at not in own[:-1]], []
        refused = [at for at in own if flagged.get(at) is False]
        notes = [f"{listed(refused)}: flagged not to be trained, and trained: use turns='flagged'"] if refused else []
        return whose, notes

    def _expanded(
        self, messages: Messages, tools: Any, chosen: list[int], notes: list[str], keep: bool
    ) -> list[Sample]:
        rows: list[tuple[RenderedTokens, list[int]]] = []
        for at in chosen:
            if messages[at]["role"] != "assistant":
                continue
            rendered = self.renderer.render_turn(messages[: at + 1], tools=tools)
            if rows and _extends(rendered, *rows[-1]):
                rows[-1] = (rendered, [*rows[-1][1], at])
            else:
                rows.append((rendered, [at]))
        if not rows:
            rows = [(self.renderer.render(messages, tools=tools), [])]
        out, before = [], -1
        for rendered, own in rows:
            last = own[-1] if own else len(messages) - 1
            others = [at for at in chosen if before < at <= last and messages[at]["role"] != "assistant"]
            remarks: list[Remark] = [*notes, *self._pasts.starts(rendered, messages, tools, own)]
            out.append(self._sample(rendered, messages, tools, sorted([*own, *others]), remarks, keep))
            before = last
        return out

    def _sample(
        self,
        rendered: RenderedTokens,
        messages: Messages,
        tools: Any,
        chosen: list[int],
        remarks: Sequence[Remark],
        keep: bool,
    ) -> Sample:
        notes = [*rendered.notes, *map(str, remarks)]
        added: int | None = None
        last = rendered.turns[-1] if rendered.turns else None
        if last is not None and last.stop_token is None and last.message in chosen and last.stop == len(rendered.ids):
            stop, is_sampled = self._left_open(messages, last.message, tools)
            if is_sampled or self.settings.final_stop:
                added = stop
            elif stop is not None:
                notes.append(
                    f"message {last.message}: ends without the token {self.renderer.tokenizer.decode([stop])!r} that "
                    "the model stops with: final_stop=True adds it"
                )
        later: Any = Later(lambda: self._finder.arrays(rendered, tools is not None))
        sample = Sample(
            ids=rendered.ids,
            mask=self._mask(rendered, messages, later, chosen),
            messages=later,
            kinds=later,
            parts=later,
            notes=tuple(notes),
            warnings=tuple(one for one in remarks if isinstance(one, Warning)),
            rendered=rendered if keep else None,
        )
        if last is None or added is None:
            return sample
        return _with_stop(sample, added, last.message, Part.STOP in self.settings.parts)

    def _mask(
        self, rendered: RenderedTokens, messages: Messages, later: Later, chosen: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        if self.settings.is_usual and len(chosen) == sum(row["role"] == "assistant" for row in messages):
            return rendered.mask.copy()  # all that is sampled
        by_message = np.zeros(len(messages) + 1, np.bool_)  # the last is for tokens of no message, -1
        by_message[list(chosen)] = True
        picked = by_message[rendered.messages]
        mask: npt.NDArray[np.bool_] = rendered.mask & picked
        if self.settings.parts != _ALL_PARTS:
            wanted = np.zeros(max(Part) + 1, np.bool_)
            wanted[list(self.settings.parts)] = True
            wanted[Part.OTHER] = wanted[Part.CONTENT]
            mask &= wanted[later.find()["parts"]]
        if any(messages[at]["role"] != "assistant" for at in chosen):
            others = np.asarray([row["role"] != "assistant" for row in messages] + [False], np.bool_)
            mask |= picked & others[rendered.messages] & (later.find()["parts"] == Part.CONTENT) & ~rendered.mask
        return mask

    def _left_open(self, messages: Messages, at: int, tools: Any) -> tuple[int | None, bool]:
        """The token that the model ends turn `at` with, the last of a row; and whether the conversation shows it.

        A row that expansion ends before the conversation ends has to show how this turn stopped: no other row trains
        it, and a model that never learns to stop after its calls makes hundreds of them.
        """
        if at == len(messages) - 1:
            return self._stop_of(messages, tools), False
        if self.settings.past is not Past.EXPAND:
            return None, False
        known = self._pasts.stop_before(messages[: at + 1], messages[at + 1], tools)
        return (self._stop_of(messages[: at + 1], tools) if known is None else known), True

    def _stop_of(self, messages: Messages, tools: Any) -> int | None:
        """The token that ends the last turn when another message follows."""
        called = messages[-1].get("tool_calls")
        if called:
            name = (called[0].get("function") or called[0]).get("name", "")
            following = {"role": "tool", "name": name, "content": "result"}
            if called[0].get("id"):
                following["tool_call_id"] = called[0]["id"]
        else:
            following = {"role": "user", "content": "and then?"}
        return self._pasts.stop_before(messages, following, tools)


def _flag(at: int, message: Mapping[str, Any]) -> bool | None:
    for name in FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise SampleError(f"message {at}, {name}: must be true or false (1 or 0), not {value!r}")
    return None


def _extends(rendered: RenderedTokens, before: RenderedTokens, own: Sequence[int]) -> bool:
    """Whether a rendering begins with another one, up to the end of the last trained turn of that one."""
    stop = max((turn.stop for turn in before.turns if turn.message == own[-1]), default=len(before.ids))
    return bool(np.array_equal(rendered.ids[:stop], before.ids[:stop]))


def _with_stop(sample: Sample, stop: int, message: int, trained: bool) -> Sample:
    return sample.replace(
        ids=np.append(sample.ids, np.int32(stop)),
        mask=np.append(sample.mask, trained),
        messages=np.append(sample.messages, np.int32(message)),
        kinds=np.append(sample.kinds, np.uint8(Kind.SAMPLED)),
        parts=None if sample.parts is None else np.append(sample.parts, np.uint8(Part.STOP)),
    )
