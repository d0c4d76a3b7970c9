"""The cuts of a model at one n in the document: the layers that are gone, and the operators that bridge them."""

import math
from collections.abc import Iterable
from typing import Any

from stages.boundaries import runs
from stages.project.keys import Row
from stages.reporting import markdown
from stages.reporting.results import Results


def removed_layers(results: Results, model: str, n: int) -> Iterable[str]:
    """Which layers each criterion removed, and which criteria agree; nothing where none are removed."""
    chosen = results.chosen(model, n)
    if not chosen:
        return
    scores = results.scores[model].set_index(["start", "end"])["cosine"]
    lines = []
    for criterion, layers in chosen.items():
        cuts = runs(layers)
        cosines = [f"cos(h_{start}, h_{end}) = {scores[start, end]:.4f}" for start, end in cuts]
        options = results.criterion_options[Row(model, criterion, n)]
        lines.append(f"- {criterion}: {markdown.layers(cuts)} ({', '.join(cosines)}); options {options}")
    yield "Removed layers:"
    yield "\n".join(lines)
    for distinct in dict.fromkeys(tuple(layers) for layers in chosen.values()):
        same = [criterion for criterion, layers in chosen.items() if tuple(layers) == distinct]
        if len(same) > 1:
            yield (
                f"{markdown.listed(same)} chose identical layers: {markdown.layers(runs(list(distinct)))}. "
                f"Their rows are the same model, so between them there is nothing to compare."
            )


def diagnostics(results: Results, model: str, n: int) -> Iterable[str]:
    """The table of the operators, a line per boundary; nothing without operators."""
    solved = [(row, cut) for row in results.pruned(model, n) for cut in results.operators[row].to_dict("records")]
    if not solved:
        return
    cuts: list[dict[Any, Any]] = [cut for _, cut in solved]
    yield (
        "Operators, per boundary [start, end): relative residual ‖X_pre W + b - X_post‖² / ‖X_post‖² on the "
        "calibration tokens without (W = I, b = 0) and with what is put at the cut, X_pre being what a new down "
        "projection makes of it where there is one; anti-symmetric share of M = W - I; condition number of the Gram "
        "matrix. Few tokens of massive activation can make up most of both norms: an operator that scales by mean "
        "ratios may then raise the residual and lower the perplexity all the same. The *token residual* is therefore "
        "also given: the mean over tokens of each token's own relative residual, in which all count the same (the sums "
        "do not tell it of a new down projection). *Chosen* are the options that the operator found itself."
    )
    yield markdown.table(
        {
            **markdown.row_labels([row for row, _ in solved]),
            "boundary": [f"[{cut['start']}, {cut['end']})" for cut in cuts],
            "one operator per": [cut["boundary"] for cut in cuts],
            "options": [cut["options"] for cut in cuts],
            "chosen": [markdown.NOTHING if cut["chosen"] == "{}" else cut["chosen"] for cut in cuts],
            "residual before": [markdown.significant(cut["residual_before"]) for cut in cuts],
            "residual after": [markdown.significant(cut["residual_after"]) for cut in cuts],
            "token residual before": [markdown.significant(cut["token_residual_before"]) for cut in cuts],
            "token residual after": [markdown.significant(cut["token_residual_after"]) for cut in cuts],
            "anti-symmetric share": [markdown.significant(cut["antisymmetric_share"]) for cut in cuts],
            "condition": [
                "singular" if math.isinf(cut["condition"]) else markdown.significant(cut["condition"]) for cut in cuts
            ],
            "tokens": [f"{cut['tokens']:,}" for cut in cuts],
        },
        text=["criterion", "operator", "boundary", "one operator per", "options", "chosen"],
    )
