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

from ..data.sources import Format, find_sources, read_rows
from ..engines import EmbeddedEngine, Engine, HTTPSettings, SamplingParams
from ..engines.servers import connect as connect_engine
from ..errors import InputError
from ..pocket import POCKET
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from . import loading
from .batch import grouped, row_task
from .interactions import BaseInteraction, choose_interaction
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
_ADDRESS: Final = ("kind", "url", "urls", "http")

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


class DataSection(Struct, forbid_unknown_fields=True):
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
    tools: list[loading.ToolSection] | None = None
    tools_file: str | None = None
    interaction: loading.UserSection | list[loading.UserSection] | None = None
    interaction_file: str | None = None
    sampling: dict[str, Any] = {}
    budget: dict[str, Any] = {}
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

    file: RunFile
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
    seed: int | None
    output: Path
    settings: Mapping[str, Any]
    """What must not change when a run continues."""

    @property
    def advantages(self) -> str | None:
        return None if self.file.advantages == "none" else self.file.advantages

    async def close(self) -> None:
        for tool in self.tools:
            await tool.close()

    def agent(self, engine: Engine) -> Agent:
        return Agent(
            engine,
            self.renderer,
            sampling=self.sampling,
            tools=self.tools,
            interaction=self.interactions,
            reward=self.reward,
            budget=self.budget,
            resume_aborted=self.file.resume_aborted,
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
    """Return the run that a YAML file describes; arguments override the file. Raises ConfigError.

    Looks for files beside the configuration. `sources` make tasks of sections under ``data``: one called ``questions``
    reads ``data: {questions: {count: 8}}``, and ``reward: questions`` is its reward.
    """
    document = loading.read_config(path)
    values = _renamed(document, document.values, _VERL_NAMES)
    file = document.convert(RunFile, values)
    maker = _Maker(document, file, Path(path).resolve().parent, sources)
    if file.output is None and output is None:
        raise document.error("'output' is missing: the folder to write to, or --output")
    renderer = maker.renderer()
    connect = maker.engine(renderer.tokenizer.vocabulary.size)
    tools, users = maker.tools(), maker.users()
    task_set, digests = maker.tasks(tools, limit)
    if not task_set.tasks:
        raise document.error("there is nothing to run", "data")
    users = users or ({} if task_set.interaction is None else {"": task_set.interaction})
    with document.at("data"):
        for task in task_set.tasks:
            choose_interaction(users, task.interaction_settings)
    sampling, budget = maker.sampling()
    if file.resume_aborted:
        with document.at("resume_aborted"):
            check_resumable(sampling)
    seed = next((one for one in (seed, file.seed, sampling.seed) if one is not None), None)
    groups = {"rollouts_per_task": file.rollouts_per_task, "tasks": len(task_set.tasks), "files": digests}
    return Run(
        file=file,
        connect=connect,
        renderer=renderer,
        tools=tools,
        interactions=users,
        reward=maker.reward(task_set.reward),
        sampling=replace(sampling, seed=None),  # one seed for all would make the rollouts of a group the same
        budget=budget,
        tasks=list(grouped(task_set.tasks, file.rollouts_per_task)),
        concurrency=concurrency or file.concurrency,
        seed=seed,
        output=Path(output if output is not None else str(file.output)).expanduser(),
        settings=maker.lasting(values) | groups | {"seed": seed},
    )


def _renamed(
    document: loading.Document, values: Mapping[str, Any], names: Mapping[str, str], *path: str
) -> dict[str, Any]:
    """Give settings under verl's names ours. Raises ConfigError if both are there."""
    for key in names.keys() & values:
        if names[key] in values:
            raise document.error(f"{names[key]} is the same setting: leave one of them out", *path, key)
    return {names.get(key, key): value for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class _Maker:
    document: loading.Document
    file: RunFile
    folder: Path
    sources: Mapping[str, TaskSource]

    @property
    def source(self) -> str | None:
        return next((name for name in self.sources if name in self.file.data), None)

    def renderer(self) -> Renderer:
        file, folder, document = self.file, self.folder, self.document
        name, kind = file.tokenizer, file.engine.kind
        if name is None and kind != "embedded":
            raise document.error(f"'tokenizer' is missing: the folder or hub name of the model that {kind} serves")
        if kind == "embedded" and name not in (None, POCKET.name) and (folder / name).resolve() != POCKET.resolve():
            raise document.error("the embedded engine has the pocket model's tokenizer: leave this out", "tokenizer")
        source = POCKET if name is None else folder / name if (folder / name).exists() else name
        parameters = inspect.signature(create_renderer).parameters.values()
        names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name != "tokenizer"]
        document.check_names(file.renderer, [*names, "kwargs"], "renderer")
        settings = {key: value for key, value in file.renderer.items() if key != "kwargs" and value is not None}
        template = settings.get("chat_template")
        if isinstance(template, str) and (folder / template).is_file():
            settings["chat_template"] = (folder / template).read_text(encoding="utf-8")
        with document.at("renderer" if file.renderer else "tokenizer"):
            return create_renderer(source, **settings, **(file.renderer.get("kwargs") or {}))

    def engine(self, vocab_size: int) -> Callable[[], Awaitable[Engine]]:
        section, document = self.file.engine, self.document
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

        async def connect() -> Engine:
            if kind == "embedded":
                return EmbeddedEngine()
            with document.at("engine", "urls" if section.urls else "url"):
                return await connect_engine(urls, kind, **({"vocab_size": vocab_size} | options))

        return connect

    def tools(self) -> list[BaseTool]:
        path, sections = self._beside("tools", self.file.tools_file, self.file.tools), self.file.tools or []
        tools = loading.load_tools(path) if path else loading.make_tools(self.document, sections, self.folder)
        if tools and self.source is not None:
            raise self.document.error(f"data.{self.source} brings its own tools: leave this out", "tools")
        return tools

    def users(self) -> dict[str, BaseInteraction]:
        sections = self.file.interaction
        path = self._beside("interaction", self.file.interaction_file, sections)
        if path is not None:
            return loading.load_interactions(path)
        return {} if sections is None else loading.make_interactions(self.document, sections, self.folder)

    def _beside(self, key: str, name: str | None, section: Any) -> Path | None:
        """Return the path of a section's own file. Raises ConfigError if the section is there as well."""
        if name is None:
            return None
        if section is not None:
            raise self.document.error(f"there is {key!r} too: leave one of them out", f"{key}_file")
        if not (self.folder / name).is_file():
            raise self.document.error(f"there is no file {self.folder / name}", f"{key}_file")
        return self.folder / name

    def sampling(self) -> tuple[SamplingParams, Budget]:
        file, document = self.file, self.document
        limits, values = _renamed(document, file.budget, _VERL_LIMITS, "budget"), dict(file.sampling)
        for key in _NOT_VERL.keys() & limits:
            raise document.error(_NOT_VERL[key], "budget", key)
        budget = document.build(Budget, limits, "budget")
        if "seed" in values and file.seed is not None:
            raise document.error("there is a seed for the whole run too: leave one of them out", "sampling", "seed")
        if "max_tokens" in values and "turn_tokens" in limits:
            raise document.error("budget.turn_tokens is the same: leave one of them out", "sampling", "max_tokens")
        most = values.pop("max_tokens", budget.turn_tokens)
        sampling = document.build(SamplingParams, values, "sampling", max_tokens=most, stop_token_ids=())
        return sampling, replace(budget, turn_tokens=sampling.max_tokens)

    def reward(self, default: Reward | None) -> Reward | None:
        name = self.file.reward
        if name is None or name == self.source:
            return default
        with self.document.at("reward"):
            if name in self.sources:
                raise InputError(f"it judges the answers to data.{name}, and there is no data.{name}")
            function: Reward = loading.load_object(name, self.folder)
            if not callable(function):
                raise InputError("is not a function")
            return function

    def tasks(self, tools: Sequence[BaseTool], limit: int | None) -> tuple[TaskSet, dict[str, str]]:
        """Return the tasks of a source, or of files, and the digests of the files."""
        document, name = self.document, self.source
        other = {key: value for key, value in self.file.data.items() if key != name}
        data = document.convert(DataSection, other, "data")
        if name is not None:
            settings = document.convert(self.sources[name].settings, self.file.data[name], "data", name)
            with document.at("data", name):
                return self.sources[name].make(settings, limit or data.limit), {}
        names = data.files or ([data.file] if data.file else [])
        if not names:
            raise document.error("'file' is missing", "data")
        most, tasks = limit or data.limit or 1 << 62, list[Task]()
        key = "files" if data.files else "file"
        with tempfile.TemporaryDirectory(prefix="tokentrace-") as spool, document.at("data", key):
            inputs = [str(self.folder / name) if (self.folder / name).exists() else name for name in names]
            sources = find_sources(inputs, Path(spool), split=data.split)
            for source in sources:
                from_json = source.format is not Format.PARQUET
                for row in itertools.islice(read_rows(source), most - len(tasks)):
                    try:
                        if row.problem is not None:
                            raise InputError(row.problem)
                        named = f"row-{len(tasks):06d}"
                        tasks.append(row_task(row.value, tools, name=named, from_json=from_json))
                    except InputError as error:
                        raise InputError(f"{Path(source.name).name}, row {row.number}: {error}") from error
        return TaskSet(tasks), {source.name: source.digest for source in sources}

    def lasting(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that must not change when a run continues, without addresses and keys."""
        changing = ("output", "concurrency", "patience", "resume_aborted", "seed")
        lasting = {key: value for key, value in values.items() if key not in changing}
        settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(lasting, enc_hook=str))
        settings["data"].pop("limit", None)
        for key in ("url", "urls", "http", "check_echo"):
            settings["engine"].pop(key, None)
        for key in ("tools_file", "interaction_file"):
            if settings.get(key) is not None:
                settings[key] = loading.read_config(self.folder / settings[key]).values
        for tool in settings.get("tools") or (settings.get("tools_file") or {}).get("tools") or ():
            for key in ("url", "headers", "env"):
                (tool.get("mcp") or {}).pop(key, None)
        return settings
