"""Texts by which the formats of models mark reasoning, tool calls and declared tools."""

from __future__ import annotations

from typing import Final

REASONING_TAGS: Final = (
    ("<think>", "</think>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<unused94>thought\n", "<unused95>"),
)
"""Texts that open and close reasoning."""

CALL_TAGS: Final = (
    ("<tool_call>", "</tool_call>"),
    ("<function=", "</function>"),
    ("<invoke name=", "</invoke>"),
    ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    (" to=functions.", "<|call|>"),
    ("[TOOL_CALLS]", "</s>"),
)
"""Texts that open and close a tool call."""

TOOL_SECTIONS: Final = (
    ("<tools>", "</tools>"),
    ("tool_declare<|im_middle|>", "<|im_end|>"),
    ("namespace functions {", "} // namespace functions"),
    ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ("<functions>", "</functions>"),
    ("Calls to these tools must go to the commentary channel", "<|end|>"),
    ("\n## Tools\n", "<｜User｜>"),
)
"""Texts between which templates declare tools."""
