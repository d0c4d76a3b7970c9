"""The report's texts and costs, from fabricated artifacts."""

from pathlib import Path

import pandas as pd
import pytest
from world import World, csv, table, text

from stages import report
from stages.project import artifacts, schemas
from stages.project.artifacts import write_table
from stages.project.errors import UserError
from stages.project.keys import Row
from stages.reporting import pictures

GHOST = Row("pico", "streamline", 2, "ghost")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "versions", lambda: {})
    monkeypatch.setattr(pictures, "save", lambda _draw, path: path.write_bytes(b""))


def test_texts_of_every_row():
    World(criteria=["streamline"], prompts=["The river", "A | b"]).write()
    report.main()
    assert text().index("**The river** ...") < text().index("**A | b** ...")
    assert table(text(), "continuation") == [
        {"criterion": "dense", "operator": "-", "continuation": "pico-dense ⏎ The river"},
        {"criterion": "streamline", "operator": "none", "continuation": "pico-streamline-2-none ⏎ The river"},
        {"criterion": "streamline", "operator": "ghost", "continuation": "pico-streamline-2-ghost ⏎ The river"},
    ]


def test_without_prompts_and_costs_nothing_is_said_of_them():
    World().write()
    report.main()
    assert "prompt" not in text()
    assert "Cost" not in text()
    assert csv("cost").empty


def test_texts_after_other_prompts_are_refused():
    World(prompts=["The river"]).write()
    file = Path("data/generate/pico-dense.parquet")
    frame = pd.read_parquet(file).assign(prompt="The sea")
    write_table(file, frame, schemas.GENERATE)
    with pytest.raises(UserError, match=r"pico-dense.parquet: not the texts after the prompts in params.yaml"):
        report.main()


def test_costs_are_medians_over_turns():
    World(costs=[GHOST.key]).write()
    report.main()
    found = csv("cost").set_index(["criterion", "operator"])
    assert list(found.index) == [("none", "none"), ("streamline", "none"), ("streamline", "ghost")]
    ghost = found.loc["streamline", "ghost"]
    assert (ghost["row"], ghost["repeats"], ghost["threads"]) == (GHOST.key, 3, 2)
    assert ghost["prefill_seconds"] == 1.01
    assert (ghost["prefill_seconds_q1"], ghost["prefill_seconds_q3"]) == (1.01, 3.03)
    # The slow turn was slow for all.
    assert ghost["prefill_ratio"] == pytest.approx(1.01)
    assert found.loc["none", "none"]["prefill_ratio"] == 2.0
    assert ghost["decode_tokens_per_second"] == 16.0
    lines = table(text(), "prefill, ms")
    assert [line["criterion"] for line in lines] == ["dense", "streamline", "streamline"]
    assert lines[2]["prefill, ms"] == "1,010.0 [1,010.0, 3,030.0]"
    assert lines[2]["against no operator"] == "1.010"
    assert (lines[2]["weights, MiB"], lines[2]["peak, MiB"], lines[2]["prefill, GFLOP"]) == ("1.0", "3.0", "2.00")
    assert "batches of 2, prompts of 8 tokens, 4 new ones, 3 turns" in text()
