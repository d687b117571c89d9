"""The append-only record of one rollout: exact tokens, where each came from, and the tree of rewritten histories."""

from .bridges import Bridge
from .records import Ending, Loaded, from_bytes, to_bytes
from .storage import TrajectoryFile, load_trajectory, save_trajectory
from .trajectory import Trajectory
from .turns import Branch, LogprobKind, MessageSpan, SharedPrefix, Turn, VersionSpan

__all__ = [
    "Branch",
    "Bridge",
    "Ending",
    "Loaded",
    "LogprobKind",
    "MessageSpan",
    "SharedPrefix",
    "Trajectory",
    "TrajectoryFile",
    "Turn",
    "VersionSpan",
    "from_bytes",
    "load_trajectory",
    "save_trajectory",
    "to_bytes",
]
