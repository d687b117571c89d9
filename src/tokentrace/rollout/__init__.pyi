"""The public names of rollouts and where each is defined."""

from .batch import Summary as Summary
from .batch import grouped as grouped
from .batch import row_task as row_task
from .batch import run_rollouts as run_rollouts
from .config import ConfigError as ConfigError
from .config import load_interaction as load_interaction
from .config import load_tools as load_tools
from .cutting import Keep as Keep
from .ends import FAILED_ENDS as FAILED_ENDS
from .ends import End as End
from .interactions import BaseInteraction as BaseInteraction
from .interactions import Reply as Reply
from .loop import Agent as Agent
from .patience import EngineDown as EngineDown
from .patience import Outage as Outage
from .patience import Patience as Patience
from .record import Budget as Budget
from .record import Rollout as Rollout
from .record import Task as Task
from .setup import read_run as read_run
from .store import RolloutStore as RolloutStore
from .store import group_advantages as group_advantages
from .tools import BaseTool as BaseTool
from .tools import FunctionTool as FunctionTool
from .tools import ToolResult as ToolResult
