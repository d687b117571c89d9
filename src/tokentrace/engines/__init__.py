"""Token-in token-out engines: ids and sampling parameters to ids, logprobs and a finish reason.

Importing this loads no optional dependency; connecting to a server needs ``tokentrace[engines]``.
"""

from .embedded import EmbeddedEngine
from .http import Connection, HTTPSettings
from .llamacpp import LlamaCppEngine
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    LogprobKindError,
    SamplingParams,
    collected,
)
from .routing import Router
from .scripted import ScriptedEngine
from .sglang import SGLangEngine
from .vllm import VLLMEngine

__all__ = [
    "Capabilities",
    "Completion",
    "Connection",
    "Delta",
    "EmbeddedEngine",
    "Engine",
    "EngineAnswerError",
    "EngineError",
    "EngineRefusal",
    "EngineUnavailable",
    "FinishReason",
    "GenerateRequest",
    "HTTPSettings",
    "LlamaCppEngine",
    "LogprobKind",
    "LogprobKindError",
    "Router",
    "SGLangEngine",
    "SamplingParams",
    "ScriptedEngine",
    "VLLMEngine",
    "collected",
]
