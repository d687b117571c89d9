"""Tokenizer: one facade over ``tokenizers`` and ``fastokens``, which encodes the same ids much faster."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..errors import InputError, TokenizerError, shown
from .checks import Check, CheckResult, remember_tables, remembered_tables
from .control import ControlPatterns
from .ordinals import ScaffoldTokens
from .vocabulary import TOKEN_FLAGS, Vocabulary

Ids = npt.NDArray[np.int32]

_SAMPLE: Final = (
    "The quick brown fox; it's 1234567 o'clock — they'LL say \"naïve café\" I'd've.\n\n\tdef f(x):\n        return "
    '{\'a\': [1, 2.5e-3], "b": None}  # TODO\r\n<a href="x?y=1&z=2">Ärger</a>   trailing  \n \n日本語のテキスト、'
    "中文字符。한국어 العربية עברית हिन्दी ไทย 🙂👩‍👩‍👧‍👦🇩🇪 e\u0301\u0323 ﬁ Å Ω ½ x²  \u200b\u00a0\ufeff !!??…\n\n\n"
    "snake_case CamelCase SCREAMING 0x1F \\n \\u00e9 ``` $\\alpha$ a@b.c //path/to/file.py:12 +-*/=<>|~^%"
)
"""Text on which the ids of the two encoders are compared when a tokenizer is loaded."""

_LONG: Final = 10_000
"""Characters of a text that may be a conversation which has grown."""
_SEGMENTS: Final = 32 * 2**20
"""Bytes for the texts and ids of segments that fastokens keeps."""

_LARGE: Final = 2**20
"""Bytes of a ``tokenizer.json`` that takes so long to read that its tables are remembered."""

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
        self._core = _shared_core(spec_json, name, fast)
        self.vocabulary = self._core.vocabulary
        self.digest = self._core.digest
        """A hash of the ``tokenizer.json``."""

    @property
    def backend(self) -> str:
        """Which library encodes: ``"fastokens"`` or ``"tokenizers"``."""
        return "fastokens" if self._core.encoder.verdict.fast else "tokenizers"

    def wait(self) -> None:
        """Have the library that encodes loaded, if it is not yet: where its ids are known to be right from an earlier
        time, tokenizers, which loads faster, stands in for fastokens until it is there.
        """
        self._core.encoder.wait()

    def encode(self, text: str) -> Ids:
        """The ids of `text`, control tokens recognised, nothing added: what transformers gives.

        Raises InputError for what is not text, half of a surrogate pair included.
        """
        try:
            return self._core.encoder.encode(text)
        except (TypeError, AttributeError, UnicodeError) as error:
            raise InputError(f"encode takes text that UTF-8 can hold, not {shown(text)}") from error

    def encode_plain(self, texts: Sequence[str], *, first: bool = False, normalized: bool = False) -> list[Ids]:
        """The ids of each text on its own, with no control token in any of them.

        `first` says that ``texts[0]`` begins the input, `normalized` that the normalizer has been over the texts.
        """
        if first and self.vocabulary.first_prefixed and texts:
            begin = self._core.plain(True, normalized).encode_batch(texts[:1])
            return [*begin, *self._core.plain(False, normalized).encode_batch(texts[1:])]
        return self._core.plain(False, normalized).encode_batch(texts)

    def offsets(self, text: str, *, first: bool, normalized: bool = False) -> tuple[Ids, list[tuple[int, int]]]:
        """Plain ids with the character offsets that ``tokenizers`` reports: the last resort of attribution."""
        return _with_offsets(self._core.plain(first, normalized).slow, text)

    def reference(self, text: str) -> tuple[Ids, list[tuple[int, int]]]:
        """What ``tokenizers`` makes of a text, control tokens recognised, with its offsets."""
        return _with_offsets(self._core.encoder.slow, text)

    def normalize(self, text: str) -> tuple[str, list[tuple[int, int]] | None]:
        """A text as the normalizer leaves it, and where each of its characters comes from; None: it is as it was."""
        normal = self._core.normalize(text)
        return normal, None if normal == text else self._core.aligner.encode(text).offsets

    @property
    def patterns(self) -> ControlPatterns:
        """How control tokens are looked for in text."""
        return self._core.patterns

    @property
    def scaffold(self) -> ScaffoldTokens:
        """The control tokens of what templates write themselves."""
        return self._core.scaffold

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD. For people to read, never to encode."""
        return b"".join(self.vocabulary.token_bytes(int(index)) for index in ids).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of a control token, by its text."""
        token = self.vocabulary.control.get(text)
        return None if token is None else token.id

    # -- copying and pickling: by its ``tokenizer.json``; what is made of that is shared inside a process

    def __copy__(self) -> Tokenizer:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self

    def __getstate__(self) -> dict[str, Any]:
        names = ("name", "templates", "variables", "eos_ids")
        given = {name: getattr(self, name) for name in names}
        return {"spec_json": self._core.encoder.spec_json, "fast": self._core.fast, **given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
        _unpickled[self.digest] = self._core
        while len(_unpickled) > 2:
            del _unpickled[next(iter(_unpickled))]

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocabulary.size} ids, {self.backend})"


class _Core:
    """What follows from a ``tokenizer.json`` alone; shared by all tokenizers that have the same one."""

    def __init__(self, spec_json: bytes, digest: str, name: str, fast: bool) -> None:
        tables = remembered_tables(digest) if len(spec_json) >= _LARGE else None
        try:
            self.vocabulary = Vocabulary(spec_json, tables)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(f"{name or 'the tokenizer'} is not a valid tokenizer.json: {error}") from error
        if tables is None and len(spec_json) >= _LARGE:
            remember_tables(digest, self.vocabulary.tables)
        self.digest = digest
        self.name = name
        self.fast = fast
        controls = sorted(self.vocabulary.control)[:40]
        sample = _SAMPLE + "".join(f"{text} x\n{text}" for text in controls)
        self._plain: dict[tuple[bool, bool], _PlainEncoder] = {}
        self.encoder = _Encoder(spec_json, name, digest)
        if fast:
            self.encoder.check(sample, self._plain_oracle)

    def _plain_oracle(self) -> Any:
        """The tokenizer for plain text, where that is the whole one without its added tokens."""
        vocabulary = self.vocabulary
        if not vocabulary.exact or vocabulary.first_prefixed or vocabulary.white_space or not vocabulary.plain_model:
            return None
        return self.plain(True, False).slow

    def plain(self, first: bool, normalized: bool) -> _PlainEncoder:
        """The encoder of text that makes no control token: at the beginning of the input or not, normalized or not."""
        key = (first or not self.vocabulary.first_prefixed, normalized)
        if key not in self._plain:
            self._plain[key] = _PlainEncoder(self, first=key[0], normalized=normalized)
        return self._plain[key]

    @computed
    def patterns(self) -> ControlPatterns:
        return ControlPatterns(self.vocabulary, self.normalize)

    @computed
    def scaffold(self) -> ScaffoldTokens:
        return ScaffoldTokens(self.vocabulary, self.encoder.encode)

    def normalize(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    @computed
    def _normalizer(self) -> Any:
        """The normalizer by itself, for which no vocabulary has to be loaded."""
        import tokenizers

        spec = self.vocabulary.parts.get("normalizer")
        if spec is None:
            return None
        shell = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
        return tokenizers.Tokenizer.from_str(json.dumps({**shell, "normalizer": spec})).normalizer

    @computed
    def aligner(self) -> Any:
        """A tokenizer that does nothing but normalize, with one token for each character that comes out."""
        import tokenizers

        aligner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
        aligner.normalizer = self._normalizer
        aligner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        return aligner


_cores: weakref.WeakValueDictionary[tuple[str, bool], _Core] = weakref.WeakValueDictionary()
_unpickled: dict[str, _Core] = {}
"""The last ones that came out of a pickle: a worker is sent the same one with each task, and lets go of it after."""


def _shared_core(spec_json: str | bytes, name: str, fast: bool) -> _Core:
    raw = spec_json if isinstance(spec_json, bytes) else spec_json.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(raw).hexdigest()
    core = _cores.get((digest, fast))
    if core is None:
        core = _cores[digest, fast] = _Core(raw, digest, name, fast)
    return core


class _Encoder:
    """One ``tokenizer.json`` under both libraries, of which fastokens may not be relied upon, or not be there yet.

    Before it is checked there is no fastokens. The first time both are loaded and compared. Where that is remembered,
    tokenizers, which loads faster, begins; fastokens is loaded beside it when `WORTH` characters have been asked for.
    """

    WORTH: Final = 20_000

    def __init__(self, spec_json: bytes, name: str, digest: str = "") -> None:
        self.spec_json = spec_json
        self._digest = digest
        self._name = name
        self._asked = 0
        self._fast: Any = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._heads: set[int] | None = set()
        """How long texts began, up to the first that begins as another did."""
        self.verdict = CheckResult(False, False)

    @computed
    def slow(self) -> Any:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(self.spec_json)
        except Exception as error:
            raise TokenizerError(
                f"{self._name or 'the tokenizer'} does not load: tokenizers {tokenizers.__version__} does not know "
                "what its tokenizer.json asks for; a newer version may"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def check(self, sample: str, plain: Callable[[], Any] = lambda: None) -> None:
        """Find out whether fastokens can be relied upon, from memory or by a comparison on a sample; say if not.

        `plain` gives the tokenizer that says what plain text is, where it is this one without its added tokens.
        """
        check = Check(self._digest or hashlib.sha256(self.spec_json).hexdigest(), sample)
        verdict = check.remembered()
        if verdict is None:
            try:
                verdict = self._compared(sample, plain)
                check.remember(verdict)
            except (MemoryError, OSError, ImportError) as error:  # may be gone the next time: not remembered
                verdict = CheckResult(False, False, str(error) or type(error).__name__)
        self.verdict = verdict
        if not verdict.fast:
            self._warn(verdict.problem)

    def _compared(self, sample: str, plain: Callable[[], Any]) -> CheckResult:
        expected = self.slow.encode(sample, add_special_tokens=False).ids
        try:
            fast = self._load()
            if fast.encode(sample).ids != expected:
                return CheckResult(False, False, "its ids differ from those of tokenizers")
        except (MemoryError, OSError, ImportError):
            raise
        except Exception as error:
            return CheckResult(False, False, str(error))
        self._fast, oracle = fast, plain()
        if oracle is None:
            return CheckResult(True, False)
        return CheckResult(
            True, fast.encode_ordinary(sample).ids == oracle.encode(sample, add_special_tokens=False).ids
        )

    def _load(self) -> Any:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(self.spec_json.decode("utf-8"))
        fast.no_truncation()
        fast.no_padding()
        return fast

    def _warn(self, problem: str) -> None:
        warnings.warn(
            f"fastokens cannot be used for {self._name or 'this tokenizer'} ({problem}); falling back to "
            "tokenizers, which gives the same ids more slowly",
            RuntimeWarning,
            stacklevel=5,
        )

    def fast(self, characters: int) -> Any:
        """fastokens' tokenizer for a text as long; None where it is not there: not to be relied upon, or not yet."""
        if self._fast is not None or not self.verdict.fast:
            return self._fast
        self._asked += characters
        if self._asked >= self.WORTH and self._process != os.getpid():  # a thread does not outlive a fork
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._arrive, name="tokentrace: fastokens")
            self._thread.start()
        return self._fast

    def wait(self) -> None:
        """Have fastokens loaded, where it can be relied upon."""
        if self.fast(self.WORTH) is None and self._thread is not None:
            self._thread.join()

    def _arrive(self) -> None:
        try:
            self._fast = self._load()
        except Exception as error:  # it loaded when it was compared
            self.verdict = CheckResult(False, False, str(error))
            self._warn(str(error))

    def encode(self, text: str) -> Ids:
        fast = self._fast or self.fast(len(text))
        if fast is not None and (text.isascii() or LONG_S not in text):
            if len(text) >= _LONG and self._heads is not None:
                self._notice(fast, text)
            ids, _ = fast.encode_batch_flat([text])
            return np.frombuffer(ids, np.int32)
        return np.asarray(self.slow.encode(text, add_special_tokens=False).ids, np.int32)

    def _notice(self, fast: Any, text: str) -> None:
        """Have fastokens keep the ids of segments once a long text begins as one before did: conversations that grow
        are encoded in a third of the time then, and those that do not a little more slowly.
        """
        heads, head = self._heads, hash(text[:_LONG])
        if heads is None:
            return
        if head in heads:
            with contextlib.suppress(RuntimeError):  # another thread is encoding: the next time
                fast.enable_segment_cache(_SEGMENTS)
                self._heads = None
        elif len(heads) < 1000:
            heads.add(head)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []
        fast = self._fast or self.fast(sum(map(len, texts)))
        if fast is None or any(LONG_S in text for text in texts if not text.isascii()):
            return _encode_batch(self.slow, texts)
        flat, ends = fast.encode_batch_flat(list(texts))
        ids = np.frombuffer(flat, np.int32)
        bounds = np.frombuffer(ends, np.uint64).astype(np.int64)
        return [ids[bounds[index] : bounds[index + 1]] for index in range(len(texts))]


class _PlainEncoder:
    """Encodes text in which no control token is to be found.

    fastokens encodes it, without looking for added tokens, where that was compared. Elsewhere it begins with the model
    that is loaded already, as it is needed at once where the first forged token turns up; a fastokens of its own, which
    takes seconds to load, joins in when more than `WORTH` characters have been asked for.
    """

    WORTH: Final = 1_000_000

    def __init__(self, core: _Core, *, first: bool, normalized: bool = False) -> None:
        self._vocabulary = core.vocabulary
        self._full = core.encoder
        self._name = core.name
        self._options = {"first": first, "normalized": normalized}
        self._direct = core.vocabulary.exact and first
        """Whether text that spells no control token can as well be encoded with the whole tokenizer."""
        self._asked = 0
        self._fast: _Encoder | None = None

    @computed
    def slow(self) -> Any:
        import tokenizers

        if not self._vocabulary.plain_model:
            return _Encoder(_written(self._vocabulary.plain_spec(**self._options)), self._name).slow
        model = {"type": "BPE", "vocab": {}, "merges": []}  # only to have the rest read; the loaded one is shared
        parts = {**self._vocabulary.plain_parts(**self._options), "model": model}
        shell = _Encoder(_written(parts), self._name).slow
        shell.model = self._full.slow.model
        rows = self._vocabulary.white_space
        shell.add_tokens(
            [
                tokenizers.AddedToken(row["content"], **{flag: bool(row.get(flag)) for flag in TOKEN_FLAGS})
                for row in rows
            ]
        )
        return shell

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if not self._full.verdict.fast:
            return _encode_batch(self.slow, texts)
        pattern = self._vocabulary.control_pattern
        careful = [not self._direct or (pattern is not None and bool(pattern.search(text))) for text in texts]
        pairs = list(zip(texts, careful, strict=True))
        direct = iter(self._full.encode_batch([text for text, spells in pairs if not spells]))
        others = iter(self._carefully([text for text, spells in pairs if spells]))
        return [next(others if spells else direct) for spells in careful]

    def _carefully(self, texts: Sequence[str]) -> list[Ids]:
        length = sum(map(len, texts))
        if self._full.verdict.ordinary and self._direct:
            fast = self._full.fast(length)
            if fast is None or any(LONG_S in text for text in texts):
                return _encode_batch(self.slow, texts)
            return [np.asarray(fast.encode_ordinary(text).ids, np.int32) for text in texts]
        self._asked += length
        if self._asked < self.WORTH:
            return _encode_batch(self.slow, texts)
        if self._fast is None:
            self._fast = _Encoder(_written(self._vocabulary.plain_spec(**self._options)), self._name)
            self._fast.check(_SAMPLE)
        return self._fast.encode_batch(texts)


def _written(spec: dict[str, Any]) -> bytes:
    return json.dumps(spec, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _with_offsets(tokenizer: Any, text: str) -> tuple[Ids, list[tuple[int, int]]]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32), encoding.offsets


def _encode_batch(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, np.int32) for encoding in found]
