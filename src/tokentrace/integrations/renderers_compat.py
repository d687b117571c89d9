"""A drop-in for the `renderers` package that renders with tokentrace."""

from collections.abc import Mapping
from typing import Any

from ..errors import RendererError
from ..rendering.factory import create_renderer as create_ours
from ..rendering.renderer import Renderer
from .renderers import TokentraceConfig, TokentraceRenderer, history_of

import renderers  # isort: skip  (the module above says what to install if it is missing)
from renderers import create_renderer as create_theirs  # isort: skip
from renderers.base import MODEL_RENDERER_MAP  # isort: skip

DIALECTS: dict[Any, str] = {
    "qwen3": "hermes",
    "qwen3.5": "qwen-xml",
    "glm": "glm-xml",
    "deepseek-v3": "deepseek",
}

_SHARED = frozenset({"name", "thinking_retention"})


class ConfiguredRenderer(TokentraceRenderer):
    def _create(self, tokenizer: Any) -> Renderer:
        config = self.config
        names = ("tool_parser", "reasoning_parser")
        parsers: dict[str, Any] = {name: getattr(config, name, None) for name in names}
        parsers["tool_parser"] = DIALECTS.get(parsers["tool_parser"], parsers["tool_parser"])
        fields = {name: field.default for name, field in type(config).model_fields.items()}
        values = {name: getattr(config, name) for name in fields if name not in _SHARED | set(parsers)}
        changed = {name: value for name, value in values.items() if value != fields[name]}
        extra = getattr(config, "model_extra", None) or {}
        renderer = create_ours(tokenizer, history=history_of(config), **parsers, **changed, **extra)
        read = renderer.study().template.reads
        defaults = {name: value for name, value in values.items() if value is not None and name in read}
        return renderer.with_variables(defaults) if defaults else renderer


def _class(name: str, config: Any) -> Any:
    fields = {"config_class": config, "__module__": __name__, "__doc__": config.__doc__}
    return type(name, (ConfiguredRenderer,), fields)


CLASSES: dict[str, Any] = {
    name: _class(name, config)
    for name in renderers.__all__
    if name.endswith("Renderer") and (config := getattr(renderers, f"{name}Config", None))
}
"""Our classes, by the names of renderers' classes."""

_BY_CONFIG = {kind.config_class: kind for kind in CLASSES.values()}


def create_renderer(
    tokenizer: Any, config: Any = None, *, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Like `renderers.create_renderer`, but for any model."""
    if isinstance(config, renderers.CustomRendererConfig):
        return create_theirs(tokenizer, config, chat_template_kwargs=chat_template_kwargs)
    if config is None or isinstance(config, renderers.AutoRendererConfig):
        # renderers' class for this model's name, else ours
        name = MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
        kind = TokentraceConfig if name is None else type(renderers.config_from_name(name))
        config = kind(thinking_retention=getattr(config, "thinking_retention", None))
    config = renderers.merge_chat_template_kwargs(config, chat_template_kwargs)
    ours = TokentraceRenderer if isinstance(config, TokentraceConfig) else _BY_CONFIG.get(type(config))
    if ours is None:
        raise RendererError(f"{type(config).__name__} does not configure one of renderers' own classes")
    return ours(tokenizer, config)


def __getattr__(name: str) -> Any:
    return CLASSES[name] if name in CLASSES else getattr(renderers, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *renderers.__all__})
