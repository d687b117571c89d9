"""A conversation as training rows: what carries loss, cut to a length, padded to one batch."""

import json

from tokentrace import build_supervised_sample, build_supervised_samples, collate, create_renderer, truncate
from tokentrace.pocket import EXAMPLE, POCKET

example = json.loads(EXAMPLE.read_text(encoding="utf-8"))
renderer = create_renderer(POCKET)
messages, tools = example["messages"], example["tools"]

everything = build_supervised_sample(renderer, messages, tools=tools)
calls = build_supervised_sample(renderer, messages, tools=tools, parts=["tool_calls", "stop"])
print(f"{len(everything)} tokens: {everything.trained} carry loss, {calls.trained} if only calls and stop tokens do")

rows = build_supervised_samples(renderer, messages, tools=tools, past="expand")
print(f"each turn as the model would have seen it: {len(rows)} row(s)")

short = truncate(everything, 480, "turns").sample
assert short is not None
print(f"whole turns within 480 tokens: {len(short)} tokens, {short.trained} trained")

pad = renderer.tokenizer.token_id("<|pad|>") or 0
batch = collate([everything, calls, short], pad_id=pad, multiple_of=64)
print(f"a batch of shape {batch['input_ids'].shape}, {batch['loss_mask'].sum()} tokens carry loss")
