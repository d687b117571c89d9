"""On a machine that is busy everything takes long: only tests that are about it let the command line say so."""

from __future__ import annotations

import pytest

from tokentrace.cli import output


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SOON", 3600.0)
