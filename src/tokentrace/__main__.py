"""``python -m tokentrace`` is ``tokentrace``."""

from .cli import main

main(prog_name="tokentrace")
