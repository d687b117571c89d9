"""The public names of show and where each is defined."""

from .document import Document as Document
from .page import Page as Page
from .page import show as show
from .results import json_view as json_view
from .terminal import plain_view as plain_view
from .terminal import text_view as text_view

__all__: list[str]
