"""The pruned rows of one model and n against each other, column by column, and which of them are marked as the best."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stages.project.keys import Row
from stages.reporting.measures import hits, tasks_with, window_means
from stages.reporting.results import Results
from stages.reporting.significance import Estimate, average, bootstrap, mcnemar, weighted_mean

MEAN = "mean"
LEVEL = 0.05


@dataclass(frozen=True)
class Pair:
    """The paired difference of two rows a - b, and the two-sided p of its test; None where there is none."""

    difference: Estimate
    p: float | None

    def values(self) -> tuple[float, float | None, float | None]:
        """Difference, standard error and p."""
        return self.difference.value, self.difference.error, self.p


Pairs = dict[tuple[Row, Row], Pair]
"""Every pair of rows, once: a stands before b in the tables."""
Comparison = dict[tuple[str, str], Pairs]
"""By column: what is measured (`perplexity`, `acc`, `acc_norm`), and on which corpus or task, or `mean`."""


def comparisons(results: Results) -> dict[tuple[str, int], Comparison]:
    """The comparison of every model and n."""
    return {(model, n): compare(results, model, n) for model in results.models for n in results.numbers}


def compare(results: Results, model: str, n: int) -> Comparison:
    """All pairs of the pruned rows of `model` and `n` in all columns; empty with fewer than two rows."""
    rows = results.pruned(model, n)
    if len(rows) < 2:
        return {}
    found = _perplexities(results, rows) if results.corpora else {}
    for metric in ("acc", "acc_norm"):
        found |= _accuracies(results, rows, metric)
    return found


def _perplexities(results: Results, rows: list[Row]) -> Comparison:
    """Differences of the mean negative log-likelihood, nats per token, tested by a bootstrap over windows.

    NLL, not perplexity: what two rows have in common cancels there, and it cannot overflow.
    """
    first, second = np.triu_indices(len(rows), 1)
    differences, weights = [], []
    for corpus in results.corpora:
        values = np.stack([window_means(results, row, corpus)[0] for row in rows])
        differences.append(values[first] - values[second])
        weights.append(window_means(results, rows[0], corpus)[1])
    estimates = [
        [weighted_mean(of_pair, tokens) for of_pair in values]
        for values, tokens in zip(differences, weights, strict=True)
    ]
    estimates.append([average(of_pair) for of_pair in zip(*estimates, strict=True)])
    found: Comparison = {}
    for on, column, tests in zip([*results.corpora, MEAN], estimates, bootstrap(differences, weights), strict=True):
        pairs = [
            Pair(estimate, None if estimate.error is None else float(p))
            for estimate, p in zip(column, tests, strict=True)
        ]
        found["perplexity", on] = dict(zip(combinations(rows, 2), pairs, strict=True))
    return found


def _accuracies(results: Results, rows: list[Row], metric: str) -> Comparison:
    """Differences of the share of right answers, tested on the questions that one of the two rows alone got right.

    The difference of the means is the tasks' average; its test takes the questions of all tasks together, and p is 1
    where these do not point the same way, as they may where tasks differ in size.
    """
    tasks = tasks_with(results, metric)
    right = {row: [hits(results, row, task, metric) for task in tasks] for row in rows}
    found: Comparison = {(metric, on): {} for on in (*tasks, MEAN) if tasks}
    for a, b in combinations(rows, 2):
        differences = [of_a - of_b for of_a, of_b in zip(right[a], right[b], strict=True)]
        estimates = [weighted_mean(values, np.ones_like(values)) for values in differences]
        counts = [(int((values > 0).sum()), int((values < 0).sum())) for values in differences]
        for task, estimate, (wins, losses) in zip(tasks, estimates, counts, strict=True):
            found[metric, task][a, b] = Pair(estimate, mcnemar(wins, losses))
        if tasks:
            wins, losses = map(sum, zip(*counts, strict=True))
            mean = average(estimates)
            found[metric, MEAN][a, b] = Pair(mean, mcnemar(wins, losses) if mean.value * (wins - losses) > 0 else 1.0)
    return found


def best(values: Mapping[Row, float], pairs: Pairs, identity: Callable[[Row], Hashable], *, lowest: bool) -> list[Row]:
    """The rows with the lowest (or highest) value if they lead all others clearly, else none.

    Rows of the same `identity` are one model and do not compete; they are the best together. A lead is clear if the
    paired difference has the right sign, exceeds its standard error and has p < LEVEL. None is the best alone.
    """
    if not values:
        return []
    first = (min if lowest else max)(values, key=values.__getitem__)
    same = [row for row in values if identity(row) == identity(first)]
    others = [row for row in values if row not in same]
    return same if others and all(_leads(first, other, pairs, lowest=lowest) for other in others) else []


def _leads(row: Row, other: Row, pairs: Pairs, *, lowest: bool) -> bool:
    ahead = (row, other) in pairs
    pair = pairs[(row, other) if ahead else (other, row)]
    error = pair.difference.error
    if error is None or pair.p is None or pair.p >= LEVEL:
        return False
    lead = pair.difference.value * (1 if ahead else -1) * (-1 if lowest else 1)
    # Where one question of m is all that differs, lead and error are both 1/m: rounding must not decide.
    return lead > error * (1 + 1e-9)
