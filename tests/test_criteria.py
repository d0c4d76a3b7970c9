import importlib
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from stages import select
from stages.criteria import shortgpt, streamline
from stages.project.errors import UserError
from stages.protection import removable


def choose(criterion: str, scores: pd.DataFrame, n: int, options: dict[str, Any]) -> list[int]:
    """What the stage `select` makes of a criterion that goes by the scores."""
    allowed = removable(int(scores["end"].max()), n, criterion, options)
    return select.choose(importlib.import_module(f"stages.criteria.{criterion}"), (scores,), n, allowed, options)


def scores_of(layers: int, cosines: dict[tuple[int, int], float], default: float = 0.5) -> pd.DataFrame:
    """A table of scores: `default` but for the pairs named."""
    pairs = [(i, j) for i in range(layers + 1) for j in range(i + 1, layers + 1)]
    same = {"angular": 0.0, "angular_last": 0.0}
    return pd.DataFrame(
        [{"start": i, "end": j, "cosine": cosines.get((i, j), default), **same} for i, j in pairs]
    ).sample(frac=1, random_state=0)


def angles_of(**angles: dict[tuple[int, int], float]) -> pd.DataFrame:
    """A table of scores of 8 layers: every angle is 0.5 but for the pairs named, by column; the cosines mislead."""
    frame = scores_of(8, {(1, 4): 0.99})
    for column, values in angles.items():
        frame[column] = [values.get((i, j), 0.5) for i, j in zip(frame["start"], frame["end"], strict=True)]
    return frame


def test_streamline_takes_the_most_similar_block() -> None:
    scores = scores_of(8, {(3, 6): 0.9, (2, 5): 0.8, (3, 5): 0.99})
    assert streamline.choose(scores, 3, range(1, 7)) == [3, 4, 5]


def test_streamline_respects_the_protected_layers() -> None:
    scores = scores_of(8, {(0, 3): 0.99, (5, 8): 0.98, (4, 7): 0.9})
    assert choose("streamline", scores, 3, {"protect_first": 1, "protect_last": 1}) == [4, 5, 6]
    assert choose("streamline", scores, 3, {"protect_first": 0, "protect_last": 0}) == [0, 1, 2]


def test_shortgpt_takes_the_least_influential_layers() -> None:
    scores = scores_of(8, {(0, 1): 0.99, (4, 5): 0.9, (6, 7): 0.8, (7, 8): 0.999, (2, 5): 1.0})
    assert shortgpt.choose(scores, 3, range(7)) == [0, 4, 6]


PROTECT = {"protect_first": 1, "protect_last": 1}
BY_SCORES = pytest.mark.parametrize(
    ("criterion", "options"),
    [("streamline", {}), ("shortgpt", {}), ("angular", {"tokens": "last"}), ("angular", {"tokens": "all"})],
    ids=str,
)


@BY_SCORES
def test_ties_go_to_the_lower_index(criterion: str, options: dict[str, Any]) -> None:
    assert choose(criterion, scores_of(8, {}), 3, {**PROTECT, **options}) == [1, 2, 3]


@BY_SCORES
def test_all_that_may_go_can_go(criterion: str, options: dict[str, Any]) -> None:
    assert choose(criterion, scores_of(5, {}), 3, {**PROTECT, **options}) == [1, 2, 3]


def test_angular_takes_the_block_of_the_least_angle() -> None:
    scores = angles_of(
        angular={(2, 5): 0.1, (4, 7): 0.2, (2, 4): 0.01, (0, 3): 0.02},
        angular_last={(2, 5): 0.3, (4, 7): 0.2, (3, 7): 0.01, (5, 8): 0.02},
    )
    assert choose("angular", scores, 3, {**PROTECT, "tokens": "all"}) == [2, 3, 4]
    assert choose("angular", scores, 3, {**PROTECT, "tokens": "last"}) == [4, 5, 6]
    free = {"protect_first": 0, "protect_last": 0}
    assert choose("angular", scores, 3, {**free, "tokens": "all"}) == [0, 1, 2]
    assert choose("angular", scores, 3, {**free, "tokens": "last"}) == [5, 6, 7]


@pytest.mark.parametrize("layers", [[1, 2, 6], [6, 1, 2]], ids=str)
def test_explicit_takes_what_it_is_told(layers: list[int]) -> None:
    assert choose("explicit", scores_of(8, {}), 3, {**PROTECT, "layers": layers}) == [1, 2, 6]


@pytest.mark.parametrize(
    "layers", [[1, 2], [1, 2, 3, 4], [1, 2, 2], [1, 2, 2, 3], [0, 1, 2], [5, 6, 7], [-1, 1, 2], []], ids=str
)
def test_explicit_layers_that_cannot_go(layers: list[int]) -> None:
    with pytest.raises(
        UserError, match=r"select.explicit.layers = .*must name 3 different layers \(grid.n\) of 1 to 6"
    ):
        choose("explicit", scores_of(8, {}), 3, {**PROTECT, "layers": layers})


@pytest.mark.parametrize("found", [[1, 2], [1, 2, 3, 4], [1, 1, 2], [0, 1, 2], [5, 6, 7]], ids=str)
@pytest.mark.parametrize("function", ["choose", "search"])
def test_a_criterion_that_breaks_its_contract(function: str, found: list[int]) -> None:
    broken = ModuleType("stages.criteria.broken")
    setattr(broken, function, lambda _given, _n, _allowed: found)
    with pytest.raises(UserError, match=r"stages.criteria.broken: chose .*, expected 3 layers of range\(1, 7\)"):
        select.choose(broken, (None,), 3, range(1, 7), PROTECT)


def test_what_a_criterion_is_given() -> None:
    given = []
    module = ModuleType("stages.criteria.own")
    setattr(module, "search", lambda *positional, **named: given.append((positional, named)) or [4, 2])  # noqa: B010
    assert select.choose(module, ("model", "text"), 2, range(1, 7), {**PROTECT, "extra": 5}) == [2, 4]
    assert given == [(("model", "text", 2, range(1, 7)), {"extra": 5})]


@pytest.mark.parametrize(
    ("n", "first", "last", "most"), [(4, 1, 1, 3), (5, 0, 0, 4), (6, 0, 0, 4), (1, 3, 3, 0), (9, 1, 1, 3)]
)
def test_too_many_layers_says_what_is_allowed(n: int, first: int, last: int, most: int) -> None:
    with pytest.raises(UserError, match=rf"grid\.n: {n} layers .* has 5 layers.*1 to {most}"):
        removable(5, n, "streamline", {"protect_first": first, "protect_last": last})
