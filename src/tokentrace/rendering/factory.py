"""`create_renderer`: a tokenizer, its template and the settings, checked."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ..conversation.forms import MessageForm
from ..errors import RendererError, TemplateError, brief, kind_of
from ..formats import families
from ..parsing.response import CallReading
from ..settings import choose, flag, instance, whole
from ..study.outline import recognise
from ..study.study import study_of
from ..template.chat_template import ChatTemplate, PythonFormat, Template
from ..tokens.encoding import ControlPolicy
from ..tokens.loading import load_tokenizer, named_templates
from ..tokens.tokenizer import Tokenizer
from .bridged import Truncation
from .lost import LostPolicy
from .past import Past
from .renderer import OF_RENDER, Renderer, unread_variable
from .trust import TRUSTED, check_trusted


def create_renderer(
    tokenizer: Any,
    renderer: str = "auto",
    *,
    past: str | None = None,
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

    `renderer` is ``"auto"`` (the tokenizer's own template, recognised by its behaviour),
    ``"default"`` (the same, not recognised), or a family's name, which raises RendererError if
    the template behaves differently. `chat_template` overrides the template: its source, file
    or name. Other arguments are variables of the template: ``enable_thinking=False``.

    - `past`: how to show earlier turns; see `Past`. `preserve_all_thinking`, `use_patched`,
      `preserve_thinking_between_tool_calls` and `history` are other names for its values.
    - `calls`: ``"strict"``, or ``"lenient"``, which counts calls outside their place, as vLLM.
    - `tool_parser`, `reasoning_parser`: the dialect of calls or reasoning if the template does not
      show it: a name (``"hermes"``), `Dialect`, `CallGrammar` or `Frame`.
    - `messages`: ``"adapt"`` them to what the template reads, or leave them ``"as_given"``.
    - `lost`: if text reaches no token, ``"warn"``, ``"error"`` or ``"ignore"``.
    - `control_tokens` in text that is not `trusted`: see `ControlPolicy`; also `Truncation`.
    """
    instance("renderer", renderer, str)
    loaded = load_tokenizer(tokenizer)
    templates = _templates(loaded, chat_template, renderer)
    _check_variables(template_kwargs, templates.values())
    family = "default"
    if renderer != "default":
        template = templates.get("default") or next(iter(templates.values()))
        family = recognise(study_of(template, loaded, template_kwargs), renderer)
    usual_parser = families.BY_NAME[family].tool_parser if family in families.BY_NAME else None
    return Renderer(
        loaded,
        templates,
        family=family,
        past=_past(past, use_patched, preserve_all_thinking, preserve_thinking_between_tool_calls, history),
        control_tokens=choose(ControlPolicy, "control_tokens", control_tokens),
        truncation=choose(Truncation, "truncation", truncation),
        tool_parser=usual_parser if tool_parser is None else tool_parser,
        reasoning_parser=reasoning_parser,
        calls=choose(CallReading, "calls", calls),
        trusted=check_trusted(trusted, templates.values(), template_kwargs),
        messages=choose(MessageForm, "messages", messages),
        lost=choose(LostPolicy, "lost", lost),
        template_kwargs=template_kwargs,
    )


def _past(past: Any, patched: Any, preserve: Any, tool_calls: Any, history: Any) -> Past:
    """The value that `past` or the first of its aliases chooses."""
    if not isinstance(history, str) or history not in ("train", "inference"):
        raise RendererError(f"history must be 'train' or 'inference', not {brief(history)}")
    aliases = {
        Past.PATCHED: flag("use_patched", patched),
        Past.PRESERVE: flag("preserve_all_thinking", preserve),
        Past.TOOL_CALLS: flag("preserve_thinking_between_tool_calls", tool_calls),
        Past.INFERENCE: history == "inference",
    }
    named = next((value for value, is_set in aliases.items() if is_set), None)
    if past == Past.EXPAND:
        raise RendererError("past='expand' makes several rows: pass it to build_supervised_samples")
    chosen = choose(Past, "past", named or Past.TEMPLATE if past is None else past)
    if named not in (None, chosen):
        raise RendererError(f"past is {chosen}, but another setting means {named}: use only one of them")
    return chosen


def _check_variables(variables: Mapping[str, Any], templates: Collection[Template]) -> None:
    for name in variables:
        if name in OF_RENDER:
            raise RendererError(f"{name} belongs to a conversation: pass it to render(), not the renderer")
        if problem := unread_variable(name, templates):
            settings = ", ".join(create_renderer.__kwdefaults__ or ())
            raise RendererError(f"{brief(name)} is not a setting of a renderer ({settings}), and {problem}")


def template_source(template: Any) -> Any:
    """The text of the file that `template` names, else `template`."""
    if not isinstance(template, (str, PurePath)) or _is_source(str(template)):
        return template
    try:
        if not Path(template).is_file():
            return str(template)
        source = Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RendererError(f"chat_template: {brief(str(template))} cannot be read: {error}") from error
    if not _is_source(source):
        raise RendererError(f"{template} is not a chat template: it contains no {{{{, {{% or {{#")
    return source


def _is_source(text: str) -> bool:
    return any(mark in text for mark in ("{{", "{%", "{#"))


def _templates(tokenizer: Tokenizer, template: Any, renderer: str) -> dict[str, Template]:
    """The templates to use, by name."""
    if isinstance(template, (ChatTemplate, PythonFormat)):
        return {"default": template}
    if isinstance(template, str) and template in tokenizer.templates:
        return {"default": ChatTemplate(tokenizer.templates[template])}
    if template is not None:
        source = template_source(template)
        if isinstance(source, str) and not _is_source(source):
            names = ", ".join(sorted(tokenizer.templates)) or "none"
            problem = f"the tokenizer carries no template with that name (it carries {names})"
            raise RendererError(f"chat_template: there is no file {brief(source)}, and {problem}")
        sources = named_templates(source)
        if not sources:
            expected = "a template's source, file or name"
            raise RendererError(f"chat_template must be {expected}, not {kind_of(template)}")
        return {name: ChatTemplate(source) for name, source in sources.items()}
    python_format = families.python_format(renderer, tokenizer)
    if python_format is not None:
        return {"default": python_format}
    if not tokenizer.templates:
        name = tokenizer.name or "the tokenizer"
        raise TemplateError(f"{name} carries no chat template; pass chat_template= with its source")
    return {name: ChatTemplate(source) for name, source in tokenizer.templates.items()}


@dataclass(frozen=True, slots=True)
class RendererPool:
    """One renderer that many threads share, for code that expects a pool."""

    renderer: Renderer
    size: int

    @contextmanager
    def checkout(self) -> Iterator[Renderer]:
        """Never waits."""
        yield self.renderer


def create_renderer_pool(
    name_or_path: Any, renderer: str = "auto", size: int = 16, **settings: Any
) -> RendererPool:
    """A pool of one renderer, made with `create_renderer`."""
    shared = create_renderer(name_or_path, renderer, **settings)
    return RendererPool(shared, whole("the size of a pool", size, least=1))
