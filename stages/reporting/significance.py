"""Standard errors of means and of paired differences, and whether the best of several is better than the next.

Everything is a weighted mean of values x_i with weights w_i (W = sum w_i, m values):

    mean   D    = sum w_i x_i / W
    error  SE^2 = m / (m - 1) * sum (w_i / W)^2 (x_i - D)^2

the error of a ratio estimator; with equal weights it is the sample standard deviation (ddof = 1) over sqrt(m). A
paired difference is the weighted mean of the differences, so that what makes a window or a question hard for both
sides cancels. There is no error with m = 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Candidate = TypeVar("Candidate")


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


def best(
    candidates: Sequence[Candidate],
    value: Callable[[Candidate], float],
    difference: Callable[[Candidate, Candidate], Estimate],
    *,
    lowest: bool,
) -> Candidate | None:
    """The candidate with the lowest (or highest) value if it beats the runner-up by more than the error, else None.

    `difference(a, b)` is the paired difference a - b, of the value or of a quantity that grows with it; it must have
    the right sign and exceed its standard error. None as well when there is no runner-up or no error.
    """
    if len(candidates) < 2:
        return None
    first, second = sorted(candidates, key=value, reverse=not lowest)[:2]
    paired = difference(first, second)
    lead = -paired.value if lowest else paired.value
    # Where one question of m is all that differs, lead and error are both 1/m: rounding must not decide.
    return first if paired.error is not None and lead > paired.error * (1 + 1e-9) else None
