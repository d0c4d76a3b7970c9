"""Stage `select`: which decoder layers go, a pure choice from the scores.

Reads ``data/score/<model>.parquet``; no model. Writes ``data/select/<model>-<criterion>-<n>.parquet``.
"""

import importlib
import json
from typing import Any

import pandas as pd

from stages.project import params
from stages.project.artifacts import read_table, write_table
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import score_file, select_file
from stages.project.schemas import SCORE, SELECT
from stages.protection import removable


def main() -> None:
    """Run the stage for one selection."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: grid.criteria", row.criterion, settings.select)
    scores = read_table(score_file(row.model), SCORE)
    layers = int(scores["end"].max())
    removed = choose(row.criterion, scores, row.n, settings.select[row.criterion])
    first = scores.iloc[0]
    frame = pd.DataFrame({"layer": removed}).assign(
        model=row.model,
        criterion=row.criterion,
        n=row.n,
        dtype=first["dtype"],
        calibration=first["calibration"],
        layers=layers,
        criterion_options=json.dumps(settings.select[row.criterion], sort_keys=True),
    )
    write_table(select_file(row), frame, SELECT)


def choose(criterion: str, scores: pd.DataFrame, n: int, options: dict[str, Any]) -> list[int]:
    """The layers that `criterion` removes, in order.

    Raises UserError when n is too large for the layers it may remove, or when it breaks its contract.
    """
    own = {name: value for name, value in options.items() if name not in ("protect_first", "protect_last")}
    allowed = removable(int(scores["end"].max()), n, criterion, options)
    removed = sorted(importlib.import_module(f"stages.criteria.{criterion}").choose(scores, n, allowed, **own))
    if len(set(removed)) != n or not set(removed) <= set(allowed):
        raise UserError(f"stages/criteria/{criterion}.py: chose {removed}, expected {n} layers of {allowed}")
    return removed


if __name__ == "__main__":
    run(main)
