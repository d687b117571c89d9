"""Pages of the site that are made of something else, and links that leave it. MkDocs calls what is named ``on_…``.

- The first page is README.md; CHANGELOG.md and CONTRIBUTING.md are pages too.
- The reference has a page for each package: its public names with their docstrings. The page of the command line has
  each command's help, read off click.
- A link to a file of the repository (an example, a test) becomes one to the repository if pyproject.toml says where
  that is (``tool.hatch.metadata.hooks.custom``), and plain text if it does not.
- A page that would load anything from another host is an error: the site works offline.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import click
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tokentrace.cli import main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tokentrace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"].rstrip("/")
COPIED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_ESCAPED = "\\|"
_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code with an escaped bar, as tables need it; Python-Markdown would show the backslash."""
_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//([^\"'\s>]+)")


def command_line() -> str:
    """Each command's own help, its examples as they are, its options as a table."""
    root = click.Context(main, info_name="tokentrace")
    told = ["## Commands"]
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None
        told += [f"### {name}", *_command(command, click.Context(command, info_name=name, parent=root))]
    return "\n\n".join(told)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        yield f"```text\n{rest}\n```" if first.strip() == "\b" else escape(paragraph, quote=False)
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    rows = [f"| `{_cell(name)}` | {_cell(escape(what, quote=False))} |" for name, what in records if what]
    yield "\n".join(["| option | |", "| --- | --- |", *rows])


def _cell(text: str) -> str:
    return text.replace("|", _ESCAPED)


def stages() -> dict[str, tuple[str, list[str]]]:
    """Each package with public names, in the order of docs/architecture.md: its docstring and its names."""
    order = re.findall(r"^  (\w+)/", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    stubs = {name: SOURCE / name / "__init__.pyi" for name in order if (SOURCE / name / "__init__.pyi").exists()}
    packages = {name: (_docstring(stub.with_suffix(".py")), _imported(stub)) for name, stub in stubs.items()}
    errors = ast.parse((SOURCE / "errors.py").read_text(encoding="utf-8")).body
    names = [node.name for node in errors if isinstance(node, ast.ClassDef)]
    return packages | {"errors": (_docstring(SOURCE / "errors.py"), names)}


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _imported(stub: Path) -> list[str]:
    lines = ast.parse(stub.read_text(encoding="utf-8")).body
    return sorted(name.name for line in lines if isinstance(line, ast.ImportFrom) for name in line.names)


def titles(nav: Any) -> dict[str, str]:
    """The title of each page in the navigation: on the site it stands for the name of the page's file."""
    found: dict[str, str] = {}
    for entry in nav if isinstance(nav, list) else []:
        for title, inner in entry.items() if isinstance(entry, dict) else ():
            found |= {inner: title} if isinstance(inner, str) else titles(inner)
    return found


def on_config(config: Any) -> Any:
    """The reference's pages into the navigation, in the order of the stages."""
    pages = [{name: f"reference/{name}.md"} for name in stages()]
    for tab in config.nav:
        for entries in tab.values():
            for entry in entries:
                if isinstance(entry, dict) and entry.get("API") == "reference/":
                    entry["API"] = pages
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """The pages that are made of something else."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in COPIED.items()}
    for stage, (what, names) in stages().items():
        head = f"# tokentrace.{stage}\n\n{what}\n\n"
        made[f"reference/{stage}.md"] = head + "\n".join(f"::: tokentrace.{stage}.{name}\n" for name in names)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Links as the site has them."""
    path = page.file.src_path
    if path == "command-line.md":
        markdown = f"{markdown}\n\n{command_line()}"
    folder = "" if path in COPIED else posixpath.join("docs", posixpath.dirname(path))
    if path in COPIED:
        markdown = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", markdown)

    def rewrite(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        own = {source: name for name, source in COPIED.items()}.get(target)
        inside = own or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is not None and (own or files.get_file_from_path(inside) is not None):
            way = posixpath.relpath(inside, posixpath.dirname(path) or ".")
            named = titles(config.nav).get(inside) if found[1].endswith(".md") else None
            return f"[{named or found[1]}]({way}{found[3] or ''})"
        if not (ROOT / target).exists():
            raise PluginError(f"{path}: a link to {found[2]}, which is not there")
        return f"[{found[1]}]({REPOSITORY}/blob/main/{target})" if REPOSITORY else found[1]

    return _BAR.sub(
        lambda found: f"<code>{escape(found[1]).replace(_ESCAPED, '&#124;')}</code>", _LINK.sub(rewrite, markdown)
    )


def on_post_build(*, config: Any) -> None:
    """The index of the search as a script too: a page that was opened from the disk can read no other file."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def on_post_page(output: str, *, page: Page, config: Any) -> str:
    """The page, unless it would load something from elsewhere."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_path}: loads {found[2]} from another host; the site has to work offline")
    return output
