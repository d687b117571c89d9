"""The public names of engines and where each is defined."""

from ..trajectory.turns import LogprobKind as LogprobKind
from .answers import EngineReply as EngineReply
from .embedded import EmbeddedEngine as EmbeddedEngine
from .errors import EngineAnswerError as EngineAnswerError
from .errors import EngineError as EngineError
from .errors import EngineRefusal as EngineRefusal
from .errors import EngineUnavailable as EngineUnavailable
from .errors import LogprobKindError as LogprobKindError
from .http import Connection as Connection
from .http import HTTPSettings as HTTPSettings
from .llamacpp import LlamaCppEngine as LlamaCppEngine
from .protocol import Capabilities as Capabilities
from .protocol import Completion as Completion
from .protocol import Delta as Delta
from .protocol import Engine as Engine
from .protocol import FinishReason as FinishReason
from .protocol import GenerateRequest as GenerateRequest
from .protocol import SamplingParams as SamplingParams
from .protocol import collected as collected
from .routing import Router as Router
from .scripted import CallbackEngine as CallbackEngine
from .scripted import ScriptedEngine as ScriptedEngine
from .servers import connect as connect
from .sglang import SGLangEngine as SGLangEngine
from .vllm import VLLMEngine as VLLMEngine
