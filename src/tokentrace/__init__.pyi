"""The public names and where each is defined. `__init__.py` reads this file; a name is declared nowhere else."""

from .compare.breaks import Break as Break
from .compare.breaks import BreakCause as BreakCause
from .compare.breaks import explain_break as explain_break
from .compare.histories import compare_histories as compare_histories
from .compare.incremental import tokenize_incrementally as tokenize_incrementally
from .compare.splicing import splice_prefix as splice_prefix
from .conversation.forms import Change as Change
from .data.job import tokenize_files as tokenize_files
from .data.tables import read_samples as read_samples
from .data.tables import write_samples as write_samples
from .data.tokenizing import TokenizeSettings as TokenizeSettings
from .data.tokenizing import tokenize_rows as tokenize_rows
from .engines.embedded import EmbeddedEngine as EmbeddedEngine
from .engines.protocol import Engine as Engine
from .engines.protocol import EngineError as EngineError
from .engines.protocol import SamplingParams as SamplingParams
from .errors import (
    ControlTokenError as ControlTokenError,
)
from .errors import (
    ExtensionError as ExtensionError,
)
from .errors import (
    InputError as InputError,
)
from .errors import LostTextError as LostTextError
from .errors import LostTextWarning as LostTextWarning
from .errors import (
    RendererError as RendererError,
)
from .errors import (
    SampleError as SampleError,
)
from .errors import (
    TemplateError as TemplateError,
)
from .errors import (
    TemplateLimitError as TemplateLimitError,
)
from .errors import (
    TokenizerError as TokenizerError,
)
from .errors import (
    TokentraceError as TokentraceError,
)
from .errors import (
    TrajectoryError as TrajectoryError,
)
from .formats.dialects import DIALECTS as DIALECTS
from .formats.dialects import Dialect as Dialect
from .formats.grammar import CallGrammar as CallGrammar
from .formats.grammar import Frame as Frame
from .formats.grammar import TurnGrammar as TurnGrammar
from .parsing.losses import Loss as Loss
from .parsing.losses import LossKind as LossKind
from .parsing.parser import StreamingParser as StreamingParser
from .parsing.response import (
    CallStatus as CallStatus,
)
from .parsing.response import (
    ParsedResponse as ParsedResponse,
)
from .parsing.response import (
    ParsedToolCall as ParsedToolCall,
)
from .rendering.bridged import BridgedTokens as BridgedTokens
from .rendering.lost import Lost as Lost
from .rendering.rendered import RenderedTokens as RenderedTokens
from .rendering.rendered import TokenSpan as TokenSpan
from .rendering.renderer import (
    Renderer as Renderer,
)
from .rendering.renderer import (
    RendererPool as RendererPool,
)
from .rendering.renderer import (
    create_renderer as create_renderer,
)
from .rendering.renderer import (
    create_renderer_pool as create_renderer_pool,
)
from .rollout.batch import run_rollouts as run_rollouts
from .rollout.interactions import BaseInteraction as BaseInteraction
from .rollout.loop import Agent as Agent
from .rollout.loop import Budget as Budget
from .rollout.loop import Rollout as Rollout
from .rollout.loop import Task as Task
from .rollout.tools import BaseTool as BaseTool
from .samples.collation import collate as collate
from .samples.packing import Pack as Pack
from .samples.packing import flatten as flatten
from .samples.packing import pack as pack
from .samples.packing import unpack as unpack
from .samples.sample import Sample as Sample
from .samples.supervised import (
    HistoryWarning as HistoryWarning,
)
from .samples.supervised import (
    Supervision as Supervision,
)
from .samples.supervised import (
    build_prompt_response_sample as build_prompt_response_sample,
)
from .samples.supervised import (
    build_supervised_sample as build_supervised_sample,
)
from .samples.supervised import (
    build_supervised_samples as build_supervised_samples,
)
from .samples.trajectories import (
    RolloutReport as RolloutReport,
)
from .samples.trajectories import (
    report_rollouts as report_rollouts,
)
from .samples.trajectories import (
    trajectory_samples as trajectory_samples,
)
from .samples.truncation import Overlong as Overlong
from .samples.truncation import Truncated as Truncated
from .samples.truncation import truncate as truncate
from .study.seams import BridgeRefusal as BridgeRefusal
from .study.seams import RefusalReason as RefusalReason
from .template import ChatTemplate as ChatTemplate
from .tokens import ControlPolicy as ControlPolicy
from .tokens import Tokenizer as Tokenizer
from .tokens import load_tokenizer as load_tokenizer
from .tokens.kinds import Kind as Kind
from .tokens.kinds import Part as Part
from .trajectory import (
    Trajectory as Trajectory,
)
from .trajectory import (
    TrajectoryFile as TrajectoryFile,
)
from .trajectory import (
    Turn as Turn,
)
from .trajectory import (
    load_trajectory as load_trajectory,
)
from .trajectory import (
    save_trajectory as save_trajectory,
)

__version__: str
__all__: list[str]
