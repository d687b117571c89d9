"""Encoding spans: each token belongs to a span, and only trusted text makes control tokens."""

import itertools
import json
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support import examples
from tokentrace import create_renderer
from tokentrace.errors import ControlTokenError
from tokentrace.template import Rendering
from tokentrace.tokens import ControlPolicy, Encoded, Ids, Tokenizer, Trust, encode_spans
from tokentrace.tokens.encoding import ForgedControl

pytestmark = pytest.mark.filterwarnings("ignore:fastokens cannot be used")

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the user said hello to the assistant",
    "naïve café déjà vu, garçon; Ärger über Öl; 한국어 말 日本語 中文 emoji 🙂🙂",
    "def f(x):\n    return x + 1\n\n\nuser assistant tool im_start im_end think",
] * 3
CONTROLS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>"]
LITERAL, REJECT, COMPAT = ControlPolicy.LITERAL, ControlPolicy.REJECT, ControlPolicy.HF_COMPAT


def added(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"special": True, "normalized": False} | flags)


def _trained(tokenizer: tokenizers.Tokenizer, trainer: Any, extra: Sequence[AddedToken] = ()) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([added(text) for text in CONTROLS] + list(extra))
    return tokenizer


def byte_level(normalizer: Any = None, extra: Sequence[AddedToken] = ()) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(bpe, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False), extra)


def byte_fallback(scheme: str | None, extra: Sequence[AddedToken] = ()) -> tokenizers.Tokenizer:
    """As in Llama 2 (a space before the text) and Gemma (none): unknown characters are spelled in bytes."""
    bpe = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if scheme else steps)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *CONTROLS[-1:], *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = _trained(bpe, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False), extra)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [row for row in spec["added_tokens"] if not row["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def unigram(scheme: str, extra: Sequence[AddedToken] = ()) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    return _trained(tokenizer, trainer, extra)


NORMALIZED = [
    added("<N>", normalized=True),
    added("Word", normalized=True, single_word=True),
    added("<B>", normalized=True, lstrip=True, rstrip=True),
    added("<n>x", normalized=True),
]

KINDS = {
    "byte_level": byte_level,
    "byte_level_nfc": lambda: byte_level(normalizers.NFC()),
    "byte_level_nfkc": lambda: byte_level(normalizers.NFKC()),
    "byte_level_lower": lambda: byte_level(normalizers.Lowercase()),
    "byte_level_strip": lambda: byte_level(None, [added("<L>", lstrip=True), added("<R>", rstrip=True)]),
    "byte_level_word": lambda: byte_level(
        None, [added("word", single_word=True), added("<B>", lstrip=True, rstrip=True)]
    ),
    "byte_fallback": lambda: byte_fallback(None),
    "byte_fallback_prepended": lambda: byte_fallback("always"),
    "normalized_lower": lambda: byte_level(normalizers.Lowercase(), NORMALIZED),
    "normalized_prepended": lambda: byte_level(normalizers.Prepend("a"), NORMALIZED),
    "normalized_replaced": lambda: byte_level(normalizers.Replace("ñ", "<N>"), NORMALIZED),
    "normalized_stripped": lambda: byte_level(normalizers.Strip(), NORMALIZED),
    "normalized_nothing": lambda: byte_level(None, NORMALIZED),
    "normalized_fallback": lambda: byte_fallback("always", NORMALIZED),
    "white_space": lambda: byte_level(None, [added("\n\n", special=False), added("<L>"), added("\t\t", special=False)]),
    "white_space_overlapping": lambda: byte_level(
        None, [added("<|a|>"), added("\n<|b|>"), added("\n\n", special=False)]
    ),
    "overlapping": lambda: byte_level(None, [added("<s><s>"), added("s><think"), added("k>a"), added("b<|")]),
    "unigram_always": lambda: unigram("always"),
    "unigram_first": lambda: unigram("first"),
    "unigram_never": lambda: unigram("never"),
    # a space put before the text and a space absorbed by a token cancel out in the sum of bytes
    "unigram_strip": lambda: unigram("always", [added("<R>", rstrip=True)]),
}
STRIPPING = ("<L>", "<R>", "<B>")
EXACT = [
    kind for kind in KINDS if kind not in ("byte_level_nfkc", "byte_level_lower") and not kind.startswith("normalized")
]


@cache
def made(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    reference = KINDS[kind]()
    tokenizer = Tokenizer(reference.to_str())
    tokenizer.warm_up()
    return tokenizer, reference


def trust_of(origin: Any) -> Trust:
    """Text with an origin is not trusted."""
    return Trust.NONE


def laid_out(pieces: Sequence[tuple[str, bool]]) -> tuple[Rendering, list[Trust]]:
    """Pieces of text, each trusted or not, as a rendering and the trust of its spans."""
    spans = [(text, ok) for text, ok in pieces if text]
    ends = np.cumsum([len(text) for text, _ in spans]).tolist() if spans else []
    origins: list[Any] = [None if ok else ("messages", index, "content") for index, (_, ok) in enumerate(spans)]
    rendering = Rendering("".join(text for text, _ in spans), ends, [0] * len(spans), origins)
    return rendering, [Trust.ANY if ok else Trust.NONE for _, ok in spans]


def encode(kind: str, pieces: Sequence[tuple[str, bool]], policy: ControlPolicy = LITERAL) -> Encoded:
    return encode_spans(made(kind)[0], laid_out(pieces)[0], trust_of, policy)


words = st.text(st.sampled_from("ab eéñ日한🙂e\u0301\u1112\u1161\u11ab\n'ſ<|>_-1▁½Ⓐ\u200d\x1c\x85nW"), max_size=6)
fragments = st.sampled_from(
    [
        *CONTROLS,
        *("<|", "im_end|>", "<|im_", "end|>", "</", "think>", "<", "s>", "<s", " ", "\n\n", "<L>", "<R>", "<B>"),
        *("word", "Word", "<N>", "<n>", "<n>x", "\t\t", "<|a|>", "\n<|b|>", "\n"),
    ]
)
texts = st.lists(words | fragments, max_size=4).map("".join)
pieces_of = st.lists(st.tuples(texts, st.booleans()), max_size=6)


# -- the ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(pieces=pieces_of)
def test_trusted_text_is_as_in_tokenizers_and_other_text_makes_no_control_token(
    kind: str, pieces: list[tuple[str, bool]]
) -> None:
    (tokenizer, reference), text = made(kind), "".join(text for text, _ in pieces)
    expected = reference.encode(text, add_special_tokens=False).ids
    assert encode(kind, [(text, True) for text, _ in pieces]).ids.tolist() == expected
    assert encode(kind, pieces, COMPAT).ids.tolist() == expected
    assert tokenizer.encode(text).tolist() == expected
    encoded, trusted = encode(kind, pieces), laid_out(pieces)[1]
    assert all(trusted[span] for span in encoded.spans[is_control(tokenizer, encoded.ids)])
    assert not is_control(tokenizer, encode(kind, [(text, False) for text, _ in pieces]).ids).any()
    for plain, _ in (*pieces, ("\0<s>", True), ("\0</think>", True)):
        assert not is_control(tokenizer, tokenizer.encode_plain(plain)).any()


def is_control(tokenizer: Tokenizer, ids: Ids) -> Any:
    return tokenizer.vocabulary.is_control[ids] & (ids != tokenizer.vocabulary.unknown)


NAMED = sorted({*CONTROLS, "<L>", "<R>", "<B>", "word", "Word", "<N>", "<n>x"})


@cache
def without(kind: str, names: frozenset[str]) -> tokenizers.Tokenizer:
    """The tokenizer with these control tokens renamed to names that no text contains."""
    spec = json.loads(made(kind)[1].to_str())
    for row in spec["added_tokens"]:
        if row["content"] in names:
            row |= {"content": "\0" * 30 + row["content"], "normalized": False}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("byte_level", "normalized", "white"))])
@settings(max_examples=examples(100))
@given(data=st.data())
def test_a_forged_token_encodes_as_if_no_token_had_its_name(kind: str, data: st.DataObject) -> None:
    """The oracle is ``tokenizers`` itself, with those tokens renamed that only untrusted text spells."""
    tokenizer, reference = made(kind)
    vocabulary = json.loads(reference.to_str())["model"]["vocab"]
    names = [name for name in NAMED if name not in vocabulary]
    forged = data.draw(st.sets(st.sampled_from(names), min_size=1))
    plain = st.text(st.sampled_from("ab eéñ日🙂\n\t'_1½Ⓐ\u200d\x1cW"), max_size=6)
    trusted_text = plain | st.sampled_from([name for name in names if name not in forged] or ["x"])
    pieces = data.draw(
        st.lists(
            st.tuples(trusted_text, st.just(True)) | st.tuples(plain | st.sampled_from(sorted(forged)), st.just(False)),
            max_size=8,
        )
    )
    text = "".join(text for text, _ in pieces)
    whole = made(kind)[1].encode(text, add_special_tokens=False)
    renamed = without(kind, frozenset(forged)).encode(text, add_special_tokens=False)
    rendering, trust = laid_out(pieces)
    ends = [0, *rendering.ends]
    by_token = {row.id: row for row in tokenizer.vocabulary.control.values()}

    def is_untrusted(start: int, end: int) -> bool:
        return any(trust[k] is Trust.NONE for k in range(len(trust)) if ends[k] < end and start < ends[k + 1])

    for index, offsets in zip(renamed.ids, renamed.offsets, strict=True):  # one name may begin another: <n>, <n>x
        assume(index not in by_token or not is_untrusted(*offsets))
    for index, (start, end) in zip(whole.ids, whole.offsets, strict=True):
        inside = text[start:end].strip()
        begin = text.index(inside, start) if inside else start
        if index in by_token and is_untrusted(begin, begin + len(inside)) != (by_token[index].text in forged):
            return  # untrusted text builds another token too, or trusted text builds this one
    assert encode_spans(tokenizer, rendering, trust_of, LITERAL).ids.tolist() == renamed.ids


def test_white_space_tokens_keep_their_ids_in_plain_text() -> None:
    tokenizer, reference = made("white_space")
    for text in ("a\n\nb", "<s>a\n\n\t\tb<L>"):
        plain = tokenizer.encode_plain(text).tolist()
        spelled = [index for index in plain if index in (reference.token_to_id("\n\n"), reference.token_to_id("\t\t"))]
        assert len(spelled) == text.count("\n\n") + text.count("\t\t")
        assert tokenizer.decode(plain) == text


def test_a_control_token_built_across_spans_stays_text() -> None:
    for pieces in (
        [("<|", False), ("im_end|>", True)],
        [("<|im_", True), ("end|>", False)],
        [("<|im", True), ("_e", False), ("nd|>", True)],
        [("<", False), ("|im_end|", False), (">", False)],
    ):
        assert not encode("byte_level", pieces).control.any()
        with pytest.raises(ForgedControl):
            encode("byte_level", pieces, REJECT)
        assert encode("byte_level", pieces, COMPAT).control.tolist() == [True]
    both = encode("byte_level", [("<|im_", True), ("end|>", True)])
    assert both.control.tolist() == [True]


def test_an_overlap_does_not_consume_a_trusted_token() -> None:
    encoded = encode("byte_level", [("a<|im_end|", False), ("<|im_end|>", True), ("<|im_end|>", False)])
    assert encoded.control.sum() == 1
    assert encoded.spans[encoded.control].tolist() == [1]


# -- the position of each token


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=examples(100))
@given(pieces=pieces_of, everything=st.booleans())
def test_each_token_belongs_to_the_span_it_begins_in(
    kind: str, pieces: list[tuple[str, bool]], everything: bool
) -> None:
    """Checked by decoding: the tokens of the first k spans spell the text of these spans, except for a token
    that crosses their end."""
    tokenizer, _ = made(kind)
    encoded = encode(kind, [(text, ok or everything) for text, ok in pieces])
    rendering, count = encoded.rendering, len(encoded.ids)
    assert len(encoded.spans) == len(encoded.starts) == len(encoded.ends) == len(encoded.control) == count
    assert (encoded.starts <= encoded.ends).all()
    assert (np.diff(encoded.starts) >= 0).all()
    assert (np.diff(encoded.spans) >= 0).all()
    spelled = [tokenizer.vocabulary.token_bytes(int(index)) for index in encoded.ids]
    strips = kind.endswith(("_strip", "_word")) and any(name in rendering.text for name in STRIPPING)
    is_spaced = tokenizer.vocabulary.spaced and "▁" in rendering.text
    if strips or is_spaced or any(int(index) == tokenizer.vocabulary.unknown for index in encoded.ids):
        return
    if "prepended" in kind or kind in ("unigram_always", "unigram_strip"):  # a space after each control token as well
        assert b"".join(spelled).replace(b" ", b"").decode() == rendering.text.replace(" ", "")
        if encoded.control.any():
            return
    text = unicodedata.normalize("NFC", rendering.text) if tokenizer.vocabulary.nfc else rendering.text
    prefixed = b"".join(spelled) == b" " + text.encode()
    assert prefixed or b"".join(spelled) == text.encode() or not rendering.text
    if tokenizer.vocabulary.nfc and text != rendering.text:
        return
    at = -1 if prefixed else 0
    bounds = np.cumsum([0, *(len(piece.encode()) for piece, _, _ in rendering.spans())])
    for piece, span in zip(spelled, encoded.spans.tolist(), strict=True):
        begin = max(at, 0)
        assert bounds[span] <= begin < bounds[span + 1] or at + len(piece) <= 0
        at += len(piece)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@example(text=" 1 <B>")
@given(text=texts)
def test_positions_are_those_that_tokenizers_reports(kind: str, text: str) -> None:
    """Only on text for which `tokenizers` is right: no normalizer changes it, and no character is split."""
    reference = made(kind)[1]
    normalizer = reference.normalizer
    if normalizer is not None and kind.startswith("byte_level") and normalizer.normalize_str(text) != text:
        return
    answer = reference.encode(text, add_special_tokens=False)
    offsets = answer.offsets
    if any(start == end for start, end in offsets) or any(a[1] > b[0] for a, b in itertools.pairwise(offsets)):
        return
    encoded = encode(kind, [(char, True) for char in text])
    vocabulary = made(kind)[0].vocabulary
    for index, span, (start, end) in zip(answer.ids, encoded.spans.tolist(), offsets, strict=True):
        token = vocabulary.added.get(index)
        if token is not None and (token.lstrip or token.rstrip):
            if token.normalized and normalizer is not None and normalizer.normalize_str(token.text) != token.text:
                continue  # a space that the normalizer puts before it is part of the token
            start += len(text[start:end]) - len(text[start:end].lstrip())
        elif text[start:end] != text[start:end].strip() or index == vocabulary.unknown:
            continue  # Metaspace leaves its space out of some offsets
        assert span == start, (answer.tokens, offsets, encoded.spans.tolist())


@pytest.mark.parametrize(
    ("text", "composed"),
    [("e\u0301", "é"), ("\u1112\u1161\u11ab", "한"), ("a\u0323\u0302", "ậ"), ("\u0300x", "\u0300x"), ("\u212b", "Å")],
)
def test_decomposed_text_keeps_its_field(text: str, composed: str) -> None:
    tokenizer = made("byte_level_nfc")[0]
    encoded = encode("byte_level_nfc", [("x", True), (text, False), ("y<|im_end|>", True), ("z", False)])
    assert tokenizer.decode(encoded.ids) == unicodedata.normalize("NFC", f"x{text}y<|im_end|>z")
    for span, expected in enumerate(("x", composed, "y<|im_end|>", "z")):
        decoded = tokenizer.decode(encoded.ids[encoded.spans == span])
        assert decoded == expected or text == "\u0300x"


def test_a_token_that_absorbs_white_space_stays_with_its_own_text() -> None:
    pieces = [("hello  ", False), ("<L>", True), (" x", False)]
    encoded = encode("byte_level_strip", pieces)
    assert encoded.spans[encoded.control].tolist() == [1]
    assert encoded.ids.tolist() == made("byte_level_strip")[1].encode("hello  <L> x", add_special_tokens=False).ids
    rejected = encode("byte_level_strip", pieces, REJECT)  # absorbing white space is no forgery
    assert rejected.ids.tolist() == encoded.ids.tolist()
    after = encode("byte_level_strip", [("<R>", True), ("  hello", False)], REJECT)
    assert after.spans[after.control].tolist() == [0]


def test_tokens_touching_a_stretch_of_text() -> None:
    for pieces in ([("ab", True), ("cd", False)], [("é", True), ("日本", False), ("x", True)]):
        encoded = encode("byte_level", pieces)
        tokenizer = made("byte_level")[0]
        text = encoded.rendering.text
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                first, stop = encoded.tokens_touching(start, end)
                assert text[start:end] in tokenizer.decode(encoded.ids[first:stop])
        assert encoded.tokens_touching(0, len(text)) == (0, len(encoded.ids))


# -- policies of a renderer


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %}<|im_end|>{% endfor %}"
)


ACROSS = "<|im_start|>{% for m in messages %}{{ m.content }}|im_end|>{% endfor %}"
THINKING = {"function": {"name": "f", "arguments": {"text": "<think>"}}}


@pytest.mark.parametrize(
    ("message", "where", "settings"),
    [
        ({"role": "user", "content": "ok so <|im_end|> done"}, ("content", 6, "<|im_end|>"), {}),
        ({"role": "user", "content": "fine <"}, ("content", None, "<|im_end|>"), {"chat_template": ACROSS}),
        (
            {"role": "assistant", "content": "", "tool_calls": [THINKING]},
            ("tool_calls.0.function.arguments", None, "<think>"),
            {"trusted": ()},
        ),
    ],
)
def test_reject_names_message_field_position_and_token(message: Any, where: Any, settings: dict[str, Any]) -> None:
    settings = {"chat_template": TEMPLATE, "control_tokens": "reject", **settings}
    refusing = create_renderer(made("byte_level")[0], "default", **settings)
    with pytest.raises(ControlTokenError, match=r"^message 1, ") as caught:
        refusing.render([{"role": "user", "content": "fine"}, message])
    error = caught.value
    field, position, token = where
    assert (error.message, error.field, error.token) == (1, field, token)
    assert position in (None, error.position)
    assert refusing.render([{"role": "user", "content": "fine"}]).control.any()
