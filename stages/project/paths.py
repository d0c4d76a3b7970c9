"""Where every artifact lies: the one place that names them."""

from pathlib import Path

from stages.project.keys import Row

DATA = Path("data")
ASSETS = DATA / "assets"
REPORTS = Path("reports")
GRID = DATA / "grid.parquet"
"""The rows that params.yaml declares (`stages.project.schemas.GRID`)."""


def model_folder(model: str) -> Path:
    """What the stage `model` writes: a checkpoint, or where one is."""
    return DATA / "model" / model


def calibration_file(model: str) -> Path:
    """The sequences that operators are solved from (`stages.project.schemas.CALIBRATION_TEXT`)."""
    return DATA / "text" / model / "calibration.parquet"


def selection_file(model: str) -> Path:
    """The calibration sequences that layers are selected from (`stages.project.schemas.CALIBRATION_TEXT`)."""
    return DATA / "text" / model / "selection.parquet"


def corpus_file(model: str, corpus: str) -> Path:
    """The windows of a perplexity corpus (`stages.project.schemas.CORPUS_TEXT`)."""
    return DATA / "text" / model / f"{corpus}.parquet"


def corpora_index(model: str) -> Path:
    """The perplexity corpora and the SHA-256 of their files, JSON."""
    return DATA / "text" / model / "perplexity.json"


def task_folder(task: str) -> Path:
    """The definition and questions of a task."""
    return DATA / "task" / task


def score_file(model: str) -> Path:
    """The similarity of every pair of residual states (`stages.project.schemas.SCORE`)."""
    return DATA / "score" / f"{model}.parquet"


def select_file(row: Row) -> Path:
    """The removed layers of a selection (`stages.project.schemas.SELECT`)."""
    return DATA / "select" / f"{row.selection}.parquet"


def collect_file(row: Row) -> Path:
    """The boundary sums of a selection, safetensors."""
    return DATA / "collect" / f"{row.selection}.safetensors"


def solve_file(row: Row) -> Path:
    """The operators of a row, safetensors."""
    return DATA / "solve" / f"{row.key}.safetensors"


def diagnostics_file(row: Row) -> Path:
    """The diagnostics of a row's operators (`stages.project.schemas.SOLVE`)."""
    return DATA / "solve" / f"{row.key}.parquet"


def patch_folder(row: Row) -> Path:
    """The adapter of a row."""
    return DATA / "patch" / row.key


def perplexity_file(row: Row) -> Path:
    """The negative log-likelihoods of a row (`stages.project.schemas.EVAL_PPL`)."""
    return DATA / "eval_ppl" / f"{row.key}.parquet"


def accuracy_file(row: Row, task: str) -> Path:
    """The answers of a row to a task's questions (`stages.project.schemas.EVAL_ACC`)."""
    return DATA / "eval_acc" / f"{row.key}-{task}.parquet"


def text_file(row: Row) -> Path:
    """What a row's model writes after the prompts (`stages.project.schemas.GENERATE`)."""
    return DATA / "generate" / f"{row.key}.parquet"


def cost_file(row: Row) -> Path:
    """Times and sizes of a row's model (`stages.project.schemas.COST`)."""
    return DATA / "cost" / f"{row.key}.parquet"


def export_folder(row: Row) -> Path:
    """The checkpoint that `python -m stages.export` writes."""
    return DATA / "export" / row.key
