"""Tokenizer: one facade over ``tokenizers`` and ``fastokens``, which is much faster."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..errors import InputError, TokenizerError, brief
from .control import ControlPatterns, control_patterns
from .vocabulary import TOKEN_FLAGS, Vocabulary

Ids = npt.NDArray[np.int32]

_SAMPLE = (
    "The quick brown fox; it's 1234567 o'clock — they'LL say \"naïve café\" I'd've.\n\n\tdef f(x):\n        "
    'return {\'a\': [1, 2.5e-3], "b": None}  # TODO\r\n<a href="x?y=1&z=2">Ärger</a>   trailing  \n \n日本語の'
    "テキスト、中文字符。한국어 العربية עברית हिन्दी ไทย 🙂👩‍👩‍👧‍👦🇩🇪 e\u0301\u0323 ﬁ Å Ω ½ x²"
    "  \u200b\u00a0\ufeff !!??…\n\n\nsnake_case CamelCase SCREAMING 0x1F \\n \\u00e9 ``` $\\alpha$ a@b.c "
    "//path/to/file.py:12 +-*/=<>|~^%"
)
"""Text for which fastokens must return the ids of tokenizers."""

_WORTH = 20_000
"""Characters to encode before fastokens is loaded, which takes long."""

_SEGMENTS = 32 * 2**20
"""Bytes of fastokens' segment cache: it encodes growing conversations in a third of the time."""

LONG_S = "\u017f"
"""``'ſ`` under case-insensitive contractions is the two encoders' only known difference."""


class Tokenizer:
    """Text to ids and back. Never re-encodes decoded text. Threads may share it.

    `templates` are chat templates by name, `variables` the special tokens by theirs
    (``bos_token``…), `eos_ids` end generation.
    """

    def __init__(
        self,
        spec_json: str | bytes,
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
        raw = spec_json if isinstance(spec_json, bytes) else spec_json.encode("utf-8", "surrogatepass")
        self.digest = hashlib.sha256(raw).hexdigest()
        key = (self.digest, fast)
        self.core = _cores.get(key) or _cores.setdefault(key, _Core(raw, name, fast))
        self.vocabulary = self.core.vocabulary

    @property
    def backend(self) -> str:
        """The library that encodes now."""
        return "tokenizers" if self.core.fast is None else "fastokens"

    def warm_up(self) -> None:
        """Load and check fastokens now, not after 20,000 characters."""
        self.core.fast_for(_WORTH)

    def encode(self, text: str) -> Ids:
        """The ids of `text` with its control tokens. Raises InputError if it is not text."""
        try:
            return self.core.encode(text)
        except (TypeError, AttributeError, UnicodeError) as error:
            raise InputError(f"encode takes text that UTF-8 can encode, not {brief(text)}") from error

    def encode_plain(self, text: str) -> Ids:
        """The ids of `text` in ordinary tokens, no control tokens. It does not begin the input."""
        return self.core.encode_plain(text, False, False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, for people to read. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.vocabulary.token_bytes(int(index)) for index in ids).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of a control token, by its text."""
        token = self.vocabulary.control.get(text)
        return None if token is None else token.id

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self

    def __getstate__(self) -> dict[str, Any]:  # pickles carry the `tokenizer.json`; a process loads it once
        settings = {name: getattr(self, name) for name in ("name", "templates", "variables", "eos_ids")}
        return {"spec_json": self.core.spec_json, "fast": self.core.may_be_fast, **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
        _unpickled[self.digest] = self.core
        while len(_unpickled) > 2:
            del _unpickled[next(iter(_unpickled))]

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocabulary.size} ids, {self.backend})"


class _Core:
    """What follows from a ``tokenizer.json`` alone, shared by all tokenizers with that file.

    tokenizers encodes first; after `_WORTH` characters fastokens, if its ids are right.
    """

    def __init__(self, spec_json: bytes, name: str, fast: bool) -> None:
        try:
            self.vocabulary = Vocabulary(spec_json)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{name or 'the tokenizer'} is not a valid tokenizer.json: {error}"
            ) from error
        self.spec_json = spec_json
        self.may_be_fast = fast
        self.fast: Any = None
        """fastokens' tokenizer, loaded, with right ids."""
        self._ordinary = False
        """Its ids are right for plain text, too."""
        self._name = name
        self._encoded = 0
        self._lock = threading.Lock()
        self._plain: dict[tuple[bool, bool], Any] = {}

    @computed
    def slow(self) -> Any:
        return self._load_slow(self.spec_json)

    def _load_slow(self, spec: bytes | dict[str, Any]) -> Any:
        import tokenizers

        if isinstance(spec, dict):
            spec = json.dumps(spec, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(spec)
        except Exception as error:
            version = f"tokenizers {tokenizers.__version__}"
            problem = f"{version} does not support its tokenizer.json; a newer version may"
            raise TokenizerError(f"{self._name or 'the tokenizer'} does not load: {problem}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def fast_for(self, characters: int) -> Any:
        """fastokens' tokenizer, once enough characters were encoded, if it is usable."""
        if self.fast is None and self.may_be_fast:
            self._encoded += characters
            if self._encoded >= _WORTH:
                with self._lock:
                    if self.fast is None and self.may_be_fast:
                        self._load_fast()
        return self.fast

    def _load_fast(self) -> None:
        try:
            import fastokens

            fast = fastokens.Tokenizer.from_json_str(self.spec_json.decode("utf-8"))
            fast.no_truncation()
            fast.no_padding()
            sample = _SAMPLE + "".join(f"{text} x\n{text}" for text in sorted(self.vocabulary.control)[:40])
            if fast.encode(sample).ids != self.slow.encode(sample, add_special_tokens=False).ids:
                raise ValueError("its ids differ from those of tokenizers")
            vocabulary = self.vocabulary
            if self._is_direct(True) and vocabulary.plain_model and not vocabulary.white_space:
                plain = self.plain(True, False).encode(sample, add_special_tokens=False).ids
                self._ordinary = fast.encode_ordinary(sample).ids == plain
            fast.enable_segment_cache(_SEGMENTS)
            self.fast = fast
        except TokenizerError:
            raise
        except Exception as error:
            self.may_be_fast = False
            warnings.warn(
                f"fastokens cannot be used for {self._name or 'this tokenizer'} ({error}); falling back to "
                "tokenizers, which gives the same ids more slowly",
                RuntimeWarning,
                stacklevel=5,
            )

    def encode(self, text: str) -> Ids:
        fast = self.fast or self.fast_for(len(text))
        if fast is not None and (text.isascii() or LONG_S not in text):
            ids, _ = fast.encode_batch_flat([text])
            return np.frombuffer(ids, np.int32)
        return np.asarray(self.slow.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_plain(self, text: str, first: bool, normalized: bool) -> Ids:
        """The ids of a text in ordinary tokens."""
        if self._is_direct(first):
            pattern = self.vocabulary.control_pattern
            if pattern is None or not pattern.search(text):
                return self.encode(text)
            fast = self.fast_for(len(text))
            if fast is not None and self._ordinary and LONG_S not in text:
                return np.asarray(fast.encode_ordinary(text).ids, np.int32)
        return with_offsets(self.plain(first, normalized), text)[0]

    def _is_direct(self, first: bool) -> bool:
        """Whether the full tokenizer also encodes text that spells no control token."""
        return self.vocabulary.exact and (first or not self.vocabulary.first_prefixed)

    def plain(self, first: bool, normalized: bool) -> Any:
        """The tokenizer without control tokens: see `Vocabulary.plain_spec`."""
        key = (first or not self.vocabulary.first_prefixed, normalized)
        if key not in self._plain:
            self._plain[key] = self._load_plain(*key)
        return self._plain[key]

    def _load_plain(self, first: bool, normalized: bool) -> Any:
        import tokenizers

        vocabulary = self.vocabulary
        if not vocabulary.plain_model:
            return self._load_slow(vocabulary.plain_spec(first=first, normalized=normalized))
        parts = vocabulary.plain_parts(first=first, normalized=normalized)
        plain = self._load_slow({**parts, "model": {"type": "BPE", "vocab": {}, "merges": []}})
        plain.model = self.slow.model  # shared: loading a vocabulary is slow
        for row in vocabulary.white_space:
            flags = {flag: bool(row.get(flag)) for flag in TOKEN_FLAGS}
            plain.add_tokens([tokenizers.AddedToken(row["content"], **flags)])
        return plain

    @computed
    def patterns(self) -> ControlPatterns:
        return control_patterns(self.vocabulary, lambda text: self.normalize(text)[0])

    def normalize(self, text: str) -> tuple[str, list[tuple[int, int]] | None]:
        """Normalized text, and where its characters come from; None if nothing changed."""
        normalizer = self._aligner.normalizer
        normal = text if normalizer is None else str(normalizer.normalize_str(text))
        return normal, None if normal == text else self._aligner.encode(text).offsets

    @computed
    def _aligner(self) -> Any:
        """A tokenizer that only normalizes: one token for each resulting character."""
        import tokenizers

        aligner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
        aligner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        spec = {**json.loads(aligner.to_str()), "normalizer": self.vocabulary.parts.get("normalizer")}
        return tokenizers.Tokenizer.from_str(json.dumps(spec))


_cores: weakref.WeakValueDictionary[tuple[str, bool], _Core] = weakref.WeakValueDictionary()
_unpickled: dict[str, _Core] = {}
"""The last two cores from pickles: a worker gets the same tokenizer with each task."""


def with_offsets(tokenizer: Any, text: str) -> tuple[Ids, list[tuple[int, int]]]:
    """Ids, and the character offsets that ``tokenizers`` reports: the last resort."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32), encoding.offsets
