import json
import os
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from stages.project import artifacts, schemas
from stages.project.artifacts import read_tensors, write_tensors
from stages.project.errors import UserError

FRAME = pd.DataFrame(
    {
        "model": "m",
        "criterion": "streamline",
        "n": 2,
        "dtype": "float32",
        "calibration": "c",
        "layer": [3, 4],
        "layers": 6,
        "criterion_options": "{}",
    }
)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def left_over() -> list[Path]:
    return [file for file in artifacts.PARTIAL.rglob("*") if file.is_file()]


def test_table_round_trip_with_versions() -> None:
    path = Path("data/select/x.parquet")
    artifacts.write_table(path, FRAME, schemas.SELECT)
    assert artifacts.read_table(path, schemas.SELECT)["layer"].tolist() == [3, 4]
    assert pq.read_schema(path).names == schemas.SELECT.names
    assert json.loads(pq.read_schema(path).metadata[b"versions"])["torch"]
    assert not left_over()


def test_same_table_same_bytes() -> None:
    for name in ("a", "b"):
        artifacts.write_table(Path(name), FRAME, schemas.SELECT)
    assert Path("a").read_bytes() == Path("b").read_bytes()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (FRAME.assign(extra=1), "extra"),
        (FRAME.drop(columns="layers"), "layers"),
        (FRAME.assign(model=None), "model: string not null"),
    ],
)
def test_wrong_columns_are_not_written(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        artifacts.write_table(Path("x"), frame, schemas.SELECT)
    assert not Path("x").exists()


def test_interrupted_write_keeps_what_was_there() -> None:
    path = Path("data/x")
    artifacts.write_json(path, {"a": 1})

    def interrupted() -> None:
        with artifacts.writing(path) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert artifacts.read_json(path) == {"a": 1}
    assert not left_over()


def test_folder_is_replaced_whole() -> None:
    path = Path("data/folder")
    for name in ("old", "new"):
        with artifacts.writing(path) as partial:
            partial.mkdir()
            (partial / name).touch()
    assert [file.name for file in path.iterdir()] == ["new"]


def test_partials_of_dead_processes_are_cleared_and_others_kept() -> None:
    artifacts.PARTIAL.mkdir(parents=True)
    # Process ids end far below 2^30 on every system.
    dead, mine = (artifacts.PARTIAL / f"data+x.{pid}" for pid in (2**30, os.getppid()))
    dead.touch()
    mine.touch()
    artifacts.write_json(Path("data/x"), {})
    assert left_over() == [mine]


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.write_json(Path("x"), {"a": float("nan")})


def test_missing_artifact_is_named() -> None:
    with pytest.raises(UserError, match="data/x.parquet: not found"):
        artifacts.read_table(Path("data/x.parquet"), schemas.SELECT)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_artifacts_are_named(kept: float) -> None:
    artifacts.write_table(Path("x"), FRAME, schemas.SELECT)
    write_tensors(Path("y"), {"a": torch.ones(100)})
    for file in (Path("x"), Path("y")):
        content = file.read_bytes()
        file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match="x: cannot be read"):
        artifacts.read_table(Path("x"), schemas.SELECT)
    with pytest.raises(UserError, match="y: cannot be read"):
        read_tensors(Path("y"))


def test_table_of_another_kind_is_refused() -> None:
    artifacts.write_table(Path("x"), FRAME, schemas.SELECT)
    with pytest.raises(UserError, match="x: has columns"):
        artifacts.read_table(Path("x"), schemas.SCORE)


def test_tensors_round_trip() -> None:
    tensors = {"b": torch.randn(3, 4, dtype=torch.float64).T, "a": torch.tensor(3)}
    write_tensors(Path("x"), tensors, {"dtype": "float32"})
    found, metadata = read_tensors(Path("x"))
    assert metadata == {"dtype": "float32"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_same_tensors_same_bytes() -> None:
    metadata = {name: name for name in "abcdefgh"}
    written = set()
    for _ in range(8):
        write_tensors(Path("x"), {"a": torch.ones(2)}, metadata)
        written.add(Path("x").read_bytes())
    assert len(written) == 1


def test_every_column_has_one_meaning() -> None:
    """A name shared by two tables is of one type in both."""
    types: dict[str, object] = {}
    for schema in (value for value in vars(schemas).values() if isinstance(value, schemas.Schema)):
        for column in schema.columns:
            assert column.meaning
            assert types.setdefault(column.name, column.type) == column.type
