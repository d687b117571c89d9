"""pydantic-ai: one agent, three questions, over all three dialects."""

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from task import QUESTIONS, SYSTEM, Run, run_all, weather


def model_of(run: Run):
    if run.dialect == "messages":
        client = AsyncAnthropic(base_url=run.url, api_key=run.key)
        return AnthropicModel("pocket", provider=AnthropicProvider(anthropic_client=client))
    provider = OpenAIProvider(base_url=run.openai, api_key="none")
    kind = OpenAIResponsesModel if run.dialect == "responses" else OpenAIChatModel
    return kind("pocket", provider=provider)


async def watch(_context, events) -> None:
    """Without a reader of events it does not stream."""
    async for _ in events:
        pass


async def talk(run: Run) -> None:
    agent = Agent(model_of(run), system_prompt=SYSTEM, tools=[weather])
    history = None
    for question in QUESTIONS:
        handler = watch if run.stream else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        history = result.all_messages()
        print(repr(result.output))


run_all(talk)
