"""The pocket model in NumPy: Qwen3 in float32, a cache per sequence, batches of any lengths.

>>> model = load_pocket()
>>> cache = model.new_cache()
>>> model.extend([cache], [[4065, 4067]]).shape, cache.length
((1, 4096), 2)
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from ..errors import InputError, brief

Floats = npt.NDArray[np.float32]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

BLOCK = 256
"""Tokens that attend at a time, so that memory does not grow with the square of the length."""
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
SMALLEST = 256
"""The initial capacity of a cache, in tokens."""


class Cache:
    """The keys and values of the first `length` tokens of a sequence. Grows as needed."""

    __slots__ = ("keys", "length", "values")

    def __init__(self, layers: int, kv_heads: int, head_size: int, capacity: int) -> None:
        # Transposed, so that multiplying a query with them reads memory in order.
        self.keys: Floats = np.zeros((layers, kv_heads, head_size, capacity), np.float32)
        self.values: Floats = np.zeros((layers, kv_heads, capacity, head_size), np.float32)
        self.length = 0

    @property
    def capacity(self) -> int:
        return int(self.values.shape[2])

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise InputError(f"a cache of {self.length} tokens cannot be cut to {length}")
        self.length = length

    def copy(self, length: int | None = None, capacity: int = 0) -> Cache:
        """A copy of the first `length` tokens; of all by default."""
        count = self.length if length is None else length
        if not 0 <= count <= self.length:
            raise InputError(f"a cache of {self.length} tokens has no prefix of {length}")
        layers, kv_heads, head_size, _ = self.keys.shape
        other = Cache(layers, kv_heads, head_size, max(count, capacity, SMALLEST))
        other.keys[..., :count] = self.keys[..., :count]
        other.values[:, :, :count] = self.values[:, :, :count]
        other.length = count
        return other

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all."""
        if length > self.capacity:
            grown = self.copy(capacity=max(length, 2 * self.capacity))
            self.keys, self.values = grown.keys, grown.values

    def __repr__(self) -> str:
        return f"Cache({self.length} of {self.capacity} tokens)"


class _Layer:
    """The weights of one layer, with matrices transposed for ``rows @ matrix``."""

    def __init__(self, weights: dict[str, Floats], index: int) -> None:
        def of(name: str) -> Floats:
            return weights[f"model.layers.{index}.{name}.weight"]

        def joined(*names: str) -> Floats:
            return np.ascontiguousarray(np.concatenate([of(name) for name in names]).T)

        self.before_attention = of("input_layernorm")
        self.qkv = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.q_norm, self.k_norm = of("self_attn.q_norm"), of("self_attn.k_norm")
        self.out = joined("self_attn.o_proj")
        self.before_mlp = of("post_attention_layernorm")
        self.gate_up = joined("mlp.gate_proj", "mlp.up_proj")
        self.down = joined("mlp.down_proj")


class PocketModel:
    """Ids in, logits out. Holds no sequences itself, and is safe to use from several threads."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Floats]) -> None:
        self._config = config
        self._shapes = {name: array.shape for name, array in weights.items()}
        self.vocabulary_size = int(config["vocab_size"])
        self.longest = int(config["max_position_embeddings"])
        """How many tokens a sequence can have."""
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        self._head_size = size = int(config["head_dim"])
        self._epsilon = np.float32(config["rms_norm_eps"])
        self._embedding = np.ascontiguousarray(weights[_EMBEDDING])
        self._head = np.ascontiguousarray(self._embedding.T)
        self._norm = weights["model.norm.weight"]
        self._layers = [_Layer(weights, index) for index in range(int(config["num_hidden_layers"]))]
        # Normed and rotated together; the queries' norm includes the attention scale.
        scale = np.ones((self._heads + self._kv_heads, 1), np.float32)
        scale[: self._heads] = 1 / math.sqrt(size)
        heads = [self._heads, self._kv_heads]
        norms = (np.stack((one.q_norm, one.k_norm)) for one in self._layers)
        self._qk_norms = [np.repeat(pair, heads, axis=0) * scale for pair in norms]
        # In float32 from the start, as in other engines: at a thousand tokens the rounding is
        # visible.
        powers = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        frequencies = np.float32(1) / np.float32(config["rope_theta"]) ** powers
        angles = np.outer(np.arange(self.longest, dtype=np.float32), frequencies)[:, None, :]
        self._cos, self._sin = np.cos(angles), np.sin(angles)

    def with_weights(self, weights: Mapping[str, Floats]) -> PocketModel:
        """The model with new weights; a head must equal the embedding.

        Raises InputError if any is missing, unknown or of another shape.
        """
        arrays = dict(weights)
        head = arrays.pop(_HEAD, None)
        shapes = {name: shape for name, shape in self._shapes.items() if name != _HEAD}
        for name in [*shapes, *arrays]:
            if name not in arrays:
                raise InputError(f"the new weights have no {name!r}; they must include all of the model's")
            if name not in shapes:
                raise InputError(f"the new weights have {name!r}, which the model does not have")
            if arrays[name].shape != shapes[name]:
                raise InputError(
                    f"{name} has shape {arrays[name].shape}, but the model's has {shapes[name]}"
                )
        if head is not None and not np.array_equal(head, arrays[_EMBEDDING]):
            raise InputError(f"{_HEAD} differs from {_EMBEDDING}: the model has one matrix for both")
        return PocketModel(self._config, arrays)

    def new_cache(self, capacity: int = SMALLEST) -> Cache:
        """The cache of an empty sequence."""
        return Cache(len(self._layers), self._kv_heads, self._head_size, max(1, capacity))

    @overload
    def extend(self, caches: Sequence[Cache], ids: Sequence[TokenIds]) -> Floats: ...
    @overload
    def extend(
        self, caches: Sequence[Cache], ids: Sequence[TokenIds], *, every: Literal[True]
    ) -> list[Floats]: ...
    def extend(
        self, caches: Sequence[Cache], ids: Sequence[TokenIds], *, every: bool = False
    ) -> Floats | list[Floats]:
        """Append ids to each sequence. Returns the logits after its last id, [sequences, vocabulary].

        With `every`, returns the logits after each new id, one array [ids, vocabulary] per
        sequence. Leaves the caches unchanged if it raises InputError.
        """
        rows = self._check(caches, ids)
        counts = [len(row) for row in rows]
        ends = np.cumsum(counts)
        flat = np.concatenate(rows)
        begins = np.repeat([cache.length for cache in caches] - ends + counts, counts)
        places = begins + np.arange(len(flat))
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(cache.length + count)
        x = self._embedding[flat]
        cos, sin = self._cos[places], self._sin[places]
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, self._qk_norms[index], x, cos, sin)
            for cache, stop, count in zip(caches, ends, counts, strict=True):
                new, old = slice(stop - count, stop), slice(cache.length, cache.length + count)
                cache.keys[index, :, :, old] = k[new].transpose(1, 2, 0)
                cache.values[index, :, old] = v[new].transpose(1, 0, 2)
            attend = self._attend_next if len(flat) == len(caches) else self._attend_many
            x = x + attend(index, caches, counts, q) @ layer.out
            x = x + self._mlp(layer, x)
        for cache, count in zip(caches, counts, strict=True):
            cache.length += count
        if not every:
            x = x[ends - 1]
        logits: Floats = self._normed(x, self._norm) @ self._head
        return np.split(logits, ends[:-1]) if every else logits

    def score(self, ids: TokenIds) -> Floats:
        """The logprob of each id after the first, given all ids before it."""
        (logits,) = self.extend([self.new_cache(len(ids))], [ids], every=True)
        return log_softmax(logits[:-1])[np.arange(len(ids) - 1), np.asarray(ids[1:], np.intp)]

    def _check(self, caches: Sequence[Cache], ids: Sequence[TokenIds]) -> list[npt.NDArray[np.intp]]:
        if len(caches) != len(ids) or not len(caches):
            raise InputError(f"{len(ids)} sequences of ids for {len(caches)} caches; give one for each")
        if len({id(cache) for cache in caches}) < len(caches):
            raise InputError("a cache was given twice; make a copy of it")
        rows = []
        for at, (cache, new_ids) in enumerate(zip(caches, ids, strict=True)):
            row = np.asarray(new_ids)
            if row.ndim != 1 or not len(row) or not np.issubdtype(row.dtype, np.integer):
                raise InputError(f"sequence {at}: the ids are not a list of at least one number")
            if row.min() < 0 or row.max() >= self.vocabulary_size:
                raise InputError(
                    f"sequence {at}: an id is outside of the vocabulary of {self.vocabulary_size}"
                )
            if (length := cache.length + len(row)) > self.longest:
                raise InputError(f"sequence {at}: {length} tokens are more than {self.longest}")
            rows.append(row.astype(np.intp))
        return rows

    def _normed(self, x: Floats, weight: Floats) -> Floats:
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        normed: Floats = x * (weight / np.sqrt(mean + self._epsilon))
        return normed

    def _project(
        self, layer: _Layer, norms: Floats, x: Floats, cos: Floats, sin: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Scaled queries [tokens, heads, size]; keys, values [tokens, kv heads, size]."""
        projected = (self._normed(x, layer.before_attention) @ layer.qkv).reshape(
            len(x), -1, self._head_size
        )
        both = self._normed(projected[:, : self._heads + self._kv_heads], norms)
        half = self._head_size // 2
        first, second = both[..., :half], both[..., half:]
        turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
        return (
            turned[:, : self._heads],
            turned[:, self._heads :],
            projected[:, self._heads + self._kv_heads :],
        )

    def _attend_next(self, index: int, caches: Sequence[Cache], counts: Sequence[int], q: Floats) -> Floats:
        """Attend with one new token per sequence: one softmax for all."""
        lengths = [cache.length + 1 for cache in caches]
        groups = self._heads // self._kv_heads
        q = q.reshape(len(caches), self._kv_heads, groups, self._head_size)
        scores = np.full((len(caches), self._kv_heads, groups, max(lengths)), -np.inf, np.float32)
        for row, cache, length, out in zip(q, caches, lengths, scores, strict=True):
            np.matmul(row, cache.keys[index, :, :, :length], out=out[..., :length])
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = np.empty_like(q)
        for row, cache, length, out in zip(scores, caches, lengths, mixed, strict=True):
            np.matmul(row[..., :length], cache.values[index, :, :length], out=out)
        mixed /= scores.sum(-1, keepdims=True)
        return mixed.reshape(len(caches), -1)

    def _attend_many(self, index: int, caches: Sequence[Cache], counts: Sequence[int], q: Floats) -> Floats:
        """Attend with several new tokens per sequence: one sequence after another, in blocks."""
        groups = self._heads // self._kv_heads
        mixed = np.empty((len(q), self._kv_heads, groups, self._head_size), np.float32)
        begin = 0
        for cache, count in zip(caches, counts, strict=True):
            for start in range(0, count, BLOCK):
                stop = min(start + BLOCK, count)
                length = cache.length + stop
                block: Floats = q[begin + start : begin + stop].reshape(
                    -1, self._kv_heads, groups, self._head_size
                )
                block = block.transpose(1, 2, 0, 3).reshape(self._kv_heads, -1, self._head_size)
                scores = block @ cache.keys[index, :, :, :length]
                scores = scores.reshape(self._kv_heads, groups, stop - start, length)
                later = np.arange(length) > np.arange(cache.length + start, length)[:, None]
                scores[..., later] = -np.inf
                scores -= scores.max(-1, keepdims=True)
                np.exp(scores, out=scores)
                total = scores.sum(-1, keepdims=True)
                out = scores.reshape(self._kv_heads, -1, length) @ cache.values[index, :, :length]
                out = out.reshape(self._kv_heads, groups, stop - start, self._head_size) / total
                mixed[begin + start : begin + stop] = out.transpose(2, 0, 1, 3)
            begin += count
        return mixed.reshape(len(q), -1)

    def _mlp(self, layer: _Layer, x: Floats) -> Floats:
        both = self._normed(x, layer.before_mlp) @ layer.gate_up
        half = both.shape[-1] // 2
        gate, up = both[:, :half], both[:, half:]
        with np.errstate(over="ignore"):  # exp(-gate) is infinite where the sigmoid is 0
            out: Floats = (gate / (1 + np.exp(-gate)) * up) @ layer.down
        return out


def log_softmax(logits: Floats) -> Floats:
    """Return logprobs along the last axis. Sums in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    logprobs: Floats = shifted - np.log(total).astype(np.float32)
    return logprobs


def read_safetensors(path: Path) -> dict[str, Floats]:
    """Read all tensors of a file as float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, row in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        low, high = (start + offset for offset in row["data_offsets"])
        raw = memoryview(data)[low:high]
        match row["dtype"]:
            case "F32":
                array = np.frombuffer(raw, "<f4").astype(np.float32)
            case "F16":
                array = np.frombuffer(raw, "<f2").astype(np.float32)
            case "BF16":  # the upper half of a float32
                array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            case other:
                raise InputError(f"{path.name}, {name}: numbers of type {other} are not supported")
        tensors[name] = array.reshape(row["shape"])
    return tensors


def weights_from(source: str | Path | Mapping[str, Any]) -> dict[str, Floats]:
    """A folder's safetensors, or copies of a mapping's arrays or tensors, as float32."""
    if isinstance(source, Mapping):
        return {str(name): _array(name, value) for name, value in source.items()}
    if not isinstance(source, str | Path):
        raise InputError(f"weights are a folder of safetensors or a mapping of arrays, not {brief(source)}")
    files = sorted(Path(source).glob("*.safetensors"))
    if not files:
        raise InputError(f"{source} has no safetensors")
    weights: dict[str, Floats] = {}
    for file in files:
        weights |= {name: _array(name, value) for name, value in read_safetensors(file).items()}
    return weights


def _array(name: Any, value: Any) -> Floats:
    if callable(getattr(value, "detach", None)):  # a torch tensor, on any device and of any dtype
        value = value.detach().cpu().float().numpy()
    array = np.array(value, dtype=np.float32)  # a copy: trainers change tensors in place
    if not np.isfinite(array).all():
        raise InputError(f"{name}: the new weights are not finite")
    return array


@functools.cache
def load_pocket() -> PocketModel:
    """The shipped model. Loads it once."""
    folder = Path(__file__).parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return PocketModel(config, read_safetensors(folder / "model.safetensors"))
