"""A table of the servers' dialects: requests, answers, and how to read the answers."""

import base64
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.engines.support import RECORDINGS, Fake, Model, Reply, recording
from tokentrace.engines.adapter import HTTPEngine
from tokentrace.engines.llamacpp import COMPLETION, LlamaCppEngine
from tokentrace.engines.protocol import OPTIONAL, Capabilities, SamplingParams
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import COMPLETIONS, GENERATE, VLLMEngine
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

TINY = Capabilities(
    "tiny",
    model="tiny",
    max_length=4096,
    vocab_size=1024,
    logprobs=LogprobKind.PROCESSED,
    aborts=True,
    pauses=True,
    top_logprobs=20,
    sampling=frozenset(OPTIONAL),
    weights=True,
)
RAW = replace(TINY, logprobs=LogprobKind.RAW)
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FORCED = ("logit_bias", "ignore_eos")
"""Settings that only the recordings used; adapters have no such settings."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """A server's format of requests and answers."""

    name: str
    kind: type[HTTPEngine]
    path: str
    read: Callable[[Any], dict[str, Any]]
    """Reads ids, logprobs, versions and cached tokens from a whole answer."""
    body: dict[str, Any] = field(default_factory=dict)
    """Fields that the adapter adds to a recorded request."""
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def engine(self, *answers: Any, capabilities: Capabilities = RAW, **options: Any) -> tuple[Any, Fake]:
        """An engine and the fake server behind it."""
        fake = Fake().on(self.path, *answers)
        return self.kind(fake.connection(), capabilities, **(self.options | options)), fake  # type: ignore[call-arg]

    def expected_body(self, recorded: Any, **changes: Any) -> Any:
        """The recorded body with every sampling setting, and without the settings in `FORCED`."""
        body = self.body | copy.deepcopy(recorded["request"]["json"]) | changes
        params = body.get("sampling_params", body)
        for name in FORCED:
            params.pop(name, None)
        params |= {name: value for name, value in self.params.items() if name not in params}
        return body | ({"rid": f"{len(body['rid'])}-{body['rid']}"} if "rid" in body else {})


def _vllm(answer: Any) -> dict[str, Any]:
    choice, usage = answer["choices"][0], answer["usage"]
    rows = choice["logprobs"].get("content") or []
    return {
        "ids": choice["token_ids"],
        "logprobs": [row["logprob"] for row in rows] or choice["logprobs"]["token_logprobs"],
        "versions": choice.get("weight_versions") or [],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


def _sglang(answer: Any) -> dict[str, Any]:
    meta = answer["meta_info"]
    logprobs = [row[0] for row in meta["output_token_logprobs"]]
    versions, cached = meta["weight_versions"], meta["cached_tokens"]
    return {"ids": answer["output_ids"], "logprobs": logprobs, "versions": versions, "cached": cached}


def _llamacpp(answer: Any) -> dict[str, Any]:
    logprobs = [row["logprob"] for row in answer["completion_probabilities"]]
    return {"ids": answer["tokens"], "logprobs": logprobs, "versions": [], "cached": answer["timings"]["cache_n"]}


NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **PENALTIES}
VLLM = Dialect(
    "vllm", VLLMEngine, GENERATE, _vllm, {"return_token_ids": False}, NEUTRAL, {"path": GENERATE, "check_echo": False}
)
VLLM_COMPLETIONS = Dialect(
    "vllm by completions",
    VLLMEngine,
    COMPLETIONS,
    _vllm,
    {"add_special_tokens": False, "return_tokens_as_token_ids": True},
    NEUTRAL,
    {"path": COMPLETIONS},
)
SGLANG = Dialect(
    "sglang",
    SGLangEngine,
    "/generate",
    _sglang,
    {"logprob_start_len": -1, "stream": False},
    NEUTRAL | {"top_k": -1, "skip_special_tokens": False},
)
LLAMACPP = Dialect("llama.cpp", LlamaCppEngine, COMPLETION, _llamacpp, {"post_sampling_probs": False, "stream": False})
DIALECTS = (VLLM, VLLM_COMPLETIONS, SGLANG, LLAMACPP)


def inputs(recorded: Any) -> tuple[list[int], SamplingParams, str | None]:
    """The prompt, the sampling parameters and the id of a recorded request."""
    body = recorded["request"]["json"]
    params = body.get("sampling_params", body)
    max_tokens = next(params[name] for name in ("max_tokens", "max_new_tokens", "n_predict") if name in params)
    sampling = SamplingParams(
        max_tokens,
        temperature=params.get("temperature", 1.0),
        seed=params.get("seed"),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
    )
    prompt = next(body[name] for name in ("token_ids", "input_ids", "prompt") if name in body)
    return prompt, sampling, body.get("request_id") or body.get("rid")


def spans(rows: Any) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*row.values()) for row in rows)


# -- fake servers

FLAT = np.linspace(0.0, -2.0, 64)


def vllm_server(*, mode: str = "processed", native: bool = True, logits: Any = FLAT, seed: int = 0) -> Fake:
    """Like vLLM 0.32: ``logprobs: 1`` returns the sampled token's logprob only, ``2`` also that of the likeliest."""
    model = Model(mode, logits, seed)

    def sample(body: Any, limit: int) -> tuple[int, Any, list[int]]:
        params = body.get("sampling_params", body)
        token, logprobs, ranked = model.sample(params["temperature"], params["top_k"])
        return token, logprobs, [token, *(one for one in ranked[: params["logprobs"]] if one != token)][:limit]

    def generate(body: Any) -> Any:
        token, logprobs, tokens = sample(body, body["sampling_params"]["logprobs"])
        rows = [{"token_id": one, "logprob": logprobs[one]} for one in tokens]
        answer = recording("vllm_generate")["response"] | {"prompt_token_ids": body["token_ids"]}
        answer["usage"]["prompt_tokens"] = len(body["token_ids"])
        answer["choices"][0] |= {
            "token_ids": [token],
            "weight_versions": [{"version": "default", "start": 0, "end": 1}],
            "logprobs": {"content": [rows[0] | {"top_logprobs": rows}]},
        }
        return answer

    def completions(body: Any) -> Any:
        token, logprobs, tokens = sample(body, 99)
        answer = recording("vllm_completions_ids")["response"]
        tops = [{f"token_id:{one}": logprobs[one] for one in tokens}]
        logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [logprobs[token]], "top_logprobs": tops}
        answer["usage"]["prompt_tokens"] = len(body["prompt"])
        answer["choices"][0] |= {"token_ids": [token], "logprobs": logprobs, "prompt_token_ids": body["prompt"]}
        return answer

    disabled = (RECORDINGS / "vllm_generate_disabled_403.txt").read_bytes()
    fake = Fake().on("/version", {"version": "0.32.0"}).on(COMPLETIONS, completions)
    fake.on("/v1/models", {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]})
    if native:
        fake.on("/is_paused", recording("vllm_is_paused")["response"])
        fake.on("/weight_info", {"weight_version": "default"})
    return fake.on(GENERATE, generate if native else Reply([disabled.split(b"\n")[0]], 403))


def sglang_server(*, mode: str = "scaled", experts: int = 0, **model: Any) -> Fake:
    """Answers in the shape of SGLang's documentation; the completion is a recorded one."""
    served_model = Model(mode, FLAT)

    def generate(body: Any) -> Any:
        answer = recording("sglang_generate_prompt_lp")["response"]
        params = body["sampling_params"]
        _, logprobs, ranked = served_model.sample(params["temperature"], max(params["top_k"], 0))
        top = [[[logprobs[ranked[0]], ranked[0], None]]]
        answer["meta_info"] |= {"output_top_logprobs": top, "prompt_tokens": len(body["input_ids"])}
        if experts and body.get("return_routed_experts"):
            answer["meta_info"]["routed_experts"] = base64.b64encode(bytes(4 * experts)).decode()
        return answer

    fake = Fake().on("/generate", generate).on("/version", {"version": "0.5.23"})
    fake.on("/get_model_info", {"model_path": "models/tiny", "weight_version": "default"} | model)
    fake.on("/get_server_info", {"version": "0.5.23", "context_length": None, "max_total_num_tokens": 20480})
    return fake.on("/v1/models", {"data": [{"id": "tiny", "max_model_len": 4096}]})


def llamacpp_server() -> Fake:
    fake = Fake().on("/props", recording("llamacpp_props")["response"])
    return fake.on("/v1/models", {"data": [{"id": "tiny.gguf", "meta": {"n_vocab": 1024}}]})
