"""openai-agents: one agent, three questions, over chat completions and responses."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from task import QUESTIONS, SYSTEM, Run, run_all, weather


async def talk(run: Run) -> None:
    client = AsyncOpenAI(base_url=run.openai, api_key="none")
    kind = OpenAIResponsesModel if run.dialect == "responses" else OpenAIChatCompletionsModel
    agent = Agent("Weather", instructions=SYSTEM, tools=[function_tool(weather)], model=kind("pocket", client))
    history: list = []
    for question in QUESTIONS:
        messages = [*history, {"role": "user", "content": question}]
        if run.stream:
            result = Runner.run_streamed(agent, messages)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, messages)
        history = result.to_input_list()
        print(repr(result.final_output))


run_all(talk)
