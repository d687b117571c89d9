"""Runs the code blocks of a documentation page, one after another, in an empty folder.

````
```python                     run, all blocks of a page in one namespace; it may await
```console                    lines that begin with "$ " are run; the lines after one, if any, are its expected output
```text title="output"        the expected output of the block before
```yaml title="tools.yaml"    written to that file; any language
```json, yaml, toml           parsed, to check its syntax
```text                       ignored
<!-- not run: why -->         on the line before a block: it is not run
<!-- exits: 1 -->             likewise: the exit code of its commands
<!-- with: agents -->         likewise: run by the Python of another environment
````

An expression whose comment is a value (``rows[0].samples  # (0, 2)``) must have that value.
In expected output, ``…`` matches anything. ``pip install`` and ``make`` are not run, but their extras and targets must
exist. ``tokentrace serve`` runs on a free port until the end of the page, and its default address is replaced by it.

This file needs only the standard library at import: `python tests/guides.py PAGE` runs a page where pytest is not
installed.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
SERVED = "http://127.0.0.1:8400"
"""The gateway's address on pages."""

_BLOCK = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|exits|with): (\S[^\n]*?) -->\s*$")
_COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_SHELL = re.compile(r"[|&;<>$`*]")
_PLAIN = {"COLUMNS": "120", "NO_COLOR": "1"}
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    title: str | None
    code: str
    line: int
    marks: Mapping[str, str]


def blocks(page: Path) -> Iterator[Block]:
    """Every block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        title = re.search(r'\btitle="([^"]+)"', match[3])
        marks = dict(_marks(text[: match.start()]))
        line = text.count("\n", 0, match.start()) + 2
        yield Block(match[2], title[1] if title else None, textwrap.dedent(match[4]), line, marks)


def _marks(before: str) -> Iterator[tuple[str, str]]:
    while match := _MARK.search(before):
        yield match[1], match[2]
        before = before[: match.start()]


def has_code(page: Path) -> bool:
    """Whether a page has a block that is run, written or parsed."""
    return any("not run" not in block.marks and (block.title or block.language != "text") for block in blocks(page))


def run_guide(name: str, folder: Path) -> dict[str, Any]:
    """Run a page of `docs/guides/` in a folder and return the names that its Python defined."""
    return run_page(GUIDES / f"{name}.md", folder)


def run_page(
    page: Path,
    folder: Path,
    *,
    models: Mapping[str, Path] = _NONE,
    pythons: Mapping[str, Path] = _NONE,
    in_process: bool = True,
) -> dict[str, Any]:
    """Run a page with a folder as working directory and return the names that its Python defined.

    Raises AssertionError if a block does not do what the page says, or the page has no code. `models` are folders that
    are linked into the working directory, by name; `pythons` are the interpreters for ``with:``. tokentrace's commands
    run in this process, which is faster, unless `in_process` is false; then a shell runs them.
    """
    assert has_code(page), f"{page.name}: there is no code to run"
    before = Path.cwd()
    for name, model in models.items():
        (folder / name).symlink_to(model, target_is_directory=True)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    running = _Run(page, pythons, in_process)
    try:
        for block in blocks(page):
            if "not run" not in block.marks:
                running.run(block)
    finally:
        running.close()
        os.chdir(before)
        sys.path.remove(str(folder))
    return running.names


@dataclass
class _Run:
    """The state of a page while it runs."""

    page: Path
    pythons: Mapping[str, Path]
    in_process: bool
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""
    address: str = SERVED
    loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    servers: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Run, write, parse or compare a block."""
        code = block.code.replace(SERVED, self.address)
        if block.title == "output":
            self._compare(block.code, block, "the block before")
        elif block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(code, encoding="utf-8")
        elif block.language == "python":
            self._python(code, block)
        elif block.language == "console":
            for command, expected in _COMMAND.findall(code):
                self._command(command.strip(), block)
                if expected.strip():
                    self._compare(expected, block, command)
        elif block.language in _READERS:
            _READERS[block.language](code)
        else:
            assert block.language == "text", f"{self._place(block)}: a block in {block.language or 'no language'}"

    def _python(self, code: str, block: Block) -> None:
        if "with" in block.marks:
            Path("block.py").write_text(code, encoding="utf-8")
            self._shell(shlex.join([str(self.pythons[block.marks["with"]]), "block.py"]), block)
            return
        padded = "\n" * (block.line - 1) + code  # so that tracebacks name the page's lines
        self.names["__shown__"] = self._check_value
        compiled = compile(_with_values(padded), str(self.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            result = eval(compiled, self.names)
            if inspect.iscoroutine(result):
                self.loop.run(result)
        self.printed = out.getvalue()

    def _check_value(self, value: object, comment: str, line: int) -> None:
        actual, expected = ("".join(text.split()) for text in (repr(value), comment))
        assert actual == expected, f"{self.page.name}, line {line}: it is {value!r} and not {comment}"

    def _command(self, command: str, block: Block) -> None:
        words = shlex.split(command, comments=True)
        if words[:2] == ["pip", "install"]:
            _check_install(words[2:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), command
        elif words[:2] == ["tokentrace", "serve"]:
            self._serve(words)
        elif self.in_process and words[0] == "tokentrace" and not _SHELL.search(command.partition(" # ")[0]):
            self._tokentrace(words[1:], block)
        else:
            self._shell(command, block)

    def _tokentrace(self, words: list[str], block: Block) -> None:
        """Run a tokentrace command in this process, which has its imports and models loaded."""
        from click.testing import CliRunner

        from tokentrace.cli import main

        result = CliRunner().invoke(main, words, env=_PLAIN, catch_exceptions=False)
        self._check_exit(result.exit_code, result.stdout, result.stderr, shlex.join(["tokentrace", *words]), block)

    def _shell(self, command: str, block: Block) -> None:
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        env = {**os.environ, **_PLAIN, "PATH": os.pathsep.join(paths)}
        result = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, check=False)
        self._check_exit(result.returncode, result.stdout, result.stderr, command, block)

    def _check_exit(self, code: int, out: str, err: str, command: str, block: Block) -> None:
        description = f"{self._place(block)}: {command}\n{out[-2000:]}\n{err[-4000:]}"
        assert code == int(block.marks.get("exits", 0)), f"exit code {code}: {description}"
        self.printed = out

    def _serve(self, words: list[str]) -> None:
        command = [sys.executable, "-m", *words, "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), words
        if "--port" not in words:
            self.address, self.printed = address, SERVED

    def _compare(self, expected: str, block: Block, what: str) -> None:
        lines = [line.rstrip() for line in expected.strip().splitlines()]
        pattern = "\n".join("(?s:.*)" if line == "…" else re.escape(line).replace("…", ".*") for line in lines)
        actual = "\n".join(line.rstrip() for line in self.printed.strip().splitlines())
        assert re.fullmatch(pattern, actual), f"{self._place(block)}: {what} printed\n{actual}\nand not\n{expected}"

    def _place(self, block: Block) -> str:
        return f"{self.page.name}, line {block.line}"

    def close(self) -> None:
        """Close the loop and stop the servers."""
        self.loop.close()
        for server in self.servers:
            server.terminate()
            server.communicate(timeout=60)


def _with_values(code: str) -> ast.Module:
    """Parse code and compare each expression with the value in its comment (``rows[0].samples  # (0, 2)``)."""
    tree, lines = ast.parse(code), code.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.Expr):
            continue
        comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2] if node.end_lineno else ""
        with contextlib.suppress(SyntaxError):
            if any(isinstance(inner, ast.Constant) for inner in ast.walk(ast.parse(comment, mode="eval"))):
                arguments = [node.value, ast.Constant(comment), ast.Constant(node.end_lineno)]
                node.value = ast.Call(ast.Name("__shown__", ast.Load()), arguments, [])
    return ast.fix_missing_locations(tree)


def _check_install(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words:
        if named := re.fullmatch(r"tokentrace\[([\w,]+)\]", word):
            assert set(named[1].split(",")) <= set(extras), f"{word}: there is no such extra"


def _read_yaml(code: str) -> None:
    import yaml

    yaml.safe_load(code)


def _read_json(code: str) -> None:
    try:
        json.loads(code)
    except ValueError:
        for line in code.splitlines():
            json.loads(line)


_READERS = {"yaml": _read_yaml, "json": _read_json, "toml": tomllib.loads}


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve(), Path.cwd(), in_process=False)
