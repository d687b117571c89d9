"""Interactions: simulated users who answer the model until they are satisfied."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conversation.messages import Messages
from ..errors import InputError, brief
from .calling import called, takes


@dataclass(frozen=True, slots=True)
class Reply:
    """A simulated user's next message; with `done`, the rollout ends without it."""

    content: str = ""
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InputError(f"the content of a Reply must be text, not {brief(self.content)}")


class BaseInteraction:
    """A simulated user. One object serves all trajectories."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})

    @property
    def name(self) -> str:
        return str(self.config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a trajectory. `kwargs` are its task's settings."""

    async def generate_response(self, instance_id: str, messages: Messages, **kwargs: Any) -> Any:
        """Answer the last message: `Reply`, text, None to end, or (done, text, reward, metrics)."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole trajectory, or None."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""


class AdoptedInteraction(BaseInteraction):
    """Any object with `generate_response`, such as verl's."""

    def __init__(self, user: Any) -> None:
        self._user = user
        self._ids: dict[str, str] = {}
        """By trajectory: the id that `start_interaction` chose."""

    @property
    def name(self) -> str:
        return str(getattr(self._user, "name", None) or type(self._user).__name__)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        start = getattr(self._user, "start_interaction", None)
        id = None if start is None else await called(start, instance_id, **kwargs)
        self._ids[instance_id] = id if isinstance(id, str) else instance_id

    async def generate_response(self, instance_id: str, messages: Messages, **kwargs: Any) -> Any:
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        respond = self._user.generate_response
        settings = {key: value for key, value in kwargs.items() if takes(respond, key)}
        return await called(respond, self._ids[instance_id], texts, **settings)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        id = self._ids.pop(instance_id)
        finalize = getattr(self._user, "finalize_interaction", None)
        if finalize is not None:  # verl's own base class takes no id here
            await called(finalize, *([id] if takes(finalize, "instance_id") else []))


def as_interactions(interaction: Any) -> dict[str, BaseInteraction]:
    """Return simulated users by name. A single one is called "" and serves every task."""
    if interaction is None:
        return {}
    users: dict[str, BaseInteraction] = {}
    for name, user in (interaction if isinstance(interaction, Mapping) else {"": interaction}).items():
        if isinstance(user, type) or not callable(getattr(user, "generate_response", None)):
            raise InputError(f"interaction {brief(name)} must be a BaseInteraction, not {brief(user)}")
        users[name] = user if isinstance(user, BaseInteraction) else AdoptedInteraction(user)
    return users


def choose_user(
    users: Mapping[str, BaseInteraction], settings: Mapping[str, Any]
) -> BaseInteraction | None:
    """A task's simulated user: the one that its settings name, or the only one."""
    if not users or "" in users:
        return users.get("")
    name = settings.get("name")
    if name is None and len(users) == 1:
        return next(iter(users.values()))
    if not isinstance(name, str) or name not in users:
        names = " or ".join(users)
        raise InputError(f"there is no simulated user {brief(name)}: interaction_kwargs.name is {names}")
    return users[name]


def as_reply(answer: Any) -> Reply:
    """What `generate_response` returned as a reply. Raises InputError."""
    if isinstance(answer, Reply):
        return answer
    if answer is None:
        return Reply(done=True)
    if isinstance(answer, tuple) and len(answer) == 4:
        done, content, reward, metrics = answer
        return Reply("" if content is None else content, bool(done), reward, metrics or {})
    return Reply(answer)
