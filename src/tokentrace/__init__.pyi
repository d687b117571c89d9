"""The top-level names. They are declared only here: `lazy.py` reads this file."""

from .conversation import Message as Message
from .conversation import Tool as Tool
from .conversation import ToolCall as ToolCall
from .data import tokenize_files as tokenize_files
from .diagnose import compare_histories as compare_histories
from .diagnose import explain_break as explain_break
from .engines import EmbeddedEngine as EmbeddedEngine
from .engines import Engine as Engine
from .engines import SamplingParams as SamplingParams
from .engines import VLLMEngine as VLLMEngine
from .errors import InputError as InputError
from .errors import TemplateError as TemplateError
from .errors import TokentraceError as TokentraceError
from .parsing import ParsedResponse as ParsedResponse
from .parsing import StreamingParser as StreamingParser
from .rendering import BridgedTokens as BridgedTokens
from .rendering import BridgeRefusal as BridgeRefusal
from .rendering import RenderedTokens as RenderedTokens
from .rendering import Renderer as Renderer
from .rendering import create_renderer as create_renderer
from .rendering import create_renderer_pool as create_renderer_pool
from .rollout import Agent as Agent
from .rollout import Budget as Budget
from .rollout import Task as Task
from .rollout import run_rollouts as run_rollouts
from .samples import Sample as Sample
from .samples import build_supervised_sample as build_supervised_sample
from .samples import build_supervised_samples as build_supervised_samples
from .samples import collate as collate
from .samples import trajectory_samples as trajectory_samples
from .samples import truncate as truncate
from .tokens import load_tokenizer as load_tokenizer
from .trajectory import Trajectory as Trajectory
from .trajectory import load_trajectory as load_trajectory
from .version import __version__ as __version__

__all__: list[str]
