"""ms-swift: rollouts as its `RolloutOutput`.

swift encodes the conversation again for training, and puts given ids in the place of assistant messages. Given one by
one, what stands between them (tool results, the template's tokens) would still be its own encoding. So everything after
the first prompt is given as one assistant message: its ids, with a loss mask that is 0 on what was not sampled. What
swift still encodes itself is that first prompt; `check_prompt` says whether it is the one that the model saw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import SampleError
from ..rollout.ends import FAILED_ENDS
from ..rollout.record import Rollout
from ..tokens.alignment import common_prefix
from .rows import filled_logprobs, only_sample, prompt_response

try:
    from swift.infer_engine.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
        RolloutOutput,
        UsageInfo,
    )
except ImportError as error:
    raise ImportError("this needs ms-swift: pip install ms-swift") from error


def rollout_output(rollout: Rollout, *, model: str = "policy") -> RolloutOutput:
    """A rollout as swift's `RolloutOutput`, with the whole conversation and the reward in ``rollout_infos``.

    `SampleError` for a rollout that failed, one without logprobs, and one with several rows, as swift takes one.
    """
    if rollout.end in FAILED_ENDS:
        raise SampleError(f"rollout {rollout.task.name!r} failed ({rollout.end}: {'; '.join(rollout.notes)})")
    sample = only_sample(rollout.trajectory)
    filled_logprobs(sample)  # refuses rows without
    row = prompt_response(sample)
    text = rollout.answer
    finish = rollout.per_turn[-1].finish_reason
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content=text),
        finish_reason=finish if finish in ("stop", "length") else None,
        token_ids=row.response_ids,
    )
    size = len(row.prompt_ids), len(row.response_ids)
    return RolloutOutput(
        response=ChatCompletionResponse(model=model, choices=[choice], usage=UsageInfo(*size, sum(size))),
        messages=[*map(dict, rollout.task.messages), {"role": "assistant", "content": text}],
        response_token_ids=[row.response_ids],
        response_loss_mask=[row.response_mask],
        rollout_logprobs=[row.response_logprobs],
        rollout_infos={
            "messages": [dict(message) for message in rollout.messages],
            "reward": rollout.reward,
            "num_turns": rollout.turns,
            "prompt_ids": row.prompt_ids,
        },
    )


def check_prompt(output: RolloutOutput, encoded: Sequence[int]) -> None:
    """`SampleError` where what swift encoded for training does not begin with the prompt and the ids of a rollout."""
    expected = [*output.rollout_infos["prompt_ids"], *output.response_token_ids[0]]
    at = common_prefix(np.asarray(expected), np.asarray(encoded))
    if at < len(expected):
        part = "prompt" if at < len(output.rollout_infos["prompt_ids"]) else "response"
        raise SampleError(f"swift trains other ids than the model saw: the first at token {at}, in the {part}")
