"""Tokens on a page: tracks and documents of them, the page that shows one, and the scripts that gateways serve too."""
