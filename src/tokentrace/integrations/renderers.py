"""A renderer with the interface of the `renderers` package."""

import functools
from collections.abc import Sized
from typing import Any, ClassVar, Literal

import numpy as np

from ..conversation.messages import Messages
from ..parsing.response import CallStatus, PartKind
from ..parsing.response import ParsedToolCall as OurCall
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..rendering.trust import TRUSTED
from ..tokens.kinds import Kind
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Tokenizer
from .extension import holds

try:
    import renderers as theirs
except ImportError as error:
    raise ImportError("this needs renderers: pip install renderers") from error


class TokentraceConfig(theirs.BaseRendererConfig):
    model_config: ClassVar[Any] = {"frozen": True, "extra": "allow"}
    _allow_opaque_template_kwargs: ClassVar[bool] = True

    name: Literal["tokentrace"] = "tokentrace"
    renderer: str = "auto"
    preserve_all_thinking: bool = False
    preserve_thinking_between_tool_calls: bool = False
    use_patched: bool = False
    control_tokens: Literal["literal", "reject", "hf_compat"] = "literal"
    chat_template: str | None = None
    truncation: Literal["close", "refuse"] = "close"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    calls: Literal["strict", "lenient"] = "strict"
    trusted: tuple[str, ...] = tuple(sorted(TRUSTED))
    messages: Literal["adapt", "as_given"] = "adapt"
    lost: Literal["warn", "error", "ignore"] = "warn"
    refuse_unknown_tools: bool = False

    _internal_fields: ClassVar[frozenset[str]] = frozenset(
        field for field in vars() if not field.startswith("_") and field not in ("model_config", "name")
    )

    def settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self._internal_fields - {"refuse_unknown_tools"}}
        return {**settings, "history": history_of(self), **(self.model_extra or {})}


def history_of(config: Any) -> str:
    """The setting `history` for `thinking_retention`."""
    return "inference" if config.thinking_retention is None else "train"


class TokentraceRenderer:
    """Our renderer with renderers' `Renderer` protocol. Raises InputError for media."""

    config_class: ClassVar[type] = TokentraceConfig
    supports_tools: ClassVar[bool] = True

    def __init__(self, tokenizer: Any, config: Any = None) -> None:
        self.config = self.config_class() if config is None else config
        self.renderer = self._create(load_tokenizer(tokenizer))

    def _create(self, tokenizer: Tokenizer) -> Renderer:
        return create_renderer(tokenizer, **self.config.settings())

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> Any:
        """In an assistant's message, sampled tokens are content."""
        rendered = self.renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        outside = [at for at, message in enumerate(messages) if message["role"] != "assistant"]
        content = rendered.select(field="content") & np.isin(rendered.messages, outside) | rendered.mask
        return _rendered(rendered.token_ids, messages, rendered.message_indices, rendered.sampled, content)

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Any,
        previous_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> Any:
        """The next prompt. None if it cannot be proven."""
        new = self.renderer.check_messages(new_messages) if new_messages else []
        if not new or theirs.reject_assistant_in_extension(new):
            return None
        if self.config.thinking_retention == "tool_cycle" and any(m["role"] == "user" for m in new):
            return None
        bridge = self.renderer.bridge_to_next_turn
        if (bridged := bridge(previous_prompt_ids, previous_completion_ids, new, tools=tools)) is None:
            return None
        content = (bridged.kinds == Kind.CONTEXT) & (bridged.messages >= 0)
        return _rendered(bridged.token_ids, new, bridged.messages.tolist(), [False] * len(bridged), content)

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> Any:
        """Without prompt ids, assumes the template's own generation prompt."""
        prompt = None if isinstance(prompt_ids, Sized) and not len(prompt_ids) else prompt_ids
        parsed = self.renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt)
        return theirs.ParsedResponse(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=[self._call(call) for call in parsed.tool_calls],
            reasoning_complete=parsed.open is not PartKind.REASONING,
        )

    def _call(self, call: OurCall) -> Any:
        """Unreadable arguments stay the text that the model wrote."""
        refuses = getattr(self.config, "refuse_unknown_tools", False)
        is_reported = refuses or call.status is not CallStatus.UNKNOWN_TOOL
        status = _STATUSES.get(call.status, call.status.name) if is_reported else "OK"
        return theirs.ParsedToolCall(
            raw=call.raw,
            name=call.name,
            arguments=call.arguments_text if call.arguments is None else call.arguments,
            token_span=(call.span.start, call.span.stop),
            status=theirs.ToolCallParseStatus[status],
            id=call.id,
        )

    def get_stop_token_ids(self) -> list[int]:
        return self.renderer.get_stop_token_ids()

    @functools.cached_property
    def is_prefix_stable(self) -> bool:
        """Whether new messages left earlier ids unchanged in all conversations tried."""
        render = self.renderer.silent().render_ids

        def extends(before: Messages, after: Messages, tools: Any) -> bool:
            first = render(before, tools=tools)
            return render(after, tools=tools)[: len(first)] == first

        return holds(extends)


_STATUSES = {
    **dict.fromkeys((CallStatus.UNCLOSED, CallStatus.TRUNCATED), "UNCLOSED_BLOCK"),
    **dict.fromkeys((CallStatus.MALFORMED, CallStatus.DUPLICATE_ARGUMENT), "MALFORMED_STRUCTURE"),
}


def _rendered(ids: list[int], messages: Any, indices: list[int], sampled: list[bool], content: Any) -> Any:
    """If a stream comes first, `indices` and `content` cover only the ids after it."""
    before = len(ids) - len(indices)
    return theirs.RenderedTokens(
        token_ids=ids,
        message_indices=[-1] * before + indices,
        sampled_mask=sampled,
        is_content=[False] * before + content.tolist(),
        message_roles=[message["role"] for message in messages],
        message_tool_names=theirs.extract_message_tool_names(messages),
    )
