"""mini-swe-agent: its default agent in a local shell, through litellm."""

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from task import runs

for run in runs():
    model = LitellmModel(
        model_name="openai/pocket",
        model_kwargs={"api_base": run.openai, "api_key": "none"},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="You work in a shell.",
        instance_template="{{task}}",
        step_limit=10,
        cost_limit=0,
    )
    print(repr(agent.run("Say Grüezi in Zürich.")))
