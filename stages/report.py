"""Stage `report`: the comparison tables and pictures of the rows that params.yaml declares.

Reads params.yaml (which rows) and the artifacts of those rows; every number is computed from the artifacts. Writes into
``reports/``: ``report.md``, ``metrics.json``, ``perplexity.csv``, ``accuracy.csv``, ``summary.csv``, ``operators.csv``,
``similarity.csv``, ``cost.csv``, ``similarity.png`` and ``perplexity.png``; prints the tables.
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
                means.setdefault(row.criterion, {})[row.operator] = tables.mean_perplexity(found, row, found.corpora)
            if means:
                title, dense = f"{model}, n = {n}", tables.mean_perplexity(found, Row(model), found.corpora)
                of_model.append(pictures.PerplexityPanel(title, dense, means))
        panels.append(of_model)
    return panels


def _write_text(path: Path, text: str) -> None:
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def main() -> None:
    """Read, compute, write, print."""
    params = load()
    found = results.read(params)
    blocks = tables.similarity_table(found)
    frames = {
        "perplexity": tables.perplexity_table(found),
        "accuracy": tables.accuracy_table(found),
        "summary": tables.summary_table(found),
        "operators": tables.operator_table(found),
        "similarity": blocks,
        "cost": usage.cost_table(found),
    }
    for name, frame in frames.items():
        _write_text(REPORTS / f"{name}.csv", frame.to_csv(index=False, lineterminator="\n"))
    write_json(REPORTS / "metrics.json", tables.metrics(found))
    compared = perplexity_panels(found)
    with writing(REPORTS / "similarity.png") as partial:
        pictures.save(lambda: pictures.similarity(similarity_panels(found, blocks)), partial)
    with writing(REPORTS / "perplexity.png") as partial:
        pictures.save(lambda: pictures.perplexities(compared), partial)
    shown = [*(["similarity.png"] if found.scores else []), *(["perplexity.png"] if any(compared) else [])]
    _write_text(REPORTS / "report.md", document(found, shown))
    print(f"{summary(found)}\n\nThe report: {REPORTS / 'report.md'}")


if __name__ == "__main__":
    run(main)
