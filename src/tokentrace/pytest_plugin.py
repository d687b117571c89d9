"""A pytest plugin with one assertion: "our template is still safe for what we use it for".

    def test_template(assert_safe):
        assert_safe(create_renderer("models/ours"), ["rl-append-only", "sft-per-turn"])

pytest loads it wherever tokentrace is installed; everything else is loaded when a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .diagnose.certify import AuditReport


@pytest.fixture(scope="session")
def assert_safe() -> Callable[..., AuditReport]:
    """``assert_safe(renderer, uses)`` fails unless the template is safe for these uses."""
    audits: dict[Any, AuditReport] = {}

    def check(
        renderer: Any, uses: str | Iterable[str], *, partly: bool = False, **settings: Any
    ) -> AuditReport:
        """Audit a renderer, or a tokenizer with settings, once per run of pytest.

        Fails the test unless the template is safe for all `uses`; with `partly`, safe for some
        turns is enough.
        """
        from .diagnose.certify import audit_template
        from .diagnose.verdicts import Use
        from .errors import InputError, TokentraceError
        from .rendering.renderer import Renderer
        from .settings import choose

        try:
            required = [choose(Use, "uses", use) for use in ([uses] if isinstance(uses, str) else uses)]
            if not required:
                raise InputError(f"name at least one use: {', '.join(Use)}")
            if isinstance(renderer, Renderer) and settings:
                raise InputError(f"the renderer has its settings: {', '.join(settings)} cannot be set here")
            earlier = audits.get(renderer) if isinstance(renderer, Renderer) else None
            report = earlier or audit_template(renderer, **settings)
        except TokentraceError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        if isinstance(renderer, Renderer):
            audits[renderer] = report
        if unmet := report.unmet(required, partly=partly):
            lines = [f"{report.name} is not safe for {', '.join(verdict.use for verdict in unmet)}"]
            for verdict in unmet:
                lines += [f"{verdict}", *(f"  {words}" for words in verdict.against)]
            pytest.fail("\n".join(lines), pytrace=False)
        return report

    return check
