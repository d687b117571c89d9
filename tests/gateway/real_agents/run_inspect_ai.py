"""inspect-ai: its generate loop, three questions, over all three dialects."""

from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, execute_tools, get_model
from inspect_ai.tool import Tool, tool
from task import QUESTIONS, SYSTEM, Run, run_all
from task import weather as tell_weather


@tool
def weather() -> Tool:
    async def execute(city: str, days: int) -> str:
        """Tells the weather.

        Args:
            city: The name of the city.
            days: How many days ahead.
        """
        return tell_weather(city, days)

    return execute


def model_of(run: Run):
    config = GenerateConfig(max_tokens=2000)
    if run.dialect == "messages":
        return get_model("anthropic/pocket", base_url=run.url, api_key=run.key, config=config, streaming=run.stream)
    responses = run.dialect == "responses"
    return get_model("openai/pocket", base_url=run.openai, api_key="none", config=config, responses_api=responses)


async def talk(run: Run) -> None:
    model = model_of(run)
    messages: list = [ChatMessageSystem(content=SYSTEM)]
    for question in QUESTIONS:
        messages.append(ChatMessageUser(content=question))
        while True:
            output = await model.generate(messages, tools=[weather()])
            messages.append(output.message)
            if not output.message.tool_calls:
                break
            messages += (await execute_tools(messages, [weather()])).messages
        print(repr(output.completion))


run_all(talk)
