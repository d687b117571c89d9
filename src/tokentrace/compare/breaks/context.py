"""Evidence in the context around the completions: turns that are gone, declared tools, system text."""

from __future__ import annotations

from ...tokens.tokenizer import Ids
from ..token_diff import Hunk, shared_tail
from .case import Case, Finding, counted, quoted
from .causes import BreakCause
from .markup import TOOL_SECTIONS
from .written import function_of, openers, value_at


def compaction(case: Case) -> Finding | None:
    """Turns that are gone: up to a later turn, up to what the stream ends with, or in this difference."""
    stream, prompt, hunk = case.stream, case.prompt, case.hunk
    whole = shared_tail(stream, prompt, hunk.stream) if hunk.stream == hunk.prompt else None
    skipped = case.turns.skipped(stream, prompt, hunk)
    found = _fewer_turns(case, skipped, 1) or _fewer_turns(case, whole, 1) or _fewer_turns(case, hunk, 2)
    if found is not None:
        return found
    ours, theirs = hunk.sides(stream, prompt)
    region = case.region
    outside = region is not None and region.completion is None and not region.first_prompt
    if outside and hunk.meets and not case.turns.count(ours) and len(ours) >= max(64, 4 * len(theirs)):
        role = case.turns.role(stream, hunk.stream) or "context"
        return Finding(BreakCause.COMPACTION, f"{_sizes(ours, theirs)}: text of the {role} was cut or cleared")
    return None


def cut_short(case: Case) -> Finding | None:
    """A prompt that is much shorter from here on, whatever little it has in common with the rest of the stream."""
    rest = Hunk(case.hunk.stream, len(case.stream), case.hunk.prompt, len(case.prompt), False)
    return _fewer_turns(case, rest, 2)


def _fewer_turns(case: Case, hunk: Hunk | None, least: int) -> Finding | None:
    if hunk is None:
        return None
    ours, theirs = hunk.sides(case.stream, case.prompt)
    turns = case.turns.count(ours)
    if turns < least or turns <= case.turns.count(theirs) or len(ours) < 2 * len(theirs):
        return None
    if turns == 1 and case.turns.role(case.stream, hunk.stream) in ("system", "developer"):
        return None  # only that message is gone
    why = "messages are missing, or something shorter stands for them"
    return Finding(BreakCause.COMPACTION, f"{_sizes(ours, theirs)}: {why}", hunk)


def _sizes(ours: Ids, theirs: Ids) -> str:
    left = counted(len(theirs)) if len(theirs) else "nothing"
    return f"{counted(len(ours))} of history are {left} in the next prompt"


def tools(case: Case) -> Finding | None:
    """Other tools, or none, where a template declares them."""
    if case.in_completion:
        return None
    ours, theirs = case.hunk_texts()
    differ = f"the declared tools differ: the stream has {quoted(ours)}, the next prompt {quoted(theirs)}"
    if _in_schema(case):
        return Finding(BreakCause.CHANGED_TOOLS, differ)
    if not {"system", "developer", None} & set(case.roles()):  # anybody may write of tools
        return None
    turn = case.turns.lead(case.stream, case.hunk.stream)
    for opening, closing in TOOL_SECTIONS:
        begun = turn.rfind(opening)
        if begun >= 0 and closing not in turn[begun:]:
            return Finding(BreakCause.CHANGED_TOOLS, differ)
        if (opening in ours) != (opening in theirs):
            if opening in case.text.stream and opening in case.text.prompt:
                moved = "the template declares the tools at another place in the next prompt"
                return Finding(BreakCause.UNKNOWN, f"{moved}: {quoted(ours)} stands against {quoted(theirs)}")
            one, other = ("stream", "next prompt") if opening in ours else ("next prompt", "stream")
            return Finding(BreakCause.CHANGED_TOOLS, f"the {one} declares tools here, the {other} does not")
    return None


def _in_schema(case: Case) -> bool:
    """Whether the difference lies in the JSON of a function's declaration."""
    ours, theirs, at = case.sides()
    for text in (ours, theirs):
        for start in openers(text, at):
            value = value_at(text, start)
            if value is not None and value[1] > at and isinstance(value[0], dict):
                function = function_of(value[0])
                if "name" in function and ("parameters" in function or "description" in function):
                    return True
    return False


def system(case: Case) -> Finding | None:
    """A difference in text of the system or the developer."""
    if case.in_completion:
        return None
    one, other = case.roles()
    if one is None and other is None and case.turns.before_user(case.stream, case.hunk.stream):
        one = other = "system"
    if not {"system", "developer"} & {one, other}:
        return None
    if one != other:
        said = f"the stream has a {one} message where the next prompt has a {other} message"
        return Finding(BreakCause.CHANGED_SYSTEM, said)
    ours, theirs = case.hunk_texts()
    said = f"the {one} text differs: the stream has {quoted(ours)}, the next prompt {quoted(theirs)}"
    return Finding(BreakCause.CHANGED_SYSTEM, said)
