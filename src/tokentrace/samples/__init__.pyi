"""The public names of samples and where each is defined."""

from .collation import collate as collate
from .packing import Pack as Pack
from .packing import flatten as flatten
from .packing import pack as pack
from .packing import unpack as unpack
from .pasts import HistoryWarning as HistoryWarning
from .pasts import TurnStartWarning as TurnStartWarning
from .sample import Sample as Sample
from .supervised import SampleSettings as SampleSettings
from .supervised import build_prompt_response_sample as build_prompt_response_sample
from .supervised import build_supervised_sample as build_supervised_sample
from .supervised import build_supervised_samples as build_supervised_samples
from .trajectories import RolloutReport as RolloutReport
from .trajectories import report_rollouts as report_rollouts
from .trajectories import trajectory_samples as trajectory_samples
from .truncation import Overlong as Overlong
from .truncation import Truncated as Truncated
from .truncation import truncate as truncate
