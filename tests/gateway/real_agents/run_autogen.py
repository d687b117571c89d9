"""autogen: an assistant that reflects on what its tools say, three questions."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from task import QUESTIONS, SYSTEM, Run, run_all, weather

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def talk(run: Run) -> None:
    client = OpenAIChatCompletionClient(model="pocket", base_url=run.openai, api_key="none", model_info=INFO)
    agent = AssistantAgent(
        "weather",
        client,
        tools=[weather],
        system_message=SYSTEM,
        reflect_on_tool_use=True,
        model_client_stream=run.stream,
    )
    for question in QUESTIONS:
        result = await agent.run(task=question)
        print(repr(result.messages[-1].content))
    await client.close()


run_all(talk)
