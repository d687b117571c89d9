"""Reads a grammar off a template: renders probes, whose trace shows where each field is.

Reasoning shows how it opens and closes, content what surrounds it. Calls: `study.derive_calls`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats.grammar import NO_CALLS, ONE_CALL, CallGrammar, Channels, Frame, TurnGrammar
from .derive_calls import CallDeriver
from .probes import ONE_ARGUMENT, call
from .reading import TurnReader, WrittenTurn, leading, trailing

if TYPE_CHECKING:
    from .study import TemplateStudy

SEVERAL_MESSAGES = (
    "a turn has several messages, and it is unclear what distinguishes them: reasoning is content"
)
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "function", "id", "type"})
TWO_TURNS = "the template writes calls after content as a separate turn"
BARE_CALLS = "nothing separates calls from content: they are found only if no content comes before them"


def template_grammar(study: TemplateStudy, ends: Iterable[int], tools: bool) -> TurnGrammar:
    """The grammar of turns that end with one of the tokens `ends`."""
    alone = study.prompts.alone(tools)
    prompt = (alone.tail or alone.added) if alone is not None else ""
    return _Deriver(study, TurnReader(study, ends, tools), prompt).derive()


@dataclass(frozen=True, slots=True)
class _Deriver:
    study: TemplateStudy
    reader: TurnReader
    prompt: str

    def derive(self) -> TurnGrammar:
        reader = self.reader
        plain = reader.turn({"content": "answer"})
        content = plain.first("content")
        after = plain.text[content.stop :] if content is not None else ""
        close = after.strip()
        closing = Frame(trail=leading(after), close=close, after=trailing(after) if close else "")
        if close:
            reader.ends.append(close)
            plain = reader.turn({"content": "answer"})
        hole = plain.first("content")
        before = plain.text[: hole.start] if hole is not None else None
        reasoned = self._reasoned()
        if (channels := self._channels(reasoned)) is not None:
            calls, prompt = self._bodies(channels), self.prompt
            return TurnGrammar(prompt, prompt, calls=calls, channels=channels, notes=tuple(reader.notes))
        frame, opening = self._frames(reasoned, before or "")
        if frame is not None and self.prompt.strip() and opening.startswith(self.prompt):
            reader.note(SEVERAL_MESSAGES)
            frame, opening = None, ""
        if frame is None:
            frame = self._hidden(before or "")
        head, opened, after_empty = self._head(before, reasoned, frame, opening)
        opened = opened or self._opened_beside(head, frame)
        around = (
            dataclasses.replace(closing, open=opened.strip(), lead=trailing(opened)) if opened else closing
        )
        grammar = TurnGrammar(head, self.prompt, frame, after_empty, around)
        calls = self._calls(grammar)
        opened = calls.section_open or calls.open if calls is not None else ""
        if opened.strip() and around.open and head.endswith(opened):
            # the prompt opens whatever comes first
            around = dataclasses.replace(around, open=opened + around.open)
            grammar = grammar.replace(head=head.removesuffix(opened), content=around)
        return grammar.replace(calls=calls, notes=tuple(reader.notes))

    def _reasoned(self) -> WrittenTurn:
        calls = {"tool_calls": [call()]}
        as_text = {"content": None, "tool_calls": [call(as_text=True)]}
        beside = ({"content": "answer"}, {"content": "answer", **calls}, {"content": "", **calls}, as_text)
        # transformers fills `thinking` from both, `reasoning` from neither
        names = ("reasoning_content", "reasoning")
        for variables, name, fields in itertools.product(({}, *self.study.toggles), names, beside):
            turn = self.reader.turn({name: "thought", **fields}, variables)
            if turn.first("reasoning") is not None:
                return turn
        # Cohere's `tool_plan`
        others = dict.fromkeys(sorted(self.study.template.fields - _FIELDS), "thought")
        turn = self.reader.turn({**others, "content": "", **calls})
        plan = turn.first("reasoning")
        return turn if plan is not None and self.reader.tag.match(turn.text, plan.stop) else WrittenTurn()

    def _frames(self, turn: WrittenTurn, head: str) -> tuple[Frame | None, str]:
        reasoning = turn.first("reasoning")
        stop = reasoning.stop if reasoning is not None else 0
        following = next((hole for hole in turn.holes if hole.start >= stop), None)
        if reasoning is None or following is None:
            return None, ""
        before_content, between = following.field == "content", turn.between(reasoning, following)
        close = self.reader.tag.search(between)
        if close is None or between[: close.start()].strip():
            close = re.search(r"\S(?:.*\S)?", between, re.DOTALL) if before_content else None
        if close is None:
            self.reader.note("no delimiter closes the reasoning")
            return None, ""
        opened, lead = self._opening(turn.text[: reasoning.start], head, close[0])
        if not opened or opened == close[0]:
            self.reader.note("nothing opens the reasoning, so it cannot be distinguished from content")
            return None, ""
        trail, after = between[: close.start()], between[close.end() :]
        frame = Frame(opened, lead, trail, close[0], leading(after))
        return frame, after.lstrip() if before_content else ""

    def _opening(self, before: str, head: str, close: str) -> tuple[str, str]:
        """The text that opens reasoning, and the white space after it.

        It is the last tag before reasoning, all text after the head, or a longer generation
        prompt's end. If a plain answer starts alike and closes reasoning, it begins at the tag.
        """
        tag = next(reversed(list(self.reader.tag.finditer(before))), None)
        if tag and not before[tag.end() :].strip() and (tag[0] not in head or close in head):
            return tag[0], before[tag.end() :]
        if tag and head[len(before) :].lstrip().startswith(close) and head.startswith(before):
            opened = before[tag.start() :]  # an empty place for reasoning
        else:
            opened = before[len(self.reader.common_prefix(before, head or self.prompt)) :]
            if not opened.strip() and self.prompt.startswith(before):
                opened = self.prompt[len(before) :]
        return (opened.strip(), trailing(opened)) if opened.strip() else ("", "")

    def _hidden(self, head: str) -> Frame | None:
        """Delimiters that the template only prompts with, or looks for in content."""
        prompt = self.prompt.rstrip()
        texts = "\n".join((self.prompt, head, *sorted(self.study.template.constants)))
        for left, name, right in dict.fromkeys(re.findall(r"([<\[])/?(\w[\w:.-]*)([>\]])", texts)):
            opened, closed = f"{left}{name}{right}", f"{left}/{name}{right}"
            beyond = prompt.endswith(opened) and opened not in head
            text = self.reader.turn({"content": f"{opened}alpha{closed}omega"}).text
            dropped = "omega" in text and "alpha" not in text
            if beyond or dropped or prompt.endswith(closed) or (opened in head and closed in head):
                problem = "the template never shows reasoning"
                self.reader.note(f"{problem}; it prompts with {opened} or looks for {closed}")
                # the prompt's is the only white space around reasoning that is known
                lead = self.prompt[self.prompt.rindex(opened) + len(opened) :] if beyond else ""
                return Frame(opened, lead, "", closed, "")
        return None

    def _head(
        self, before: str | None, reasoned: WrittenTurn, frame: Frame | None, opening: str
    ) -> tuple[str, str, str]:
        """What begins a turn, what opens content, and the space after empty reasoning."""
        after_empty = frame.after if frame is not None else ""
        prompt, prompted = _split_at_reasoning(self.prompt, frame)
        if before is None:
            lead = reasoned.text[: reasoned.holes[0].start] if reasoned else ""
            return _split_at_reasoning(lead, frame)[0] or prompt, opening, prompted or after_empty
        head, after = _split_at_reasoning(before, frame)
        if not before:  # the whole head is in the prompt
            head = prompt
        if opening and before.endswith(opening):
            head = head.removesuffix(opening)
            after = after and after.removesuffix(opening)
        if after is not None:
            return head, opening, after
        common, has_prompt = before, bool(prompt.strip())
        if has_prompt and not opening:
            common = self.reader.common_prefix(before, prompt)
        elif not self.prompt and not opening and frame is None:  # compare with a call instead
            turn = self.reader.called()
            common = self.reader.common_prefix(before, turn.text[: turn.holes[0].start] if turn else before)
        if before[len(common) :].strip() and (common.strip() or not has_prompt):
            head, opening = common, before[len(common) :]
        return head, opening, prompted if prompted is not None else after_empty

    def _opened_beside(self, head: str, frame: Frame | None) -> str:
        """What opens content only before calls: ``<|python_start|>`` (Llama 4)."""
        beside = self.reader.called(content="answer")
        content, calls = beside.first("content"), beside.first_of_calls()
        if content is None or calls is None or calls.start < content.stop:
            return ""
        before = _split_at_reasoning(beside.text[: content.start], frame)[0]
        opened = before.removeprefix(head)
        return opened if before.startswith(head) and self.reader.tag.fullmatch(opened.strip()) else ""

    def _channels(self, turn: WrittenTurn) -> Channels | None:
        """Channels, if reasoning and content follow the same tag, with different headers.

        A header has a tag and then a channel, or names the recipient: ``to=user``.
        """
        reasoning, content = turn.first("reasoning"), turn.first("content")
        if reasoning is None or content is None or content.start < reasoning.stop:
            return None
        lead, between = turn.text[: reasoning.start], turn.between(reasoning, content)
        before, tags = (list(self.reader.tag.finditer(text)) for text in (lead, between))
        if not before or len(tags) not in (3, 4) or before[-1].end() != reasoning.start:
            return None
        end, start, *channels, message = (match[0] for match in tags)
        if before[-1][0] != message or len({end, start, *channels, message}) < len(tags):
            return None
        if not channels:
            words = [(text[: text.rindex(message)].split() or [""])[-1] for text in (lead, between)]
            (to, equals, first), (other, _, second) = (word.rpartition("=") for word in words)
            if not equals or to != other or first == second:
                return None
            headless = Channels(start, "", message, end, first, second, f"{to}=", "", "", "", end)
            return self._channel_calls(headless)
        headers = (text[: text.rindex(message)] for text in (lead, between))
        first, second = (header.rpartition(channels[0])[2].strip() for header in headers)
        return self._channel_calls(Channels(start, channels[0], message, end, first, second))

    def _channel_calls(self, channels: Channels) -> Channels:
        turn = self.reader.called()
        name, arguments = turn.first("name", 0), turn.arguments(0)
        if name is None or not arguments or not turn.text[: name.start].strip():
            self.reader.note(NO_CALLS)
            return channels
        recipient, _, namespace = turn.text[: name.start].rsplit(maxsplit=1)[-1].rpartition("=")
        header = turn.between(name, arguments[0])
        begin = header.find(channels.channel) + len(channels.channel)
        words = header[begin : header.rfind(channels.message)].split()
        after = turn.full[arguments[-1].stop :]
        ending = (
            self.reader.tag.match(after)
            if channels.channel
            else [None, *self.reader.tag.finditer(after)][-1]
        )
        call_end = ending[0] if ending else channels.call_end
        changes = {"recipient": f"{recipient}=", "namespace": namespace, "call_end": call_end}
        changes |= {"call": "".join(words[:1]), "content_type": " ".join(words[1:])}
        return dataclasses.replace(channels, **changes)

    def _bodies(self, channels: Channels) -> CallGrammar | None:
        self.reader.body = channels.message
        body = self.reader.called()
        arguments = body.arguments(0)
        if not arguments or arguments[0].start == 0:
            return None
        return CallDeriver(self.reader, TurnGrammar(), body, WrittenTurn(), WrittenTurn()).derive()

    def _calls(self, grammar: TurnGrammar) -> CallGrammar | None:
        reader = self.reader
        beside = reader.called(content="answer")
        one = reader.called() or beside
        if not one:
            reader.note(NO_CALLS)
            return None
        if not beside:
            reader.note("the template shows no content before tool calls")
        else:
            head = _split_at_reasoning(self.prompt, grammar.reasoning)[0].strip()
            content, first = beside.first("content"), beside.first_of_calls()
            between = beside.between(content, first) if content is not None and first is not None else ""
            if head in between and reader.tag.match(head) is not None:
                reader.note(TWO_TURNS)
                beside = WrittenTurn()
        two = reader.called(ONE_ARGUMENT, ONE_ARGUMENT)
        if not two:
            reader.note(ONE_CALL)
        calls = CallDeriver(reader, grammar, one, beside, two).derive()
        if calls is not None and beside and (calls.section_open or calls.open).strip() in ("", "[", "{"):
            reader.note(BARE_CALLS)
        return calls


def _split_at_reasoning(text: str, frame: Frame | None) -> tuple[str, str | None]:
    """The text before a place for reasoning, and the text after it if it is closed."""
    if frame is None:
        return text, None
    after = None
    if frame.close in text:
        text, _, after = text.rpartition(frame.close)
    if frame.open and frame.open in text:
        text = text[: text.rindex(frame.open)]
    return text, after
