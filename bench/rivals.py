"""The rival libraries, each loaded and ready to be called. All get the same conversations.

Most of the difference between libraries is due to their encoders, so transformers and `renderers` are also measured
with fastokens, the encoder of tokentrace, in place of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from typing import Any

import fastokens

import tokentrace
from tests.assets import family_dir

PEERS = {"qwen3": "Qwen3", "qwen3.5": "Qwen35", "glm-4.5": "GLM45", "minimax-m2": "MiniMaxM2", "kimi-k2.5": "KimiK25"}
"""The families that `renderers` supports, and its names for them."""

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"strip_thinking_from_history": False}),
    "qwen3.5": ("Qwen35", {}),
    "glm-5.2": ("Glm52", {}),
    "kimi-k2.5": ("KimiK25", {}),
    "gpt-oss": ("GptOss", {}),
    "nemotron-3-nano": ("Nemotron3", {}),
}
"""The same for `tml-renderers`, with the settings that are closest to the template in an agent's rollout."""

Message = dict[str, Any]


def transformers_tokenizer(family: str, *, fast: bool = False) -> Any:
    """The tokenizer of a family, as transformers loads it. With `fast`, its encoder is fastokens.

    `fastokens.patch_transformers` affects only tokenizers that are loaded while it is active, so both kinds coexist.
    """
    from transformers import PreTrainedTokenizerFast, logging

    logging.set_verbosity_error()  # it warns about long conversations
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if not fast:
            return PreTrainedTokenizerFast.from_pretrained(str(family_dir(family)))
        fastokens.patch_transformers()
        try:
            return PreTrainedTokenizerFast.from_pretrained(str(family_dir(family)))
        finally:
            fastokens.unpatch_transformers()


def our_renderer(family: str, **settings: Any) -> tokentrace.Renderer:
    """The renderer of a family, with its encoder already loaded."""
    renderer = tokentrace.create_renderer(str(family_dir(family)), **settings)
    renderer.tokenizer.warm_up()
    return renderer


def peer_renderer(family: str, tokenizer: Any) -> Any:
    """The renderer of `renderers` for a family, None if it has none."""
    if family not in PEERS:
        return None
    import renderers

    return renderers.create_renderer(tokenizer, getattr(renderers.configs, f"{PEERS[family]}RendererConfig")())


class NativeRenderer:
    """`tml-renderers`, in Rust with its own tokenizers."""

    def __init__(self, family: str) -> None:
        from tml_renderers import renderers

        name, settings = NATIVE[family]
        self._renderer = getattr(renderers, name)(**settings)

    def convert(self, messages: list[Message], tools: list[Message]) -> list[Any]:
        """Convert a conversation to the library's objects: reasoning becomes a content part, tools become a message."""
        from tml_renderers import chat

        functions = [tool["function"] for tool in tools]
        specs = [chat.ToolSpecJson("function", one["name"], one["description"], one["parameters"]) for one in functions]
        system = chat.Author(chat.AuthorKind.System)
        declarations = [chat.OpenAIMessage(author=system, content=[chat.ToolDeclareJson(specs)])] if specs else []
        return [*declarations, *chat.OpenAIMessage.from_oss_messages([_thinking(message) for message in messages])]

    def prompt(self, messages: list[Any]) -> list[int]:
        """The ids of a prompt."""
        return [index for span in self._renderer.render_for_completion(messages)[0] for index in span.span.tokens]

    def parser(self, messages: list[Message], tools: list[Message]) -> Any:
        """A parser for the completion of a prompt. It is stateful, so each completion needs a new one."""
        return self._renderer.render_for_completion(self.convert(messages, tools))[1]


def native_parsed_fields(messages: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls that its parser returned; the first two are stripped."""
    from tml_renderers import chat

    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls = []
    for message in chat.OpenAIMessage.to_oss_messages(chat.OpenAIMessage.from_messages(messages)):
        content = message.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            texts[part["type"]] += part[part["type"]]
        for call in message.get("tool_calls") or []:
            calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    return texts["text"].strip(), texts["thinking"].strip(), calls


def native_renderer(family: str) -> NativeRenderer | None:
    """The renderer of `tml-renderers` for a family, None if it has none."""
    return NativeRenderer(family) if family in NATIVE else None


def _thinking(message: Message) -> Message:
    if "reasoning_content" not in message:
        return message
    parts = [{"type": "thinking", "thinking": message["reasoning_content"]}]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {**{key: value for key, value in message.items() if key != "reasoning_content"}, "content": parts}
