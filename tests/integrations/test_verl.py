"""Without verl, its integration says what to install. With it, it is tried in `tests/apart/verl`."""

from __future__ import annotations

import importlib
import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed here")
@pytest.mark.parametrize("name", ["verl", "verl_parser", "verl_sft"])
def test_without_verl_the_error_says_what_to_install(name: str) -> None:
    with pytest.raises(ImportError, match=r"needs verl: pip install 'verl\[verl-core\]'"):
        importlib.import_module(f"tokentrace.integrations.{name}")
