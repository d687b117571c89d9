"""Warnings of other packages are not ours to mend."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are shown here, and no errors."""
    config.addinivalue_line("filterwarnings", "default")
