"""A pytest plugin for renderers' own test suite: tokenizers come from local folders, and renderers from tokentrace.

It runs in the suite's process, which has neither our `tests` package nor a hub. The environment says where things are:
`RENDERERS_SUITE_TOKENIZERS` is a JSON object of folders by hub name, `RENDERERS_SUITE_THROUGH` is "tokentrace", or
"renderers" to run the suite on what it was written for.
"""

import asyncio
import functools
import inspect
import json
import os
import sys
from typing import Any

import pytest

FOLDERS: dict[str, str] = json.loads(os.environ.get("RENDERERS_SUITE_TOKENIZERS", "{}"))


def no_hub(name: Any, *_: Any, **__: Any) -> None:
    pytest.skip(f"there is no tokenizer of {name} here", allow_module_level=True)


def local_tokenizers() -> None:
    """Let `AutoTokenizer.from_pretrained` read the local folder of a hub name, and skip what has none."""
    import transformers

    @functools.cache
    def load(name: str) -> Any:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDERS[name])
        tokenizer.name_or_path = name
        return tokenizer

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        return load(str(name)) if str(name) in FOLDERS else no_hub(name)

    transformers.AutoTokenizer.from_pretrained = from_pretrained
    transformers.AutoProcessor.from_pretrained = no_hub


def through_tokentrace() -> None:
    """Let every name under which the suite finds a renderer class, or `create_renderer`, be ours."""
    import renderers
    from renderers import base

    from tokentrace import create_renderer
    from tokentrace.integrations import renderers_compat as compat
    from tokentrace.tokens.loading import load_tokenizer

    loaded: dict[int, tuple[Any, Any]] = {}
    kept = []

    def create(tokenizer: Any, **settings: Any) -> Any:
        """As `create_renderer`, which would read a tokenizer and study a template anew for each test."""
        if id(tokenizer) not in loaded:
            loaded[id(tokenizer)] = (tokenizer, load_tokenizer(tokenizer))
        kept.append(create_renderer(loaded[id(tokenizer)][1], **settings))
        return kept[-1]

    compat.create_ours = create
    for name, made in compat.CLASSES.items():
        setattr(sys.modules[getattr(renderers, name).__module__], name, made)
        setattr(renderers, name, made)
    renderers.create_renderer = base.create_renderer = compat.create_renderer


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, as pytest-asyncio does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "asyncio: a coroutine")
    local_tokenizers()
    if os.environ["RENDERERS_SUITE_THROUGH"] == "tokentrace":
        through_tokentrace()
