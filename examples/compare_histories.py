"""Where production, rollout and training differ, for a template that forgets the reasoning of earlier turns."""

from tokentrace import create_renderer
from tokentrace.diagnose import compare_histories
from tokentrace.pocket import POCKET

FORGETFUL = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
messages = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "reasoning_content": "A simple sum.", "content": "4"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "reasoning_content": "They want the reason.", "content": "By definition."},
]
for settings in ({}, {"preserve_all_thinking": True}, {"history": "inference"}):
    renderer = create_renderer(POCKET, chat_template=FORGETFUL, **settings)
    report = compare_histories(renderer, messages)
    print(settings or "as shipped")
    print(report.summary, end="\n\n")
print(report)
