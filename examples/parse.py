"""Parse a completion into reasoning, content and tool calls, as a whole and token by token."""

from tokentrace import create_renderer
from tokentrace.parsing.events import ContentDelta, Done
from tokentrace.pocket import POCKET

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SAMPLED = (
    "<think>\nTwo places, two calls.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", days: 2}}\n</tool_call><|end|>'
)

renderer = create_renderer(POCKET)
print("the model writes calls as", renderer.grammar().calls.outline())
prompt = renderer.render_ids([{"role": "user", "content": "Weather?"}], tools=[WEATHER], add_generation_prompt=True)
completion = renderer.tokenizer.encode(SAMPLED).tolist()

parsed = renderer.parse_response(completion, tools=[WEATHER], prompt_ids=prompt)
print("reasoning:", repr(parsed.reasoning_content), "content:", repr(parsed.content))
for call in parsed.tool_calls:
    print(call.status.value, call.name, call.arguments, f"tokens {call.span.start} to {call.span.stop}", call.problem)
print("as a message:", parsed.to_message())

# The same while it streams. Events are emitted only when they are certain, and are never withdrawn.
parser = renderer.streaming_parser(tools=[WEATHER], prompt_ids=prompt)
events = [event for index in completion for event in parser.feed([index])] + parser.finish()
print(len(events), "events;", "content came as", [event.text for event in events if isinstance(event, ContentDelta)])
assert isinstance(events[-1], Done)
assert events[-1].response == parsed
