"""The public names of engines and where each is defined."""

from .callback import CallbackEngine as CallbackEngine
from .callback import EngineReply as EngineReply
from .embedded import EmbeddedEngine as EmbeddedEngine
from .http import Connection as Connection
from .http import HTTPSettings as HTTPSettings
from .llamacpp import LlamaCppEngine as LlamaCppEngine
from .protocol import Capabilities as Capabilities
from .protocol import Completion as Completion
from .protocol import Delta as Delta
from .protocol import Engine as Engine
from .protocol import EngineAnswerError as EngineAnswerError
from .protocol import EngineError as EngineError
from .protocol import EngineRefusal as EngineRefusal
from .protocol import EngineUnavailable as EngineUnavailable
from .protocol import FinishReason as FinishReason
from .protocol import GenerateRequest as GenerateRequest
from .protocol import LogprobKind as LogprobKind
from .protocol import LogprobKindError as LogprobKindError
from .protocol import SamplingParams as SamplingParams
from .protocol import collected as collected
from .routing import Router as Router
from .scripted import Sampled as Sampled
from .scripted import ScriptedEngine as ScriptedEngine
from .servers import connect as connect
from .sglang import SGLangEngine as SGLangEngine
from .vllm import VLLMEngine as VLLMEngine
