"""Tokenizer: one facade over ``tokenizers`` and ``fastokens``, which encodes the same ids much faster."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TokenizerError
from .vocabulary import Vocabulary

Ids = npt.NDArray[np.int32]

_SAMPLE: Final = (
    "The quick brown fox; it's 1234567 o'clock — they'LL say \"naïve café\" I'd've.\n\n\tdef f(x):\n        return "
    '{\'a\': [1, 2.5e-3], "b": None}  # TODO\r\n<a href="x?y=1&z=2">Ärger</a>   trailing  \n \n日本語のテキスト、'
    "中文字符。한국어 العربية עברית हिन्दी ไทย 🙂👩‍👩‍👧‍👦🇩🇪 e\u0301\u0323 ﬁ Å Ω ½ x²  \u200b\u00a0\ufeff !!??…\n\n\n"
    "snake_case CamelCase SCREAMING 0x1F \\n \\u00e9 ``` $\\alpha$ a@b.c //path/to/file.py:12 +-*/=<>|~^%"
)
"""Text on which the two encoders are held against each other when a tokenizer is loaded."""

LONG_S: Final = "\u017f"
"""``'ſ`` under case-insensitive contractions is the one place the two encoders are known to differ."""


class Tokenizer:
    """Text to ids and back. Never decodes to encode again. Immutable and safe to share between threads.

    `templates` maps names to chat templates (``"default"``, ``"tool_use"``…), `variables` holds the special
    tokens by their template names (``bos_token``…), `eos_ids` the ids that the model's own configuration
    names as ends of generation.
    """

    def __init__(
        self,
        spec_json: str,
        *,
        name: str = "",
        templates: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        fast: bool = True,
    ) -> None:
        self.name = name
        self.templates = dict(templates or {})
        self.variables = dict(variables or {})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self._core = _shared_core(spec_json, name, fast)
        self.vocabulary = self._core.vocabulary
        self.digest = self._core.digest
        """A hash of the ``tokenizer.json``."""

    @property
    def backend(self) -> str:
        """Which library encodes: ``"fastokens"`` or ``"tokenizers"``."""
        return "fastokens" if self._core.encoder.fast is not None else "tokenizers"

    def encode(self, text: str) -> Ids:
        """The ids of `text`, control tokens recognised, nothing added: what transformers gives."""
        return self._core.encoder.encode(text)

    def encode_plain(self, texts: Sequence[str], *, first: bool = False) -> list[Ids]:
        """The ids of each text on its own, with no control token in any of them.

        `first` says that ``texts[0]`` begins the input.
        """
        if first and self.vocabulary.first_prefixed and texts:
            return [self._core.plain_first.encode(texts[0]), *self._core.plain.encode_batch(texts[1:])]
        return self._core.plain.encode_batch(texts)

    def offsets(self, text: str, *, first: bool) -> tuple[Ids, list[tuple[int, int]]]:
        """Plain ids with the character offsets that ``tokenizers`` reports: the last resort of attribution."""
        encoder = self._core.plain_first if first and self.vocabulary.first_prefixed else self._core.plain
        encoding = encoder.slow.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32), encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD. For people to read, never to encode."""
        return b"".join(self.vocabulary.token_bytes(int(index)) for index in ids).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of a control token, by its text."""
        token = self.vocabulary.control.get(text)
        return None if token is None else token.id

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocabulary.size} ids, {self.backend})"


class _Core:
    """What follows from a ``tokenizer.json`` alone; shared by all tokenizers that have the same one."""

    def __init__(self, spec_json: str, digest: str, name: str, fast: bool) -> None:
        try:
            self.vocabulary = Vocabulary(json.loads(spec_json))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(f"{name or 'the tokenizer'} is not a valid tokenizer.json: {error}") from error
        self.digest = digest
        self.name = name
        controls = sorted(self.vocabulary.control)[:40]
        sample = _SAMPLE + "".join(f"{text} x\n{text}" for text in controls)
        self.encoder = _Encoder(spec_json, name, sample=sample if fast else None)

    @functools.cached_property
    def plain(self) -> _Encoder:
        spec = self.vocabulary.plain_spec(first=not self.vocabulary.first_prefixed)
        sample = _SAMPLE if self.encoder.fast is not None else None
        return _Encoder(json.dumps(spec, ensure_ascii=False), self.name, sample=sample)

    @functools.cached_property
    def plain_first(self) -> _Encoder:
        return _Encoder(json.dumps(self.vocabulary.plain_spec(), ensure_ascii=False), self.name, sample=None)


_cores: weakref.WeakValueDictionary[tuple[str, bool], _Core] = weakref.WeakValueDictionary()


def _shared_core(spec_json: str, name: str, fast: bool) -> _Core:
    digest = hashlib.sha256(spec_json.encode("utf-8", "surrogatepass")).hexdigest()
    core = _cores.get((digest, fast))
    if core is None:
        core = _cores[digest, fast] = _Core(spec_json, digest, name, fast)
    return core


class _Encoder:
    """One ``tokenizer.json`` under both libraries. `fast` is None where fastokens cannot be relied upon."""

    def __init__(self, spec_json: str, name: str, *, sample: str | None) -> None:
        self._json = spec_json
        self._name = name
        self.fast: Any = self._load_fast(sample) if sample is not None else None

    @functools.cached_property
    def slow(self) -> Any:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:
            raise TokenizerError(f"{self._name or 'the tokenizer'} does not load: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _load_fast(self, sample: str) -> Any:
        import fastokens

        expected = self.slow.encode(sample, add_special_tokens=False).ids
        problem = "its ids differ from those of tokenizers"
        try:
            fast = fastokens.Tokenizer.from_json_str(self._json)
            fast.no_truncation()
            fast.no_padding()
            if fast.encode(sample).ids == expected:
                return fast
        except Exception as error:
            problem = str(error)
        warnings.warn(
            f"fastokens cannot be used for {self._name or 'this tokenizer'} ({problem}); falling back to "
            "tokenizers, which gives the same ids more slowly",
            RuntimeWarning,
            stacklevel=5,
        )
        return None

    def encode(self, text: str) -> Ids:
        if self.fast is not None and (text.isascii() or LONG_S not in text):
            ids, _ = self.fast.encode_batch_flat([text])
            return np.frombuffer(ids, np.int32)
        return np.asarray(self.slow.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self.fast is None or any(LONG_S in text for text in texts if not text.isascii()):
            return [
                np.asarray(encoding.ids, np.int32)
                for encoding in self.slow.encode_batch(list(texts), add_special_tokens=False)
            ]
        if not texts:
            return []
        flat, ends = self.fast.encode_batch_flat(list(texts))
        ids = np.frombuffer(flat, np.int32)
        bounds = np.frombuffer(ends, np.uint64).astype(np.int64)
        return [ids[bounds[index] : bounds[index + 1]] for index in range(len(texts))]
