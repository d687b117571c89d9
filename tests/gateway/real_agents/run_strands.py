"""strands: one agent, three questions, over chat completions and messages. It always streams."""

from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from task import QUESTIONS, SYSTEM, Run, runs, weather


def model_of(run: Run):
    if run.dialect == "messages":
        return AnthropicModel(client_args={"base_url": run.url, "api_key": run.key}, model_id="pocket", max_tokens=2000)
    return OpenAIModel(client_args={"base_url": run.openai, "api_key": "none"}, model_id="pocket")


for run in runs():
    agent = Agent(model=model_of(run), tools=[tool(weather)], system_prompt=SYSTEM, callback_handler=None)
    for question in QUESTIONS:
        print(repr(str(agent(question))))
