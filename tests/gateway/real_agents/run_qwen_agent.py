"""qwen-agent: its assistant with the server's own function calling, three questions. It always streams."""

import json

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool
from task import QUESTIONS, SYSTEM, runs
from task import weather as tell_weather


@register_tool("weather")
class Weather(BaseTool):
    description = "Tells the weather."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }

    def call(self, params: str, **kwargs) -> str:
        return tell_weather(**json.loads(params))


for run in runs():
    model = {
        "model": "pocket",
        "model_type": "oai",
        "model_server": run.openai,
        "api_key": "none",
        "generate_cfg": {"use_raw_api": True},
    }
    agent = Assistant(llm=model, function_list=["weather"], system_message=SYSTEM)
    messages: list = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        *_, response = agent.run(messages=messages)
        messages += response
        print(repr(messages[-1]["content"]))
