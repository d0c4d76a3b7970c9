"""Standard errors and tests against other ways to compute them."""

import math
from fractions import Fraction

import numpy as np
import pytest

from stages.reporting import significance
from stages.reporting.significance import Estimate, average, bootstrap, mcnemar, perplexity, weighted_mean


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


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [(5, 0, 0.0625), (0, 5, 0.0625), (6, 0, 0.03125), (1, 4, 0.375), (3, 3, 1.0), (1, 0, 1.0), (0, 0, 1.0)],
)
def test_mcnemar_by_hand(wins, losses, expected):
    # 1 against 4: 2 (C(5, 0) + C(5, 1)) / 2^5 = 12 / 32
    assert mcnemar(wins, losses) == expected


def test_mcnemar_is_exact_for_many_questions():
    for wins, losses in ((40, 61), (480, 560), (2400, 2500), (0, 3000)):
        n = wins + losses
        exact = Fraction(2 * sum(math.comb(n, k) for k in range(wins + 1)), 2**n)
        assert mcnemar(wins, losses) == pytest.approx(float(min(exact, 1)), rel=1e-11)


def test_bootstrap_against_a_loop_over_resamples(monkeypatch):
    monkeypatch.setattr(significance, "RESAMPLES", 300)
    random = np.random.default_rng(3)
    differences = [random.normal(0.1, 0.8, (3, 5)), random.normal(0.1, 0.8, (3, 4))]
    weights = [np.array([4.0, 1, 2, 3, 1]), np.array([2.0, 2, 5, 1])]
    generators = [np.random.default_rng([significance.SEED, corpus]) for corpus in (0, 1)]
    counts = np.zeros((2, 3, 3))
    for _ in range(300):
        drawn = [generator.integers(len(of), size=len(of)) for generator, of in zip(generators, weights, strict=True)]
        for pair in range(3):
            parts = [differences[c][pair][drawn[c]] @ weights[c][drawn[c]] / weights[c][drawn[c]].sum() for c in (0, 1)]
            for corpus, value in enumerate((*parts, sum(parts) / 2)):
                counts[0, corpus, pair] += value <= 0
                counts[1, corpus, pair] += value >= 0
    expected = np.clip(2 * (counts.min(axis=0) + 1) / 301, [[2**-4], [2**-3], [2**-8]], 1)
    assert len(set(expected.ravel())) > 5
    assert bootstrap(differences, weights) == pytest.approx(expected)
    monkeypatch.setattr(significance, "BLOCK", 35)
    assert bootstrap(differences, weights) == pytest.approx(expected)


def test_bootstrap_of_identical_rows_has_p_1_and_of_opposite_ones_the_same_p():
    values = np.random.default_rng(4).normal(0.1, 0.2, 9)
    p = bootstrap([np.stack([np.zeros(9), values, -values])], [np.arange(1.0, 10)])
    assert p[:, 0].tolist() == [1, 1]
    assert p[:, 1].tolist() == p[:, 2].tolist()
    # The mean over a single corpus is that corpus.
    assert p[0].tolist() == p[1].tolist()


def test_bootstrap_of_windows_that_agree_is_no_surer_than_their_number():
    p = bootstrap([np.full((1, 20), 0.5), np.full((1, 3), 0.5)], [np.ones(20), np.ones(3)])
    assert p.tolist() == [[2 / 10_001], [0.25], [2 / 10_001]]
    assert bootstrap([np.full((1, 1), 0.5)], [np.ones(1)]).tolist() == [[1], [1]]


def test_bootstrap_p_is_about_uniform_where_nothing_differs():
    differences = np.random.default_rng(5).normal(0, 1, (2000, 40))
    p = bootstrap([differences], [np.ones(40)])[0]
    assert np.mean(p < 0.05) == pytest.approx(0.05, abs=0.02)
    assert np.mean(p < 0.5) == pytest.approx(0.5, abs=0.05)
