"""The known families of templates, recognised by their outline (`study.outline`).

To add one: a row here, a row in the tests' asset list, a golden file. Nothing here decides how a template is rendered,
except for the formats that have no template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..template.chat_template import PythonFormat
from ..tokens.tokenizer import Tokenizer
from .deepseek import DEEPSEEK_V4, DEEPSEEK_V32, EOS

_CHATML: Final = "<|im_start|>assistant\n"
_CLOSE: Final = "<|im_end|>\n"
_THOUGHT: Final = "<think>\n⟨reasoning⟩\n</think>\n\n"
_RESULT: Final = "<|im_start|>user\n<tool_response>\n⟨content⟩\n</tool_response>"
_HERMES: Final = '\n<tool_call>\n{"name": "⟨name⟩", "arguments": ⟨arguments⟩}\n</tool_call>'
_QWEN_XML: Final = "<tool_call>\n<function=⟨name⟩>\n<parameter=⟨key⟩>\n⟨value⟩\n</parameter>\n</function>\n</tool_call>"
_KIMI: Final = "<|im_assistant|>assistant<|im_middle|>"
_KIMI_CALL: Final = (
    "<|tool_calls_section_begin|><|tool_call_begin|>⟨id⟩<|tool_call_argument_begin|>⟨arguments⟩<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
)
_KIMI_RESULT: Final = "<|im_system|>⟨name⟩<|im_middle|>## Return of ⟨tool_call_id⟩\n⟨content⟩<|im_end|>"
_LLAMA: Final = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@dataclass(frozen=True, slots=True)
class Family:
    """A name, the models that have it, and the outline by which a template is recognised."""

    name: str
    models: str
    answer: str
    call: str
    result: str
    prompt: str | None = None
    """The generation prompt, if it distinguishes the family from another with the same turns."""
    image: str | None = None
    """The placeholder of an image, if that distinguishes it."""
    format: PythonFormat | None = None
    """Its format, if it has no Jinja template."""
    tool_parser: str | None = None
    """The dialect of its calls, if the template does not show them, or shows them wrong."""

    @property
    def turn(self) -> str:
        """An assistant's turn, as written with a tool call where there are any."""
        return self.call or self.answer

    @property
    def tool(self) -> str:
        return self.result

    def differs(self, outline: Any) -> str:
        """Why a template with this `study.outline` does not belong to the family; ``""`` if it does."""
        for name in ("answer", "call", "result", "prompt", "image"):
            expected, actual = getattr(self, name), getattr(outline, name)
            if expected is not None and expected != actual:
                return f"its {name} is {actual!r}, where the family's is {expected!r}"
        return ""


FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        "qwen3", "Qwen3 hybrid and Qwen3-Thinking-2507",
        answer=_CHATML + _THOUGHT + "⟨content⟩" + _CLOSE,
        call=_CHATML + _THOUGHT + "⟨content⟩" + _HERMES + _CLOSE,
        result=_RESULT + _CLOSE,
    ),
    Family(
        "qwen3_vl", "Qwen3-VL instruct",
        answer=_CHATML + "⟨content⟩" + _CLOSE,
        call=_CHATML + "⟨content⟩" + _HERMES + _CLOSE,
        result=_RESULT + _CLOSE,
        image="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    Family(
        "qwq", "QwQ-32B",
        answer=_CHATML + "⟨content⟩" + _CLOSE,
        call=_CHATML + "⟨content⟩" + _HERMES + _CLOSE,
        result=_RESULT + _CLOSE,
        prompt=_CHATML + "<think>\n", image="",
    ),
    Family(
        "qwen2.5", "Qwen2.5, Qwen3-Instruct-2507 and others that write hermes calls in ChatML",
        answer=_CHATML + "⟨content⟩" + _CLOSE,
        call=_CHATML + "⟨content⟩" + _HERMES + _CLOSE,
        result=_RESULT + _CLOSE,
        prompt=_CHATML, image="",
    ),
    Family(
        "qwen3_coder", "Qwen3-Coder",
        answer=_CHATML + "⟨content⟩" + _CLOSE,
        call=_CHATML + "⟨content⟩\n\n" + _QWEN_XML + _CLOSE,
        result=_RESULT + "\n" + _CLOSE,
    ),
    Family(
        "qwen3.5", "Qwen3.5 and Qwen3.6",
        answer=_CHATML + _THOUGHT + "⟨content⟩" + _CLOSE,
        call=_CHATML + _THOUGHT + "⟨content⟩\n\n" + _QWEN_XML + _CLOSE,
        result=_RESULT + _CLOSE,
    ),
    Family(
        "glm4.5", "GLM-4.5 and GLM-4.6",
        answer="<|assistant|>\n<think>⟨reasoning⟩</think>\n⟨content⟩",
        call="<|assistant|>\n<think>⟨reasoning⟩</think>\n⟨content⟩\n<tool_call>⟨name⟩\n<arg_key>⟨key⟩</arg_key>\n"
        "<arg_value>⟨value⟩</arg_value>\n</tool_call>",
        result="<|observation|>\n<tool_response>\n⟨content⟩\n</tool_response>",
    ),
    Family(
        "glm5", "GLM-4.7 and GLM-5",
        answer="<|assistant|><think>⟨reasoning⟩</think>⟨content⟩",
        call="<|assistant|><think>⟨reasoning⟩</think>⟨content⟩<tool_call>⟨name⟩<arg_key>⟨key⟩</arg_key>"
        "<arg_value>⟨value⟩</arg_value></tool_call>",
        result="<|observation|><tool_response>⟨content⟩</tool_response>",
    ),
    Family(
        "minimax-m2", "MiniMax-M2",
        answer="]~b]ai\n" + _THOUGHT + "⟨content⟩[e~[\n",
        call="]~b]ai\n" + _THOUGHT + '⟨content⟩\n<minimax:tool_call>\n<invoke name="⟨name⟩">\n'
        '<parameter name="⟨key⟩">⟨value⟩</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n',
        result="]~b]tool\n<response>⟨content⟩</response>[e~[\n",
    ),
    Family(
        "minimax-m3", "MiniMax-M3",
        answer="]~b]ai\n<mm:think>⟨reasoning⟩</mm:think>⟨content⟩[e~[\n",
        call="]~b]ai\n<mm:think>⟨reasoning⟩</mm:think>⟨content⟩]<]minimax[>[<tool_call>\n"
        ']<]minimax[>[<invoke name="⟨name⟩">]<]minimax[>[<⟨key⟩>⟨value⟩]<]minimax[>[</⟨key⟩>]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>[e~[\n",
        result="]~b]tool\n<response>⟨content⟩</response>[e~[\n",
    ),
    Family(
        "deepseek_v3", "DeepSeek V3",
        answer="<｜Assistant｜>⟨content⟩" + EOS,
        call="<｜Assistant｜>⟨content⟩" + EOS,
        result="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>⟨content⟩<｜tool▁output▁end｜>",
        tool_parser="deepseek",
    ),
    Family(
        "deepseek_r1", "DeepSeek R1",
        answer="<｜Assistant｜>⟨content⟩" + EOS,
        call="<｜Assistant｜>⟨content⟩<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>⟨type⟩<｜tool▁sep｜>⟨name⟩\n```json\n"
        "⟨arguments⟩\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>" + EOS,
        result="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>⟨content⟩<｜tool▁output▁end｜>",
    ),
    Family(
        "deepseek_v3.1", "DeepSeek V3.1",
        answer="<｜Assistant｜></think>⟨content⟩" + EOS,
        call="<｜Assistant｜></think>⟨content⟩<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>⟨name⟩<｜tool▁sep｜>⟨arguments⟩"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>" + EOS,
        result="<｜tool▁output▁begin｜>⟨content⟩<｜tool▁output▁end｜>",
    ),
    Family(
        "deepseek_v3.2", "DeepSeek V3.2",
        answer="", call="", result="", format=DEEPSEEK_V32,
    ),
    Family(
        "deepseek_v4", "DeepSeek V4",
        answer="", call="", result="", format=DEEPSEEK_V4,
    ),
    Family(
        "kimi_k2", "Kimi K2 instruct",
        answer=_KIMI + "⟨content⟩<|im_end|>",
        call=_KIMI + "⟨content⟩" + _KIMI_CALL,
        result=_KIMI_RESULT,
    ),
    Family(
        "kimi_k25", "Kimi K2.5",
        answer=_KIMI + "<think></think>⟨content⟩<|im_end|>",
        call=_KIMI + "<think>⟨reasoning⟩</think>⟨content⟩" + _KIMI_CALL,
        result=_KIMI_RESULT,
    ),
    Family(
        "nemotron3", "Nemotron 3 nano",
        answer=_CHATML + "<think>\n⟨reasoning⟩\n</think>\n⟨content⟩" + _CLOSE,
        call=_CHATML + "<think>\n⟨reasoning⟩\n</think>\n⟨content⟩\n" + _QWEN_XML + "\n" + _CLOSE,
        result=_RESULT + "\n" + _CLOSE,
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
        answer=_LLAMA + "⟨content⟩<|eot_id|>",
        call=_LLAMA + '{"name": "⟨name⟩", "parameters": ⟨arguments⟩}<|eot_id|>',
        result='<|start_header_id|>ipython<|end_header_id|>\n\n"⟨content⟩"<|eot_id|>',
    ),
    Family(
        "mistral", "Mistral-Nemo instruct",
        answer="⟨content⟩</s>",
        call='[TOOL_CALLS][{"name": "⟨name⟩", "arguments": ⟨arguments⟩, "id": "⟨id⟩"}]</s>',
        result='[TOOL_RESULTS]{"content": ⟨content⟩, "call_id": "⟨tool_call_id⟩"}[/TOOL_RESULTS]',
    ),
    Family(
        "gemma3", "Gemma 3",
        answer="<start_of_turn>model\n⟨content⟩<end_of_turn>\n",
        call="", result="",
    ),
)  # fmt: skip

BY_NAME: Final = {family.name: family for family in FAMILIES}


def python_format(renderer: str, tokenizer: Tokenizer) -> PythonFormat | None:
    """The format of a family that has no template: by name, or by its vocabulary where the tokenizer has none."""
    family = BY_NAME.get(renderer)
    if family is not None:
        return family.format
    if tokenizer.templates or "｜DSML｜" not in tokenizer.vocabulary.control:
        return None
    return DEEPSEEK_V4 if "<｜latest_reminder｜>" in tokenizer.vocabulary.control else DEEPSEEK_V32


def tool_parser_of(family: str) -> str | None:
    """The dialect of a family's calls, where its template does not show them."""
    return BY_NAME[family].tool_parser if family in BY_NAME else None
