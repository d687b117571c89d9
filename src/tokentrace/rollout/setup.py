"""A run of rollouts from its YAML file: engine, renderer, tools, tasks, reward."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ..data.sources import find_sources, read_rows
from ..engines import EmbeddedEngine, Engine, HTTPSettings, SamplingParams
from ..engines.servers import connect as connect_engine
from ..errors import InputError
from ..pocket import POCKET
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from .batch import grouped, row_task
from .interactions import BaseInteraction, choose_user
from .loading import Document, load_object, make_interactions, make_tools, read_config, read_section
from .loop import Agent, Budget, Reward, Task, check_resumable
from .tools import BaseTool

_VERL_NAMES = {"tool_config_path": "tools_file", "interaction_config_path": "interaction_file"}
_VERL_LIMITS = {
    "max_assistant_turns": "turns",
    "max_user_turns": "user_turns",
    "max_parallel_calls": "parallel_calls",
}
_ADDRESS = ("kind", "url", "urls", "http")

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class EngineSection(Struct, forbid_unknown_fields=True):
    kind: Literal["embedded", "vllm", "sglang", "llama.cpp"]
    url: str | None = None
    urls: list[str] = []
    vocab_size: Positive | None = None
    logprobs: Literal["processed", "scaled", "raw"] | None = None
    model: str | None = None
    check_echo: bool | None = None
    http: dict[str, Any] | None = None


class DataSection(Struct, forbid_unknown_fields=True):
    questions: dict[str, Any] | None = None
    file: str | None = None
    files: list[str] = []
    split: str | None = None
    limit: Positive | None = None


class RunFile(Struct, forbid_unknown_fields=True, kw_only=True):
    engine: EngineSection
    data: DataSection
    output: str | None = None
    tokenizer: str | None = None
    renderer: dict[str, Any] = {}
    tools: Any = None
    """A list of `ToolSection`."""
    tools_file: str | None = None
    interaction: Any = None
    """A `UserSection`, or a list of them."""
    interaction_file: str | None = None
    sampling: dict[str, Any] = {}
    budget: dict[str, Any] = {}
    reward: str | None = None
    advantages: Literal["none", "group"] = "none"
    rollouts_per_task: Positive = 1
    concurrency: Positive = 64
    patience: Annotated[float, Meta(ge=0)] | None = 600.0
    seed: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    resume_aborted: bool = False


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks, and the interaction and reward if the configuration has none."""

    tasks: Sequence[Task]
    interaction: BaseInteraction | None = None
    reward: Reward | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the files that hold the tasks."""


MakeTasks = Callable[[Mapping[str, Any], int | None], TaskSet]


@dataclass(frozen=True, slots=True)
class Run:
    """A configuration, ready to run."""

    file: RunFile
    connect: Callable[[], Awaitable[Engine]]
    agent: Callable[[Engine], Agent]
    tools: Sequence[BaseTool]
    tasks: Sequence[Task]
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


def read_run(
    path: str | Path,
    *,
    output: str | Path | None = None,
    limit: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    questions: MakeTasks | None = None,
) -> Run:
    """The run of a YAML file, which the arguments override. Raises ConfigError.

    `questions` makes the tasks for ``data: {questions: ...}``.
    """
    document = read_config(path)
    values = _renamed(document, document.values, _VERL_NAMES)
    file = document.convert(RunFile, values)
    folder = output or file.output
    if folder is None:
        raise document.error("'output' is missing: the folder to write to, or --output")
    renderer = _renderer(document, file)
    with_tools, with_users = (_with_section(document, file, key) for key in ("tools", "interaction"))
    tools = [] if with_tools is None else make_tools(with_tools)
    task_set = _tasks(document, file.data, tools, limit or file.data.limit, questions)
    users = {} if task_set.interaction is None else {"": task_set.interaction}
    users = users if with_users is None else make_interactions(with_users)
    with document.at("data"):
        for task in task_set.tasks:
            choose_user(users, task.interaction_settings)
    sampling, budget = _sampling(document, file)
    seed = next((one for one in (seed, file.seed, sampling.seed) if one is not None), None)
    agent = partial(
        Agent,
        renderer=renderer,
        sampling=replace(sampling, seed=None),  # with one seed, all rollouts of a group would be the same
        tools=tools,
        interaction=users,
        reward=_reward(document, file.reward, task_set.reward),
        budget=budget,
        resume_aborted=file.resume_aborted,
    )
    groups = {"rollouts_per_task": file.rollouts_per_task, "tasks": len(task_set.tasks)}
    return Run(
        file,
        _engine(document, file.engine, renderer.tokenizer.vocabulary.size),
        agent,
        tools,
        list(grouped(task_set.tasks, file.rollouts_per_task)),
        concurrency or file.concurrency,
        seed,
        Path(folder).expanduser(),
        _lasting(document, values) | groups | {"files": task_set.digests, "seed": seed},
    )


def _renamed(
    document: Document, values: Mapping[str, Any], names: Mapping[str, str], *path: str
) -> dict[str, Any]:
    for key in names.keys() & values:
        if names[key] in values:
            raise document.error(f"{names[key]} is the same setting: leave one of them out", *path, key)
    return {names.get(key, key): value for key, value in values.items()}


def _renderer(document: Document, file: RunFile) -> Renderer:
    name, kind, folder = file.tokenizer, file.engine.kind, document.folder
    if name is None and kind != "embedded":
        raise document.error(f"'tokenizer' is missing: that of the model that {kind} serves")
    if (
        kind == "embedded"
        and name not in (None, POCKET.name)
        and (folder / name).resolve() != POCKET.resolve()
    ):
        raise document.error("the embedded engine has its own tokenizer: leave this out", "tokenizer")
    source = POCKET if name is None else folder / name if (folder / name).exists() else name
    parameters = inspect.signature(create_renderer).parameters.values()
    names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    document.check_names(file.renderer, ["renderer", *names, "kwargs"], "renderer")
    settings = {key: value for key, value in file.renderer.items() if key != "kwargs" and value is not None}
    template = settings.get("chat_template")
    if isinstance(template, str) and (folder / template).is_file():
        settings["chat_template"] = (folder / template).read_text(encoding="utf-8")
    with document.at("renderer" if file.renderer else "tokenizer"):
        return create_renderer(source, **settings, **(file.renderer.get("kwargs") or {}))


def _engine(document: Document, section: EngineSection, vocab_size: int) -> Callable[[], Awaitable[Engine]]:
    kind, urls = section.kind, section.urls or [section.url or ""]
    options = msgspec.structs.asdict(section)
    options = {name: value for name, value in options.items() if value is not None and name not in _ADDRESS}
    if section.http is not None:
        options["settings"] = document.convert(HTTPSettings, section.http, "engine", "http")
    if kind == "embedded" and (options or section.url or section.urls):
        raise document.error("the embedded engine has no settings", "engine")
    if kind != "embedded" and (section.url is None) == (not section.urls):
        raise document.error(f"needs the address of {kind} as url, or several as urls", "engine")

    async def connect() -> Engine:
        if kind == "embedded":
            return EmbeddedEngine()
        with document.at("engine", "urls" if section.urls else "url"):
            return await connect_engine(urls, kind, **({"vocab_size": vocab_size} | options))

    return connect


def _with_section(document: Document, file: RunFile, key: str) -> Document | None:
    name, is_here = getattr(file, f"{key}_file"), getattr(file, key) is not None
    if name is None:
        return document if is_here else None
    path = document.folder / name
    if is_here:
        raise document.error(f"{key!r} is set too: leave one of them out", f"{key}_file")
    if not path.is_file():
        raise document.error(f"there is no file {path}", f"{key}_file")
    return read_section(path, key)


def _sampling(document: Document, file: RunFile) -> tuple[SamplingParams, Budget]:
    limits, values = _renamed(document, file.budget, _VERL_LIMITS, "budget"), file.sampling
    budget = document.convert(Budget, limits, "budget")
    if "seed" in values and file.seed is not None:
        raise document.error("there is a seed for the whole run: leave one out", "sampling", "seed")
    if "max_tokens" in values and "turn_tokens" in limits:
        raise document.error("budget.turn_tokens is the same: leave one out", "sampling", "max_tokens")
    sampling = document.convert(SamplingParams, {"max_tokens": budget.turn_tokens, **values}, "sampling")
    if file.resume_aborted:
        with document.at("resume_aborted"):
            check_resumable(sampling)
    return sampling, replace(budget, turn_tokens=sampling.max_tokens)


def _reward(document: Document, name: str | None, default: Reward | None) -> Reward | None:
    if name is None or (name == "questions" and default is not None):
        return default
    with document.at("reward"):
        function: Reward = load_object(name, document.folder)
        if not callable(function):
            raise InputError("is not a function")
        return function


def _tasks(
    document: Document,
    data: DataSection,
    tools: Sequence[BaseTool],
    limit: int | None,
    questions: MakeTasks | None,
) -> TaskSet:
    if data.questions is None:
        task_set = _read_tasks(document, data, tools, limit or 1 << 62)
    elif questions is None:
        raise document.error("there is no such setting", "data", "questions")
    elif tools:
        raise document.error("data.questions brings its own tools: leave this out", "tools")
    else:
        with document.at("data", "questions"):
            task_set = questions(data.questions, limit)
    if not task_set.tasks:
        raise document.error("there is nothing to run", "data")
    return task_set


def _read_tasks(document: Document, data: DataSection, tools: Sequence[BaseTool], limit: int) -> TaskSet:
    names, tasks, folder = data.files or [data.file or ""], list[Task](), document.folder
    if not names[0]:
        raise document.error("'file' is missing", "data")
    with document.at("data", "files" if data.files else "file"):
        inputs = [str(folder / name) if (folder / name).exists() else name for name in names]
        sources = find_sources(inputs, split=data.split)
        for source in sources:
            for row in islice(read_rows(source), limit - len(tasks)):
                name = f"row-{len(tasks):06d}"
                try:
                    if row.problem is not None:
                        raise InputError(row.problem)
                    tasks.append(row_task(row.value, tools, name=name, from_json=not row.filled))
                except InputError as error:
                    raise InputError(f"{Path(source.name).name}, row {row.number}: {error}") from error
    return TaskSet(tasks, digests={source.name: source.digest for source in sources})


def _lasting(document: Document, values: Mapping[str, Any]) -> dict[str, Any]:
    """`Run.settings`, without addresses and keys."""
    changing = ("output", "concurrency", "patience", "resume_aborted", "seed")
    lasting = {key: value for key, value in values.items() if key not in changing}
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(lasting, enc_hook=str))
    settings["data"].pop("limit", None)
    for key in ("url", "urls", "http", "check_echo"):
        settings["engine"].pop(key, None)
    for key in ("tools_file", "interaction_file"):
        if settings.get(key) is not None:
            settings[key] = read_config(document.folder / settings[key]).values
    for tool in settings.get("tools") or (settings.get("tools_file") or {}).get("tools") or ():
        for key in ("url", "headers", "env"):
            (tool.get("mcp") or {}).pop(key, None)
    return settings
