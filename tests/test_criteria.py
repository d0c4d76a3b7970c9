import pandas as pd
import pytest

from stages.criteria import shortgpt, streamline
from stages.project.errors import UserError
from stages.protection import removable
from stages.select import choose


def scores_of(layers: int, cosines: dict[tuple[int, int], float], default: float = 0.5) -> pd.DataFrame:
    """A table of scores: `default` but for the pairs named."""
    pairs = [(i, j) for i in range(layers + 1) for j in range(i + 1, layers + 1)]
    return pd.DataFrame(
        [{"start": i, "end": j, "cosine": cosines.get((i, j), default), "angular": 0.0} for i, j in pairs]
    ).sample(frac=1, random_state=0)


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


@pytest.mark.parametrize("criterion", ["streamline", "shortgpt"])
def test_ties_go_to_the_lower_index(criterion: str) -> None:
    assert choose(criterion, scores_of(8, {}), 3, {"protect_first": 1, "protect_last": 1}) == [1, 2, 3]


@pytest.mark.parametrize("criterion", ["streamline", "shortgpt"])
def test_all_that_may_go_can_go(criterion: str) -> None:
    assert choose(criterion, scores_of(5, {}), 3, {"protect_first": 1, "protect_last": 1}) == [1, 2, 3]


@pytest.mark.parametrize(
    ("n", "first", "last", "most"), [(4, 1, 1, 3), (5, 0, 0, 4), (6, 0, 0, 4), (1, 3, 3, 0), (9, 1, 1, 3)]
)
def test_too_many_layers_says_what_is_allowed(n: int, first: int, last: int, most: int) -> None:
    with pytest.raises(UserError, match=rf"grid\.n: {n} layers .* has 5 layers.*1 to {most}"):
        removable(5, n, "streamline", {"protect_first": first, "protect_last": last})
