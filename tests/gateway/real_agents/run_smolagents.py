"""smolagents: an agent that calls tools, two tasks; it repeats its calls as text."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from task import QUESTIONS, runs, weather

for run in runs():
    model = OpenAIServerModel("pocket", api_base=run.openai, api_key="none")
    agent = ToolCallingAgent(
        tools=[tool(weather)], model=model, stream_outputs=run.stream, add_base_tools=False, verbosity_level=0
    )
    for at, question in enumerate(QUESTIONS[:2]):
        print(repr(agent.run(question, reset=not at)))
