"""Building a family's folder out of package members, once, verified, and whole or not at all."""

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
"""Raised when the files written for an unchanged row change."""


def sha256(content: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def get_family(name: str) -> Family:
    """The row of that name; an unknown name is refused with the known ones."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise AssetError(f"no family {name!r}; there are {', '.join(FAMILIES)}") from None


def recipe_digest(family: Family) -> str:
    """A digest of all that decides the folder's content: row, packages, expected results, layout."""
    packages = {part.package: PACKAGES[part.package].sha256 for part in family.parts()}
    recipe = [LAYOUT, dataclasses.asdict(family), packages, PINS.get(family.name)]
    return sha256(json.dumps(recipe, sort_keys=True).encode())


def built_path(family: Family) -> Path:
    """Where the family's folder lies, or will lie once built; a changed row has another place."""
    return cache_root() / "families" / recipe_digest(family)[:12] / family.name


def _read(part: Part) -> bytes:
    return package_member(part.package, part.path)


@lru_cache(maxsize=1)
def tokenizer_json(tokenizer: Part) -> bytes:
    """A vocabulary as tokenizer.json; neighbouring rows that share one share the conversion."""
    return CONVERTERS[tokenizer.via](_read(tokenizer))


def chat_template(family: Family) -> bytes | None:
    """The family's template in UTF-8, or None where none exists."""
    return READERS[family.template.via](_read(family.template)).encode() if family.template else None


def tokenizer_config(family: Family) -> dict[str, object]:
    """The family's configuration, made to load tokenizer.json as it is.

    A model-specific class would replace the pre-tokenizer in it, and remote code would be asked for.
    """
    source = family.tokenizer_config
    config = dict(source) if isinstance(source, Mapping) else dict(json.loads(_read(source)))
    for key in ("auto_map", "chat_template", "processor_class", "backend", "is_local"):
        config.pop(key, None)
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def computed_pins(family: Family) -> tuple[str, str | None]:
    """What the row yields now, in the form of a row of `PINS`."""
    template = chat_template(family)
    return sha256(tokenizer_json(family.tokenizer)), sha256(template) if template is not None else None


def folder_files(family: Family) -> dict[str, bytes]:
    """Every file of the family's folder; refuses content that is not the pinned one."""
    files = {"tokenizer.json": tokenizer_json(family.tokenizer)}
    template = chat_template(family)
    if template is not None:
        files["chat_template.jinja"] = template
    tokenizer_pin, template_pin = PINS.get(family.name, (None, None))
    expected = {"tokenizer.json": tokenizer_pin, "chat_template.jinja": template_pin}
    for name, pinned in expected.items():
        found = sha256(files[name]) if name in files else None
        if found != pinned:
            raise AssetError(f"{family.name}: {name} has sha256 {found}, pinned is {pinned}")
    config = json.dumps(tokenizer_config(family), ensure_ascii=False, indent=1)
    files["tokenizer_config.json"] = config.encode()
    files |= {name: _read(part) for name, part in family.extras.items()}
    return files


def named_path(family: Family) -> Path:
    """The family's folder under a name that stays the same, for people to type: a link to the last that was built."""
    return cache_root() / "families" / family.name


def _name(family: Family, target: Path) -> None:
    """Let the family's name lead to its folder; where the system has no links, it has no such name."""
    link = named_path(family)
    wanted = os.path.relpath(target, link.parent)
    with contextlib.suppress(OSError):
        if link.is_symlink() and os.readlink(link) == wanted:
            return
        draft = link.with_name(f".link-{os.getpid()}-{family.name}")
        os.symlink(wanted, draft, target_is_directory=True)
        os.replace(draft, link)


def build(family: Family) -> Path:
    """The family's folder, built when it is not there yet."""
    target = built_path(family)
    if target.is_dir():
        _name(family, target)
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
    _name(family, target)
    return target


def family_dir(name: str) -> Path:
    """The folder of a family: tokenizer.json, tokenizer_config.json, chat_template.jinja, extras.

    Fetches and builds what is missing; raises `AssetError` when that cannot be done.
    """
    return build(get_family(name))


TRL_FOLDER = "trl/chat_templates/"


def trl_templates() -> dict[str, str]:
    """Every template of the pinned TRL release, by its name without the ending."""
    paths = package_members("trl", TRL_FOLDER, ".jinja")
    return {Path(path).stem: package_member("trl", path).decode() for path in paths}
