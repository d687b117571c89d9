"""Builds a family's folder from package members: once, verified, and atomically."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from tests.assets.convert import CONVERTERS
from tests.assets.families import FAMILIES, Family, Part
from tests.assets.lock import PACKAGES, PINS, AssetError
from tests.assets.store import cache_root, locked, package_member, package_members
from tests.assets.templates import READERS

LAYOUT = 1
"""Incremented when the files written for an unchanged row change."""


def sha256(content: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def get_family(name: str) -> Family:
    """The row of that name. Raises AssetError with the available names if there is none."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise AssetError(f"no family {name!r}; there are {', '.join(FAMILIES)}") from None


def recipe_digest(family: Family) -> str:
    """A digest of everything that determines the folder's content: row, packages, pins, layout."""
    packages = {part.package: PACKAGES[part.package].sha256 for part in family.parts()}
    recipe = [LAYOUT, dataclasses.asdict(family), packages, PINS.get(family.name)]
    return sha256(json.dumps(recipe, sort_keys=True).encode())


def built_path(family: Family) -> Path:
    """The path of the family's folder, built or not; it changes with the row."""
    return cache_root() / "families" / recipe_digest(family)[:12] / family.name


def _read(part: Part) -> bytes:
    return package_member(part.package, part.path)


@lru_cache(maxsize=1)
def tokenizer_json(tokenizer: Part) -> bytes:
    """A vocabulary as tokenizer.json, cached for neighbouring rows that share it."""
    return CONVERTERS[tokenizer.via](_read(tokenizer))


def chat_template(family: Family) -> bytes | None:
    """The family's template in UTF-8, or None where none exists."""
    return READERS[family.template.via](_read(family.template)).encode() if family.template else None


def tokenizer_config(family: Family) -> dict[str, object]:
    """The family's configuration, changed to load tokenizer.json as it is, without code of the model."""
    source = family.tokenizer_config
    config = dict(source) if isinstance(source, Mapping) else dict(json.loads(_read(source)))
    for key in ("auto_map", "chat_template", "processor_class", "backend", "is_local"):
        config.pop(key, None)
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def computed_pins(family: Family) -> tuple[str, str | None]:
    """The digests of the row's current content, as in `PINS`."""
    template = chat_template(family)
    return sha256(tokenizer_json(family.tokenizer)), sha256(template) if template is not None else None


def folder_files(family: Family) -> dict[str, bytes]:
    """Every file of the family's folder. Raises AssetError if a digest is not the pinned one."""
    files = {"tokenizer.json": tokenizer_json(family.tokenizer)}
    template = chat_template(family)
    if template is not None:
        files["chat_template.jinja"] = template
    tokenizer_pin, template_pin = PINS.get(family.name, (None, None))
    expected = {"tokenizer.json": tokenizer_pin, "chat_template.jinja": template_pin}
    for name, pinned in expected.items():
        actual = sha256(files[name]) if name in files else None
        if actual != pinned:
            raise AssetError(f"{family.name}: {name} has sha256 {actual}, pinned is {pinned}")
    config = json.dumps(tokenizer_config(family), ensure_ascii=False, indent=1)
    files["tokenizer_config.json"] = config.encode()
    files |= {name: _read(part) for name, part in family.extras.items()}
    return files


def named_path(family: Family) -> Path:
    """The stable path of the family's folder, for people to type: a link to the folder built last."""
    return cache_root() / "families" / family.name


def _link(family: Family, target: Path) -> None:
    """Link the family's name to its folder; does nothing if the system has no links."""
    link = named_path(family)
    relative = os.path.relpath(target, link.parent)
    with contextlib.suppress(OSError):
        if link.is_symlink() and os.readlink(link) == relative:
            return
        draft = link.with_name(f".link-{os.getpid()}-{family.name}")
        os.symlink(relative, draft, target_is_directory=True)
        os.replace(draft, link)


def build(family: Family) -> Path:
    """The family's folder, built if it does not exist."""
    target = built_path(family)
    if target.is_dir():
        _link(family, target)
        return target
    with locked(f"{family.name}.family"):
        if not target.is_dir():
            draft = target.with_name(f".draft-{os.getpid()}-{family.name}")
            draft.mkdir(parents=True)
            try:
                for name, content in folder_files(family).items():
                    (draft / name).write_bytes(content)
                os.replace(draft, target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    _link(family, target)
    return target


def family_dir(name: str) -> Path:
    """The folder of a family, with its files fetched and built. Raises `AssetError` if that fails."""
    return build(get_family(name))


TRL_FOLDER = "trl/chat_templates/"


def trl_templates() -> dict[str, str]:
    """Every template of the pinned TRL release, by its name without the ending."""
    paths = package_members("trl", TRL_FOLDER, ".jinja")
    return {Path(path).stem: package_member("trl", path).decode() for path in paths}
