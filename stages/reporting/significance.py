"""Standard errors of means and of paired differences, and tests of whether a difference could be chance.

Everything is a weighted mean of values x_i with weights w_i (W = sum w_i, m values):

    mean   D    = sum w_i x_i / W
    error  SE^2 = m / (m - 1) * sum (w_i / W)^2 (x_i - D)^2

the error of a ratio estimator; with equal weights it is the sample standard deviation (ddof = 1) over sqrt(m). A
paired difference is the weighted mean of the differences, so that what makes a window or a question hard for both
sides cancels. There is no error with m = 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 10_000
SEED = 0
BLOCK = 2**17
"""Most values per corpus in one array of resamples: 1 MiB."""


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means, and its standard error in the same unit; None where there is none."""

    value: float
    error: float | None


def weighted_mean(values: Array, weights: Array) -> Estimate:
    """Mean and standard error of `values` [m] weighted by `weights` [m], m >= 1, by the formulas above."""
    total = weights.sum()
    value = float(weights @ values / total)
    m = len(values)
    if m == 1:
        return Estimate(value, None)
    return Estimate(value, math.sqrt(m / (m - 1) * float(np.sum((weights / total * (values - value)) ** 2))))


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of k >= 1 independent estimates, equally weighted: SE = sqrt(sum SE_i^2) / k; None if any has none."""
    k = len(estimates)
    value = sum(estimate.value / k for estimate in estimates)
    errors = [estimate.error for estimate in estimates if estimate.error is not None]
    return Estimate(value, math.hypot(*errors) / k if len(errors) == k else None)


def perplexity(nll: float) -> float:
    """Exp of a mean negative log-likelihood in nats; infinity where a double can't hold it (from 709.8 nats on)."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p of McNemar's test, from how many questions the one row alone and the other alone got right.

    min(1, 2 P(X <= min(wins, losses))) with X ~ Binomial(wins + losses, 1/2); 1 without such a question.
    """
    n, k = wins + losses, min(wins, losses)
    # From the largest term down: C(n, i - 1) / C(n, i) = i / (n - i + 1).
    below = np.arange(k, 0, -1)
    terms = 1 + float(np.cumprod(below / (n - below + 1)).sum())
    return min(1.0, 2 * (math.comb(n, k) / (1 << n)) * terms)


def bootstrap(differences: Sequence[Array], weights: Sequence[Array]) -> Array:
    """Two-sided p of k paired differences in each of c >= 1 corpora, and of their means over the corpora: [c + 1, k].

    `differences` holds per corpus [k, m] values, one per pair and window, `weights` [m] those of the windows. Windows
    are drawn with replacement, m of m, the same for all pairs and independently per corpus; D* is the weighted mean of
    what was drawn. With B resamples

        p = min(1, 2 min((#(D* <= 0) + 1) / (B + 1), (#(D* >= 0) + 1) / (B + 1)))

    but no less than 2^(1 - m), m the number of windows (of all corpora, for the means): the p of a sign test in which
    all windows agree. Resamples of very few windows cannot know better.
    """
    generators = [np.random.default_rng([SEED, corpus]) for corpus in range(len(weights))]
    counts = np.zeros((2, len(weights) + 1, len(differences[0])))
    # As many resamples at once as keep the arrays small; the draws do not depend on it.
    at_once = max(1, BLOCK // max(len(differences[0]), *map(len, weights)))
    for first in range(0, RESAMPLES, at_once):
        resamples = min(at_once, RESAMPLES - first)
        drawn = [
            _shares(of_corpus, generator, resamples) @ values.T
            for values, of_corpus, generator in zip(differences, weights, generators, strict=True)
        ]
        means = np.stack([*drawn, np.mean(drawn, axis=0)])
        counts += np.count_nonzero([means <= 0, means >= 0], axis=2)
    windows = np.array([*map(len, weights), sum(map(len, weights))])
    p: Array = np.clip(2 * (counts.min(axis=0) + 1) / (RESAMPLES + 1), 2.0 ** (1 - windows)[:, None], 1)
    return p


def _shares(weights: Array, generator: np.random.Generator, resamples: int) -> Array:
    """The share of the weight that every one of m windows has in each resample, [resamples, m]; rows sum to 1."""
    m = len(weights)
    drawn = generator.integers(m, size=(resamples, m)) + m * np.arange(resamples)[:, None]
    times = np.bincount(drawn.ravel(), minlength=resamples * m).reshape(resamples, m)
    shares: Array = times * weights / (times @ weights)[:, None]
    return shares
