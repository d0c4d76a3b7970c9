"""What the rows that params.yaml declares were found to be: the artifacts, read and checked to be comparable.

Of every declared row the scores, the selection, the diagnostics, the perplexities and the accuracies, of some the texts
and the costs (their places: :mod:`stages.project.paths`, their columns: :mod:`stages.project.schemas`). Files that
params.yaml does not declare are not looked at.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from stages.project import schemas
from stages.project.artifacts import REMEDY, read_table
from stages.project.errors import UserError
from stages.project.keys import Row
from stages.project.paths import (
    accuracy_file,
    cost_file,
    diagnostics_file,
    perplexity_file,
    score_file,
    select_file,
    text_file,
)
from stages.project.sections import Params

SAME_WINDOWS = ["window", "tokens", "seqlen", "bos", "source", "cut", "seed"]
SAME_QUESTIONS = ["member", "question", "answer", "version", "source", "limit", "available", "num_fewshot"]

Tables = list[tuple[Path, pd.DataFrame]]


@dataclass(frozen=True)
class Results:
    """The declared rows with their artifacts. A selection is keyed by its :class:`Row` without operator."""

    rows: list[Row]
    corpora: list[str]
    tasks: list[str]
    numbers: list[int]
    prompts: list[str] = field(default_factory=list)
    scores: dict[str, pd.DataFrame] = field(default_factory=dict)
    selections: dict[Row, list[int]] = field(default_factory=dict)
    criterion_options: dict[Row, str] = field(default_factory=dict)
    operators: dict[Row, pd.DataFrame] = field(default_factory=dict)
    windows: dict[Row, dict[str, pd.DataFrame]] = field(default_factory=dict)
    questions: dict[Row, dict[str, pd.DataFrame]] = field(default_factory=dict)
    texts: dict[Row, pd.DataFrame] = field(default_factory=dict)
    costs: dict[Row, pd.DataFrame] = field(default_factory=dict)
    versions: dict[str, set[str]] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """The models in the order of params.yaml."""
        return [row.model for row in self.rows if row.dense]

    @cached_property
    def normed(self) -> list[str]:
        """The tasks whose questions carry the metric acc_norm beside acc."""
        scored = self.questions.values()
        return [task for task in self.tasks if all(of_row[task]["correct_norm"].notna().all() for of_row in scored)]

    def pruned(self, model: str, n: int) -> list[Row]:
        """The rows of `model` with `n` layers removed: those that compete in one table."""
        return [row for row in self.rows if (row.model, row.n) == (model, n) and not row.dense]

    def recipe(self, row: Row) -> tuple[str, str, tuple[int, ...]]:
        """What makes a pruned row the model that it is, whatever the criterion: base, operator and removed layers."""
        return row.model, row.operator, tuple(self.selections[Row(row.model, row.criterion, row.n)])

    def first_alike(self, row: Row) -> str:
        """The first criterion that removed the same layers as that of `row`: its own, if none did before."""
        layers = self.selections[Row(row.model, row.criterion, row.n)]
        return next(name for name, chosen in self.chosen(row.model, row.n).items() if chosen == layers)

    def chosen(self, model: str, n: int) -> dict[str, list[int]]:
        """The layers that each criterion removed from `model`, ascending, by criterion."""
        return {row.criterion: layers for row, layers in self.selections.items() if (row.model, row.n) == (model, n)}


def read(params: Params) -> Results:
    """Read the artifacts of all declared rows.

    Raises UserError naming the file when one is missing, unreadable, of another schema or of another row, empty or not
    finite where it must not be; and naming two files and a column when rows of one model are not comparable.
    """
    grid = params.grid
    results = Results(params.rows(), params.text.perplexity.corpora, grid.tasks, grid.n, params.generate.prompts)
    for model in grid.models:
        _read_model(results, model, grid.criteria)
    for key in params.cost.rows:
        row = params.row(key)
        results.costs[row] = _read(results, cost_file(row), schemas.COST, {"model": row.model})
    return results


def _read_model(results: Results, model: str, criteria: Sequence[str]) -> None:
    selected: Tables = []
    calibrated: Tables = []
    evaluated: Tables = []
    if results.numbers:
        path = score_file(model)
        scores = _read(results, path, schemas.SCORE, {"model": model})
        _require_finite(path, scores, "cosine")
        results.scores[model] = scores
        selected.append((path, scores))
    for n in results.numbers:
        for criterion in criteria:
            row = Row(model, criterion, n)
            path = select_file(row)
            selection = _read(results, path, schemas.SELECT, {"model": model, "criterion": criterion, "n": n})
            results.selections[row] = _layers(path, selection, n, of=int(results.scores[model]["end"].max()))
            results.criterion_options[row] = selection["criterion_options"].iloc[0]
            selected.append((path, selection))
    for row in (row for row in results.rows if row.model == model):
        tables = _read_evaluations(results, row)
        evaluated += tables
        if not row.dense:
            path = diagnostics_file(row)
            results.operators[row] = _read(results, path, schemas.SOLVE, row.columns())
            calibrated += [*tables, (path, results.operators[row])]
    _require_same("calibration", selected)
    _require_same("calibration", calibrated)
    written = [(text_file(row), frame) for row, frame in results.texts.items() if row.model == model]
    _require_same("dtype", selected + calibrated + evaluated + written)
    _require_same("operator_dtype", [(path, frame.dropna(subset="operator_dtype")) for path, frame in evaluated])
    for corpus in results.corpora:
        parts = [(path, frame[frame["corpus"] == corpus]) for path, frame in evaluated if "corpus" in frame]
        _require_comparable(parts, SAME_WINDOWS)
    for task in results.tasks:
        parts = [(path, frame[frame["task"] == task]) for path, frame in evaluated if "task" in frame]
        _require_comparable([part for part in parts if len(part[1])], SAME_QUESTIONS)


def _read_evaluations(results: Results, row: Row) -> Tables:
    """Read the perplexities and accuracies of one row, sorted so that rows pair up."""
    tables: Tables = []
    if results.corpora:
        path = perplexity_file(row)
        windows = _read(results, path, schemas.EVAL_PPL, row.columns()).sort_values(["corpus", "window"])
        _require_finite(path, windows, "nll")
        if (windows["tokens"] < 1).any():
            raise UserError(f"{path}: a window predicts no token; {REMEDY}")
        results.windows[row] = {corpus: windows[windows["corpus"] == corpus] for corpus in results.corpora}
        for corpus, frame in results.windows[row].items():
            if frame.empty:
                raise UserError(f"{path}: holds no window of the corpus {corpus!r}; {REMEDY}")
        tables.append((path, windows))
    if results.prompts:
        path = text_file(row)
        results.texts[row] = _read(results, path, schemas.GENERATE, row.columns())
        if results.texts[row]["prompt"].tolist() != results.prompts:
            raise UserError(f"{path}: not the texts after the prompts in params.yaml: generate.prompts; {REMEDY}")
    results.questions[row] = {}
    for task in results.tasks:
        path = accuracy_file(row, task)
        questions = _read(results, path, schemas.EVAL_ACC, {**row.columns(), "task": task})
        questions = questions.sort_values(["member", "question"])
        if questions.empty:
            raise UserError(f"{path}: holds no question; {REMEDY}")
        if questions["correct_norm"].isna().nunique() > 1:
            raise UserError(f"{path}: column `correct_norm` is null for some questions and not for others; {REMEDY}")
        results.questions[row][task] = questions
        tables.append((path, questions))
    return tables


def _read(results: Results, path: Path, schema: schemas.Schema, identity: dict[str, Any]) -> pd.DataFrame:
    """Read one artifact, check that it is the one its name says, and note the libraries that made it."""
    frame = read_table(path, schema)
    for column, expected in identity.items():
        for found in frame.loc[frame[column] != expected, column].head(1):
            raise UserError(f"{path}: column `{column}` holds {found!r}, expected {expected!r}; {REMEDY}")
    made_with = (pq.read_schema(path).metadata or {}).get(b"versions", b"{}")
    for library, version in json.loads(made_with).items():
        results.versions.setdefault(library, set()).add(version)
    return frame


def _layers(path: Path, selection: pd.DataFrame, n: int, of: int) -> list[int]:
    layers = sorted({int(layer) for layer in selection["layer"]})
    if not set(layers) <= set(range(of)):
        raise UserError(f"{path}: names layer {layers[-1]}, the scores have {of} layers; {REMEDY}")
    if len(layers) != n or len(selection) != n:
        raise UserError(f"{path}: names {len(layers)} layers in {len(selection)} rows, expected {n}; {REMEDY}")
    return layers


def _require_finite(path: Path, frame: pd.DataFrame, column: str) -> None:
    bad = ~np.isfinite(frame[column].to_numpy())
    if bad.any():
        raise UserError(
            f"{path}: column `{column}` is not finite in {int(bad.sum())} of {len(frame)} rows (first: row "
            f"{int(bad.argmax())}); the model computed NaN or infinity, often because its dtype is too narrow "
            f"(models.<model>.dtype)"
        )


def _require_same(column: str, tables: Tables) -> None:
    """Every table must hold one and the same value (or null) in `column`; empty tables hold none."""
    values = [(path, value) for path, frame in tables for value in frame[column].astype(object).unique()]
    for path, value in values:
        first, expected = values[0]
        if value != expected and not (pd.isna(value) and pd.isna(expected)):
            raise _incomparable(first, path, column, expected, value)


def _require_comparable(tables: Tables, columns: Sequence[str]) -> None:
    """Every table must hold the same values as the first in `columns`, row by row."""
    for path, frame in tables[1:]:
        first, expected = tables[0]
        for column in columns:
            a, b = expected[column].reset_index(drop=True), frame[column].reset_index(drop=True)
            if len(a) != len(b):
                raise _incomparable(first, path, column, f"{len(a)} rows", f"{len(b)} rows")
            if not a.equals(b):
                at = int(((a != b) & ~(a.isna() & b.isna())).argmax())
                raise _incomparable(first, path, column, a[at], b[at])


def _incomparable(first: Path, second: Path, column: str, expected: object, found: object) -> UserError:
    return UserError(
        f"{first} and {second} differ in column `{column}`: {expected} and {found}; rows of one table must share it: "
        f"run `dvc repro`, which computes again what other settings made"
    )
