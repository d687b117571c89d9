"""Finds the family of a test, so that tests of one vocabulary run together: loading one takes seconds and 500 MB."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from zlib import crc32

from tests.assets import FAMILIES

ROOT = Path(__file__).parents[1]
ASSETS = re.compile(
    r"^from tests\.(assets|oracle|rendering\.bridge\.rollouts)|"
    r"^from tests\..*\b(load_family|make_renderer|per_family|templates_of_trl)\b",
    re.MULTILINE,
)
"""Imports of files that use real tokenizers and templates."""
ASSET_FIXTURES = frozenset({"family", "any_family", "encoding"})

TOGETHER = (
    "tests/data/test_cluster.py",
    "tests/demo/",
    "tests/gateway/test_agents.py",
    "tests/integrations/test_trl.py",
    "tests/live/test_llamacpp.py",
    "tests/pocket/test_training.py",
    "tests/rollout/test_cluster.py",
)
"""Files, or folders, whose tests share something that is slow to set up: a Ray cluster, a server, a run of the demo,
agents, a training run."""

LONGEST = (
    "tests/test_install.py",
    "tests/tokens/test_encoding.py",
    "tests/data/test_job.py",
    "tests/gateway/test_kill.py",
    "tests/pocket/test_model.py",
    "tests/rendering/bridge/test_matrix.py",
    "tests/test_parity.py",
    "tests/template/test_limits.py",
    "tests/diagnose/test_pytest_plugin.py",
    "tests/show/test_browser.py",
    "tests/engines/test_embedded.py",
    "tests/diagnose/test_verdicts.py",
    "tests/store/test_crash.py",
)
"""The slowest files without a family: they start early, so that no process finishes long after the others."""

LENGTHY = (
    "tests/diagnose/test_pytest_plugin.py",
    "tests/diagnose/test_verdicts.py",
    "tests/cli/test_audit.py",
    "tests/cli/test_cli.py::test_examples_run",
    "tests/cli/test_cli.py::test_the_demo",
    "tests/cli/test_rollout.py",
    "tests/engines/test_embedded",
    "tests/data/test_job.py",
    "tests/diagnose/test_lines.py::test_a_forced_run",
    "tests/integrations/test_converters.py",
    "tests/pocket/test_model.py",
    "tests/rendering/test_renderer_settings.py::test_a_renderer_works_in_another_process",
    "tests/rollout/test_resuming.py",
    "tests/rollout/test_store.py::test_a_killed_process",
    "tests/samples/test_truncation.py",
    "tests/store/test_crash.py",
    "tests/gateway/test_kill.py",
    "tests/template/test_limits.py",
    "tests/test_install.py::test_links_of_the_package_page",
    "tests/test_junk.py::test_junk_gives_typed_errors",
    "tests/test_notebooks.py",
    "tests/tokens/test_encoding.py",
    "tests/show/test_browser.py",
)
"""Prefixes of tests that need no assets and no optional package, but are too slow for ``--quick``: whole audits,
rollouts of the pocket model, a browser, installed environments, and properties with many examples."""

LONG = (
    "tests/cli/test_cli.py::test_the_demo",
    "tests/demo/test_demo.py::test_engines_see",
    "tests/diagnose/test_pytest_plugin.py::test_hooks",
    "tests/diagnose/test_verdicts.py::test_a_date_is_detected_anywhere",
    "tests/gateway/test_replicas.py::test_many_agents_write_to_one_session_at_both_gateways_at_once[sqlite]",
    "tests/pocket/test_training.py::test_slips",
    "tests/rollout/test_cluster.py::test_worker_that_cannot_be_made",
    "tests/rollout/test_mcp.py::test_each_trajectory",
    "tests/show/test_browser.py::test_it_fits",
    "tests/test_bench.py",
    "tests/test_guides.py::test_guide_runs[trl]",
)
"""Prefixes of tests that only `make test-long` runs, since similar tests are part of every run."""

EVERY_FAMILY = (
    "tests/test_",
    "tests/conversation/test_forms.py",
    "tests/rendering/bridge/test_matrix.py",
    "tests/parsing/test_round_trip.py",
    "tests/parsing/test_streaming.py",
    "tests/samples/test_mask_oracles.py",
)
"""Prefixes of tests that run on every family in each run: parity, masks, bridges, parses."""

_ORDER = list(FAMILIES)


def sampled(nodeids: Iterable[str]) -> set[str]:
    """The tests of an ordinary run: a test on all families runs on a sixteenth of them, a different one for each test.

    `EVERY_FAMILY` lists the tests that run on all families; `make test-long` runs every test on all of them.
    """
    selected, families = set[str](), defaultdict[str, dict[str, str | None]](dict)
    for nodeid in nodeids:
        function, _, parameters = nodeid.partition("[")
        families[function][nodeid] = _in_parameters(parameters)
    for function, tests in families.items():
        tests = {nodeid: family for nodeid, family in tests.items() if not nodeid.startswith(LONG)}
        whole = function.startswith(EVERY_FAMILY) or len(set(tests.values())) < len(FAMILIES) // 2
        start = crc32(function.encode())
        selected |= {
            nodeid
            for nodeid, family in tests.items()
            if whole or family is None or (start + _ORDER.index(family)) % 16 == 0
        }
    return selected


def family_of(nodeid: str) -> str | None:
    """The family in a test's parameters, else the first that its function names, directly or through its module."""
    file, _, test = nodeid.partition("::")
    function, _, parameters = test.partition("[")
    return _in_parameters(parameters) or _named_by(file).get(function)


def _in_parameters(parameters: str) -> str | None:
    inside = f"-{parameters.rstrip(']')}-"
    return max((name for name in FAMILIES if f"-{name}-" in inside), key=len, default=None)


def group_of(nodeid: str) -> str:
    """The group of a test, by vocabulary, else by file: one process runs it, so module fixtures are made once."""
    shared = _shared(nodeid)
    if shared is not None:
        return shared
    family = family_of(nodeid)
    return nodeid.partition("::")[0] if family is None else _first_of_vocabulary(family)


def place_of(nodeid: str) -> tuple[int, int, int]:
    """The sort key of a test: files that stay together and slow ones first, so no process ends long after others."""
    shared = _shared(nodeid)
    if shared is not None:
        return 0, TOGETHER.index(shared), 0
    family = family_of(nodeid)
    file = nodeid.partition("::")[0]
    if family is None:
        return (1, LONGEST.index(file), 0) if file in LONGEST else (3, 0, 0)
    return 2, _ORDER.index(_first_of_vocabulary(family)), _ORDER.index(family)


def is_quick(nodeid: str, fixtures: Iterable[str]) -> bool:
    """Whether ``--quick`` runs a test: it is short, has no real family, and shares nothing that is slow to set up."""
    if nodeid.startswith(LENGTHY) or _shared(nodeid) is not None:
        return False
    return family_of(nodeid) is None and not ASSET_FIXTURES & set(fixtures)


def needs_assets(path: Path) -> bool:
    """Whether a test file uses real tokenizers and templates."""
    return path.suffix == ".py" and ASSETS.search(path.read_text(encoding="utf-8")) is not None


def _shared(nodeid: str) -> str | None:
    """The row of `TOGETHER` that a test belongs to."""
    return next((row for row in TOGETHER if nodeid.startswith(row)), None)


def _first_of_vocabulary(family: str) -> str:
    tokenizer = FAMILIES[family].tokenizer
    return next(name for name, row in FAMILIES.items() if row.tokenizer == tokenizer)


@cache
def _named_by(file: str) -> dict[str, str]:
    """The family that each test function of a file names, itself or through a function or fixture it uses."""
    path = ROOT / file
    if path.suffix != ".py" or not path.is_relative_to(ROOT / "tests"):
        return {}
    text = path.read_text(encoding="utf-8")
    if not any(f'"{name}"' in text for name in FAMILIES):
        return {}
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    family_by_test = {
        name: next(_families(node, functions, set()), None)
        for name, node in functions.items()
        if name.startswith("test_")
    }
    return {name: family for name, family in family_by_test.items() if family is not None}


def _families(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef], seen: set[str]) -> Iterator[str]:
    seen.add(node.name)
    names: list[str] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value in FAMILIES:
            yield inner.value
        elif isinstance(inner, ast.Name):
            names.append(inner.id)
        elif isinstance(inner, ast.arg):
            names.append(inner.arg)
    for name in names:
        if name in functions and name not in seen:
            yield from _families(functions[name], functions, seen)
