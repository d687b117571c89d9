"""Reward functions for TRL, and rollouts that failed: they are left out only where no function scores them."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import InputError, shown
from .finished import Finished

_MARK: Final = "leaves_out_failed_rollouts"


def unless_failed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL's kind that says None for rollouts that failed, and otherwise what `reward` says.

    TRL adds up what the functions say, and leaves a row out of its group only where every one of them says None. So
    each function beside `rollout_reward` wants this, or rollouts that failed are trained as if they had no reward from
    the agent. `reward` is a function or a coroutine function; it is asked for all rows.
    """
    if not callable(reward):
        raise InputError(f"unless_failed takes a reward function, not {shown(reward)}")

    def judged(rewards: Sequence[Any], rollout: Sequence[Finished]) -> list[Any]:
        return [None if one.failed else said for one, said in zip(rollout, rewards, strict=True)]

    async def awaited(*, rollout: Sequence[Finished], **told: Any) -> list[Any]:
        return judged(await reward(rollout=rollout, **told), rollout)

    def plain(*, rollout: Sequence[Finished], **told: Any) -> list[Any]:
        return judged(reward(rollout=rollout, **told), rollout)

    waits = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    scored: Callable[..., Any] = awaited if waits else plain
    functools.update_wrapper(scored, reward)
    scored.__name__ = getattr(reward, "__name__", type(reward).__name__)  # what TRL's logs call it
    scored.__dict__[_MARK] = True
    return scored


@unless_failed
def rollout_reward(rollout: Sequence[Finished], **_: Any) -> list[float | None]:
    """A reward function for TRL: what the agent's own reward function, its tools or its simulated user gave.

    None for rollouts that failed or sampled nothing. TRL leaves them out of their group, with an advantage of 0, if all
    its other reward functions say None as well: `unless_failed` makes them.
    """
    return [one.reward for one in rollout]


def warn_of_scored_failures(finished: Sequence[Finished], rewards: Sequence[Any], names: Sequence[str]) -> None:
    """Warn where rollouts failed, and a reward function of the trainer scores them nevertheless."""
    failed = sum(one.failed for one in finished)
    scoring = [name for reward, name in zip(rewards, names, strict=True) if not getattr(reward, _MARK, False)]
    if failed and scoring:
        warnings.warn(
            f"{failed} of {len(finished)} rollouts failed, and these reward functions score them as well, so that they "
            f"are trained: {', '.join(scoring)}; pass unless_failed(function) in their place",
            stacklevel=3,
        )
