"""The others, each made ready to be called. All are given the same conversation; what they cannot take is said.

An encoder makes most of the difference between libraries, so transformers and `renderers` are also measured with
fastokens, the one that tokentrace has, put in place of their own.
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
"""The families that `renderers` has a renderer for, and what it calls them."""

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"strip_thinking_from_history": False}),
    "qwen3.5": ("Qwen35", {}),
    "glm-5.2": ("Glm52", {}),
    "kimi-k2.5": ("KimiK25", {}),
    "gpt-oss": ("GptOss", {}),
    "nemotron-3-nano": ("Nemotron3", {}),
}
"""The same of `tml-renderers`, with the setting that comes nearest to the template for the rollout of an agent."""

Message = dict[str, Any]


def transformers_tokenizer(family: str, *, fast: bool = False) -> Any:
    """The tokenizer of a family, as transformers loads it; `fast`: with the encoder of fastokens.

    `fastokens.patch_transformers` exchanges the encoder of what is loaded while it holds: both kinds live side by side.
    """
    from transformers import PreTrainedTokenizerFast, logging

    logging.set_verbosity_error()  # it says of long conversations that they are long
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
    """The renderer of a family, with the library that encodes loaded."""
    renderer = tokentrace.create_renderer(str(family_dir(family)), **settings)
    renderer.tokenizer.warm_up()
    return renderer


def peer_renderer(family: str, tokenizer: Any) -> Any:
    """The renderer that `renderers` has for a family, None where it has none."""
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

    def read(self, messages: list[Message], tools: list[Message]) -> list[Any]:
        """A conversation in its own objects: reasoning is a part of the content, tools a message."""
        from tml_renderers import chat

        functions = [tool["function"] for tool in tools]
        specs = [chat.ToolSpecJson("function", one["name"], one["description"], one["parameters"]) for one in functions]
        system = chat.Author(chat.AuthorKind.System)
        declared = [chat.OpenAIMessage(author=system, content=[chat.ToolDeclareJson(specs)])] if specs else []
        return [*declared, *chat.OpenAIMessage.from_oss_messages([_thinking(message) for message in messages])]

    def prompt(self, messages: list[Any]) -> list[int]:
        """The ids of a prompt."""
        return [index for span in self._renderer.render_for_completion(messages)[0] for index in span.span.tokens]

    def parser(self, messages: list[Message], tools: list[Message]) -> Any:
        """A parser for the completion of a prompt. It has a state, so each completion needs its own."""
        return self._renderer.render_for_completion(self.read(messages, tools))[1]


def native_story(messages: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What its parser found: content, reasoning and calls, with white space around the first two left out."""
    from tml_renderers import chat

    said: dict[str, str] = {"text": "", "thinking": ""}
    calls = []
    for message in chat.OpenAIMessage.to_oss_messages(chat.OpenAIMessage.from_messages(messages)):
        content = message.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            said[part["type"]] += part[part["type"]]
        for call in message.get("tool_calls") or []:
            calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    return said["text"].strip(), said["thinking"].strip(), calls


def native_renderer(family: str) -> NativeRenderer | None:
    """The renderer that `tml-renderers` has for a family, None where it has none."""
    return NativeRenderer(family) if family in NATIVE else None


def _thinking(message: Message) -> Message:
    if "reasoning_content" not in message:
        return message
    parts = [{"type": "thinking", "thinking": message["reasoning_content"]}]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {**{key: value for key, value in message.items() if key != "reasoning_content"}, "content": parts}
