"""Reading a grammar off a template: probes are rendered, and the trace says what stands where.

Reasoning with content shows how reasoning opens and closes, content alone what is written in its place, and what
stands around content. Calls are `study.derive_calls`. Nothing here knows a model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..conversation.messages import Messages
from ..errors import TemplateError
from ..formats.grammar import NO_CALLS, ONE_CALL, CallGrammar, Channels, Frame, TurnGrammar
from ..template.trace import Rendering
from .derive_calls import CallDeriver
from .probes import call
from .reading import TurnReader, WrittenTurn, leading, trailing
from .turns import find_turns

if TYPE_CHECKING:
    from .study import TemplateStudy

SEVERAL_MESSAGES: Final = "a turn is several messages, and how they are told apart was not understood: all is content"
TWO_TURNS: Final = "the template writes calls after content as a turn of their own"
BARE_CALLS: Final = "nothing sets calls off from content: they are found only where no content comes before them"


def template_grammar(study: TemplateStudy, ends: Iterable[int], tools: bool) -> TurnGrammar:
    """The grammar of a template's turns. `ends` are the tokens that end them; `tools` declares the stand-in tool."""
    added = study.tokenizer.vocabulary.added
    stops = [added[index].text for index in sorted(ends) if index in added]
    reader = TurnReader(functools.partial(_last_turn, study, tools), study.tokenizer.vocabulary, stops)
    toggles = [{name: value} for name in sorted(study.template.variables) for value in (True, False)]
    asked = study.prompts.alone(tools)
    prompt = (asked.tail or asked.added) if asked is not None else ""
    return _Deriver(reader, prompt, study.template.constants, toggles).derive()


def _last_turn(
    study: TemplateStudy, tools: bool, messages: Messages, changes: Mapping[str, Any]
) -> tuple[Rendering, int, int] | None:
    """A conversation, and where the turn of its last message stands; None where it is refused or there is none."""

    def render(some: Messages, prompt: bool) -> Rendering:
        rendering = study.probe(some, tools, prompt, changes)
        if rendering is None:
            raise TemplateError("the template refuses the probe")
        return rendering

    rendering, last = study.probe(messages, tools, changes=changes), len(messages) - 1
    if rendering is None:
        return None
    turns, _ = find_turns(rendering, messages, render, study.tokenizer, wanted=lambda index: index == last)
    own = [turn for turn in turns if turn.message == last and turn.start < turn.end]
    return (rendering, own[0].start, own[-1].end) if own else None


@dataclass(frozen=True, slots=True)
class _Deriver:
    reader: TurnReader
    prompt: str
    constants: frozenset[str]
    """The strings that the template compares things with."""
    toggles: Sequence[Mapping[str, Any]]
    """Template variables that may show reasoning where it is hidden."""

    def derive(self) -> TurnGrammar:
        reader = self.reader
        plain = reader.turn({"content": "answer"})
        closing = self._closing(plain)
        if closing.close:
            reader.ends.append(closing.close)
            plain = reader.turn({"content": "answer"})
        thought = self._reasoned()
        channels = self._channels(thought)
        if channels is not None:
            calls = self._bodies(channels)
            notes = tuple(dict.fromkeys(reader.notes))
            return TurnGrammar(self.prompt, self.prompt, calls=calls, channels=channels, notes=notes)
        frame, opening = self._frames(thought, plain)
        if self.prompt.strip() and opening.startswith(self.prompt):
            reader.notes.append(SEVERAL_MESSAGES)
            return TurnGrammar(head=self.prompt, prompt=self.prompt, notes=tuple(reader.notes))
        if frame is None:
            frame = self._hidden(plain)
        head, opened, after_empty = self._head(plain, thought, frame, opening)
        opened = opened or self._opened_beside(head, frame)
        content = dataclasses.replace(closing, open=opened.strip(), lead=trailing(opened)) if opened else closing
        grammar = TurnGrammar(head, self.prompt, frame, after_empty, content)
        calls = self._calls(grammar)
        opened = calls.section_open or calls.open if calls is not None else ""
        if opened.strip() and content.open and head.endswith(opened):  # the prompt opens whatever comes first
            content = dataclasses.replace(content, open=opened + content.open)
            grammar = grammar.replace(head=head.removesuffix(opened), content=content)
        return grammar.replace(calls=calls, notes=tuple(dict.fromkeys(reader.notes)))

    def _reasoned(self) -> WrittenTurn | None:
        """A turn that shows reasoning, with content if that can be, or with calls."""
        calls = {"tool_calls": [call()]}
        text_calls = {"tool_calls": [call(as_text=True)]}
        beside = ({"content": "answer"}, {"content": "answer", **calls}, {"content": "", **calls})
        for variables, more in itertools.product(({}, *self.toggles), (*beside, {"content": None, **text_calls})):
            turn = self.reader.turn({"reasoning_content": "thought", **more}, variables)
            if turn is not None and turn.first("reasoning") is not None:
                return turn
        return None

    # -- content

    def _closing(self, plain: WrittenTurn | None) -> Frame:
        """What the template writes after content: letters that close the turn, or white space before its stop."""
        said = plain.first("content") if plain else None
        after = plain.text[said.stop :] if plain is not None and said is not None else ""
        if not after.strip():
            return Frame(trail=after)
        return Frame(trail=leading(after), close=after.strip(), after=trailing(after))

    # -- reasoning

    def _frames(self, turn: WrittenTurn | None, plain: WrittenTurn | None) -> tuple[Frame | None, str]:
        """What stands around reasoning, and what opens content after it."""
        reasoning = turn.first("reasoning") if turn else None
        if turn is None or reasoning is None:
            return None, ""
        after = [hole for hole in turn.holes if hole.start >= reasoning.stop]
        if not after:
            return None, ""
        between = turn.text[reasoning.stop : after[0].start]
        closing = self.reader.mark.search(between)
        if closing is None or between[: closing.start()].strip():
            closing = re.search(r"\S(?:.*\S)?", between, re.DOTALL) if after[0].field == "content" else None
        if closing is None:
            self.reader.notes.append("nothing that could be looked for closes the reasoning")
            return None, ""
        opened, lead = self._opening(turn.text[: reasoning.start], plain, closing[0])
        if not opened or opened == closing[0]:
            self.reader.notes.append("nothing opens the reasoning, so that it is not to be told from content")
            return None, ""
        rest = between[closing.end() :] if after[0].field == "content" else ""
        space = leading(rest) if rest else leading(between[closing.end() :])
        frame = Frame(
            open=opened,
            lead=lead,
            trail=between[: closing.start()],
            close=closing[0],
            after=space,
        )
        return frame, rest.lstrip() if rest.strip() else ""

    def _opening(self, before: str, plain: WrittenTurn | None, closed: str) -> tuple[str, str]:
        """What opens reasoning, and the white space after it.

        That is the last mark before it, or all that is not the head; or what the generation prompt ends with where it
        goes further than that. Where an answer has the same and then what closes reasoning, it begins at the last mark.
        """
        said = plain.first("content") if plain else None
        head = plain.text[: said.start] if plain is not None and said is not None else ""
        marks = [match for match in self.reader.mark.finditer(before) if not before[match.end() :].strip()]
        if marks and (marks[-1][0] not in head or closed in head):
            return marks[-1][0], before[marks[-1].end() :]
        begun = list(self.reader.mark.finditer(before))
        if begun and head[len(before) :].lstrip().startswith(closed) and head.startswith(before):
            rest = before[begun[-1].start() :]  # a place for reasoning, which is empty
            return rest.strip(), trailing(rest)
        rest = before[len(self.reader.common_prefix(before, head or self.prompt)) :]
        if not rest.strip() and self.prompt.startswith(before):
            rest = self.prompt[len(before) :]
        return (rest.strip(), trailing(rest)) if rest.strip() else ("", "")

    def _hidden(self, plain: WrittenTurn | None) -> Frame | None:
        """Reasoning that is never shown, known by what the template looks for in content, or by what it prompts.

        How the model sets it off is then not to be seen: nothing is taken for white space of the grammar.
        """
        said = plain.first("content") if plain else None
        before = plain.text[: said.start] if plain is not None and said is not None else ""
        prompt = self.prompt.rstrip()
        for opened, closed in self._tags(before):
            beyond = prompt.endswith(opened) and opened not in before
            turn = self.reader.turn({"content": f"{opened}alpha{closed}omega"})
            dropped = turn is not None and "omega" in turn.text and "alpha" not in turn.text
            if beyond or dropped or prompt.endswith(closed) or (opened in before and closed in before):
                self.reader.notes.append(
                    f"the template never shows reasoning; it prompts with {opened} or looks for {closed}"
                )
                lead = self.prompt[self.prompt.rindex(opened) + len(opened) :] if beyond else ""
                return Frame(opened, lead, "", closed, "")
        return None

    def _tags(self, before: str) -> list[tuple[str, str]]:
        """Tags that stand in the generation prompt or before content, or that the template looks for in texts."""
        found: dict[tuple[str, str], None] = {}
        for text in (self.prompt, before, *sorted(self.constants)):
            for left, name, right in re.findall(r"([<\[])/?(\w[\w:.-]*)([>\]])", text):
                found[f"{left}{name}{right}", f"{left}/{name}{right}"] = None
        return list(found)

    def _head(
        self, plain: WrittenTurn | None, thought: WrittenTurn | None, frame: Frame | None, opening: str
    ) -> tuple[str, str, str]:
        """What a turn begins with, what opens content, and the white space after an empty place for reasoning."""
        after_empty = frame.after if frame is not None else ""
        prompt, prompted = self._before_reasoning(self.prompt, frame)
        said = plain.first("content") if plain else None
        if plain is None or said is None:
            before = thought.text[: thought.holes[0].start] if thought is not None else ""
            return self._before_reasoning(before, frame)[0] or prompt, opening, prompted or after_empty
        before = plain.text[: said.start]
        head, rest = self._before_reasoning(before, frame)
        if not before:  # all of its head is in the prompt
            head = prompt
        if opening and before.endswith(opening):
            head = head.removesuffix(opening)
            rest = rest.removesuffix(opening) if rest is not None else None
        if rest is not None:
            return head, opening, rest
        if prompt.strip() and not opening:
            common = self.reader.common_prefix(before, prompt)
            if common.strip() and before[len(common) :].strip():
                head, opening = common, before[len(common) :]
        elif not self.prompt and not opening and frame is None:
            head, opening = self._without_prompt(before)
        return head, opening, prompted if prompted is not None else after_empty

    def _opened_beside(self, head: str, frame: Frame | None) -> str:
        """What opens content where calls follow, and only there: Llama 4 writes it after ``<|python_start|>``."""
        beside = self.reader.called({"key": "value"}, content="answer")
        said, called = (beside.first("content"), beside.called()) if beside is not None else (None, None)
        if beside is None or said is None or called is None or called.start < said.stop:
            return ""
        before = self._before_reasoning(beside.text[: said.start], frame)[0]
        opened = before.removeprefix(head)
        return opened if before.startswith(head) and self.reader.mark.fullmatch(opened.strip()) else ""

    def _without_prompt(self, before: str) -> tuple[str, str]:
        """What all turns begin with and what opens content, where no generation prompt tells the two apart."""
        turn = self.reader.called({"key": "value"})
        called = turn.text[: turn.holes[0].start] if turn is not None else before
        head = self.reader.common_prefix(before, called)
        return (head, before[len(head) :]) if before[len(head) :].strip() else (before, "")

    def _before_reasoning(self, text: str, frame: Frame | None) -> tuple[str, str | None]:
        """What stands before a place for reasoning, and what comes after it where it is closed."""
        if frame is None:
            return text, None
        after = None
        if frame.close in text:
            after = text[text.rindex(frame.close) + len(frame.close) :]
            text = text[: text.rindex(frame.close)]
        if frame.open and frame.open in text:
            text = text[: text.rindex(frame.open)]
        return text, after

    # -- channels

    def _channels(self, turn: WrittenTurn | None) -> Channels | None:
        """Reasoning and content in messages of their own: both come after the same mark, with another header.

        A header has a mark and a channel after it, or a word that says who the message goes to: ``to=user``.
        """
        reasoning, content = (turn.first("reasoning"), turn.first("content")) if turn else (None, None)
        if turn is None or reasoning is None or content is None or content.start < reasoning.stop:
            return None
        before = list(self.reader.mark.finditer(turn.text[: reasoning.start]))
        between = turn.text[reasoning.stop : content.start]
        marks = list(self.reader.mark.finditer(between))
        if not before or len(marks) not in (3, 4) or before[-1].end() != reasoning.start:
            return None
        end, start, *channels, message = (match[0] for match in marks)
        if before[-1][0] != message or len({end, start, *channels, message}) < len(marks):
            return None
        lead = turn.text[: reasoning.start]
        if not channels:
            words = [(text[: text.rindex(message)].split() or [""])[-1] for text in (lead, between)]
            (to, mark, named), (other, _, said) = (word.rpartition("=") for word in words)
            if not mark or to != other or named == said:
                return None
            return self._channel_calls(Channels(start, "", message, end, named, said, f"{to}=", "", "", "", end))
        channel = channels[0]
        named = lead[lead.rindex(channel) + len(channel) : lead.rindex(message)]
        said = between[between.rindex(channel) + len(channel) : between.rindex(message)]
        return self._channel_calls(Channels(start, channel, message, end, named.strip(), said.strip()))

    def _channel_calls(self, channels: Channels) -> Channels:
        turn = self.reader.called({"key": "value"})
        name = turn.first("name", 0) if turn else None
        arguments = turn.arguments(0) if turn else []
        if turn is None or name is None or not arguments:
            self.reader.notes.append(NO_CALLS)
            return channels
        lead = turn.text[: name.start].rsplit(maxsplit=1)[-1]
        recipient, _, namespace = lead.rpartition("=")
        header = turn.text[name.stop : arguments[0].start]
        words = header[header.find(channels.channel) + len(channels.channel) : header.rfind(channels.message)].split()
        rest = turn.full[arguments[-1].stop :]
        ending = self.reader.mark.match(rest) if channels.channel else list(self.reader.mark.finditer(rest))[-1]
        return dataclasses.replace(
            channels,
            recipient=f"{recipient}=",
            namespace=namespace,
            call=words[0] if words else "",
            content_type=" ".join(words[1:]),
            call_end=ending[0] if ending else channels.call_end,
        )

    def _bodies(self, channels: Channels) -> CallGrammar | None:
        """How calls are written in messages of their own; None where that is one JSON, or was not understood."""
        reader = self.reader
        reader.body = channels.message
        body = reader.called({"key": "value"})
        arguments = body.arguments(0) if body is not None else []
        if body is None or not arguments or arguments[0].start == 0:
            return None
        return CallDeriver(reader, TurnGrammar(), body, None, None).derive()

    # -- calls

    def _calls(self, grammar: TurnGrammar) -> CallGrammar | None:
        reader = self.reader
        one = reader.called({"key": "value"})
        beside = reader.called({"key": "value"}, content="answer")
        one = one or beside
        if one is None:
            reader.notes.append(NO_CALLS)
            return None
        if beside is None:
            reader.notes.append("the template shows no content before tool calls")
        elif self._begins_again(beside, grammar):
            reader.notes.append(TWO_TURNS)
            beside = None
        two = reader.called({"key": "value"}, {"key": "value"})
        if two is None:
            reader.notes.append(ONE_CALL)
        calls = CallDeriver(reader, grammar, one, beside, two).derive()
        if calls is not None and beside is not None and (calls.section_open or calls.open).strip() in ("", "[", "{"):
            reader.notes.append(BARE_CALLS)
        return calls

    def _begins_again(self, beside: WrittenTurn, grammar: TurnGrammar) -> bool:
        """Whether what the generation prompt begins with stands between content and calls."""
        begun = self._before_reasoning(self.prompt, grammar.reasoning)[0].strip()
        said, called = beside.first("content"), beside.called()
        if said is None or called is None or self.reader.mark.match(begun) is None:
            return False
        return begun in beside.text[said.stop : called.start]
