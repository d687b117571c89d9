"""All shapes that are read, the most telling first, and which of them a line has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import InputError, shown
from . import nemo_gym, openenv, plain, rows, trl, verifiers, verl
from .shape import Shape

SHAPES: Final[tuple[Shape, ...]] = (
    *verifiers.SHAPES,
    *nemo_gym.SHAPES,
    *openenv.SHAPES,
    *trl.SHAPES,
    *verl.SHAPES,
    *rows.SHAPES,
    *plain.SHAPES,
)
NAMES: Final = tuple(dict.fromkeys(shape.name for shape in SHAPES))
"""What ``--shape`` takes."""


def shape_of(row: Any, name: str | None = None) -> Shape:
    """The shape of a line, among all or among those of one name; InputError says what the line has."""
    if not isinstance(row, Mapping):
        raise InputError(f"a line of a dump is an object, not {shown(row)}")
    found = next((shape for shape in SHAPES if name in (None, shape.name) and shape.fits(row)), None)
    if found is not None:
        return found
    if name is not None:
        forms = "; ".join(shape.form for shape in SHAPES if shape.name == name)
        raise InputError(f"this is {shown(row)}, and none of what {name} writes: {forms}")
    raise InputError(
        f"this is {shown(row)}, which is none of the shapes that are known ({', '.join(NAMES)}): a call needs "
        "prompt_ids and completion_ids, a row input_ids and loss_mask"
    )
