"""tokentrace: train on the exact tokens the model saw and sampled.

>>> import tokentrace
>>> from tokentrace.pocket import POCKET
>>> renderer = tokentrace.create_renderer(POCKET)
>>> rendered = renderer.render([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> rendered.decode(rendered.mask)
'4<|end|>'
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audit import compare_histories
    from .bridged import BridgedTokens
    from .data.job import tokenize_files
    from .data.supervised import (
        HistoryWarning,
        Supervision,
        build_prompt_response_sample,
        build_supervised_sample,
        build_supervised_samples,
    )
    from .data.tables import read_samples, write_samples
    from .data.tokenizing import TokenizeSettings, tokenize_rows
    from .engines.embedded import EmbeddedEngine
    from .engines.protocol import Engine, EngineError, SamplingParams
    from .errors import (
        ControlTokenError,
        ExtensionError,
        InputError,
        RendererError,
        SampleError,
        TemplateError,
        TemplateLimitError,
        TokenizerError,
        TokentraceError,
        TrajectoryError,
    )
    from .formats.dialects import DIALECTS, Dialect
    from .formats.grammar import CallGrammar, Frame, TurnGrammar
    from .formats.seams import BridgeRefusal, RefusalReason
    from .incremental import tokenize_incrementally
    from .parsing.losses import Loss, LossKind
    from .parsing.parser import StreamingParser
    from .parsing.response import CallStatus, ParsedResponse, ParsedToolCall
    from .rendered import RenderedTokens, TokenSpan
    from .renderer import Renderer, RendererPool, create_renderer, create_renderer_pool
    from .rollout.batch import run_rollouts
    from .rollout.interactions import BaseInteraction
    from .rollout.loop import Agent, Budget, Rollout, Task
    from .rollout.tools import BaseTool
    from .splicing import splice_prefix
    from .template import ChatTemplate
    from .tokens import ControlPolicy, Tokenizer, load_tokenizer
    from .tokens.kinds import Kind, Part
    from .trajectory import Trajectory, TrajectoryFile, Turn, load_trajectory, save_trajectory
    from .trajectory.breaks import Break, BreakCause, explain_break
    from .trajectory.collation import collate
    from .trajectory.packing import Pack, flatten, pack, unpack
    from .trajectory.rows import RolloutReport, report_rollouts, trajectory_samples
    from .trajectory.samples import Sample
    from .trajectory.truncation import Overlong, Truncated, truncate

# Loaded when first asked for: `import tokentrace` and `tokentrace --help` cost next to nothing.
_HOMES = {
    "DIALECTS": "formats.dialects",
    "Agent": "rollout.loop",
    "BaseInteraction": "rollout.interactions",
    "BaseTool": "rollout.tools",
    "Break": "trajectory.breaks",
    "BreakCause": "trajectory.breaks",
    "BridgeRefusal": "formats.seams",
    "BridgedTokens": "bridged",
    "Budget": "rollout.loop",
    "CallGrammar": "formats.grammar",
    "CallStatus": "parsing.response",
    "ChatTemplate": "template",
    "ControlPolicy": "tokens",
    "ControlTokenError": "errors",
    "Dialect": "formats.dialects",
    "EmbeddedEngine": "engines.embedded",
    "Engine": "engines.protocol",
    "EngineError": "engines.protocol",
    "ExtensionError": "errors",
    "Frame": "formats.grammar",
    "HistoryWarning": "data.supervised",
    "InputError": "errors",
    "Kind": "tokens.kinds",
    "Loss": "parsing.losses",
    "LossKind": "parsing.losses",
    "Overlong": "trajectory.truncation",
    "Pack": "trajectory.packing",
    "ParsedResponse": "parsing.response",
    "ParsedToolCall": "parsing.response",
    "Part": "tokens.kinds",
    "RefusalReason": "formats.seams",
    "RenderedTokens": "rendered",
    "Renderer": "renderer",
    "RendererError": "errors",
    "RendererPool": "renderer",
    "Rollout": "rollout.loop",
    "RolloutReport": "trajectory.rows",
    "Sample": "trajectory.samples",
    "SampleError": "errors",
    "SamplingParams": "engines.protocol",
    "StreamingParser": "parsing.parser",
    "Supervision": "data.supervised",
    "Task": "rollout.loop",
    "TemplateError": "errors",
    "TemplateLimitError": "errors",
    "TokenSpan": "rendered",
    "TokenizeSettings": "data.tokenizing",
    "Tokenizer": "tokens",
    "TokenizerError": "errors",
    "TokentraceError": "errors",
    "Trajectory": "trajectory",
    "TrajectoryError": "errors",
    "TrajectoryFile": "trajectory",
    "Truncated": "trajectory.truncation",
    "Turn": "trajectory",
    "TurnGrammar": "formats.grammar",
    "build_prompt_response_sample": "data.supervised",
    "build_supervised_sample": "data.supervised",
    "build_supervised_samples": "data.supervised",
    "collate": "trajectory.collation",
    "compare_histories": "audit",
    "create_renderer": "renderer",
    "create_renderer_pool": "renderer",
    "explain_break": "trajectory.breaks",
    "flatten": "trajectory.packing",
    "load_tokenizer": "tokens",
    "load_trajectory": "trajectory",
    "pack": "trajectory.packing",
    "read_samples": "data.tables",
    "report_rollouts": "trajectory.rows",
    "run_rollouts": "rollout.batch",
    "save_trajectory": "trajectory",
    "splice_prefix": "splicing",
    "tokenize_files": "data.job",
    "tokenize_incrementally": "incremental",
    "tokenize_rows": "data.tokenizing",
    "trajectory_samples": "trajectory.rows",
    "truncate": "trajectory.truncation",
    "unpack": "trajectory.packing",
    "write_samples": "data.tables",
}

__all__ = [
    "DIALECTS",
    "Agent",
    "BaseInteraction",
    "BaseTool",
    "Break",
    "BreakCause",
    "BridgeRefusal",
    "BridgedTokens",
    "Budget",
    "CallGrammar",
    "CallStatus",
    "ChatTemplate",
    "ControlPolicy",
    "ControlTokenError",
    "Dialect",
    "EmbeddedEngine",
    "Engine",
    "EngineError",
    "ExtensionError",
    "Frame",
    "HistoryWarning",
    "InputError",
    "Kind",
    "Loss",
    "LossKind",
    "Overlong",
    "Pack",
    "ParsedResponse",
    "ParsedToolCall",
    "Part",
    "RefusalReason",
    "RenderedTokens",
    "Renderer",
    "RendererError",
    "RendererPool",
    "Rollout",
    "RolloutReport",
    "Sample",
    "SampleError",
    "SamplingParams",
    "StreamingParser",
    "Supervision",
    "Task",
    "TemplateError",
    "TemplateLimitError",
    "TokenSpan",
    "TokenizeSettings",
    "Tokenizer",
    "TokenizerError",
    "TokentraceError",
    "Trajectory",
    "TrajectoryError",
    "TrajectoryFile",
    "Truncated",
    "Turn",
    "TurnGrammar",
    "build_prompt_response_sample",
    "build_supervised_sample",
    "build_supervised_samples",
    "collate",
    "compare_histories",
    "create_renderer",
    "create_renderer_pool",
    "explain_break",
    "flatten",
    "load_tokenizer",
    "load_trajectory",
    "pack",
    "read_samples",
    "report_rollouts",
    "run_rollouts",
    "save_trajectory",
    "splice_prefix",
    "tokenize_files",
    "tokenize_incrementally",
    "tokenize_rows",
    "trajectory_samples",
    "truncate",
    "unpack",
    "write_samples",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
