"""Renderings for people to look at: in a terminal, in a notebook, as a page, as JSON."""

from .arrays import json_view
from .html import html_fragment, html_page
from .terminal import plain_view, text_view

__all__ = ["html_fragment", "html_page", "json_view", "plain_view", "text_view"]
