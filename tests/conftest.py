"""Fixtures for families and a browser, and hooks that select and order the tests."""

import contextlib
import gc
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.assets import FAMILIES, AssetError, family_dir, package_member
from tests.browser import Chromium, NoBrowserError, chromium
from tests.grouping import group_of, is_quick, needs_assets, place_of, sampled
from tests.support import FULL, JINJA_FAMILIES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing")
    parser.addoption("--quick", action="store_true", help="only tests that need no assets and no optional package")
    parser.addoption("--apart", action="store_true", help="run by tests.apart.run, in an integration's own environment")
    parser.addoption("--all", action="store_true", help="an error where a test file needs a package that is not here")


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("hypothesis") is not None:  # not installed in environments of integrations
        from hypothesis import HealthCheck, settings

        # the time of an example depends on the load of the machine more than on the code
        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")
    if not config.getoption("--all"):  # skip modules of src whose dependency is not installed
        config.option.doctest_ignore_import_errors = True


TESTS = Path(__file__).parent
APART = TESTS / "apart"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests that run in separate environments, and with ``--quick`` files that need assets."""
    if APART in collection_path.parents and collection_path != APART / "run.py":
        return None if config.getoption("--apart") else True  # folders too: their conftest.py import the package
    if config.getoption("--quick") and TESTS in collection_path.parents and needs_assets(collection_path):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file that imports a package that is not installed; with ``--all`` it is an error."""
    report: Any = yield
    missing = re.search(r"ModuleNotFoundError: No module named '([^'.]+)", str(report.longrepr))
    if report.failed and missing is not None and not collector.config.getoption("--all"):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"needs {missing[1]}")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        selected = {item.nodeid for item in items if is_quick(item.nodeid, getattr(item, "fixturenames", ()))}
    else:
        selected = {item.nodeid for item in items} if FULL else sampled(item.nodeid for item in items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected])
    items[:] = [item for item in items if item.nodeid in selected]
    items.sort(key=lambda item: place_of(item.nodeid))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the imported modules, two million objects that the garbage collector then skips.

    Collect less often, too, as a vocabulary has a million objects; `tests/support.py` collects when it drops one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a test that fails because a package is not installed; with ``--all`` or ``--apart`` it fails."""
    report: Any = yield
    complete = item.config.getoption("--all") or item.config.getoption("--apart")
    error = call.excinfo.value if report.failed and call.excinfo is not None and not complete else None
    while error is not None and not (isinstance(error, ModuleNotFoundError) and error.name):
        error = error.__cause__ or error.__context__
    if error is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"needs {error.name}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under ``--dist loadgroup``, tests that load the same vocabulary run in one process, one after another.

    xdist 3.8 has groups of its own, but writes them into an attribute that items no longer have in pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # `place_of` orders the tests

    class ByVocabulary(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByVocabulary(config, log)


def _available(name: str) -> str:
    """The family's name, after building its files; skips the test if they are not available."""
    try:
        family_dir(name)
    except AssetError as error:
        pytest.skip(f"{name}: {error}")
    return name


@pytest.fixture(scope="session", params=JINJA_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every family with a Jinja template. Session-scoped, so that pytest groups tests by family."""
    return _available(request.param)


@pytest.fixture(scope="session", params=list(FAMILIES))
def any_family(request: pytest.FixtureRequest) -> str:
    """Every family, including those whose format is written in Python."""
    return _available(request.param)


@pytest.fixture(scope="session")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """openai-harmony's own encoding, with the ranks from the asset store instead of the network."""
    import openai_harmony as harmony

    folder = tmp_path_factory.mktemp("harmony")
    ranks = FAMILIES["gpt-oss"].tokenizer
    (folder / "o200k_base.tiktoken").write_bytes(package_member(ranks.package, ranks.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """A headless Chromium; tests that use it are skipped with the reason if it does not start."""
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(chromium())
        except NoBrowserError as error:
            pytest.skip(str(error))
        yield started


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
