"""A pytest plugin for renderers' own test suite: tokenizers come from local folders, and renderers from tokentrace.

It runs in the suite's process, which has neither our `tests` package nor a hub. Two variables configure it:
`RENDERERS_SUITE_TOKENIZERS` is a JSON object of folders by hub name, and `RENDERERS_SUITE_THROUGH` is "tokentrace", or
"renderers" to run the suite on renderers itself.
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
    """Let `AutoTokenizer.from_pretrained` read the local folder of a hub name, and skip tests without one."""
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
    """Replace every renderer class that the suite imports, and `create_renderer`, by ours."""
    import renderers
    from renderers import base

    from tokentrace import create_renderer
    from tokentrace.integrations import renderers_compat as compat
    from tokentrace.tokens.loading import load_tokenizer

    loaded: dict[int, tuple[Any, Any]] = {}
    created = []

    def create(tokenizer: Any, **settings: Any) -> Any:
        """Like `create_renderer`, but loads each tokenizer only once."""
        if id(tokenizer) not in loaded:
            loaded[id(tokenizer)] = (tokenizer, load_tokenizer(tokenizer))
        created.append(create_renderer(loaded[id(tokenizer)][1], **settings))
        return created[-1]

    compat.create_ours = create
    for name, renderer_class in compat.CLASSES.items():
        setattr(sys.modules[getattr(renderers, name).__module__], name, renderer_class)
        setattr(renderers, name, renderer_class)
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
