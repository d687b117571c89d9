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
    from .compare.breaks import Break, BreakCause, explain_break
    from .compare.histories import compare_histories
    from .compare.incremental import tokenize_incrementally
    from .data.job import tokenize_files
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
    from .parsing.losses import Loss, LossKind
    from .parsing.parser import StreamingParser
    from .parsing.response import CallStatus, ParsedResponse, ParsedToolCall
    from .rendering.bridged import BridgedTokens
    from .rendering.rendered import RenderedTokens, TokenSpan
    from .rendering.renderer import Renderer, RendererPool, create_renderer, create_renderer_pool
    from .rendering.splicing import splice_prefix
    from .rollout.batch import run_rollouts
    from .rollout.interactions import BaseInteraction
    from .rollout.loop import Agent, Budget, Rollout, Task
    from .rollout.tools import BaseTool
    from .samples.collation import collate
    from .samples.packing import Pack, flatten, pack, unpack
    from .samples.sample import Sample
    from .samples.supervised import (
        HistoryWarning,
        Supervision,
        TurnStartWarning,
        build_prompt_response_sample,
        build_supervised_sample,
        build_supervised_samples,
    )
    from .samples.trajectories import RolloutReport, report_rollouts, trajectory_samples
    from .samples.truncation import Overlong, Truncated, truncate
    from .study.seams import BridgeRefusal, RefusalReason
    from .template import ChatTemplate
    from .tokens import ControlPolicy, Tokenizer, load_tokenizer
    from .tokens.kinds import Kind, Part
    from .trajectory import Trajectory, TrajectoryFile, Turn, load_trajectory, save_trajectory

# Loaded when first asked for: `import tokentrace` and `tokentrace --help` cost next to nothing.
_HOMES = {
    "DIALECTS": "formats.dialects",
    "Agent": "rollout.loop",
    "BaseInteraction": "rollout.interactions",
    "BaseTool": "rollout.tools",
    "Break": "compare.breaks",
    "BreakCause": "compare.breaks",
    "BridgeRefusal": "study.seams",
    "BridgedTokens": "rendering.bridged",
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
    "HistoryWarning": "samples.supervised",
    "InputError": "errors",
    "Kind": "tokens.kinds",
    "Loss": "parsing.losses",
    "LossKind": "parsing.losses",
    "Overlong": "samples.truncation",
    "Pack": "samples.packing",
    "ParsedResponse": "parsing.response",
    "ParsedToolCall": "parsing.response",
    "Part": "tokens.kinds",
    "RefusalReason": "study.seams",
    "RenderedTokens": "rendering.rendered",
    "Renderer": "rendering.renderer",
    "RendererError": "errors",
    "RendererPool": "rendering.renderer",
    "Rollout": "rollout.loop",
    "RolloutReport": "samples.trajectories",
    "Sample": "samples.sample",
    "SampleError": "errors",
    "SamplingParams": "engines.protocol",
    "StreamingParser": "parsing.parser",
    "Supervision": "samples.supervised",
    "Task": "rollout.loop",
    "TemplateError": "errors",
    "TemplateLimitError": "errors",
    "TokenSpan": "rendering.rendered",
    "TokenizeSettings": "data.tokenizing",
    "Tokenizer": "tokens",
    "TokenizerError": "errors",
    "TokentraceError": "errors",
    "Trajectory": "trajectory",
    "TrajectoryError": "errors",
    "TrajectoryFile": "trajectory",
    "Truncated": "samples.truncation",
    "Turn": "trajectory",
    "TurnGrammar": "formats.grammar",
    "TurnStartWarning": "samples.supervised",
    "build_prompt_response_sample": "samples.supervised",
    "build_supervised_sample": "samples.supervised",
    "build_supervised_samples": "samples.supervised",
    "collate": "samples.collation",
    "compare_histories": "compare.histories",
    "create_renderer": "rendering.renderer",
    "create_renderer_pool": "rendering.renderer",
    "explain_break": "compare.breaks",
    "flatten": "samples.packing",
    "load_tokenizer": "tokens",
    "load_trajectory": "trajectory",
    "pack": "samples.packing",
    "read_samples": "data.tables",
    "report_rollouts": "samples.trajectories",
    "run_rollouts": "rollout.batch",
    "save_trajectory": "trajectory",
    "splice_prefix": "rendering.splicing",
    "tokenize_files": "data.job",
    "tokenize_incrementally": "compare.incremental",
    "tokenize_rows": "data.tokenizing",
    "trajectory_samples": "samples.trajectories",
    "truncate": "samples.truncation",
    "unpack": "samples.packing",
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
    "TurnStartWarning",
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
