"""The public names of trajectories and where each is defined."""

from .channels import Channel as Channel
from .storage import Loaded as Loaded
from .storage import from_bytes as from_bytes
from .storage import load_trajectory as load_trajectory
from .storage import to_bytes as to_bytes
from .trajectory import Trajectory as Trajectory
from .turns import Branch as Branch
from .turns import LogprobKind as LogprobKind
from .turns import SharedPrefix as SharedPrefix
from .turns import Turn as Turn
from .turns import VersionSpan as VersionSpan
