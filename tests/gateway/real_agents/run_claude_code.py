"""Claude Code, as bundled with claude-agent-sdk: one tool, one conversation in one or more sittings."""

import os

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, create_sdk_mcp_server, tool
from task import Run, run_all
from task import weather as tell_weather


@tool("weather", "Tells the weather.", {"city": str, "days": int})
async def weather(arguments: dict) -> dict:
    return {"content": [{"type": "text", "text": tell_weather(arguments["city"], arguments["days"])}]}


async def talk(run: Run) -> None:
    options = ClaudeAgentOptions(
        model="pocket",
        mcp_servers={"sky": create_sdk_mcp_server("sky", tools=[weather])},
        allowed_tools=["mcp__sky__weather", "Bash"],
        permission_mode="bypassPermissions",
        setting_sources=[],
        env={
            "ANTHROPIC_BASE_URL": run.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
        stderr=lambda line: print("stderr:", line),
    )
    for questions in run.sittings:
        async with ClaudeSDKClient(options=options) as client:
            for question in questions:
                await client.query(question)
                async for message in client.receive_response():
                    if isinstance(message, ResultMessage):
                        print(repr(message.result), message.session_id)
                        options.resume = message.session_id


os.environ.pop("PYTHONPATH", None)
run_all(talk)
