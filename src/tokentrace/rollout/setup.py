"""A run of rollouts from its YAML configuration: engine, renderer, tools, tasks, reward."""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ..data.rows import Row, read_rows
from ..data.sources import Format, find_sources
from ..engines import EmbeddedEngine, Engine, HTTPSettings, SamplingParams
from ..engines.servers import connect as connect_engine
from ..errors import InputError
from ..pocket import POCKET
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from .batch import grouped, row_task
from .config import Document, read_config
from .interactions import BaseInteraction, choose_interaction
from .loading import (
    ToolSection,
    UserSection,
    errors_at,
    load_interactions,
    load_object,
    load_tools,
    make_interactions,
    make_tools,
)
from .loop import Agent, Budget, Reward, Task
from .resuming import check_resumable
from .tools import BaseTool

_VERL_NAMES: Final = {"tool_config_path": "tools_file", "interaction_config_path": "interaction_file"}
_VERL_LIMITS: Final = {
    "max_assistant_turns": "turns",
    "max_user_turns": "user_turns",
    "max_parallel_calls": "parallel_calls",
}
_NOT_VERL: Final = {
    "max_tool_response_length": "verl counts characters; cut results by tokens with result_tokens",
    "tool_response_truncate_side": "verl's releases disagree on what a side means; use result_keep",
}

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]


class EngineSection(Struct, forbid_unknown_fields=True):
    """Where the engine is, and how to talk to it."""

    kind: Literal["embedded", "vllm", "sglang", "llama.cpp"]
    url: str | None = None
    urls: list[str] = []
    vocab_size: Positive | None = None
    logprobs: Literal["processed", "scaled", "raw"] | None = None
    model: str | None = None
    check_echo: bool | None = None
    http: dict[str, Any] | None = None
    """Fields of `HTTPSettings`."""


class DataSection(Struct, forbid_unknown_fields=True):
    """Files of tasks."""

    file: str | None = None
    files: list[str] = []
    split: str | None = None
    limit: Positive | None = None


class RunFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A configuration as it is in the file."""

    engine: EngineSection
    data: dict[str, Any]
    """A `DataSection`, or the settings of a source by its name."""
    output: str | None = None
    tokenizer: str | None = None
    renderer: dict[str, Any] = {}
    """Settings of `create_renderer`; template variables under ``kwargs``."""
    tools: list[ToolSection] | None = None
    tools_file: str | None = None
    interaction: UserSection | list[UserSection] | None = None
    interaction_file: str | None = None
    sampling: dict[str, Any] = {}
    """Fields of `SamplingParams`."""
    budget: dict[str, Any] = {}
    """Fields of `Budget`."""
    reward: str | None = None
    advantages: Literal["none", "group"] = "none"
    rollouts_per_task: Positive = 1
    concurrency: Positive = 64
    patience: Annotated[float, Meta(ge=0)] | None = 600.0
    seed: Seed | None = None
    resume_aborted: bool = False


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of a source, and what belongs to them unless the configuration has its own."""

    tasks: Sequence[Task]
    interaction: BaseInteraction | None = None
    reward: Reward | None = None


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Makes tasks of a section under ``data``: a struct of its settings, and a function of them and a limit."""

    settings: type[Struct]
    make: Callable[[Any, int | None], TaskSet]


@dataclass(frozen=True, slots=True)
class Run:
    """A configuration, ready to run."""

    connect: Callable[[], Awaitable[Engine]]
    renderer: Renderer
    tools: Sequence[BaseTool]
    interactions: Mapping[str, BaseInteraction]
    """Simulated users by name; one that serves every task is called ""."""
    reward: Reward | None
    sampling: SamplingParams
    budget: Budget
    tasks: Sequence[Task]
    """In groups, each with its own name."""
    concurrency: int
    patience: float | None
    """Seconds to wait for an engine that is down; None is forever."""
    resume_aborted: bool
    seed: int | None
    advantages: str | None
    output: Path
    settings: Mapping[str, Any]
    """What must not change when a run continues."""

    async def close(self) -> None:
        """Close the tools."""
        for tool in self.tools:
            await tool.close()

    def agent(self, engine: Engine) -> Agent:
        """Return the agent that runs the tasks."""
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
    """Return the run that a YAML file describes; arguments override the file.

    Looks for files beside the configuration; `output` is used as it is. `sources` make tasks of sections under
    ``data``: a source called ``questions`` reads ``data: {questions: {count: 8}}``, and ``reward: questions`` is its
    reward. Raises ConfigError naming the file, the line and the setting.
    """
    document = read_config(path)
    values = _renamed(document, document.values, _VERL_NAMES)
    file = document.convert(RunFile, values)
    folder = Path(path).resolve().parent
    if file.output is None and output is None:
        raise document.error("'output' is missing: the folder to write to, or --output")
    renderer = _renderer(document, file, folder)
    connect = _engine(document, file.engine, renderer.tokenizer.vocabulary.size)
    tools, users = _tools(document, file, folder), _users(document, file, folder)
    name = next((key for key in sources if key in file.data), None)
    if name is not None and tools:
        raise document.error(f"data.{name} brings its own tools: leave this out", "tools")
    task_set, digests = _tasks(document, file.data, name, sources, tools, folder, limit)
    if not task_set.tasks:
        raise document.error("there is nothing to run", "data")
    users = users or ({} if task_set.interaction is None else {"": task_set.interaction})
    with errors_at(document, "data"):
        for task in task_set.tasks:
            choose_interaction(users, task.interaction_settings)
    sampling, budget, sampling_seed = _sampling(document, file)
    if file.resume_aborted:
        with errors_at(document, "resume_aborted"):
            check_resumable(sampling)
    seed = next((one for one in (seed, file.seed, sampling_seed) if one is not None), None)
    count = len(task_set.tasks)
    chosen = {"seed": seed, "rollouts_per_task": file.rollouts_per_task, "tasks": count, "files": digests}
    return Run(
        connect=connect,
        renderer=renderer,
        tools=tools,
        interactions=users,
        reward=_reward(document, file.reward, name, task_set.reward, sources, folder),
        sampling=sampling,
        budget=budget,
        tasks=list(grouped(task_set.tasks, file.rollouts_per_task)),
        concurrency=concurrency or file.concurrency,
        patience=file.patience,
        resume_aborted=file.resume_aborted,
        seed=seed,
        advantages=None if file.advantages == "none" else file.advantages,
        output=Path(output if output is not None else str(file.output)).expanduser(),
        settings=_lasting(values, folder) | chosen,
    )


def _renamed(document: Document, values: Mapping[str, Any], names: Mapping[str, str], *path: str) -> dict[str, Any]:
    """Give settings under verl's names ours. Raises ConfigError if both are there."""
    for key in names.keys() & values:
        if names[key] in values:
            raise document.error(f"{names[key]} is the same setting: leave one of them out", *path, key)
    return {names.get(key, key): value for key, value in values.items()}


def _lasting(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings that must not change when a run continues, without addresses and keys."""
    changing = ("output", "concurrency", "patience", "resume_aborted", "seed")
    settings: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode({key: value for key, value in values.items() if key not in changing}, enc_hook=str)
    )
    settings["data"].pop("limit", None)
    for key in ("url", "urls", "http", "check_echo"):
        settings["engine"].pop(key, None)
    for key in ("tools_file", "interaction_file"):
        if settings.get(key) is not None:
            settings[key] = read_config(folder / settings[key]).values
    for tool in settings.get("tools") or (settings.get("tools_file") or {}).get("tools") or ():
        for key in ("url", "headers", "env"):
            (tool.get("mcp") or {}).pop(key, None)
    return settings


def _tools(document: Document, file: RunFile, folder: Path) -> list[BaseTool]:
    if file.tools_file is None:
        return make_tools(document, file.tools or [], folder)
    return load_tools(_beside(document, folder, file.tools_file, "tools", file.tools is not None))


def _users(document: Document, file: RunFile, folder: Path) -> dict[str, BaseInteraction]:
    if file.interaction_file is None:
        return {} if file.interaction is None else make_interactions(document, file.interaction, folder)
    path = _beside(document, folder, file.interaction_file, "interaction", file.interaction is not None)
    return load_interactions(path)


def _beside(document: Document, folder: Path, name: str, key: str, is_there: bool) -> Path:
    """Return the path of a section's own file. Raises ConfigError if the section is there as well."""
    if is_there:
        raise document.error(f"there is {key!r} too: leave one of them out", f"{key}_file")
    if not (folder / name).is_file():
        raise document.error(f"there is no file {folder / name}", f"{key}_file")
    return folder / name


# -- the model


def _renderer(document: Document, file: RunFile, folder: Path) -> Renderer:
    name, kind = file.tokenizer, file.engine.kind
    if name is None and kind != "embedded":
        raise document.error(f"'tokenizer' is missing: the folder or hub name of the model that {kind} serves")
    if kind == "embedded" and name not in (None, POCKET.name) and (folder / name).resolve() != POCKET.resolve():
        raise document.error("the embedded engine has the pocket model's tokenizer: leave this out", "tokenizer")
    source = POCKET if name is None else folder / name if (folder / name).exists() else name
    settings = {key: value for key, value in file.renderer.items() if key != "kwargs" and value is not None}
    parameters = inspect.signature(create_renderer).parameters.values()
    names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name != "tokenizer"]
    for key in settings:
        if key not in names:
            raise document.error(f"there is no such setting; there are {', '.join(names)}, kwargs", "renderer", key)
    template = settings.get("chat_template")
    if isinstance(template, str) and (folder / template).is_file():
        settings["chat_template"] = (folder / template).read_text(encoding="utf-8")
    with errors_at(document, "renderer" if file.renderer else "tokenizer"):
        return create_renderer(source, **settings, **(file.renderer.get("kwargs") or {}))


def _engine(document: Document, section: EngineSection, vocab_size: int) -> Callable[[], Awaitable[Engine]]:
    kind, urls = section.kind, section.urls or [section.url or ""]
    options = msgspec.structs.asdict(section)
    options = {name: value for name, value in options.items() if value is not None and name not in _ADDRESS}
    if section.http is not None:
        options["settings"] = document.build(HTTPSettings, section.http, "engine", "http")
    if kind == "embedded" and (options or section.url or section.urls):
        raise document.error("the embedded engine has no settings", "engine")
    if kind != "vllm" and (section.model or section.check_echo is not None):
        raise document.error("model and check_echo are settings of vLLM", "engine")
    if kind != "embedded" and (section.url is None) == (not section.urls):
        raise document.error(f"needs the address of {kind} as url, or several as a list under urls", "engine")
    options.setdefault("vocab_size", vocab_size)

    async def connect() -> Engine:
        if kind == "embedded":
            return EmbeddedEngine()
        with errors_at(document, "engine", "urls" if section.urls else "url"):
            return await connect_engine(urls, kind, **options)

    return connect


_ADDRESS: Final = ("kind", "url", "urls", "http")


def _sampling(document: Document, file: RunFile) -> tuple[SamplingParams, Budget, int | None]:
    """Return sampling parameters, the budget, and the seed of the section, which is one for the whole run."""
    limits = _renamed(document, file.budget, _VERL_LIMITS, "budget")
    for key in _NOT_VERL.keys() & limits:
        raise document.error(_NOT_VERL[key], "budget", key)
    budget = document.build(Budget, limits, "budget")
    values = dict(file.sampling)
    if "seed" in values and file.seed is not None:
        raise document.error("there is a seed for the whole run too: leave one of them out", "sampling", "seed")
    if "max_tokens" in values and "turn_tokens" in limits:
        raise document.error("budget.turn_tokens is the same: leave one of them out", "sampling", "max_tokens")
    most = values.pop("max_tokens", budget.turn_tokens)
    sampling = document.build(SamplingParams, values, "sampling", max_tokens=most, stop_token_ids=())
    return replace(sampling, seed=None), replace(budget, turn_tokens=sampling.max_tokens), sampling.seed


def _reward(
    document: Document,
    name: str | None,
    source: str | None,
    default: Reward | None,
    sources: Mapping[str, TaskSource],
    folder: Path,
) -> Reward | None:
    if name is None or name == source:
        return default
    if name in sources:
        raise document.error(f"it judges the answers to data.{name}, and there is no data.{name}", "reward")
    with errors_at(document, "reward"):
        function: Reward = load_object(name, folder)
        if not callable(function):
            raise InputError("is not a function")
        return function


# -- the tasks


def _tasks(
    document: Document,
    values: dict[str, Any],
    name: str | None,
    sources: Mapping[str, TaskSource],
    tools: Sequence[BaseTool],
    folder: Path,
    limit: int | None,
) -> tuple[TaskSet, dict[str, str]]:
    """Return the tasks of a source, or of files, and the digests of the files."""
    if name is not None:
        other = {key: value for key, value in values.items() if key != name}
        data = document.convert(DataSection, other, "data")
        settings = document.convert(sources[name].settings, values[name], "data", name)
        with errors_at(document, "data", name):
            return sources[name].make(settings, limit or data.limit), {}
    data = document.convert(DataSection, values, "data")
    names = data.files or ([data.file] if data.file else [])
    if not names:
        raise document.error("'file' is missing", "data")
    most, tasks = limit or data.limit or 1 << 62, list[Task]()
    key = "files" if data.files else "file"
    with tempfile.TemporaryDirectory(prefix="tokentrace-") as spool, errors_at(document, "data", key):
        inputs = [str(folder / name) if (folder / name).exists() else name for name in names]
        file_sources = find_sources(inputs, Path(spool), split=data.split)
        for source in file_sources:
            for row in itertools.islice(read_rows(source), most - len(tasks)):
                tasks.append(_task(row, source.name, source.format, tools, len(tasks)))
    return TaskSet(tasks), {source.name: source.digest for source in file_sources}


def _task(row: Row, source: str, form: Format, tools: Sequence[BaseTool], number: int) -> Task:
    where = f"{Path(source).name}, row {row.number}"
    if row.problem is not None:
        raise InputError(f"{where}: {row.problem}")
    from_json = form is not Format.PARQUET
    try:
        return row_task(row.value, tools, name=f"row-{number:06d}", from_json=from_json)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
