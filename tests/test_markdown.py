"""How numbers, ranges and tables look."""

import math

import pytest

from stages.boundaries import runs
from stages.reporting import markdown
from stages.reporting.significance import Estimate


@pytest.mark.parametrize(
    ("value", "nll", "expected"),
    [
        (34.548, 3.54, "34.55"),
        (99999.4, 11.5, "99999.40"),
        (1e5, 11.5, "1.00e+05"),
        (3.27e6, 15.0, "3.27e+06"),
        (math.inf, 812.34, "exp(812.3)"),
        (math.inf, None, "> 1.8e308"),
    ],
)
def test_perplexity(value, nll, expected):
    assert markdown.perplexity(value, nll) == expected


def test_shares():
    assert markdown.percent(Estimate(0.63, 0.04852)) == "63.00 ± 4.85"
    assert markdown.percent(Estimate(1.0, None)) == "100.00 ± n/a"
    assert (markdown.share(0.6059), markdown.share(None)) == ("60.6%", "-")
    assert [markdown.significant(x) for x in (0.008853, 0.015, 2.72e6, math.nan)] == [
        "0.00885",
        "0.0150",
        "2.72e+06",
        "-",
    ]


@pytest.mark.parametrize(
    ("layers", "cuts", "expected"),
    [
        ([12, 13, 14, 15, 17, 25, 26], [(12, 16), (17, 18), (25, 27)], "12-15, 17, 25-26"),
        ([12, 13, 14], [(12, 15)], "12-14"),
        ([0], [(0, 1)], "0"),
        ([], [], ""),
    ],
)
def test_ranges_of_layers(layers, cuts, expected):
    assert runs(layers) == cuts
    assert markdown.layers(cuts) == expected


def test_lists_of_words():
    assert [markdown.listed(words) for words in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]


def test_tables_are_aligned_and_a_bar_does_not_break_a_cell():
    lines = markdown.table({"name": ["a|b", "c"], "x": ["1.00", "**2.00**"]}, text=["name"]).splitlines()
    assert lines == [
        "| name |        x |",
        "| ---- | -------: |",
        "| a\\|b |     1.00 |",
        "| c    | **2.00** |",
    ]
