"""What a model card says of an exported row's recipe, by what bridges its cuts."""

from pathlib import Path

import pytest

from stages.model_card import model_card
from stages.project.keys import Row
from stages.project.params import load

SETTINGS = load(Path(__file__).parents[1] / "profiles/methods.yaml")
ROW = Row("smollm2", "explicit", 7, "ghost")
ADAPTER = {
    "removed_layers": [3, 4],
    "base": {"num_hidden_layers": 30},
    "calibration": {"tokens": 16384, "corpus": "wiki"},
    "bridged": True,
}
OPERATOR, DOWN = "At a cut one operator x → ", "The down projection of the layer before a cut is a new one."


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"change"}, [OPERATOR + "x + x M acts"]),
        ({"change", "bias"}, [OPERATOR + "x + x M + b acts"]),
        ({"reduce", "expand"}, [OPERATOR + "x + x A B acts"]),
        ({"bias"}, [OPERATOR + "x + b acts"]),
        ({"down_projection"}, [DOWN, "It needs no operator at inference"]),
        ({"change", "down_projection"}, [DOWN, OPERATOR + "x + x M acts"]),
        (set(), ["It needs no operator at inference"]),
    ],
    ids=str,
)
def test_recipe(parts: set[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    description = {**ADAPTER, "operators": bool(parts - {"down_projection"}), "bridged": bool(parts)}
    card = model_card(ROW, SETTINGS, description, parts)
    for sentence in (OPERATOR, DOWN, "It needs no operator at inference"):
        assert (sentence in card) == any(words.startswith(sentence) for words in said)
    for words in said:
        assert words in card
    assert ("from 16,384 tokens of wiki, without training (`ghost`" in card) == bool(parts)
    assert "smollm2 without 7 of its 30 decoder layers (3, 4; criterion `explicit`)" in card
