"""Seams by family, spelled out: the sampled text, what closes it, what follows.

Names of control tokens in `sampled` are encoded as control tokens. `close` is what the bridge inserts as synthetic
tokens; `after` is everything that follows: scaffold and the new message.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conversations import SIMPLE, assistant, call, result, tool, user
from tests.rendering.bridge.rollouts import Cut, check_extension, cut_after
from tests.support import load_family, make_renderer, over_bytes
from tokentrace import BridgedTokens, BridgeRefusal
from tokentrace.rendering import RefusalReason
from tokentrace.tokens import Kind

HELLO = user("Hello")
BYE = user("Bye")
SUNNY = result("It is sunny", name="look")
LOOK = [tool("look", "Looks.", {}, [])]


@dataclass(frozen=True, slots=True)
class Seam:
    family: str
    sampled: str
    close: str
    after: str
    new: dict[str, Any] = field(default_factory=lambda: BYE)
    is_cut_off: bool = True

    @property
    def tools(self) -> Any:
        return LOOK if self.new is SUNNY else None


def texts(seam: Seam, bridged: BridgedTokens) -> tuple[str, str]:
    """The synthetic text, and all other new text."""
    decode = load_family(seam.family).decode
    synthetic = bridged.kinds == Kind.SYNTHETIC
    return decode(bridged.new_ids[synthetic]), decode(bridged.new_ids[~synthetic])


def bridge(seam: Seam, **settings: Any) -> BridgedTokens | BridgeRefusal:
    renderer = make_renderer(seam.family, **settings)
    prompt = renderer.render([HELLO], tools=seam.tools, add_generation_prompt=True)
    sampled = renderer.tokenizer.encode(seam.sampled) if seam.sampled else []
    return renderer.bridge(prompt.ids, sampled, [seam.new], tools=seam.tools)


QWEN_USER = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\nIt is sunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_CALL = "<tool_call>\n{}\n</tool_call>"
QWEN_THINK = "\n" + QWEN_USER + "<think>\n"
GLM_USER, GLM_TOOL = "\nBye<|assistant|>", "\n<tool_response>\nIt is sunny\n</tool_response><|assistant|>"
GLM_CALL = "\n<think></think>\n<tool_call>look\n</tool_call>"
QWEN_CODER_TOOL = QWEN_TOOL.replace("</tool_response>", "</tool_response>\n")
MINIMAX_TOOL = "\n]~b]tool\n<response>It is sunny</response>[e~[\n]~b]ai\n<think>\n"
MINIMAX_USER = "]~b]user\nBye[e~[\n]~b]ai\n<think>\n"
HARMONY_USER = "<|start|>user<|message|>Bye<|end|><|start|>assistant"
HARMONY_TOOL = (
    '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"It is sunny"<|end|><|start|>assistant'
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>They", "<|channel|>final<|message|>Hi"
CALLING = "<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"
DEEPSEEK_USER, DEEPSEEK_END = "<｜User｜>Bye<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"
DEEPSEEK_CLOSE = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DEEPSEEK_TOOL = "<｜tool▁output▁begin｜>It is sunny<｜tool▁output▁end｜>"
DSML = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
DSML_TOOL = "\n\n<function_results>\n<result>It is sunny</result>\n</function_results>\n\n</think>"
KIMI_USER = "<|im_user|>user<|im_middle|>Bye<|im_end|><|im_assistant|>assistant<|im_middle|>"
KIMI_TOOL = (
    "<|im_system|>look<|im_middle|>## Return of call00001\nIt is sunny<|im_end|><|im_assistant|>assistant<|im_middle|>"
)
KIMI_CALL = "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"
KIMI_CLOSE = "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
LLAMA_HEAD = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>" + LLAMA_HEAD
LLAMA_TOOL = '<|start_header_id|>ipython<|end_header_id|>\n\n"It is sunny"<|eot_id|>' + LLAMA_HEAD
MISTRAL_TOOL = '[TOOL_RESULTS]{"content": It is sunny, "call_id": "call00001"}[/TOOL_RESULTS]'
GEMMA_USER = "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"

ENDED: dict[str, list[tuple[str, str] | tuple[str, str, Any]]] = {
    "qwen3": [
        ("Hi!<|im_end|>", "\n" + QWEN_USER),
        ("Hi!<|im_end|>\n", QWEN_USER),
        ("Hi!<|im_end|>\n<|im_start|>", QWEN_USER.removeprefix("<|im_start|>")),
        ("Hi!<|endoftext|>", "\n" + QWEN_USER),
        ("Hi!<|im_end|><|endoftext|>", "\n" + QWEN_USER),
        (QWEN_CALL + "<|im_end|>", QWEN_TOOL, SUNNY),
    ],
    "glm-4.6": [
        ("\n<think></think>\nHi!<|user|>", GLM_USER),
        ("\n<think></think>\nHi!<|user|>\n", GLM_USER.removeprefix("\n")),
        ("\n<think></think>\nHi!<|endoftext|>", "<|user|>" + GLM_USER),
        ("\n<think></think>\nHi!<|observation|>", "<|user|>" + GLM_USER),
        (GLM_CALL + "<|observation|>", GLM_TOOL, SUNNY),
        (GLM_CALL + "<|user|>", "<|observation|>" + GLM_TOOL, SUNNY),
        (GLM_CALL + "<|endoftext|>", "<|observation|>" + GLM_TOOL, SUNNY),
    ],
    "glm-5": [("They</think>Hi!<|user|>", "Bye<|assistant|><think>")],
    "minimax-m2": [("They\n</think>\n\nHi![e~[", "\n" + MINIMAX_USER), ("They\n</think>\n\nHi![e~[\n", MINIMAX_USER)],
    "gpt-oss": [
        (FINAL + "<|return|>", HARMONY_USER),
        (FINAL + "<|end|>", HARMONY_USER),
        (ANALYSIS + CALLING + "}<|call|>", HARMONY_TOOL, SUNNY),
    ],
    "deepseek-v3.1": [
        ("Hi!" + DEEPSEEK_END, DEEPSEEK_USER),
        (DEEPSEEK_CALL + "}" + DEEPSEEK_CLOSE + DEEPSEEK_END, DEEPSEEK_TOOL, SUNNY),
    ],
    "deepseek-v3.2": [("Hi!" + DEEPSEEK_END, DEEPSEEK_USER), (DSML + DEEPSEEK_END, DSML_TOOL, SUNNY)],
    "kimi-k2": [("Hi!<|im_end|>", KIMI_USER), ("Hi![EOS]", KIMI_USER)],
    "llama-3.1": [("Hi!<|eot_id|>", LLAMA_USER), ('{"name": "look"}<|eom_id|>', LLAMA_TOOL, SUNNY)],
    "mistral-nemo": [("Hi!</s>", "[INST]Bye[/INST]")],
    "gemma-3": [
        ("Hi!<end_of_turn>", "\n" + GEMMA_USER),
        ("Hi!<end_of_turn>\n", GEMMA_USER),
        ("Hi!<eos>", "\n" + GEMMA_USER),
    ],
}
"""Completions that ended their turn, and what follows them."""
CUT_OFF: dict[str, list[tuple[str, str, str] | tuple[str, str, str, Any]]] = {
    "qwen3": [
        ("Hi", "<|im_end|>", "\n" + QWEN_USER),
        ("", "<|im_end|>", "\n" + QWEN_USER),
        ("<think>\nThey", "\n</think>\n\n<|im_end|>", "\n" + QWEN_USER),
        ("<think>\nThey.\n", "</think>\n\n<|im_end|>", "\n" + QWEN_USER),
        ("<think>\nThey.\n</think>", "<|im_end|>", "\n" + QWEN_USER),
        ("<think>\nA\n</think>\n\n<think>\nB", "\n</think>\n\n<|im_end|>", "\n" + QWEN_USER),
        ('<tool_call>\n{"name": "lo', "\n</tool_call><|im_end|>", QWEN_TOOL, SUNNY),
        (QWEN_CALL, "<|im_end|>", QWEN_TOOL, SUNNY),
    ],
    "qwen3-thinking-2507": [
        ("They", "\n</think>\n\n<|im_end|>", QWEN_THINK),
        ("", "</think>\n\n<|im_end|>", QWEN_THINK),
    ],
    "glm-4.6": [
        ("\n<think></think>\nHi", "", "<|user|>" + GLM_USER),
        ("Hi", "", "<|user|>" + GLM_USER),
        ("", "", "<|user|>" + GLM_USER),
        ("\n<think>They", "</think>", "<|user|>" + GLM_USER),
        (GLM_CALL, "", "<|observation|>" + GLM_TOOL, SUNNY),
        ("\n<think></think>\n<tool_call>lo", "\n</tool_call>", "<|observation|>" + GLM_TOOL, SUNNY),
        (
            "\n<think></think>\n<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>b",
            *("</arg_value>\n</tool_call>", "<|observation|>" + GLM_TOOL, SUNNY),
        ),
    ],
    "glm-5": [
        ("They", "</think>", "<|user|>Bye<|assistant|><think>"),
        ("", "</think>", "<|user|>Bye<|assistant|><think>"),
    ],
    "minimax-m2": [
        ("They\n</think>\n\nHi", "[e~[", "\n" + MINIMAX_USER),
        ("They", "\n</think>\n\n[e~[", "\n" + MINIMAX_USER),
        ("", "</think>\n\n[e~[", "\n" + MINIMAX_USER),
        (
            'They\n</think>\n\n\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Par',
            *("</parameter>\n</invoke>\n</minimax:tool_call>[e~[", MINIMAX_TOOL, SUNNY),
        ),
    ],
    "minimax-m3": [("Hi", "[e~[", "\n]~b]user\nBye[e~[\n]~b]ai\n")],
    "gpt-oss": [
        (FINAL, "<|end|>", HARMONY_USER),
        (ANALYSIS, "<|end|>", HARMONY_USER),
        ("<|channel|>ana", "<|message|><|end|>", HARMONY_USER),
        (ANALYSIS + "<|end|><|start|>assistant<|channel|>", "<|message|><|end|>", HARMONY_USER),
        ("", "<|channel|>final<|message|><|end|>", HARMONY_USER),
        ("Hi", "<|channel|>final<|message|><|end|>", HARMONY_USER),
        (ANALYSIS + CALLING, "<|end|>", HARMONY_TOOL, SUNNY),
    ],
    "deepseek-v3.1": [
        ("Hi", DEEPSEEK_END, DEEPSEEK_USER),
        ("", DEEPSEEK_END, DEEPSEEK_USER),
        (DEEPSEEK_CALL, DEEPSEEK_CLOSE + DEEPSEEK_END, DEEPSEEK_TOOL, SUNNY),
    ],
    "deepseek-v3.2": [
        ("Hi", DEEPSEEK_END, DEEPSEEK_USER),
        (DSML, DEEPSEEK_END, DSML_TOOL, SUNNY),
        ("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>" + DEEPSEEK_END, DSML_TOOL, SUNNY),
        (
            DSML.partition("</")[0] + '<｜DSML｜parameter name="city" string="true">Par',
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>" + DEEPSEEK_END,
            *(DSML_TOOL, SUNNY),
        ),
    ],
    "kimi-k2": [("Hi", "<|im_end|>", KIMI_USER), (KIMI_CALL, KIMI_CLOSE, KIMI_TOOL, SUNNY)],
    "llama-3.1": [
        ("Hi", "<|eot_id|>", LLAMA_USER),
        ('{"name": "lo', "<|eot_id|>", LLAMA_TOOL, SUNNY),
        ("", "<|eot_id|>", LLAMA_USER),
    ],
    "mistral-nemo": [("Hi", "</s>", "[INST]Bye[/INST]"), ('[TOOL_CALLS][{"name": "lo', "</s>", MISTRAL_TOOL, SUNNY)],
    "gemma-3": [("Hi", "<end_of_turn>", "\n" + GEMMA_USER)],
    "qwen3-coder": [
        (
            "<tool_call>\n<function=look>\n<parameter=city>\nPar",
            *("\n</parameter>\n</function>\n</tool_call><|im_end|>", QWEN_CODER_TOOL, SUNNY),
        )
    ],
}
"""Completions that are cut off, what closes them, and what follows."""
SEAMS = [
    *(
        Seam(family, sampled, "", after, *new, is_cut_off=False)
        for family in ENDED
        for sampled, after, *new in ENDED[family]
    ),
    *(Seam(family, *row) for family in CUT_OFF for row in CUT_OFF[family]),
]


def by_name(seams: list[Seam]) -> Any:
    return pytest.mark.parametrize("seam", [pytest.param(seam, id=f"{seam.family}-{seam.sampled!a}") for seam in seams])


@by_name(SEAMS)
def test_a_seam_is_closed_and_joined_as_spelled_out(seam: Seam) -> None:
    bridged = bridge(seam)
    assert isinstance(bridged, BridgedTokens), bridged
    assert texts(seam, bridged) == (seam.close, seam.after)
    assert bridged.closed == bool(seam.close)
    context = bridged.kinds == Kind.CONTEXT
    assert seam.new["content"].split()[-1] in load_family(seam.family).decode(bridged.new_ids[context])
    assert (bridged.messages[context] == 0).all()


@by_name([seam for seam in SEAMS if seam.is_cut_off])
def test_a_cut_off_turn_is_refused_if_that_is_the_policy(seam: Seam) -> None:
    refused = bridge(seam, truncation="refuse")
    assert isinstance(refused, BridgeRefusal)
    assert refused.reason is RefusalReason.TRUNCATED


# -- the template itself as the oracle

NEVER_ALONE = {"gpt-oss"}
"""Templates that write no reasoning without an answer: a cut-off analysis is closed by less than they would write."""

NEVER_SHOWN = {"qwq-32b", "deepseek-r1"}
"""Templates that prompt for reasoning and then never show it: there is nothing to compare with."""


def controls(family: str, ids: list[int]) -> list[str]:
    tokenizer = load_family(family)
    tokens = [tokenizer.decode([index]) for index in ids if tokenizer.vocabulary.is_control[index]]
    return ["<|end|>" if token == "<|return|>" else token for token in tokens]  # gpt-oss ends a turn with either


def cut_within(family: str, cut: Cut, words: str) -> list[list[int]]:
    decode = load_family(family).decode
    completions = []
    for length in range(1, len(cut.completion)):
        text = decode(cut.completion[:length])
        if any(text.endswith(words[:count]) for count in range(2, len(words))):
            completions.append(cut.completion[:length])
    return completions


def test_a_closed_turn_has_the_control_tokens_that_the_template_would_have_written(any_family: str) -> None:
    if any_family in NEVER_SHOWN:
        pytest.skip("the template never shows the reasoning that it prompts for")
    renderer, oracle = make_renderer(any_family), make_renderer(any_family, use_patched=True)
    prompt = renderer.render([HELLO], add_generation_prompt=True).text
    thought = None if prompt.rstrip().endswith("</think>") else "Somebody greets."
    answer = assistant("Enchanted indeed.", reasoning=thought)
    cut = cut_after(renderer, [HELLO, answer, BYE], 1, 3, None)
    assert cut is not None
    decode = load_family(any_family).decode
    checked = 0
    for words, message in (
        ("Somebody greets", lambda text: assistant("", reasoning=text)),
        ("Enchanted indeed", lambda text: assistant(text, reasoning=thought)),
    ):
        if words.startswith("Some") and any_family in NEVER_ALONE:
            continue
        for completion in cut_within(any_family, cut, words):
            text = decode(completion)
            text = text[text.rindex(words[:2]) :]
            bridged = renderer.bridge(cut.prompt, completion, [BYE])
            assert isinstance(bridged, BridgedTokens)
            check_extension(Cut(1, cut.prompt, completion, [BYE], None, cut.full, None), bridged)
            full = oracle.render([HELLO, message(text), BYE], add_generation_prompt=True)
            expected, ours = controls(any_family, full.token_ids), controls(any_family, bridged.token_ids)
            assert ours == expected, f"{decode(completion)!r}: {ours} is not {expected}"
            checked += 1
    assert checked >= 1


# -- other seams


def test_no_new_messages_give_another_generation_prompt() -> None:
    renderer = make_renderer("qwen3")
    prompt = renderer.render([HELLO], add_generation_prompt=True)
    bridged = renderer.bridge(prompt.ids, renderer.tokenizer.encode("Hi!<|im_end|>"), [])
    assert isinstance(bridged, BridgedTokens)
    assert renderer.tokenizer.decode(bridged.new_ids) == "\n<|im_start|>assistant\n"


TEXT_CLOSED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant><think>"
    "{{ message.reasoning_content or '' }}</think>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    "</assistant>\n{% else %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
"""A template that closes turns with text: only ``<think>`` and ``<tool_call>`` are control tokens."""


OPEN_AT_THE_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role != 'assistant' or not loop.last %}"
    "{{ '\\n<|end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that ends a turn with a newline and a token, and the last one with nothing."""


TEXT_AFTER = "<user>Bye.</user>\n<assistant><think>"
CONTROL_AFTER = "\n<|user|>Bye.\n<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "completion", "added"),
    [
        (TEXT_CLOSED, "Hm.</think>Hi!</assistant>\n", TEXT_AFTER),
        (TEXT_CLOSED, "Hm.</think>Hi!</assistant>", "\n" + TEXT_AFTER),
        (TEXT_CLOSED, "Hm.</think>Hi!</s>", "</assistant>\n" + TEXT_AFTER),
        (TEXT_CLOSED, "Hm.</think>Hi", "</assistant>\n" + TEXT_AFTER),
        (TEXT_CLOSED, "Hm", "</think></assistant>\n" + TEXT_AFTER),
        (TEXT_CLOSED, "</think>", "</assistant>\n" + TEXT_AFTER),
        (TEXT_CLOSED, "</think><tool_call>look</tool_call>", "</assistant>\n" + TEXT_AFTER),
        (OPEN_AT_THE_END, "Hi.", "\n<|end|>" + CONTROL_AFTER),
        (OPEN_AT_THE_END, "Hi.\n", "<|end|>" + CONTROL_AFTER),
        (OPEN_AT_THE_END, "Hi.\n<|end|>", CONTROL_AFTER),
        (OPEN_AT_THE_END, "Hi.<|end|>", CONTROL_AFTER),
    ],
)
def test_a_turn_is_closed_once_with_what_the_template_writes_at_its_end(
    template: str, completion: str, added: str
) -> None:
    renderer = over_bytes(template, controls="<|user|><|assistant|>")
    tokenizer = renderer.tokenizer
    prompt = renderer.render_ids([user("Hello.")], add_generation_prompt=True)
    bridged = renderer.bridge_to_next_turn(prompt, tokenizer.encode(completion), [user("Bye.")])
    assert bridged is not None
    assert tokenizer.decode(bridged.new_ids) == added
    if completion == "Hi.":
        conversation = [user("Hello."), assistant("Hi."), user("Bye.")]
        assert bridged.token_ids == renderer.render_ids(conversation, add_generation_prompt=True)


HANDED_OVER = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{% if m.tool_calls %}<result>{% else %}{{ '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that ends a turn with a call differently from an answer."""


@pytest.mark.parametrize("reply", [assistant("Hi."), assistant("", call("look", {}))])
def test_a_user_may_speak_before_a_call_is_answered(reply: Any) -> None:
    renderer = over_bytes(HANDED_OVER, controls="<|user|><|assistant|>")
    cut = cut_after(renderer, [user("Hello."), reply, user("Stop.")], 1, 3, SIMPLE)
    assert cut is not None
    assert cut.bridge(renderer) == cut.full.token_ids
