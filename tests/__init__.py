"""Tests, one folder a stage of the library, and what they share."""

import pytest

# What tests share asserts as well, and shows what it compared, as tests do.
pytest.register_assert_rewrite("tests.diagnose", "tests.data", "tests.parsing", "tests.samples", "tests.trajectory")
