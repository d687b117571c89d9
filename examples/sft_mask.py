"""Labels for supervised fine-tuning: loss only on what the model samples, stop token included."""

import json

import numpy as np

from tokentrace import create_renderer
from tokentrace.pocket import EXAMPLE, POCKET

example = json.loads(EXAMPLE.read_text(encoding="utf-8"))
rendered = create_renderer(POCKET).render(example["messages"], tools=example["tools"])

labels = np.where(rendered.mask, rendered.ids, -100)

print(f"{len(labels)} tokens, loss on {int((labels != -100).sum())}")
for turn in rendered.turns:
    print(f"message {turn.message}: {rendered.decode(slice(turn.start, turn.stop))!r}")
