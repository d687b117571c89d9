"""verl: an agent loop, and tool parsers."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4

try:
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopMetrics,
        AgentLoopOutput,
        ToolListWrap,
    )
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
    from verl.utils.import_utils import resolve_config_path
    from verl.utils.rollout_trace import rollout_trace_op
except ImportError as error:
    raise ImportError(f"this needs verl: pip install 'verl[verl-core]' ({error})") from error

from ..data.conversations import plain_values, without_nulls
from ..errors import InputError, TokentraceError, brief
from ..rendering.renderer import Renderer
from ..rollout import FAILED_ENDS, Agent, Budget, Task, load_interactions, load_tools
from ..rollout.loading import load_object
from ..rollout.tools import as_tools
from ..samples.sample import Sample
from .rows import only_sample, prompt_response
from .trainers import VERL_SAMPLING, ServerEngine, sampling_of
from .verl_sft import plain, renderer_of

ROLLOUT_REWARD = "rollout"
"""Uses rewards of tools and simulated users."""
_NOT_METADATA = ("raw_prompt", "tools_kwargs", "interaction_kwargs")


class RolloutFailed(TokentraceError):  # noqa: N818
    """A rollout failed or has no reward."""


class TokentraceAgentLoop(AgentLoopBase):
    """One rollout by `tokentrace.Agent`, on verl's servers, for one row of a batch.

    Keys of the YAML entry:

    - `tools_file`, `interaction_file`: tools, in addition to verl's own, and simulated users.
    - `reward`: ``module:function``, or ``"rollout"`` for the rewards of tools and simulated
      users. Without it, verl's reward function scores the rollout.
    - `budget`: fields of `Budget` that replace verl's limits.
    - `renderer`: settings of `create_renderer`.
    - `allow_raw_logprobs`: see `SamplingParams`.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: Any,
        hf_model_type: str | None = None,
        tools: ToolListWrap | None = None,
        *,
        name: str = "tokentrace",
        tools_file: str | None = None,
        interaction_file: str | None = None,
        reward: str | None = None,
        budget: Mapping[str, Any] | None = None,
        renderer: Mapping[str, Any] | None = None,
        allow_raw_logprobs: bool = False,
    ) -> None:
        # verl's constructor is not called: its prompt builder warns or fails for an unknown
        # tokenizer
        self.config, self.data_config = trainer_config.config, data_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        variables = plain(self.data_config.get("apply_chat_template_kwargs"))
        self.renderer = renderer_of(tokenizer, {**plain(renderer), **variables})
        from_file = _loaded(load_tools, tools_file) if tools_file else ()
        self.tools = as_tools([*(tools.tools if tools else ()), *from_file])
        self._interactions = _loaded(load_interactions, interaction_file) if interaction_file else None
        self._reward, self._budget, self._allow_raw = reward, plain(budget), allow_raw_logprobs
        names = [one.name for one in fields(Budget)]
        for key in self._budget:
            if key not in names:
                raise InputError(f"agent loop {name!r}: budget has no {key!r}, only {', '.join(names)}")

    @rollout_trace_op
    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> AgentLoopOutput:
        settings, priority = self.rollout_config, int(priority)
        id = f"det-{priority}" if settings.full_determinism else uuid4().hex
        size = self.renderer.tokenizer.vocabulary.size
        engine = ServerEngine(self.server_manager, id, settings, vocab_size=size, priority=priority)
        task = self._task(id, kwargs)
        judge = self._reward if self._reward != ROLLOUT_REWARD else None
        agent = Agent(
            engine,
            self.renderer,
            sampling=sampling_of(
                sampling_params,
                max_tokens=settings.response_length,
                supports=VERL_SAMPLING,
                allow_raw_logprobs=self._allow_raw,
            ),
            tools=self.tools,
            interaction=self._interactions,
            reward=None if judge is None else load_object(judge, Path.cwd()),
            budget=self._limits(task),
        )
        rollout = await agent.run(task)
        if rollout.end in FAILED_ENDS:
            raise RolloutFailed(f"{task.name} ended with {rollout.end}: {'; '.join(rollout.notes)}")
        if self._reward is not None and rollout.reward is None:
            last = brief(task.messages[-1].get("content"))
            raise RolloutFailed(
                f"{task.name}, {last}: no reward from {self._reward}; verl needs all or none"
            )
        graded = [turn for turn in rollout.per_turn if turn.reward is not None]
        preempted, experts = engine.reported("num_preempted"), engine.reported("routed_experts")
        output = row_output(
            only_sample(rollout.trajectory),
            logprobs=bool(sampling_params.get("logprobs", True)),
            reward_score=None if self._reward is None else rollout.reward,
            num_turns=2 * rollout.turns,  # each turn of the model follows a prompt, a result or a user
            metrics=AgentLoopMetrics(
                generate_sequences=rollout.engine_seconds,
                tool_calls=rollout.tool_seconds,
                num_preempted=sum(preempted) if preempted else -1,
            ),
            extra_fields={  # for verl's reward functions and logs, under the keys that verl has in every batch
                **engine.extra_fields(),
                "turn_scores": [turn.reward for turn in graded if not turn.tool_calls],
                "tool_rewards": [turn.reward for turn in graded if turn.tool_calls],
                "extras": {"end": str(rollout.end), "messages": rollout.messages, "notes": rollout.notes},
            },
        )
        if experts:
            output.routed_experts = experts[-1][: len(output.prompt_ids) + len(output.response_ids)]
        return output

    def _task(self, name: str, row: Mapping[str, Any]) -> Task:
        messages = without_nulls(plain_values(list(row["raw_prompt"])))
        tools = {tool.name: tool for tool in self.tools}
        names = plain((row.get("extra_info") or {}).get("tool_selection"))
        if missing := [name for name in names if name not in tools]:
            problem = f"there is no tool {missing[0]!r}; there are {', '.join(tools)}"
            raise InputError(problem, field="tool_selection")
        metadata = {key: plain(value) for key, value in row.items() if key not in _NOT_METADATA}
        return Task(
            messages,
            name=name,
            tools=[tools[name] for name in names] or None,
            tool_settings=without_nulls(plain(row.get("tools_kwargs"))),
            interaction_settings=without_nulls(plain(row.get("interaction_kwargs"))),
            metadata=json.loads(json.dumps(metadata, default=str)),
        )

    def _limits(self, task: Task) -> Budget:
        """Return verl's limits as a budget: everything sampled fits into its rows."""
        settings, turns = self.rollout_config, self.rollout_config.multi_turn
        tools = [tool.tool_schema for tool in (self.tools if task.tools is None else task.tools)]
        render = self.renderer.silent().render_ids
        prompt = len(render(task.messages, tools=tools or None, add_generation_prompt=True))
        if prompt > settings.prompt_length:
            problem = (
                f"a prompt has {prompt} tokens, more than rollout.prompt_length, {settings.prompt_length}"
            )
            how = "raise data.max_prompt_length, or set data.filter_overlong_prompts=True"
            raise InputError(f"{problem}: {how}")
        lengths = [prompt + settings.response_length, settings.max_model_len, self._budget.get("context")]
        limits = {
            "turns": turns.max_assistant_turns or settings.response_length,  # no limit: a token per turn
            "turn_tokens": settings.response_length,
            "user_turns": turns.max_user_turns,
            "parallel_calls": turns.max_parallel_calls,
            **self._budget,
            "context": min(length for length in lengths if length is not None),
        }
        return Budget(**limits)


def row_output(
    sample: Sample, *, logprobs: bool = True, metrics: Any = None, **more: Any
) -> AgentLoopOutput:
    """A row for verl, up to the last token with loss."""
    if logprobs and sample.logprobs is None:
        raise InputError(f"{sample!r} has no logprobs, which verl would use (rollout.calculate_log_probs)")
    row = prompt_response(sample, logprobs=logprobs)
    return AgentLoopOutput(**row._asdict(), metrics=metrics or AgentLoopMetrics(), **more)


@functools.lru_cache(maxsize=16)
def _loaded(load: Callable[[str], Any], path: str) -> Any:
    """Cached: verl makes an agent loop for every row."""
    return load(resolve_config_path(path))


@ToolParser.register("tokentrace")
class TokentraceToolParser(ToolParser):
    """Calls as the template writes them: ``format=tokentrace``."""

    calls = "strict"

    @property
    def _renderer(self) -> Renderer:
        return renderer_of(self.tokenizer, {"calls": self.calls})

    @property
    def stop_token_ids(self) -> list[int]:
        return self._renderer.get_stop_token_ids()

    @rollout_trace_op
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The content, and the calls that have a name."""
        schemas = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in tools or ()]
        parsed = self._renderer.parse_response(responses_ids, tools=schemas or None)
        calls = [call for call in parsed.tool_calls if call.name]
        return parsed.content, [
            FunctionCall(name=call.name, arguments=call.arguments_text, tool_call_id=call.id)
            for call in calls
        ]


@ToolParser.register("tokentrace_lenient")
class LenientToolParser(TokentraceToolParser):
    """Also calls outside their place: ``format=tokentrace_lenient``."""

    calls = "lenient"
