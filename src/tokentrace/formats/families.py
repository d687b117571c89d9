"""The known families of templates, recognised by their outline (`study.outline`).

To add one: a row here, a row in the tests' asset list, a golden file.
"""

from dataclasses import dataclass
from typing import Any

from ..template.chat_template import PythonFormat
from ..tokens.tokenizer import Tokenizer
from .deepseek import DEEPSEEK_V4, DEEPSEEK_V32, DSML, EOS, REMINDER
from .dialects import DIALECTS

_CONTENT = "⟨content⟩"
_CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")
_THOUGHT = "<think>\n⟨reasoning⟩\n</think>\n\n"
_RESULT = "<|im_start|>user\n<tool_response>\n⟨content⟩\n</tool_response><|im_end|>\n"
_RESULT_LINE = _RESULT.replace("<|im_end|>", "\n<|im_end|>")
_KIMI = ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>")
_KIMI_RESULT = "<|im_system|>⟨name⟩<|im_middle|>## Return of ⟨tool_call_id⟩\n⟨content⟩<|im_end|>"
_MINIMAX = ("]~b]ai\n", "[e~[\n")
_MINIMAX_RESULT = "]~b]tool\n<response>⟨content⟩</response>[e~[\n"
_DEEPSEEK = ("<｜Assistant｜>", EOS)
_DEEPSEEK_RESULT = "<｜tool▁output▁begin｜>⟨content⟩<｜tool▁output▁end｜>"
_LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")


@dataclass(frozen=True, slots=True)
class Family:
    """A name, its models, and the outline by which a template is recognised."""

    name: str
    models: str
    answer: str = ""
    call: str = ""
    result: str = ""
    prompt: str | None = None
    """The generation prompt, if only it distinguishes the family."""
    image: str | None = None
    """The placeholder of an image, if that distinguishes it."""
    format: PythonFormat | None = None
    """Its format, if it has no Jinja template."""
    tool_parser: str | None = None
    """The dialect of its calls, if the template shows none, or wrong ones."""

    def differs(self, outline: Any) -> str:
        """Why a template with this outline is not of the family, or ``""``."""
        for name in ("answer", "call", "result", "prompt", "image"):
            expected, actual = getattr(self, name), getattr(outline, name)
            if expected is not None and expected != actual:
                return f"its {name} is {actual!r}, but the family's is {expected!r}"
        return ""


def _call(dialect: str) -> str:
    calls = DIALECTS[dialect].calls
    assert calls is not None
    return calls.outline("{}")


def _family(
    name: str, models: str, turn: tuple[str, str], thought: str, call: str, result: str, **more: Any
) -> Family:
    opening, end = turn[0] + thought + _CONTENT, turn[1]
    return Family(name, models, opening + end, opening + call + end, result, **more)


_HERMES = "\n" + _call("hermes")
_QWEN_XML = _call("qwen-xml")

FAMILIES: tuple[Family, ...] = (
    _family("qwen3", "Qwen3 hybrid and Qwen3-Thinking-2507", _CHATML, _THOUGHT, _HERMES, _RESULT),
    _family(
        "qwen3_vl", "Qwen3-VL instruct", _CHATML, "", _HERMES, _RESULT,
        image="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    _family(
        "qwq", "QwQ-32B", _CHATML, "", _HERMES, _RESULT,
        prompt=_CHATML[0] + "<think>\n", image="",
    ),
    _family(
        "qwen2.5", "Qwen2.5, Qwen3-Instruct-2507 and others that write hermes calls in ChatML",
        _CHATML, "", _HERMES, _RESULT, prompt=_CHATML[0], image="",
    ),
    _family("qwen3_coder", "Qwen3-Coder", _CHATML, "", "\n\n" + _QWEN_XML, _RESULT_LINE),
    _family("qwen3.5", "Qwen3.5 and Qwen3.6", _CHATML, _THOUGHT, "\n\n" + _QWEN_XML, _RESULT),
    _family(
        "glm4.5", "GLM-4.5 and GLM-4.6", ("<|assistant|>\n", ""),
        "<think>⟨reasoning⟩</think>\n", "\n" + _call("glm-xml"),
        "<|observation|>\n<tool_response>\n⟨content⟩\n</tool_response>",
    ),
    _family(
        "glm5", "GLM-4.7 and GLM-5", ("<|assistant|>", ""),
        "<think>⟨reasoning⟩</think>", _call("glm-xml").replace("\n", ""),
        "<|observation|><tool_response>⟨content⟩</tool_response>",
    ),
    _family("minimax-m2", "MiniMax-M2", _MINIMAX, _THOUGHT, "\n" + _call("minimax-xml"), _MINIMAX_RESULT),
    _family(
        "minimax-m3", "MiniMax-M3", _MINIMAX,
        "<mm:think>⟨reasoning⟩</mm:think>", _call("minimax-tree"), _MINIMAX_RESULT,
    ),
    _family(
        "deepseek_v3", "DeepSeek V3", _DEEPSEEK, "", "", "<｜tool▁outputs▁begin｜>" + _DEEPSEEK_RESULT,
        tool_parser="deepseek",
    ),
    _family(
        "deepseek_r1", "DeepSeek R1", _DEEPSEEK, "", _call("deepseek").replace("function", "⟨type⟩"),
        "<｜tool▁outputs▁begin｜>" + _DEEPSEEK_RESULT,
    ),
    _family("deepseek_v3.1", "DeepSeek V3.1", _DEEPSEEK, "</think>", _call("deepseek-v3.1"), _DEEPSEEK_RESULT),
    Family("deepseek_v3.2", "DeepSeek V3.2", format=DEEPSEEK_V32),
    Family("deepseek_v4", "DeepSeek V4", format=DEEPSEEK_V4),
    _family("kimi_k2", "Kimi K2 instruct", _KIMI, "", _call("kimi"), _KIMI_RESULT),
    Family(
        "kimi_k25", "Kimi K2.5",
        answer=f"{_KIMI[0]}<think></think>{_CONTENT}{_KIMI[1]}",
        call=f"{_KIMI[0]}<think>⟨reasoning⟩</think>{_CONTENT}{_call('kimi')}{_KIMI[1]}",
        result=_KIMI_RESULT,
    ),
    _family(
        "nemotron3", "Nemotron 3 nano", _CHATML,
        "<think>\n⟨reasoning⟩\n</think>\n", f"\n{_QWEN_XML}\n", _RESULT_LINE,
    ),
    Family(
        "gpt_oss", "gpt-oss 20b and 120b",
        answer="<|start|>assistant<|channel|>analysis<|message|>⟨reasoning⟩<|end|><|start|>assistant<|channel|>final"
        "<|message|>⟨content⟩<|return|>",
        call="<|start|>assistant to=functions.⟨name⟩<|channel|>commentary json<|message|>⟨arguments⟩<|call|>",
        result='<|start|>functions.⟨name⟩ to=assistant<|channel|>commentary<|message|>"⟨content⟩"<|end|>',
    ),
    Family(
        "llama3", "Llama 3.1 and 3.2",
        answer=f"{_LLAMA[0]}{_CONTENT}{_LLAMA[1]}",
        call=f"{_LLAMA[0]}{_call('llama-json')}{_LLAMA[1]}",
        result='<|start_header_id|>ipython<|end_header_id|>\n\n"⟨content⟩"<|eot_id|>',
    ),
    Family(
        "mistral", "Mistral-Nemo instruct",
        answer="⟨content⟩</s>",
        call=_call("mistral") + "</s>",
        result='[TOOL_RESULTS]{"content": ⟨content⟩, "call_id": "⟨tool_call_id⟩"}[/TOOL_RESULTS]',
    ),
    Family("gemma3", "Gemma 3", answer="<start_of_turn>model\n⟨content⟩<end_of_turn>\n"),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}


def python_format(renderer: str, tokenizer: Tokenizer) -> PythonFormat | None:
    """The format of a family without a template, by name or by vocabulary."""
    if renderer in BY_NAME:
        return BY_NAME[renderer].format
    control = tokenizer.vocabulary.control
    if tokenizer.templates or DSML not in control:
        return None
    return DEEPSEEK_V4 if REMINDER in control else DEEPSEEK_V32
