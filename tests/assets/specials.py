"""Control tokens of the vocabularies that are published as bare ranks, by id.

Ids and spellings are facts of the models. An id inside a reserved range that a model gives no name to gets
that range's filler name, as in the models' own files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

AddedToken = dict[str, object]


def added_token(token_id: int, content: str, *, special: bool = True) -> AddedToken:
    """An entry of tokenizer.json's `added_tokens`, matched verbatim in raw text."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def named_range(
    ids: Iterable[int], names: Mapping[int, str], filler: str, *, plain: frozenset[int] = frozenset()
) -> list[AddedToken]:
    """One added token per id: its name, or `filler` with the id; those in `plain` are not `special`."""
    return [added_token(i, names.get(i, filler.format(i)), special=i not in plain) for i in ids]


HARMONY = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}


def harmony_tokens() -> list[AddedToken]:
    """gpt-oss: the last ordinary rank is 199997, Harmony's tokens follow."""
    return named_range(range(199998, 200019), HARMONY, "<|reserved_{}|>")


LLAMA3 = {
    128000: "<|begin_of_text|>",
    128001: "<|end_of_text|>",
    128002: "<|reserved_special_token_0|>",
    128003: "<|reserved_special_token_1|>",
    128004: "<|finetune_right_pad_id|>",
    128005: "<|reserved_special_token_2|>",
    128006: "<|start_header_id|>",
    128007: "<|end_header_id|>",
    128008: "<|eom_id|>",
    128009: "<|eot_id|>",
    128010: "<|python_tag|>",
}


def llama3_tokens() -> list[AddedToken]:
    """Llama 3.1 and 3.2: 256 control tokens; the unnamed tail counts on from `reserved_special_token_3`."""
    tail = {i: f"<|reserved_special_token_{i - 128008}|>" for i in range(128011, 128256)}
    return named_range(range(128000, 128256), LLAMA3 | tail, "{}")


KIMI_K2 = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163590: "<|start_header_id|>",
    163591: "<|end_header_id|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163838: "[UNK]",
    163839: "[PAD]",
}
KIMI_K25 = KIMI_K2 | {
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163606: "<think>",
    163607: "</think>",
}
KIMI_PLAIN = frozenset({*range(163595, 163600), 163606, 163607})


def kimi_tokens(names: Mapping[int, str]) -> list[AddedToken]:
    """Kimi K2 and K2.5: 256 control tokens; those of tool calls and thinking are not `special`."""
    plain = frozenset(i for i in KIMI_PLAIN if i in names)
    return named_range(range(163584, 163840), names, "<|reserved_token_{}|>", plain=plain)


TEKKEN_SPECIALS = 1000
NEMO = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "<pad>",
    11: "[PREFIX]",
    12: "[MIDDLE]",
    13: "[SUFFIX]",
}
NEMOTRON = NEMO | {
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<tool_call>",
    15: "</tool_call>",
    16: "<tool_response>",
    17: "</tool_response>",
}
NEMOTRON_PLAIN = frozenset(range(12, 18))


def nemo_tokens() -> list[AddedToken]:
    """Mistral-Nemo: Tekken's first thousand ids."""
    return named_range(range(TEKKEN_SPECIALS), NEMO, "<SPECIAL_{}>")


def nemotron_tokens() -> list[AddedToken]:
    """Nemotron 3: the same thousand with ids 10 to 17 renamed (12 and 13 confirmed, the rest inferred)."""
    return named_range(range(TEKKEN_SPECIALS), NEMOTRON, "<SPECIAL_{}>", plain=NEMOTRON_PLAIN)


GEMMA3_SPECIAL = frozenset(
    {"<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"}
    | {"<end_of_image>", "<image_soft_token>"}
)
GEMMA3_IMAGE_SOFT = (262144, "<image_soft_token>")
