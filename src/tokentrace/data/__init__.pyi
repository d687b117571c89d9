"""The public names of data and where each is defined."""

from .job import tokenize_dataset as tokenize_dataset
from .job import tokenize_files as tokenize_files
from .tables import read_samples as read_samples
from .tables import write_samples as write_samples
from .tokenizing import TokenizeSettings as TokenizeSettings
from .tokenizing import tokenize_rows as tokenize_rows
