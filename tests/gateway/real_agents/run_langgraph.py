"""langchain's agent on langgraph, with a memory: three questions, over all three dialects."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from task import QUESTIONS, SYSTEM, Run, runs, weather


def model_of(run: Run):
    if run.dialect == "messages":
        return ChatAnthropic(model="pocket", base_url=run.url, api_key=run.key, max_tokens=2000, streaming=run.stream)
    responses = run.dialect == "responses"
    return ChatOpenAI(
        model="pocket", base_url=run.openai, api_key="none", use_responses_api=responses, streaming=run.stream
    )


for run in runs():
    agent = create_agent(model_of(run), tools=[weather], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    for question in QUESTIONS:
        inputs = {"messages": [{"role": "user", "content": question}]}
        if run.stream:
            for _ in agent.stream(inputs, thread, stream_mode="messages"):
                pass
        else:
            agent.invoke(inputs, thread)
        print(repr(agent.get_state(thread).values["messages"][-1].content))
