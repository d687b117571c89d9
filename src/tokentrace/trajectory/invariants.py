"""What holds in every trajectory at all times, checked from the first token to the last."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..errors import TrajectoryError
from ..tokens.kinds import Kind
from .inputs import POSITIVE_NOISE
from .ledger import LATER_KINDS, PROMPT_KINDS, UNFINISHED, Ledger
from .tree import Tree


def check_ledger(ledger: Ledger) -> None:
    """Raise `TrajectoryError` naming the first invariant that does not hold."""
    nodes = ledger.tree.nodes
    if ledger.current != (ledger.log.row(len(ledger.log) - 1).branch if len(ledger.log) else -1):
        _broken("the current branch is the one last written to")
    if sorted(number for node in nodes for number in node.writes) != list(range(len(ledger.log))):
        _broken("every write belongs to one branch")
    if [node.writes[0] for node in nodes] != sorted(node.writes[0] for node in nodes):
        _broken("branches are numbered in the order they were made")
    for index in range(len(nodes)):
        _check_place(ledger, index)
        _check_tokens(ledger, index)
        _check_writes(ledger, index)
    _check_told(ledger)
    _check_laid_out(ledger.tree)


def _check_place(ledger: Ledger, index: int) -> None:
    node = ledger.tree.nodes[index]
    if (node.start == 0) != (node.parent < 0) or not -1 <= node.parent < index:
        _broken(f"branch {index} comes after its parent, and has one if it shares anything")
    if node.parent >= 0:
        parent = ledger.tree.nodes[node.parent]
        if not parent.start < node.start < parent.stop:
            _broken(f"branch {index} leaves its parent inside the parent's own tokens")
    elif not len(node.ids):
        _broken(f"branch {index} has a prompt")


def _check_tokens(ledger: Ledger, index: int) -> None:
    node = ledger.tree.nodes[index]
    ids, kinds, logprobs = node.ids.view(), node.kinds.view(), node.logprobs.view()
    if len(ids) != len(kinds):
        _broken(f"branch {index} has one kind a token")
    if len(ids) and (ids.min() < 0 or (ledger.vocab_size is not None and ids.max() >= ledger.vocab_size)):
        _broken(f"branch {index} has ids of the vocabulary")
    if len(kinds) and kinds.max() >= len(Kind):
        _broken(f"branch {index} has known kinds")
    if int((kinds == Kind.SAMPLED).sum()) != node.sampled:
        _broken(f"branch {index} knows how many tokens were sampled")
    if len(logprobs) != (node.sampled if ledger.has_logprobs else 0):
        _broken(f"branch {index} has one logprob for each sampled token")
    if not (np.isfinite(logprobs) & (logprobs <= np.float32(POSITIVE_NOISE))).all():
        _broken(f"branch {index} has logprobs that are finite and at most 0")


def _check_writes(ledger: Ledger, index: int) -> None:
    """The writes of a branch cover it, in order, and each is of the kinds it may be of."""
    node = ledger.tree.nodes[index]
    kinds = node.kinds.view()
    reached, sampled, messages = node.start, 0, ledger.messages_at(index, node.start)
    unfinished = was_turn = False
    turn_messages = -1
    for place, (number, row) in enumerate(zip(node.writes, ledger.log.rows(node.writes), strict=True)):
        where = f"write {number}"
        if row.branch != index or row.start != reached or row.stop < row.start or row.sampled != sampled:
            _broken(f"{where} begins where the one before it in branch {index} ended")
        if place and number <= node.writes[place - 1]:
            _broken(f"{where} is later than those before it")
        if row.is_turn != bool(place and row.is_turn):
            _broken(f"{where} makes branch {index} with a prompt")
        present = set(np.unique(kinds[row.start - node.start : row.stop - node.start]).tolist())
        spans = ledger.log.spans(number).tolist()
        if row.is_turn:
            detail = ledger.log.detail(row)
            if not present <= {Kind.SAMPLED} or spans or not detail.finish_reason:
                _broken(f"{where} is a completion")
            if row.messages != row.first + 1 or row.first != (turn_messages - 1 if detail.continues else messages):
                _broken(f"{where} is one message")
            if (was_turn and not detail.continues) or (detail.continues and not unfinished):
                _broken(f"{where} follows a prompt, or an unfinished turn that it continues")
            if isinstance(detail.version, tuple) and detail.version[-1].stop != row.stop - row.start:
                _broken(f"{where} has versions for all its tokens")
            unfinished = detail.finish_reason in UNFINISHED or row.stop == row.start
            turn_messages = row.messages
        else:
            if not present <= (LATER_KINDS if place else PROMPT_KINDS) or (place and row.stop == row.start):
                _broken(f"{where} is context")
            if row.first != messages or row.messages < row.first:
                _broken(f"{where} adds to the messages")
            if spans != sorted(spans) or any(
                not row.start <= start < stop <= row.stop or not 0 <= message < row.messages
                for start, stop, message in spans
            ):
                _broken(f"{where} has message spans within it")
            unfinished = unfinished and row.messages == row.first
        was_turn, messages, reached = row.is_turn, row.messages, row.stop
        sampled += row.stop - row.start if row.is_turn else 0
    if reached != node.stop or sampled != node.sampled or messages != node.messages:
        _broken(f"the writes of branch {index} cover its tokens and messages")


def _check_told(ledger: Ledger) -> None:
    """What is told of completions is of completions, and of each of their tokens."""
    turns = {
        number: row for node in ledger.tree.nodes for number in node.writes if (row := ledger.log.row(number)).is_turn
    }
    for number, channels in ledger.channels.items():
        if number not in turns:
            _broken(f"write {number} has channels, so it is a completion")
        for name, packed in channels.items():
            if packed.count != turns[number].stop - turns[number].start:
                _broken(f"channel {name!r} of write {number} has one entry a token")
            packed.check(f"channel {name!r} of write {number}")
    if dict(ledger.rewarded) != ledger.rewards or not set(ledger.rewards) <= {-1, *turns}:
        _broken("rewards are of turns or of the whole rollout, and the last one counts")


def _check_laid_out(tree: Tree) -> None:
    """What is laid out is the stream, as far as it goes."""
    branch, line = tree.line.branch, tree.line.form.view()
    if branch >= 0 and not np.array_equal(line, np.concatenate(list(tree.pieces(branch)))[: len(line)]):
        _broken(f"the laid out stream is that of branch {branch}")
    branch, wire = tree.wire.branch, tree.wire.form
    if branch >= 0:
        ids = np.concatenate(list(tree.pieces(branch)))[: len(wire)]
        if len(wire) != len(ids) or b"".join(wire.parts) != str(ids.tolist()).replace(" ", "").encode():
            _broken(f"the wire text is that of branch {branch}")


def _broken(law: str) -> NoReturn:
    raise TrajectoryError(f'the trajectory is inconsistent: "{law}" does not hold; please report this')
