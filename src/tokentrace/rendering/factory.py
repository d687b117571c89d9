"""Making renderers: `create_renderer` for one, `create_renderer_pool` for many threads."""

from __future__ import annotations

import copy
import difflib
import inspect
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Final

from ..conversation.forms import MessageForm
from ..errors import RendererError, TemplateError, kind_of, shown
from ..formats import families
from ..parsing.response import CallReading
from ..settings import choose, flag, instance, whole
from ..study.outline import recognise
from ..study.study import study_of
from ..template.chat_template import ChatTemplate, PythonFormat, Template
from ..tokens.encoding import ControlPolicy
from ..tokens.loading import load_tokenizer, named_templates
from ..tokens.tokenizer import Tokenizer
from .bridging import History
from .closing import Truncation
from .lost import LostPolicy
from .renderer import Renderer
from .trust import TRUSTED, check_trusted


def create_renderer(
    tokenizer: Any,
    renderer: str = "auto",
    *,
    preserve_all_thinking: bool = False,
    preserve_thinking_between_tool_calls: bool = False,
    use_patched: bool = False,
    control_tokens: str = "literal",
    chat_template: Any = None,
    history: str = "train",
    truncation: str = "close",
    tool_parser: Any = None,
    reasoning_parser: Any = None,
    calls: str = "strict",
    trusted: Iterable[str] = TRUSTED,
    messages: str = "adapt",
    lost: str = "warn",
    **template_kwargs: Any,
) -> Renderer:
    """A renderer for a tokenizer: a folder, a hub name, a ``tokenizers.Tokenizer`` or a transformers tokenizer.

    `renderer` is ``"auto"`` (the tokenizer's own template, recognised by what it does), ``"default"`` (the same,
    not recognised), or the name of a family, which fails where the template does not behave like it.
    `chat_template` overrides the template: its source, its file, or the name of one that the tokenizer carries. What is
    left over goes to the template, which has to read it: ``enable_thinking=False``.

    `tool_parser` and `reasoning_parser` say how calls and reasoning are written where the template does not show it:
    the name of a dialect (``"hermes"``, or as inference servers call it), or a `Dialect`, `CallGrammar` or `Frame`.

    `calls` is ``"strict"`` or ``"lenient"``: if a well-formed call outside its place counts, as in vLLM.

    `messages` is ``"adapt"`` (the template is given the form of messages that it reads) or ``"as_given"`` (they stay as
    they are, for ids that equal transformers' whatever the template makes of them). `lost` says what happens where
    given text reaches no token: ``"warn"``, ``"error"`` or ``"ignore"``.
    """
    instance("renderer", renderer, str)
    loaded = load_tokenizer(tokenizer)
    templates = _templates(loaded, chat_template, renderer)
    settings = [
        name
        for name, value in inspect.signature(create_renderer).parameters.items()
        if value.kind is value.KEYWORD_ONLY
    ]
    _check_variables(template_kwargs, templates.values(), settings)
    family = _recognised(loaded, templates, renderer, template_kwargs)
    return Renderer(
        loaded,
        templates,
        family=family,
        preserve_all_thinking=flag("preserve_all_thinking", preserve_all_thinking),
        preserve_thinking_between_tool_calls=flag(
            "preserve_thinking_between_tool_calls", preserve_thinking_between_tool_calls
        ),
        use_patched=flag("use_patched", use_patched),
        control_tokens=choose(ControlPolicy, "control_tokens", control_tokens),
        history=choose(History, "history", history),
        truncation=choose(Truncation, "truncation", truncation),
        tool_parser=tool_parser if tool_parser is not None else families.tool_parser_of(family),
        reasoning_parser=reasoning_parser,
        calls=choose(CallReading, "calls", calls),
        trusted=check_trusted(trusted, templates.values(), template_kwargs),
        messages=choose(MessageForm, "messages", messages),
        lost=choose(LostPolicy, "lost", lost),
        variables=template_kwargs,
    )


OF_RENDER: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What `render` is given with each conversation."""


def _check_variables(given: Mapping[str, Any], templates: Iterable[Template], settings: Collection[str]) -> None:
    """Raise RendererError for a variable that is no setting and that none of the templates reads."""
    some = list(templates)
    for name in given:
        if name in OF_RENDER:
            raise RendererError(f"{name} goes with each conversation: pass it to render(), not to the renderer")
        if problem := unread_variable(name, some, settings):
            raise RendererError(f"{shown(name)} is no setting of a renderer, and {problem}")


def unread_variable(name: str, templates: Collection[Template], settings: Collection[str] = ()) -> str:
    """That none of the templates reads a variable, and what may have been meant; nothing where one of them does."""
    read = frozenset[str]().union(*(template.reads for template in templates)) - OF_RENDER
    if name in read:
        return ""
    near = difflib.get_close_matches(name, [*settings, *read], 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    reads = ", ".join(sorted(frozenset[str]().union(*(template.variables for template in templates))))
    return f"the chat template does not read it{meant} (it reads {reads or 'no variables'})"


def template_source(given: Any) -> Any:
    """The text of a template's file where one is named, else what was given.

    Raises RendererError for a file that cannot be read or holds no template.
    """
    if not isinstance(given, (str, PurePath)) or _is_source(str(given)):
        return given
    try:
        if not Path(given).is_file():
            return str(given)
        source = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RendererError(f"chat_template: {shown(str(given))} cannot be read: {error}") from error
    if not _is_source(source):
        raise RendererError(f"{given} is not a chat template: nothing in it begins with {{{{, {{% or {{#")
    return source


def _is_source(text: str) -> bool:
    return any(mark in text for mark in ("{{", "{%", "{#"))


def _templates(tokenizer: Tokenizer, given: Any, renderer: str) -> dict[str, Template]:
    """The templates to use, by name; a family that has no Jinja template brings its own format."""
    if isinstance(given, (ChatTemplate, PythonFormat)):
        return {"default": given}
    if isinstance(given, str) and given in tokenizer.templates:
        return {"default": ChatTemplate(tokenizer.templates[given])}
    if given is not None:
        source = template_source(given)
        if isinstance(source, str) and not _is_source(source):
            known = ", ".join(sorted(tokenizer.templates)) or "none"
            raise RendererError(
                f"chat_template: there is no file {shown(source)}, and the tokenizer carries no template of that name "
                f"(it carries {known})"
            )
        found = named_templates(source)
        if not found:
            raise RendererError(f"chat_template is a template's source, file or name, not {kind_of(given)}")
        return {name: ChatTemplate(source) for name, source in found.items()}
    python_format = families.python_format(renderer, tokenizer)
    if python_format is not None:
        return {"default": python_format}
    if not tokenizer.templates:
        raise TemplateError(
            f"{tokenizer.name or 'the tokenizer'} carries no chat template; pass chat_template= with its source"
        )
    return {name: ChatTemplate(source) for name, source in tokenizer.templates.items()}


def _recognised(
    tokenizer: Tokenizer, templates: Mapping[str, Template], renderer: str, kwargs: Mapping[str, Any]
) -> str:
    if renderer == "default":
        return "default"
    template = templates.get("default") or next(iter(templates.values()))
    return recognise(study_of(template, tokenizer, kwargs), renderer)


class RendererPool:
    """Renderers for many threads. They share one tokenizer, which is immutable and lets go of the GIL."""

    def __init__(self, renderers: Sequence[Renderer]) -> None:
        self._free: queue.SimpleQueue[Renderer] = queue.SimpleQueue()
        self.size = len(renderers)
        for renderer in renderers:
            self._free.put(renderer)

    @contextmanager
    def checkout(self, timeout: float | None = None) -> Iterator[Renderer]:
        """A renderer for the length of a ``with`` block; waits until one is free."""
        try:
            renderer = self._free.get(timeout=timeout)
        except queue.Empty:
            raise RendererError(f"no renderer came free within {timeout} s (pool of {self.size})") from None
        try:
            yield renderer
        finally:
            self._free.put(renderer)


MOST_IN_POOL: Final = 4096


def create_renderer_pool(name_or_path: Any, renderer: str = "auto", size: int = 16, **settings: Any) -> RendererPool:
    """A pool of `size` renderers, made as `create_renderer` makes one. What one of them learns, all of them know."""
    if whole("the size of a pool", size, least=1) > MOST_IN_POOL:
        raise RendererError(f"a pool of {size} renderers is more than any machine has threads for")
    loaded = load_tokenizer(name_or_path)
    made = create_renderer(loaded, renderer, **settings)
    return RendererPool([made, *(copy.copy(made) for _ in range(size - 1))])
