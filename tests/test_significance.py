"""Standard errors against other ways to compute them, and when the best counts as best."""

import math

import numpy as np
import pytest

from stages.reporting.significance import Estimate, average, best, perplexity, weighted_mean


def test_equal_weights_give_the_sample_deviation_over_sqrt_m():
    values = np.random.default_rng(0).normal(3, 2, 17)
    estimate = weighted_mean(values, np.full(17, 511.0))
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.error == pytest.approx(values.std(ddof=1) / math.sqrt(17))


def test_unequal_weights_by_hand():
    # mean (1 + 9) / 4; SE^2 = 2 ((1/4 * 1.5)^2 + (3/4 * 0.5)^2)
    estimate = weighted_mean(np.array([1.0, 3.0]), np.array([1.0, 3.0]))
    assert (estimate.value, estimate.error) == (2.5, pytest.approx(0.75))


def test_one_value_has_no_error():
    assert weighted_mean(np.array([2.0]), np.array([7.0])) == Estimate(2.0, None)


def test_average_of_independent_estimates():
    assert average([Estimate(1.0, 0.3), Estimate(3.0, 0.4)]) == Estimate(2.0, pytest.approx(0.25))
    assert average([Estimate(1.0, 0.3), Estimate(3.0, None)]) == Estimate(2.0, None)


def test_perplexity_beyond_a_double_is_infinite():
    assert perplexity(709.0) == math.exp(709.0)
    assert perplexity(710.0) == math.inf


def test_unequal_weights_agree_with_the_jackknife():
    random = np.random.default_rng(1)
    values, weights = random.normal(3, 1, 400), random.integers(100, 512, 400).astype(float)
    everything = np.arange(400)
    left_out = np.array([np.average(values[everything != w], weights=weights[everything != w]) for w in everything])
    jackknife = math.sqrt(399 / 400 * ((left_out - left_out.mean()) ** 2).sum())
    assert weighted_mean(values, weights).error == pytest.approx(jackknife, rel=0.01)


def winner(values, difference, lowest):
    return best(list(values), values.__getitem__, lambda *_: difference, lowest=lowest)


@pytest.mark.parametrize(("lowest", "expected", "lead"), [(True, "a", -1.0), (False, "c", 1.0)])
def test_best_when_its_lead_exceeds_the_error(lowest, expected, lead):
    values = {"c": 3.0, "a": 1.0, "b": 2.0}
    assert winner(values, Estimate(lead, 0.99), lowest) == expected
    assert winner(values, Estimate(lead, 1.0), lowest) is None
    assert winner(values, Estimate(lead, None), lowest) is None
    assert winner(values, Estimate(-lead, 0.99), lowest) is None


def test_best_is_compared_with_the_runner_up():
    pairs = []

    def difference(a, b):
        pairs.append((a, b))
        return Estimate(1.0, 0.0)

    best([5.0, 1.0, 3.0, 2.0], lambda value: value, difference, lowest=True)
    best([5.0, 1.0, 3.0, 2.0], lambda value: value, difference, lowest=False)
    assert pairs == [(1.0, 2.0), (5.0, 3.0)]


def test_no_best_without_a_runner_up_or_on_a_tie():
    assert winner({"a": 1.0}, Estimate(1.0, 0.0), True) is None
    assert winner({}, Estimate(1.0, 0.0), True) is None
    assert winner({"a": 1.0, "b": 1.0}, Estimate(0.0, 0.0), True) is None
