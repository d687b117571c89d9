"""Six ways in which rollouts break when a client decodes, parses, renders and encodes again.

Each test plays both clients on the same sampled ids: one sends the whole message list through the model's own template
(through transformers), the other bridges. The first client's next prompt does not extend the tokens that the engine
saw; the second client's always does. `explain_break` names the cause.
"""

from typing import Any

import numpy as np
import pytest

from tests.conversations import assistant, call, result, tool, user
from tests.oracle import hf_ids
from tests.support import make_renderer
from tokentrace import Renderer
from tokentrace.diagnose.breaks import explain_break
from tokentrace.diagnose.finding import Cause
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory

DEPLOY = tool("deploy", "Deploy a service.", {"service": {"type": "string"}, "dry_run": {"type": "boolean"}}, [])
ECHO = tool("echo", "Say it again.", {}, [])
BASH = tool("bash", "Run a command.", {"command": {"type": "string"}}, ["command"])
HISTORY = [user("Try it, please.")]
DEPLOYS = (
    "<tool_call>\n<function=deploy>\n<parameter=dry_run>\nfalse\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


class Rollout:
    """A prompt, the sampled completion, and the two ways to build the next prompt."""

    def __init__(self, family: str, completion: str, tools: list[dict[str, Any]] | None = None) -> None:
        self.family, self.tools = family, tools
        self.renderer: Renderer = make_renderer(family)
        self.prompt = self.renderer.render_ids(HISTORY, tools=tools, add_generation_prompt=True)
        self.completion = [int(index) for index in self.renderer.tokenizer.encode(completion)]

    @property
    def stream(self) -> list[int]:
        """The ids that the engine saw and sampled."""
        return self.prompt + self.completion

    def render_again(self, *messages: dict[str, Any]) -> list[int]:
        """The next prompt of a client that keeps messages: the parsed reply and the messages after it."""
        ids = hf_ids(self.family, [*HISTORY, *messages], self.tools, add_generation_prompt=True)
        assert isinstance(ids, list)
        return ids

    def bridged(self, *new: dict[str, Any]) -> list[int]:
        """The next prompt of a client that keeps ids."""
        bridged = self.renderer.bridge(self.prompt, self.completion, list(new), tools=self.tools)
        assert bridged, bridged
        return bridged.token_ids

    def cause(self, next_prompt: list[int], **options: Any) -> Cause | None:
        """Why a prompt does not extend the stream; None if it does."""
        sampled = np.arange(len(self.stream)) >= len(self.prompt)
        finding = explain_break(self.stream, next_prompt, self.renderer, sampled=sampled, **options)
        return None if finding is None else finding.cause


def test_a_a_boolean_makes_the_round_trip_through_python() -> None:
    """``false`` is parsed to a boolean, and a template that prints it gives ``False``, turn after turn."""
    rollout = Rollout("qwen3-coder", DEPLOYS, [DEPLOY])
    messages: list[dict[str, Any]] = []
    for _ in range(4):
        messages += [assistant("", call("deploy", {"dry_run": False})), result("done")]
        assert rollout.cause(rollout.render_again(*messages)) is Cause.BOOLEAN_CASE
        next_prompt = rollout.bridged(result("done"))
        assert rollout.cause(next_prompt) is None
        rollout.prompt = next_prompt


def test_b_the_same_text_is_merged_differently() -> None:
    """The model sampled ``json`` + ``p``; encoding the text again gives ``jsonp``, and everything shifts."""
    rollout = Rollout("qwen3-instruct-2507", "<|im_end|>")
    pieces = [rollout.renderer.tokenizer.encode(piece) for piece in ("json", "p", "enderer")]
    rollout.completion = [*np.concatenate(pieces).tolist(), *rollout.completion]
    next_prompt = rollout.render_again(assistant("jsonpenderer"), user("And?"))

    assert rollout.cause(next_prompt) is Cause.BPE_REMERGE
    assert rollout.cause(rollout.bridged(user("And?"))) is None


def test_c_an_empty_parameter_vanishes() -> None:
    """The model closes a parameter that it never opened; nothing of it is left in the parsed call."""
    rollout = Rollout(
        "qwen3-coder", "<tool_call>\n<function=echo>\n</parameter>\n</function>\n</tool_call><|im_end|>", [ECHO]
    )
    next_prompt = rollout.render_again(assistant("", call("echo", {})), result("…"))

    assert rollout.cause(next_prompt) is Cause.EMPTY_PARAMETER
    assert rollout.cause(rollout.bridged(result("…"))) is None


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_d_reasoning_is_stripped_from_the_past(family: str) -> None:
    """Once a user message follows, the template drops the reasoning."""
    completion = {
        "qwen3": "<think>\nHm, two and two.\n</think>\n\nFour.<|im_end|>",
        "glm-4.5": "\n<think>Hm, two and two.</think>\nFour.<|user|>",
    }[family]
    rollout = Rollout(family, completion)
    next_prompt = rollout.render_again(assistant("Four.", reasoning="Hm, two and two."), user("Why?"))

    assert rollout.cause(next_prompt) is Cause.STRIPPED_REASONING
    assert rollout.cause(rollout.bridged(user("Why?"))) is None


def test_e_an_anchor_is_zeroed_after_truncation() -> None:
    """A client that empties the ids of an overlong turn has nothing left to extend, and renders again."""
    rollout = Rollout("qwen3-coder", DEPLOYS.partition("ameter>\n</function>")[0], [DEPLOY])
    zeroed: list[int] = []
    assert rollout.renderer.bridge_to_next_turn(zeroed, zeroed, [user("Go on.")], tools=[DEPLOY]) is None
    next_prompt = rollout.render_again(assistant("", call("deploy", {"dry_run": False})), user("Go on."))
    assert rollout.cause(next_prompt, anchor=zeroed) is Cause.ZEROED_ANCHOR

    # a trajectory keeps the sampled tokens, however many: the turn is closed with tokens that carry no loss
    record = Trajectory(logprobs=False)
    record.begin(rollout.prompt, messages=1)
    turn = record.append_completion(rollout.completion, None, finish_reason="length")
    bridged = rollout.renderer.bridge_to_next_turn(
        record.stream()[: turn.start], turn.tokens.ids, [user("Go on.")], tools=[DEPLOY]
    )
    assert bridged is not None
    assert bridged.closed
    record.append_bridge(bridged)
    assert rollout.cause(record.prompt().tolist()) is None
    assert record.loss_mask().sum() == len(rollout.completion)
    closing = bridged.new_ids[bridged.kinds == Kind.SYNTHETIC]
    assert rollout.renderer.tokenizer.decode(closing) == "\n</parameter>\n</function>\n</tool_call><|im_end|>"


def test_f_a_scaffold_rewrites_the_call_and_the_record_branches() -> None:
    """No bridge extends a history with a call that the model never made: the break is named, the record branches."""
    rollout = Rollout(
        "qwen3-coder",
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call><|im_end|>",
        [BASH],
    )
    error = {"tool": "Bash", "error": "Model tried to call unavailable tool Bash"}
    next_prompt = rollout.render_again(assistant("", call("invalid", error)), result("no such tool"))
    cause = rollout.cause(next_prompt)
    assert cause is Cause.REWRITTEN_CALL

    record = Trajectory(logprobs=False)
    record.begin(rollout.prompt, messages=1)
    record.append_completion(rollout.completion, None, finish_reason="stop")
    branch = record.branch(next_prompt, cause=str(cause))
    answer = rollout.renderer.tokenizer.encode("Sorry.<|im_end|>")
    record.append_completion(answer, None, finish_reason="stop")

    assert record.num_branches == 2
    assert record.stream(0).tolist() == rollout.stream
    assert record.stream(branch).tolist() == [*next_prompt, *answer.tolist()]
    assert record.branches[branch].start >= len(rollout.prompt), "the first prompt is shared"
    trained = [record.stream(b)[record.loss_mask(b)].tolist() for b in (0, branch)]
    assert trained == [rollout.completion, answer.tolist()], "each sampled token is trained once"
