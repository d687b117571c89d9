"""Our renderer for tinker-cookbook: ``register_renderer("tokentrace", renderer_factory())``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InputError, brief
from ..parsing.response import Finish, ParsedResponse
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer as TemplateRenderer
from ..samples.supervised import build_supervised_samples
from .extension import holds

try:
    import tinker
    import torch
    from tinker_cookbook.renderers import (
        Message,
        ParseTermination,
        Renderer,
        ToolCall,
        ToolSpec,
        TrainOnWhat,
    )
    from tinker_cookbook.renderers.base import RenderContext, RenderedMessage, UnparsedToolCall
except ImportError as error:
    raise ImportError(f"this needs tinker-cookbook: pip install tinker-cookbook ({error})") from error

_TOOLS = "tools"


def renderer_factory(**settings: Any) -> Callable[..., Renderer]:
    """A factory with the settings of `create_renderer`."""

    def create(tokenizer: Any, image_processor: Any = None) -> Renderer:
        return TracedRenderer(tokenizer, create_renderer(tokenizer, **settings))

    return create


class TracedRenderer(Renderer):
    """Our renderer as tinker-cookbook's `Renderer`, for text."""

    def __init__(self, tokenizer: Any, renderer: TemplateRenderer) -> None:
        super().__init__(tokenizer)
        self.renderer = renderer

    def get_stop_sequences(self) -> list[int]:
        return self.renderer.get_stop_token_ids()

    @functools.cached_property
    def has_extension_property(self) -> bool:
        """Whether prompts extended earlier turns in all conversations tried."""
        renderer = self.renderer.silent()

        def extends(before: Sequence[Message], after: Sequence[Message], tools: Any) -> bool:
            row = renderer.render(before, tools=tools)
            stream = row.token_ids[: np.flatnonzero(row.mask)[-1] + 1]
            prompt = renderer.render_ids(before[:-1], tools=tools, add_generation_prompt=True)
            is_open = after[-1]["role"] != "assistant"
            following = renderer.render_ids(after, tools=tools, add_generation_prompt=is_open)
            return following[: len(stream)] == stream and stream[: len(prompt)] == prompt

        return holds(extends)

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """A system message with the schemas under ``"tools"``."""
        return [{"role": "system", "content": system_prompt, _TOOLS: list(tools)}]

    def build_generation_prompt(
        self, messages: list[Message], role: str = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """A prompt, followed by `prefill`, which is encoded separately."""
        if role != "assistant":
            raise InputError(f"a template prompts for the assistant, not for {brief(role)}")
        chat, tools = conversation(messages)
        ids = self.renderer.render_ids(chat, tools=tools, add_generation_prompt=True)
        if prefill:
            ids += self.tokenizer.encode(prefill, add_special_tokens=False)
        return tinker.ModelInput.from_ints(ids)

    def build_supervised_example(
        self, messages: list[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """The conversation, and weights: 1 for what the model samples, with its stop.

        The last message, and the last turn if one row can show it, are built with
        ``past="expand"``. Of other roles' messages, only the text has a weight.
        """
        what = TrainOnWhat(train_on_what)
        custom = what is TrainOnWhat.CUSTOMIZED
        for at, message in enumerate(messages):
            if ("trainable" in message) is not custom:
                problem = (
                    "every message needs 'trainable'" if custom else "'trainable' is only for CUSTOMIZED"
                )
                raise InputError(f"train_on_what is {what.name}: {problem}", message=at)
        chat, tools = conversation(messages)
        last_user = max((at for at, message in enumerate(chat) if message["role"] == "user"), default=-1)
        roles = sorted({message["role"] for message in chat})
        choices: dict[str, dict[str, Any]] = {
            "LAST_ASSISTANT_MESSAGE": {"since": max(len(chat) - 1, 0)},
            "LAST_ASSISTANT_TURN": {"since": last_user + 1},
            "ALL_ASSISTANT_MESSAGES": {},
            "ALL_MESSAGES": {"roles": roles},
            "ALL_TOKENS": {"roles": roles},
            "ALL_USER_AND_SYSTEM_MESSAGES": {"roles": ("user", "system")},
            "CUSTOMIZED": {"roles": roles, "turns": "flagged"},
        }
        settings = choices[what.name]
        build = functools.partial(
            build_supervised_samples, self.renderer, chat, tools=tools, final_stop=True
        )
        rows = build(past="expand", **settings) if "since" in settings else []
        (sample,) = rows if len(rows) == 1 else build(**settings)
        weights = np.ones(len(sample.ids)) if what is TrainOnWhat.ALL_TOKENS else sample.mask
        return tinker.ModelInput.from_ints(sample.ids.tolist()), torch.from_numpy(
            weights.astype(np.float32)
        )

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        parsed = self.renderer.parse_response(response)
        clean = parsed.finish is Finish.STOP and parsed.unread is None
        return sampled_message(
            parsed
        ), ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED

    def to_openai_message(self, message: Message) -> dict[str, Any]:
        return chat_message(0, message)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        raise NotImplementedError("use build_generation_prompt: a template renders whole conversations")


def conversation(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return OpenAI's messages, and the tools that one of them has."""
    chat, tools = [], None
    for at, message in enumerate(messages):
        if _TOOLS in message:
            if tools is not None:
                raise InputError("tools may be given only once", message=at)
            tools = [{"type": "function", "function": dict(spec)} for spec in message[_TOOLS]] or None
            if not message.get("content"):
                continue
        chat.append(chat_message(at, message))
    return chat, tools


def chat_message(at: int, message: Message) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        problem = f"needs a role, and text or a list of parts as content, but is {brief(message)}"
        raise InputError(problem, message=at)
    converted: dict[str, Any] = {"role": role, "content": content}
    parts = [] if isinstance(content, str) else content
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "thinking"):
            raise InputError(f"only text and thinking parts are supported, not {brief(kind)}", message=at)
        if not isinstance(part.get(kind), str):
            raise InputError(f"a part of type {kind!r} has no {kind!r}: {brief(part)}", message=at)
    if thinking := [part["thinking"] for part in parts if part["type"] == "thinking"]:
        if role != "assistant" or len(thinking) > 1 or parts[0]["type"] != "thinking":
            raise InputError(
                "a template takes one thinking part, first in an assistant's message", message=at
            )
        converted["reasoning_content"] = thinking[0]
    if not isinstance(content, str):
        converted["content"] = "".join(part["text"] for part in parts if part["type"] == "text")
    converted["content"] += "".join(call.raw_text for call in message.get("unparsed_tool_calls") or ())
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
    converted |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if "trainable" in message:
        converted["train"] = message["trainable"]
    return converted


def sampled_message(parsed: ParsedResponse) -> Message:
    """A turn as a message, with parts if there is thinking."""
    content: Any = parsed.content
    if parsed.reasoning_content:
        text = [{"type": "text", "text": content}] if content else []
        content = [{"type": "thinking", "thinking": parsed.reasoning_content}, *text]
    message: Message = {"role": "assistant", "content": content}
    for call in parsed.tool_calls:
        if call.ok:
            function = ToolCall.FunctionBody(name=str(call.name), arguments=call.arguments_text)
            message.setdefault("tool_calls", []).append(ToolCall(id=call.id, function=function))
        else:
            unread = UnparsedToolCall(raw_text=call.raw, error=call.problem)
            message.setdefault("unparsed_tool_calls", []).append(unread)
    return message
