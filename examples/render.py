"""Render a conversation with the embedded pocket model, and print where its tokens come from."""

from tokentrace import create_renderer
from tokentrace.pocket import POCKET

messages = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "reasoning_content": "6 * 7 = 42", "content": "42"},
]
rendered = create_renderer(POCKET).render(messages)

print(rendered)
for start, stop, token in rendered.spans():
    text = rendered.decode(slice(start, stop))
    print(f"{start:3}-{stop:<3} {token.role or '':10} {token.field:18} {text!r}")
