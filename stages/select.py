"""Stage `select`: which decoder layers go.

Reads ``data/score/<model>.parquet``, from which most criteria choose; those that ask the model itself also read it and
``data/text/<model>/selection.parquet``. Writes ``data/select/<model>-<criterion>-<n>.parquet``.
"""

import importlib
import json
from types import ModuleType
from typing import Any

import pandas as pd

from stages.project import params
from stages.project.artifacts import read_table, write_table
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import score_file, select_file, selection_file
from stages.project.schemas import CALIBRATION_TEXT, SCORE, SELECT
from stages.project.sections import Params
from stages.protection import removable


def main() -> None:
    """Run the stage for one selection."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: grid.criteria", row.criterion, settings.select)
    params.check_name("params.yaml: models", row.model, settings.models)
    scores = read_table(score_file(row.model), SCORE)
    options = settings.select[row.criterion]
    module = importlib.import_module(f"stages.criteria.{row.criterion}")
    layers = int(scores["end"].max())
    allowed = removable(layers, row.n, row.criterion, options)
    given = inputs(row.model, settings) if hasattr(module, "search") else (scores,)
    removed = choose(module, given, row.n, allowed, options)
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


def inputs(model: str, settings: Params) -> tuple[Any, list[list[int]]]:
    """What a criterion's `search` takes: the model, and the calibration sequences that layers are selected from."""
    # The scores alone serve most criteria, and importing what loads a model takes seconds.
    from stages.base.checkpoint import load_model

    calibration = read_table(selection_file(model), CALIBRATION_TEXT)
    source = settings.models[model]
    sequences = [[int(token) for token in ids] for ids in calibration["input_ids"]]
    return load_model(model, source.dtype, source.trust_remote_code), sequences


def choose(module: ModuleType, given: tuple[Any, ...], n: int, allowed: range, options: dict[str, Any]) -> list[int]:
    """The layers that a criterion removes, in order. `given` is what its `search` or else its `choose` starts with.

    Raises UserError when it breaks its contract.
    """
    own = {name: value for name, value in options.items() if name not in ("protect_first", "protect_last")}
    function = getattr(module, "search", None) or module.choose
    removed = sorted(function(*given, n, allowed, **own))
    if len(set(removed)) != n or not set(removed) <= set(allowed):
        raise UserError(f"{module.__name__}: chose {removed}, expected {n} layers of {allowed}")
    return removed


if __name__ == "__main__":
    run(main)
