"""The pocket model in torch: a small Qwen3 with the names of weights that transformers uses.

`Pocket` is for training and for fast evaluation on one GPU; `save` writes what ``Qwen3ForCausalLM`` loads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

SHIPPED = torch.float16
"""The precision of the saved weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model; `config` has them under the names that transformers uses."""

    vocabulary: int = 4096
    hidden: int = 256
    inner: int = 512
    layers: int = 5
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    positions: int = 4096
    rope_theta: float = 10_000.0
    epsilon: float = 1e-6

    def config(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.epsilon,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": str(SHIPPED).removeprefix("torch."),
        }


class Cache:
    """Keys and values of a batch; row b has `lengths[b]` of them."""

    def __init__(self, shape: Shape, rows: int, capacity: int, device: Any, dtype: torch.dtype) -> None:
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_size)
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding with Qwen's order of halves."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_size, shape.epsilon)
        self.k_norm = RMSNorm(shape.head_size, shape.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
        rows, length, _ = x.shape
        size = self.shape.head_size
        q = self.q_norm(self.q_proj(x).view(rows, length, -1, size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, -1, size)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, size).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if cache is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            at = cache.lengths[:, None] + torch.arange(length, device=x.device)
            row = torch.arange(rows, device=x.device)[:, None]
            keys, values = cache.keys[layer], cache.values[layer]
            keys[row, :, at] = k.transpose(1, 2).to(keys.dtype)
            values[row, :, at] = v.transpose(1, 2).to(values.dtype)
            seen = torch.arange(keys.shape[2], device=x.device) <= at[:, :, None]
            out = functional.scaled_dot_product_attention(
                q, keys.to(q.dtype), values.to(q.dtype), attn_mask=seen[:, None], enable_gqa=True
            )
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.epsilon)


class Pocket(nn.Module):
    """Ids to hidden states; `logits` maps selected states to the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(shape.positions).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * shape.layers) ** 0.5 if deep else 1.0))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states [rows, length, hidden]. With a cache, the ids follow the cached ones."""
        length = ids.shape[1]
        if cache is None:
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            at = cache.lengths[:, None] + torch.arange(length, device=ids.device)
            cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache, index)
        return self.model.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """Logits over the vocabulary, from the tied embedding."""
        return functional.linear(states, self.model.embed_tokens.weight)


def save(model: Pocket, folder: Path, *, bos: int, eos: int, pad: int) -> None:
    """Write weights, config.json and generation_config.json, which transformers and vLLM load."""
    weights = {name: weight.detach().to("cpu", SHIPPED).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    for name, content in (
        ("config.json", model.shape.config(bos, eos, pad)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
