"""The public names of samples and where each is defined."""

from .batches import collate as collate
from .batches import row_staleness as row_staleness
from .batches import token_staleness as token_staleness
from .batches import token_versions as token_versions
from .pasts import HistoryWarning as HistoryWarning
from .pasts import TurnStartWarning as TurnStartWarning
from .sample import Overlong as Overlong
from .sample import Sample as Sample
from .sample import Truncated as Truncated
from .sample import truncate as truncate
from .supervised import SampleBuilder as SampleBuilder
from .supervised import SampleSettings as SampleSettings
from .supervised import build_prompt_response_sample as build_prompt_response_sample
from .supervised import build_supervised_sample as build_supervised_sample
from .supervised import build_supervised_samples as build_supervised_samples
from .trajectories import Advantages as Advantages
from .trajectories import Baseline as Baseline
from .trajectories import Relative as Relative
from .trajectories import relative_to_group as relative_to_group
from .trajectories import returns_to_go as returns_to_go
from .trajectories import trajectory_advantages as trajectory_advantages
from .trajectories import trajectory_samples as trajectory_samples
