"""A rollout by hand: prompt, sampled ids, tool result, bridge, and a trajectory of them. The engine is scripted."""

from tokentrace import Trajectory, create_renderer, explain_break
from tokentrace.pocket import POCKET

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
SAMPLED = [  # what an engine might return, with odd spacing
    "<think>\nLet me see.\n</think>\n\n"
    '<tool_call>\n{"name":"calculator",  "arguments":{"expression": "6*7"}}\n</tool_call><|end|>',
    "It is 42.<|end|>",
]

renderer = create_renderer(POCKET)
question = [{"role": "user", "content": "What is 6 * 7?"}]
record = Trajectory(name="example", vocab_size=renderer.tokenizer.vocabulary.size)
record.begin(renderer.render(question, tools=[CALCULATOR], add_generation_prompt=True).ids, messages=1)


def engine(text: str) -> list[int]:
    """Stands in for vLLM or SGLang, which return ids."""
    return [int(index) for index in renderer.tokenizer.encode(text)]


first = engine(SAMPLED[0])
turn = record.append_completion(first, [-0.5] * len(first), finish_reason="stop", version="step 1")

result = {"role": "tool", "tool_call_id": "call1", "name": "calculator", "content": "42"}
prompt, completion = record.stream()[: turn.start], turn.tokens.ids
bridged = renderer.bridge(prompt, completion, [result], tools=[CALCULATOR])
assert bridged, bridged
print("the bridge adds:", repr(renderer.tokenizer.decode(bridged.new_ids)))
record.append_bridge(bridged)

second = engine(SAMPLED[1])
record.append_completion(second, [-0.1] * len(second), finish_reason="stop", version="step 1")
print(record)
print("loss falls on:", repr(renderer.tokenizer.decode(record.stream()[record.loss_mask()])))

# What a client that keeps messages instead of ids would have sent:
call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}, "id": "call1"}
parsed = {"role": "assistant", "reasoning_content": "Let me see.", "content": "", "tool_calls": [call]}
again = renderer.render_ids([*question, parsed, result], tools=[CALCULATOR], add_generation_prompt=True)
print()
print(explain_break([*prompt.tolist(), *first], again, renderer))
