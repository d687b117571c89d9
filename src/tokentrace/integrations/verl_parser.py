"""verl: calls read by the model's own template, as one of verl's tool parsers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

try:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
    from verl.utils.rollout_trace import rollout_trace_op
except ImportError as error:
    raise ImportError(f"the tool parser needs verl: pip install 'verl[verl-core]' ({error})") from error

from ..data.conversations import plain_values
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer


@ToolParser.register("tokentrace")
class TokentraceToolParser(ToolParser):
    """Calls as the model's own template writes them, for verl's ``tool_agent``: ``multi_turn.format=tokentrace``."""

    calls = "strict"

    @property
    def _renderer(self) -> Renderer:
        return renderer_of(self.tokenizer, {"calls": self.calls})

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end a turn."""
        return self._renderer.get_stop_token_ids()

    @rollout_trace_op
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The content, and the calls with a name. Invalid JSON stays as it is: verl reports it to the model."""
        schemas = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in tools or ()]
        parsed = self._renderer.parse_response(responses_ids, tools=schemas or None)
        return parsed.content, [
            FunctionCall(name=call.name, arguments=call.arguments_text, tool_call_id=call.id)
            for call in parsed.tool_calls
            if call.name
        ]


@ToolParser.register("tokentrace_lenient")
class LenientToolParser(TokentraceToolParser):
    """Also counts well-formed calls outside their place, as vLLM and SGLang do: ``format=tokentrace_lenient``."""

    calls = "lenient"


def renderer_of(tokenizer: Any, settings: Mapping[str, Any]) -> Renderer:
    """A renderer for verl's tokenizer, cached: verl makes an agent loop for every row."""
    return _renderer(tokenizer, str(tokenizer.chat_template), json.dumps(settings, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _renderer(tokenizer: Any, _template: str, settings: str) -> Renderer:
    return create_renderer(tokenizer, **json.loads(settings))


def plain(value: Any) -> Any:
    """Settings and columns as plain values; None becomes {}."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    return {} if value is None else plain_values(value.tolist() if hasattr(value, "tolist") else value)
