"""The public names of show and where each is defined."""

from .arrays import json_view as json_view
from .terminal import plain_view as plain_view
from .terminal import text_view as text_view
from .viewing import Page as Page
from .viewing import html_fragment as html_fragment
from .viewing import html_page as html_page
from .viewing import show as show

__all__: list[str]
