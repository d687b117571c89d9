"""Tests, one folder per stage of the library, and shared helpers."""

import pytest

# Failing assertions of shared helpers show the compared values, as those of tests do.
pytest.register_assert_rewrite("tests.diagnose", "tests.data", "tests.parsing", "tests.samples", "tests.trajectory")
