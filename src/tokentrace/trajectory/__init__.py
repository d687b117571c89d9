"""The append-only record of one rollout: exact tokens, where each came from, and the tree of rewritten histories."""

from .storage import Ending, Loaded, TrajectoryFile, from_bytes, load_trajectory, save_trajectory, to_bytes
from .trajectory import Trajectory
from .turns import Branch, LogprobKind, MessageSpan, SharedPrefix, Turn, VersionSpan

__all__ = [
    "Branch",
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
