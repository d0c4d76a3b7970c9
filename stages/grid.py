"""Stage `grid`: the rows that ``params.yaml`` declares, and nothing else in the folders that the report reads.

DVC can only depend on a whole folder where the number of files varies. So that artifacts of rows no longer declared
neither change the report's dependencies nor differ between two people's folders, this stage moves them to
``data/.undeclared``; DVC restores them from its cache when they are declared again. Its own output is never taken from
the run cache (``persist``), since what it does to the folders would not be. Writes ``data/grid.parquet``.
"""

from pathlib import Path

import pandas as pd

from stages.project import params
from stages.project.artifacts import write_table
from stages.project.errors import run
from stages.project.paths import (
    DATA,
    GRID,
    accuracy_file,
    cost_file,
    diagnostics_file,
    perplexity_file,
    score_file,
    select_file,
    solve_file,
    text_file,
)
from stages.project.schemas import GRID as SCHEMA
from stages.project.sections import Params

REPORTED = ("score", "select", "solve", "eval_ppl", "eval_acc", "generate", "cost")
"""Folders of `data` that the report depends on as a whole."""
UNDECLARED = DATA / ".undeclared"


def main() -> None:
    """Run the stage."""
    settings = params.load()
    rows = settings.rows()
    for folder, declared in files(settings).items():
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted({file for file in folder.iterdir() if file.is_file()} - declared):
            UNDECLARED.joinpath(folder.name).mkdir(parents=True, exist_ok=True)
            file.replace(UNDECLARED / folder.name / file.name)
    write_table(GRID, pd.DataFrame([{**row.columns(), "key": row.key} for row in rows]), SCHEMA)


def files(settings: Params) -> dict[Path, set[Path]]:
    """Per folder that the report reads, the files that the declared rows have there."""
    rows = settings.rows()
    found: dict[Path, set[Path]] = {DATA / name: set() for name in REPORTED}
    for row in rows:
        declared = [score_file(row.model), perplexity_file(row), text_file(row)]
        declared += [accuracy_file(row, task) for task in settings.grid.tasks]
        if not row.dense:
            declared += [select_file(row), solve_file(row), diagnostics_file(row)]
        declared += [cost_file(row)] if row.key in settings.cost.rows else []
        for file in declared:
            found[file.parent].add(file)
    return found


if __name__ == "__main__":
    run(main)
