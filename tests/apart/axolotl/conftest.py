"""Settings for tests with axolotl."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings of other packages instead of raising them as errors."""
    config.addinivalue_line("filterwarnings", "default")
