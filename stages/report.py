"""Stage `report`: the comparison tables and pictures of the rows that params.yaml declares.

Reads params.yaml (which rows) and the artifacts of those rows; every number is computed from the artifacts. Writes into
``reports/``: ``report.md``, ``metrics.json``, ``perplexity.csv``, ``accuracy.csv``, ``summary.csv``, ``pairs.csv``,
``operators.csv``, ``similarity.csv``, ``cost.csv``, ``similarity.png``, ``perplexity.png`` and ``perplexity-by-n.png``;
prints the tables.
"""

from pathlib import Path

import pandas as pd

from stages.project.artifacts import write_json, writing
from stages.project.errors import run
from stages.project.keys import Row
from stages.project.params import load
from stages.project.paths import REPORTS
from stages.reporting import pictures, results, tables, usage
from stages.reporting.document import document, summary
from stages.reporting.measures import mean_perplexity
from stages.reporting.pairs import comparisons

LINES = 6
"""Most operators in one panel of the picture of perplexity against n."""
ALWAYS = ("none", "ghost")
"""Operators that it shows wherever the grid has them."""


def similarity_panels(found: results.Results, blocks: pd.DataFrame) -> list[list[pictures.SimilarityPanel]]:
    """What the similarity picture shows: per model (outer) and n (inner) the rows of `blocks`, the similarity table."""
    return [
        [
            pictures.SimilarityPanel(
                title=f"{model}, n = {n}",
                n=n,
                layers=int(scores["end"].max()),
                starts=blocks[(blocks["model"] == model) & (blocks["n"] == n)],
                chosen=found.chosen(model, n),
            )
            for n in found.numbers
        ]
        for model, scores in found.scores.items()
    ]


def perplexity_panels(found: results.Results) -> list[list[pictures.PerplexityPanel]]:
    """What the perplexity picture shows: per model (outer) and n (inner) the mean perplexities of the pruned rows."""
    panels = []
    for model in found.models if found.corpora else []:
        of_model = []
        for n in found.numbers:
            means: dict[str, dict[str, float]] = {}
            for row in found.pruned(model, n):
                means.setdefault(row.criterion, {})[row.operator] = mean_perplexity(found, row, found.corpora)
            if means:
                title, dense = f"{model}, n = {n}", mean_perplexity(found, Row(model), found.corpora)
                of_model.append(pictures.PerplexityPanel(title, dense, means))
        panels.append(of_model)
    return panels


def number_panels(found: results.Results) -> list[list[pictures.NumberPanel]]:
    """What the picture of perplexity against n shows: per model (outer) and criterion (inner) a line per operator.

    Nothing with fewer than two n. Of more operators than LINES, those of `main_operators`.
    """
    numbers = sorted(found.numbers)
    panels = []
    for model in found.models if found.corpora and len(numbers) > 1 else []:
        means: dict[str, dict[str, dict[int, float]]] = {}
        for n in numbers:
            for row in found.pruned(model, n):
                of_operator = means.setdefault(row.criterion, {}).setdefault(row.operator, {})
                of_operator[n] = mean_perplexity(found, row, found.corpora)
        dense = mean_perplexity(found, Row(model), found.corpora)
        shown = main_operators(list(means.values()), numbers[-1])
        panels.append(
            [
                pictures.NumberPanel(f"{model}, {criterion}", dense, {name: lines[name] for name in shown})
                for criterion, lines in means.items()
            ]
        )
    return panels


def main_operators(criteria: list[dict[str, dict[int, float]]], n: int) -> list[str]:
    """The operators that a picture with LINES lines shows, in their order: ALWAYS, and the best others at `n`.

    `criteria` holds the mean perplexities of one criterion each, by operator and number of removed layers; an operator
    counts by its lowest.
    """
    operators = next(iter(criteria), {})
    lowest = {operator: min(means[operator][n] for means in criteria) for operator in operators}
    ranked = sorted(lowest, key=lambda operator: (operator not in ALWAYS, lowest[operator]))
    return [operator for operator in operators if operator in ranked[:LINES]]


def _write_text(path: Path, text: str) -> None:
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def main() -> None:
    """Read, compute, write, print."""
    params = load()
    found = results.read(params)
    blocks = tables.similarity_table(found)
    compared = comparisons(found)
    frames = {
        "perplexity": tables.perplexity_table(found),
        "accuracy": tables.accuracy_table(found),
        "summary": tables.summary_table(found),
        "pairs": tables.pair_table(compared),
        "operators": tables.operator_table(found),
        "similarity": blocks,
        "cost": usage.cost_table(found),
    }
    for name, frame in frames.items():
        _write_text(REPORTS / f"{name}.csv", frame.to_csv(index=False, lineterminator="\n"))
    write_json(REPORTS / "metrics.json", tables.metrics(found))
    similar, perplexities = similarity_panels(found, blocks), perplexity_panels(found)
    by_number = number_panels(found)
    drawings = {
        "similarity.png": (lambda: pictures.similarity(similar), any(similar)),
        "perplexity.png": (lambda: pictures.perplexities(perplexities), any(perplexities)),
        "perplexity-by-n.png": (lambda: pictures.perplexities_by_number(by_number), any(by_number)),
    }
    for name, (draw, _) in drawings.items():
        with writing(REPORTS / name) as partial:
            pictures.save(draw, partial)
    shown = [name for name, (_, with_panels) in drawings.items() if with_panels]
    _write_text(REPORTS / "report.md", document(found, compared, shown))
    print(f"{summary(found, compared)}\n\nThe report: {REPORTS / 'report.md'}")


if __name__ == "__main__":
    run(main)
