"""What one row measures: its perplexities, accuracies and the shares of the dense model's that it keeps."""

import math

import numpy as np

from stages.project.keys import Row
from stages.reporting.results import Results
from stages.reporting.significance import Array, Estimate, average, perplexity, weighted_mean


def window_means(results: Results, row: Row, corpus: str) -> tuple[Array, Array]:
    """Mean negative log-likelihood (nats per token) and number of predicted tokens of every window of a corpus."""
    frame = results.windows[row][corpus]
    tokens = frame["tokens"].to_numpy(np.float64)
    return frame["nll"].to_numpy(np.float64) / tokens, tokens


def mean_nll(results: Results, row: Row, corpus: str) -> Estimate:
    """Token-weighted mean negative log-likelihood of a corpus, nats per token."""
    return weighted_mean(*window_means(results, row, corpus))


def mean_perplexity(results: Results, row: Row, corpora: list[str]) -> float:
    """Arithmetic mean over `corpora` of their perplexities; infinite if one of them is."""
    k = len(corpora)
    return sum(perplexity(mean_nll(results, row, corpus).value) / k for corpus in corpora)


def hits(results: Results, row: Row, task: str, metric: str) -> Array:
    """1 for every question answered right, 0 for the others; `metric` is `acc` or `acc_norm`."""
    column = {"acc": "correct", "acc_norm": "correct_norm"}[metric]
    return results.questions[row][task][column].to_numpy(np.float64)


def accuracy(results: Results, row: Row, task: str, metric: str) -> Estimate:
    """Share of the questions answered right, in [0, 1], with lm-eval's error of a mean: std (ddof = 1) / sqrt(m)."""
    values = hits(results, row, task, metric)
    return weighted_mean(values, np.ones_like(values))


def mean_accuracy(results: Results, row: Row, metric: str) -> Estimate:
    """Mean of `metric` over the tasks that have it, equally weighted, the tasks' errors taken as independent."""
    return average([accuracy(results, row, task, metric) for task in tasks_with(results, metric)])


def tasks_with(results: Results, metric: str) -> list[str]:
    """The tasks whose questions were scored by `metric`, `acc` or `acc_norm`."""
    return results.tasks if metric == "acc" else results.normed


def ratio(numerator: float, denominator: float) -> float | None:
    """The quotient, or None where it is undefined (0 / 0, x / 0, infinity / infinity)."""
    if denominator == 0 or not math.isfinite(numerator):
        return None
    return numerator / denominator


def gap_recovered(results: Results, row: Row, corpora: list[str]) -> float | None:
    """Share of the log-perplexity that the cut costs which the operator wins back, 1 if all of it.

    (L_none - L_row) / (L_none - L_dense), where L is the mean over `corpora` of the mean negative log-likelihoods and
    `none` the row of the same cut without operator. None for the dense row, without that row, and where the gap, the
    denominator, is not positive.
    """
    bare = Row(row.model, row.criterion, row.n)
    if row.dense or bare not in results.windows:
        return None
    dense, none, own = (
        average([mean_nll(results, of, corpus) for corpus in corpora]).value for of in (Row(row.model), bare, row)
    )
    return (none - own) / (none - dense) if none > dense else None
