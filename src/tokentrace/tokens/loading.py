"""Where tokenizers come from: a folder, a hub name, a ``tokenizers.Tokenizer`` or a transformers tokenizer.

``"pocket"`` names the embedded model, unless a folder of that name has a ``tokenizer.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError, kind_of
from ..pocket import POCKET
from .tokenizer import Tokenizer

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_REFUSALS = {
    "GatedRepoError": "the hub requires a login for it",
    "RepositoryNotFoundError": "the hub has no such model, or it needs a login",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "HFValidationError": "that is not the name of a model on the hub",
    "OSError": "the hub could not be reached",
}
"""Why the hub returns nothing, by huggingface_hub's errors, subclasses first."""


def load_tokenizer(source: Any) -> Tokenizer:
    """A Tokenizer from a folder, file, hub name or other tokenizer. Raises TokenizerError."""
    if isinstance(source, Tokenizer):
        return source
    if isinstance(source, (str, Path)):
        path = Path(source)
        if source == POCKET.name and not (path / "tokenizer.json").is_file():
            return _from_folder(POCKET, POCKET.name)
        try:
            path = path.expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, not a path at all
            raise TokenizerError(f"{str(source)[:200]!r} is not a path: {error}"[:600]) from error
        if is_folder:
            return _from_folder(path, str(source))
        if is_file:
            return _from_folder(path.parent, str(source), path.name)
        return _from_folder(_from_hub(str(source)), str(source))
    if callable(getattr(source, "apply_chat_template", None)):
        return _from_transformers(source)
    if callable(getattr(source, "to_str", None)):
        return Tokenizer(source.to_str())
    kinds = "a folder, a hub name, a tokenizers.Tokenizer or a transformers tokenizer"
    raise TokenizerError(f"a tokenizer is {kinds}, not {kind_of(source)}")


def _from_hub(name: str) -> Path:
    """The files of a model, ``name`` or ``name@revision``."""
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TokenizerError(f"there is no folder {name!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        problem = f"{name!r} is not a folder here; to fetch it from the hub, install tokentrace[hub]"
        raise TokenizerError(problem) from None
    try:
        model, _, revision = name.partition("@")
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:  # its errors are pages long and differ by version, so their names decide
        names = {kind.__name__ for kind in type(error).__mro__}
        reasons = (reason for kind, reason in _REFUSALS.items() if kind in names)
        unknown = f"it could not be fetched from the hub: {type(error).__name__}: {error}".splitlines()[0]
        raise TokenizerError(f"{name!r} is not a folder here, and {next(reasons, unknown)}") from error


def _from_folder(folder: Path, name: str, file: str = "tokenizer.json") -> Tokenizer:
    path = folder / file
    if not path.is_file():
        candidates = sorted(entry.name for entry in folder.glob("*token*") if entry.is_file())
        hint = f" (found {', '.join(candidates)}; convert it to tokenizer.json first)" if candidates else ""
        raise TokenizerError(f"there is no tokenizer.json in {name}{hint}")
    names = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    config, special, generation = (_read(folder / file) for file in names)
    eos = generation.get("eos_token_id")
    return Tokenizer(
        _text(path),
        name=name,
        templates=_templates(folder, config),
        variables=_special_tokens(special) | _special_tokens(config),
        eos_ids=[id for id in (eos if isinstance(eos, list) else [eos]) if isinstance(id, int)],
    )


def _text(path: Path) -> str:
    """The text of a file, with ``\\n`` as line ending."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path.name} cannot be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path)) if path.is_file() else {}
    except ValueError as error:
        raise TokenizerError(f"{path.name} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    extra = extra if isinstance(extra, dict) else {}
    rows = {key: value for key, value in config.items() if key.endswith("_token")} | extra
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in rows.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: of files or, without any, of the configuration."""
    configured = named_templates(config.get("chat_template"))
    configured |= named_templates(_read(folder / "chat_template.json").get("chat_template"))
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    single = folder / "chat_template.jinja"
    templates = {"default": _text(single)} if single.is_file() else {}
    return templates | {path.stem: _text(path) for path in more} or configured


def named_templates(value: Any) -> dict[str, str]:
    """Templates by name, from one template, a list of ``{"name", "template"}`` or a mapping."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        value = [{"name": name, "template": text} for name, text in value.items()]
    templates: dict[str, str] = {}
    for row in value if isinstance(value, list) else []:
        name, source = (row.get(key) if isinstance(row, Mapping) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError("chat templates need a name and a source each, both of them strings")
        templates[name] = source
    return templates


def _from_transformers(source: Any) -> Tokenizer:
    inner = getattr(source, "tokenizer", source)  # a processor holds its tokenizer
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        advice = "load its tokenizer.json, or convert it to one"
        raise TokenizerError(f"{type(source).__name__} has no fast backend; {advice}")
    template = getattr(source, "chat_template", None) or getattr(inner, "chat_template", None)
    special = inner.special_tokens_map.items()
    return Tokenizer(
        backend.to_str(),
        name=str(getattr(inner, "name_or_path", "")),
        templates=named_templates(template),
        variables={key: str(value) for key, value in special if isinstance(value, str)},
    )
