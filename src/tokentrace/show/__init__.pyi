"""The public names of show and where each is defined."""

from .arrays import json_view as json_view
from .document import Document as Document
from .page import Page as Page
from .page import show as show
from .terminal import plain_view as plain_view
from .terminal import text_view as text_view

__all__: list[str]
