"""Every notebook runs cell by cell, and stores no output, which would go stale and depend on a machine."""

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as loop:  # cells may await, and share one loop, as in Jupyter
        for number, cell in enumerate(cells):
            assert not cell["outputs"], f"cell {number} has output: clear it"
            code = compile(
                "".join(cell["source"]), f"{path.name}, cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            result = eval(code, names)
            if inspect.iscoroutine(result):
                loop.run(result)
    assert capsys.readouterr().out
