"""Tables as bytes: Arrow's stream is a file of samples like the others, and groups of rows are bounded in bytes."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tokentrace import InputError
from tokentrace.data import writers
from tokentrace.data.tables import (
    Layout,
    file_schema,
    read_metadata,
    read_samples,
    read_tables,
    samples_table,
    write_samples,
)
from tokentrace.samples.sample import Sample
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.trajectory import Trajectory


def trajectory() -> Trajectory:
    made = Trajectory(name="t")
    made.begin([1, 2, 3], messages=1, message_spans=[(0, 3, 0)])
    made.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop", version=1)
    made.branch([1, 2, 4], cause="edit")
    made.append_completion([9], [-0.75], finish_reason="stop", version="b")
    return made


def write_arrow(path: Path, samples: list[Sample], metadata: dict[str, str]) -> None:
    """Arrow's stream, as the gateway sends it."""
    layout = Layout.of(samples)
    with path.open("wb") as file:
        writer = writers.table_writer(path.name, file, file_schema(layout, metadata))
        writer.write(samples_table(samples, layout=layout))
        writer.finish()


def test_an_arrow_file_is_read_as_the_others_are(tmp_path: Path) -> None:
    samples = trajectory_samples(trajectory(), reward=0.5)
    tables = []
    for name in ("rows.arrow", "rows.parquet", "rows.jsonl"):
        write = write_arrow if name == "rows.arrow" else write_samples
        write(tmp_path / name, samples, {"made": "here"})
        assert read_metadata(tmp_path / name)["made"] == "here"
        read = list(read_samples(tmp_path / name))
        assert [each.ids.tolist() for each in read] == [[1, 2, 3, 7, 8], [1, 2, 4, 9]]
        assert [each.versions for each in read] == [each.versions for each in samples]
        tables.append([table.to_pylist() for table in read_tables(tmp_path / name, ["input_ids", "branch"])])
    assert tables[0] == tables[1] == tables[2]


def test_an_arrow_file_that_is_cut_off_or_something_else_is_an_input_error(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.arrow", tmp_path / "cut.arrow"
    write_arrow(whole, trajectory_samples(trajectory()), {})
    raw = whole.read_bytes()
    for damaged in (b"", b"not arrow at all", raw[: len(raw) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"cut\.arrow"):
            list(read_samples(path))
    with pytest.raises(InputError, match="is not there"):
        list(read_samples(tmp_path / "none.arrow"))


@pytest.mark.parametrize("name", [".parquet", ".arrow"])
def test_groups_of_rows_are_bounded_in_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = trajectory_samples(trajectory())
    table = samples_table(samples, layout=Layout.of(samples))
    monkeypatch.setattr(writers, "GROUP_BYTES", 3 * table.nbytes)
    out = io.BytesIO()
    writer = writers.table_writer(name, out, table.schema)
    for _ in range(7):
        writer.write(table)
    writer.finish()
    out.seek(0)
    if name == ".parquet":
        file = pyarrow.parquet.ParquetFile(out)
        sizes = [file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)]
    else:
        sizes = [batch.num_rows for batch in pa.ipc.open_stream(out)]
    assert sizes == [6, 6, 2]
