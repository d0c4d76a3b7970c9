"""What the picture of perplexity against the number of removed layers shows."""

import math

import numpy as np
import pytest
from world import World, text

from stages import report
from stages.project import artifacts
from stages.reporting import pictures


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "versions", lambda: {})


def number_panels(monkeypatch):
    """The panels that the report hands to the picture of perplexity against n."""
    given = []
    monkeypatch.setattr(pictures, "save", lambda draw, path: (draw(), path.write_bytes(b"")))
    monkeypatch.setattr(pictures, "perplexities_by_number", given.append)
    report.main()
    return given[0]


def test_the_picture_of_perplexity_against_n_has_a_panel_per_criterion(monkeypatch):
    world = World(models=["pico", "nano"], n=[3, 1], tasks=[])
    world.write()
    panels = number_panels(monkeypatch)
    assert [[panel.title for panel in of_model] for of_model in panels] == [
        ["pico, streamline", "pico, shortgpt"],
        ["nano, streamline", "nano, shortgpt"],
    ]

    def mean(key):
        return np.mean([math.exp(world.nll[key, corpus].sum() / 90) for corpus in ("wiki", "web")])

    panel = panels[1][0]
    assert panel.dense == pytest.approx(mean("nano-dense"))
    assert list(panel.means) == ["none", "ghost"]
    assert list(panel.means["ghost"]) == [1, 3]
    assert panel.means["ghost"] == pytest.approx({n: mean(f"nano-streamline-{n}-ghost") for n in (1, 3)})
    assert "![perplexity-by-n](perplexity-by-n.png)" in text()


def test_no_picture_of_perplexity_against_a_single_n(monkeypatch):
    World(n=[2]).write()
    assert not any(number_panels(monkeypatch))
    assert "perplexity-by-n" not in text()


def test_the_picture_of_perplexity_against_n_shows_the_main_operators():
    at_two = {"none": 90, "a": 20, "b": 60, "c": 30, "d": 40, "ghost": 80, "e": 50, "f": 10}
    criteria = [{name: {1: 1.0, 2: level} for name, level in at_two.items()}]
    assert report.main_operators(criteria, 2) == ["none", "a", "c", "d", "ghost", "f"]
    # An operator counts by the criterion that it is best with.
    other = {name: {1: 1.0, 2: 5.0 if name == "b" else 95.0} for name in at_two}
    assert report.main_operators([*criteria, other], 2) == ["none", "a", "b", "c", "ghost", "f"]
    few = {name: {2: 1.0} for name in "zyx"}
    assert report.main_operators([few], 2) == ["z", "y", "x"]


def test_a_perplexity_beyond_a_double_is_named_in_the_picture_and_the_lines_are_its_operators():
    lines = {"none": {1: 50.0, 3: math.inf}, "ghost": {1: 40.0, 3: 60.0}}
    figure = pictures.perplexities_by_number([[pictures.NumberPanel("pico, streamline", 30.0, lines)]])
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert [line.get_label() for line in axes.get_lines()] == ["none", "ghost", "dense"]
    assert axes.get_lines()[1].get_xydata().tolist() == [[1, 40], [3, 60]]
    assert axes.get_lines()[2].get_linestyle() == "--"
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [(3, "> 1.8e308")]
