"""A run of rollouts from its configuration: engine, renderer, tools, tasks, reward."""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..data.rows import Row, read_rows
from ..data.sources import Format, find_sources
from ..engines import EmbeddedEngine, Engine, EngineError, HTTPSettings, SamplingParams
from ..engines.protocol import OPTIONAL
from ..engines.servers import connect as connect_engine
from ..errors import InputError, TokentraceError
from ..pocket import POCKET
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..settings import limit as seconds_limit
from .batch import grouped, row_task
from .checks import MOST_SEED, count
from .config import Section, read_config
from .interactions import BaseInteraction, choose_interaction
from .loading import load_interactions, load_named, load_tools, make_interactions, make_tools
from .loop import Agent, Budget, Reward, Task
from .resuming import check_goes_on
from .tools import BaseTool

KEYS: Final = (
    *("engine", "tokenizer", "renderer", "tools", "tools_file", "interaction", "interaction_file", "data", "sampling"),
    *("budget", "reward", "advantages", "rollouts_per_task", "concurrency", "patience", "seed", "output"),
    "resume_aborted",
)
ENGINES: Final = ("embedded", "vllm", "sglang", "llama.cpp")
_PATIENCE: Final = 600.0

VERL_FILES: Final = {"tool_config_path": "tools_file", "interaction_config_path": "interaction_file"}
VERL_LIMITS: Final = {
    "max_assistant_turns": "turns",
    "max_user_turns": "user_turns",
    "max_parallel_calls": "parallel_calls",
}
"""Settings under the names that verl has for them."""
_NOT_VERL: Final = {
    "max_tool_response_length": "it counts characters in verl; results are cut by tokens here: result_tokens",
    "tool_response_truncate_side": "verl's releases do not agree on what a side means; say what is kept: result_keep",
}


@dataclass(frozen=True, slots=True)
class TaskSet:
    """What a source makes of its section under ``data``: tasks, and what goes with them where nothing else is set."""

    tasks: Sequence[Task]
    """They bring their own tools."""
    interaction: BaseInteraction | None = None
    reward: Reward | None = None


TaskSource: TypeAlias = Callable[[Section, int | None], TaskSet]
"""Makes tasks of a section of settings, at most as many as the number says. ConfigError where it cannot."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that a configuration says, ready to be run."""

    connect: Callable[[], Awaitable[Engine]]
    renderer: Renderer
    tools: Sequence[BaseTool]
    interactions: Mapping[str, BaseInteraction]
    """Simulated users by name; one that serves every task is called ""."""
    reward: Reward | None
    sampling: SamplingParams
    budget: Budget
    tasks: Sequence[Task]
    """In their groups, each with a name of its own."""
    concurrency: int
    patience: float | None
    """Seconds to wait for an engine that is down; None is forever."""
    resume_aborted: bool
    """Whether a turn that the engine was told to end is sampled on."""
    seed: int | None
    advantages: str | None
    output: Path
    settings: Mapping[str, Any]
    """What must not change when a run goes on: everything but the address of the engine, how many rollouts run at once,
    and the output."""

    async def close(self) -> None:
        """Let go of what the tools have kept for all rollouts."""
        for tool in self.tools:
            await tool.close()

    def agent(self, engine: Engine) -> Agent:
        """The agent that runs the tasks."""
        return Agent(
            engine,
            self.renderer,
            sampling=self.sampling,
            tools=self.tools,
            interaction=self.interactions,
            reward=self.reward,
            budget=self.budget,
            resume_aborted=self.resume_aborted,
        )


def read_run(
    path: str | Path,
    *,
    output: str | Path | None = None,
    limit: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    sources: Mapping[str, TaskSource] = MappingProxyType({}),
) -> Run:
    """The run that a YAML file describes; what is given here goes before what the file says.

    Files that the configuration names are looked for beside it; `output` is taken as it is. `sources` make tasks of
    sections under ``data``, by their names: a source called ``questions`` reads ``data: {questions: {count: 8}}``, and
    ``reward: questions`` is its reward. ConfigError names the file, the line and the key of what cannot be used.
    """
    limit = None if limit is None else count("limit", limit)
    concurrency = None if concurrency is None else count("concurrency", concurrency)
    seed = None if seed is None else count("seed", seed, least=0, most=MOST_SEED)
    top = read_config(path)
    top.rename(VERL_FILES)
    top.check_keys(KEYS)
    folder = Path(path).resolve().parent
    engine, data = (top.need(key, Section, hint="a mapping of settings") for key in ("engine", "data"))
    engine.need("kind", hint=f"one of {', '.join(ENGINES)}")
    kind = engine.choice("kind", ENGINES)
    renderer = _renderer(top, kind, folder)
    connect = _engine(engine, kind, renderer.tokenizer.vocabulary.size)
    tools = _either(top, "tools", folder, lambda: make_tools(top.sections("tools"), folder), load_tools)
    users = _either(top, "interaction", folder, lambda: make_interactions(top, folder), load_interactions)
    source = next((key for key in sources if key in data), None)
    if source and tools:
        key = "tools" if "tools" in top else "tools_file"
        raise top.error(f"data.{source} brings tools of its own: leave this out", key)
    sampling, budget, own_seed = _sampling(top)
    digests: dict[str, str] = {}
    if source is None:
        rows, digests = _rows(data, tools or [], folder, limit, list(sources))
        made = TaskSet(rows)
    else:
        data.check_keys([source, "limit"])
        asked = data.need(source, Section, hint="a mapping of settings")
        made = sources[source](asked, limit or data.count("limit"))
    tasks = made.tasks
    if not tasks:
        raise data.error("there is nothing to run: no rows, or a limit of none")
    users = users or ({} if made.interaction is None else {"": made.interaction})
    for task in tasks:
        data.checked(None, lambda task=task: choose_interaction(users, task.interaction_settings))
    per_task = top.count("rollouts_per_task", 1)
    advantages = top.choice("advantages", ("none", "group"), "none")
    given = output if output is not None else top.need("output", str, hint="the folder to write to; or give --output")
    chosen_seed = seed if seed is not None else top.count("seed", own_seed, least=0, most=MOST_SEED)
    settings = _remembered(top, folder)
    settings |= {"seed": chosen_seed, "rollouts_per_task": per_task, "tasks": len(tasks), "files": digests}
    return Run(
        connect=connect,
        renderer=renderer,
        tools=tools or [],
        interactions=users,
        reward=_reward(top, source, made.reward, sources, folder),
        sampling=sampling,
        budget=budget,
        tasks=list(grouped(tasks, per_task)),
        concurrency=concurrency or top.count("concurrency", 64),
        patience=_patience(top),
        resume_aborted=_resume_aborted(top, sampling),
        seed=chosen_seed,
        advantages=None if advantages == "none" else advantages,
        output=Path(given).expanduser(),
        settings=settings,
    )


def _either(top: Section, key: str, folder: Path, make: Callable[[], Any], load: Callable[[Path], Any]) -> Any:
    """What a section or a file of its own describes; None where there is neither."""
    name = top.read(f"{key}_file", str)
    if name is not None and key in top:
        raise top.error(f"there is {key!r} too: leave one of them out", f"{key}_file")
    if name is None:
        return None if top.get(key) is None else make()
    if not (folder / name).is_file():
        raise top.error(f"there is no file {folder / name}", f"{key}_file")
    return load(folder / name)


def _remembered(top: Section, folder: Path) -> dict[str, Any]:
    changing = ("output", "concurrency", "patience", "resume_aborted", "seed")
    settings = {key: value for key, value in top.plain().items() if key not in changing}
    settings["data"].pop("limit", None)
    for key in ("url", "urls", "http", "check_echo"):
        settings["engine"].pop(key, None)
    for key in ("tools_file", "interaction_file"):
        if settings.get(key) is not None:
            settings[key] = read_config(folder / settings[key]).plain()
    for tool in settings.get("tools") or (settings.get("tools_file") or {}).get("tools") or ():
        for key in ("url", "headers", "env"):  # addresses and keys are nobody's to remember
            (tool.get("mcp") or {}).pop(key, None)
    return settings


# -- the model


def _renderer(top: Section, kind: str, folder: Path) -> Renderer:
    name = top.read("tokenizer", str)
    if name is None and kind != "embedded":
        raise top.error(f"'tokenizer' is missing: the folder or hub name of the model that {kind} serves")
    if kind == "embedded" and name not in (None, POCKET.name) and (folder / name).resolve() != POCKET.resolve():
        raise top.error("the embedded engine has the pocket model's tokenizer: leave this out", "tokenizer")
    source = POCKET if name is None else folder / name if (folder / name).exists() else name
    section = top.read("renderer", Section)
    settings: dict[str, Any] = {}
    if section is not None:
        section.check_keys([*_renderer_settings(), "kwargs"])
        variables = section.read("kwargs", Section, default={})
        settings = {key: value for key, value in section.plain().items() if key != "kwargs" and value is not None}
        template = section.read("chat_template", str)
        if template is not None and (folder / template).is_file():
            settings["chat_template"] = (folder / template).read_text(encoding="utf-8")
        settings |= variables.plain() if variables else {}
    try:
        return create_renderer(source, **settings)
    except (TokentraceError, TypeError, ValueError) as error:
        raise top.error(str(error), "tokenizer" if section is None else "renderer") from error


def _renderer_settings() -> list[str]:
    """The settings of `create_renderer`, but for the tokenizer and what goes to the template."""
    parameters = inspect.signature(create_renderer).parameters.values()
    return [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name != "tokenizer"]


def _engine(section: Section, kind: str, vocab_size: int) -> Callable[[], Awaitable[Engine]]:
    if kind == "embedded":
        section.check_keys(["kind"])
    served: dict[str, type] = {"model": str, "check_echo": bool} if kind == "vllm" else {}
    section.check_keys(["kind", "url", "urls", "vocab_size", "logprobs", "http", *served])
    urls = section.read("urls", list, default=[])
    if kind != "embedded" and (("url" in section) == bool(urls) or not all(isinstance(url, str) for url in urls)):
        raise section.error(f"give the address of {kind} as url, or several as a list under urls")
    urls = urls or [section.read("url", str)]
    options: dict[str, Any] = {"vocab_size": section.count("vocab_size", vocab_size)}
    options |= {name: section.read(name, of) for name, of in served.items()}
    options["logprobs"] = section.choice("logprobs", ("processed", "scaled", "raw"))
    http = section.read("http", Section)
    options["settings"] = None if http is None else http.make(HTTPSettings)
    options = {name: value for name, value in options.items() if value is not None}

    async def connect() -> Engine:
        if kind == "embedded":
            return EmbeddedEngine()
        try:
            return await connect_engine(urls, kind, **options)
        except EngineError as error:
            raise section.error(str(error), "urls" if "urls" in section else "url") from error

    return connect


def _sampling(top: Section) -> tuple[SamplingParams, Budget, int | None]:
    """How to sample, the budget, and the seed of the section, which is one for the run and not for each request."""
    limits = top.read("budget", Section)
    if limits is not None:
        limits.rename(VERL_LIMITS)
        for key in _NOT_VERL.keys() & limits:
            raise limits.error(_NOT_VERL[key], key)
    budget = limits.make(Budget) if limits else Budget()
    section = top.read("sampling", Section)
    if section is None:
        return SamplingParams(budget.turn_tokens), budget, None
    section.check_keys(["temperature", "top_p", "top_k", "seed", "max_tokens", "allow_raw_logprobs", *OPTIONAL])
    if "seed" in section and "seed" in top:
        raise section.error("there is a seed for the whole run too: leave one of them out", "seed")
    most = section.count("max_tokens")
    if most is not None and limits is not None and "turn_tokens" in limits:
        raise section.error("budget.turn_tokens says the same: leave one of them out", "max_tokens")
    if most is not None:
        budget = replace(budget, turn_tokens=most)
    seed = section.count("seed", least=0, most=MOST_SEED)
    given = section.make(SamplingParams, stop_token_ids=(), **({} if most else {"max_tokens": budget.turn_tokens}))
    return replace(given, seed=None), budget, seed


def _patience(top: Section) -> float | None:
    given = top.read("patience", float) if "patience" in top else _PATIENCE
    return top.checked("patience", lambda: seconds_limit("patience", given, zero=True, error=InputError))


def _resume_aborted(top: Section, sampling: SamplingParams) -> bool:
    wanted: bool = top.read("resume_aborted", bool, default=False)
    if wanted:
        top.checked("resume_aborted", lambda: check_goes_on(sampling))
    return wanted


def _reward(
    top: Section, source: str | None, own: Reward | None, sources: Mapping[str, TaskSource], folder: Path
) -> Reward | None:
    name = top.read("reward", str)
    if name is None or name == source:
        return own
    if name in sources:
        raise top.error(f"it judges the answers to data.{name}, and there is no data.{name}", "reward")
    found = load_named(top, "reward", folder)
    if not callable(found):
        raise top.error("is not a function", "reward")
    reward: Reward = found
    return reward


# -- the tasks


def _rows(
    data: Section, tools: Sequence[BaseTool], folder: Path, limit: int | None, others: Sequence[str]
) -> tuple[list[Task], dict[str, str]]:
    """Rows of files as tasks, and what tells whether the files have changed."""
    data.check_keys([*others, "file", "files", "split", "limit"])
    key = "files" if "files" in data else "file"
    given = data.need(key, str, list)
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    most = limit or data.count("limit") or 1 << 62
    tasks: list[Task] = []
    with tempfile.TemporaryDirectory(prefix="tokentrace-") as spool:
        try:
            inputs = [str(folder / name) if (folder / name).exists() else name for name in names]
            sources = find_sources(inputs, Path(spool), split=data.read("split", str))
            for source in sources:
                for row in itertools.islice(read_rows(source), most - len(tasks)):
                    tasks.append(_task(row, source.name, source.format, tools, len(tasks)))
        except InputError as error:
            raise data.error(str(error), key) from error
    return tasks, {source.name: source.digest for source in sources}


def _task(row: Row, source: str, form: Format, tools: Sequence[BaseTool], number: int) -> Task:
    where = f"{Path(source).name}, row {row.number}"
    if row.problem is not None:
        raise InputError(f"{where}: {row.problem}")
    from_json = form is not Format.PARQUET
    try:
        return row_task(row.value, tools, name=f"row-{number:06d}", from_json=from_json)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
