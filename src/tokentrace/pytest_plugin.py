"""A pytest plugin: "our template and our data still certify", as tests.

    def test_template(certify):
        certify("models/ours", uses=["rl-append-only"])

    def test_rows(certify_rows):
        certify_rows("data/rows.parquet", tokenizer="models/ours")

Loaded by pytest itself wherever tokentrace is installed; everything else is loaded when a test asks for it. Paths are
those of the folder that has pytest's configuration, if they exist there. What tests do not name is in
``tokentrace_tokenizer`` and ``tokentrace_uses`` of that configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .audit.report import AuditReport
    from .data.check.report import CheckReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """The settings of pytest's configuration."""
    parser.addini("tokentrace_tokenizer", "the tokenizer of certify and certify_rows: a model's folder or hub name")
    parser.addini("tokentrace_uses", "what certify asks a template to be safe for", type="args", default=[])


class Certify:
    """Certifies templates; each is audited once in a run of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._known: dict[str, AuditReport] = {}

    def __call__(
        self,
        tokenizer: Any = None,
        *,
        uses: str | Iterable[str] | None = None,
        partly: bool = False,
        **settings: Any,
    ) -> AuditReport:
        """The audit of a tokenizer; the test fails unless it is safe for these uses.

        `partly` is content with uses that hold for some turns. `settings` are those of `create_renderer`.
        """
        from .audit.certify import audit_template
        from .audit.verdicts import Use
        from .errors import InputError
        from .settings import choose

        given = (
            [uses] if isinstance(uses, str) else uses if uses is not None else self._config.getini("tokentrace_uses")
        )
        with _told():
            wanted = [choose(Use, "uses", use) for use in given]
            if not wanted:
                known = ", ".join(Use)
                raise InputError(f"say what the template has to be safe for, with uses= or tokentrace_uses: {known}")
            source = _tokenizer(self._config, tokenizer)
        key = repr((source, sorted(settings.items())))
        if key not in self._known:
            with _told():
                self._known[key] = audit_template(source, **settings)
        report = self._known[key]
        unmet = report.unmet(wanted, partly=partly)
        if unmet:
            lines = [f"{report.name} is not safe for {', '.join(verdict.use for verdict in unmet)}"]
            for verdict in unmet:
                lines += [f"{verdict}", *(f"  {words}" for words in verdict.against)]
            pytest.fail("\n".join(lines), pytrace=False)
        return report


class CertifyRows:
    """Checks rows of ids against a template."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def __call__(
        self,
        *rows: str | Path,
        tokenizer: Any = None,
        source: str | Path | Iterable[str | Path] = (),
        allow_unchecked: bool = False,
        **options: Any,
    ) -> CheckReport:
        """The check of files of rows; the test fails unless every row is what the template makes of its conversation.

        `source` is the file, or the files, that the rows were made from, where they do not tell. `allow_unchecked` is
        content with rows that have no conversation beside them. `options` are those of
        `tokentrace.data.check.dataset.check_dataset`.
        """
        from .data.check.dataset import check_dataset
        from .show.checks import plain_view

        given = [source] if isinstance(source, (str, Path)) else source
        sources = [_here(self._config, one) for one in (*options.pop("sources", ()), *given)]
        with _told():
            named = _tokenizer(self._config, tokenizer)
            paths = [_file(self._config, row) for row in rows]
            report = check_dataset(paths, tokenizer=named, sources=sources, **options)
        if not report.rows or report.differing or not (report.clean or allow_unchecked):
            pytest.fail(plain_view(report), pytrace=False)
        return report


@pytest.fixture(scope="session")
def certify(request: pytest.FixtureRequest) -> Certify:
    """``certify(tokenizer, uses=[...])`` fails the test unless the template is safe for these uses."""
    return Certify(request.config)


@pytest.fixture(scope="session")
def certify_rows(request: pytest.FixtureRequest) -> CertifyRows:
    """``certify_rows(file, tokenizer=...)`` fails the test unless every row is what the template makes."""
    return CertifyRows(request.config)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What tokentrace refuses, a model that is not there for one, fails the test with its own line alone."""
    from .errors import TokentraceError

    try:
        yield
    except TokentraceError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _tokenizer(config: pytest.Config, given: Any) -> Any:
    from .errors import InputError

    source = given if given is not None else config.getini("tokentrace_tokenizer")
    if not source and given is None:
        raise InputError("name the tokenizer, or set tokentrace_tokenizer in pytest's configuration")
    return _here(config, source) if isinstance(source, (str, Path)) else source


def _file(config: pytest.Config, path: str | Path) -> str:
    """A file or folder of rows, or a dataset's name on the hub: what looks like a file has to be there."""
    from .errors import InputError

    found = Path(_here(config, path))
    if found.suffix in (".jsonl", ".json", ".parquet", ".arrow", ".gz", ".zst") and not found.exists():
        raise InputError(f"there is no file {str(path)!r} in {config.rootpath}")
    return str(found)


def _here(config: pytest.Config, path: str | Path) -> str:
    """A path below the folder of pytest's configuration, if it is there; else as it is given."""
    own = config.rootpath / path
    return str(own) if own.exists() else str(path)
