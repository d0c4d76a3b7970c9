import pytest

from stages.boundaries import Segment, pieces, runs


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ([], []),
        ([0], [(0, 1)]),
        ([12, 13, 14, 15, 17, 25, 26], [(12, 16), (17, 18), (25, 27)]),
        ([5, 3, 4], [(3, 6)]),
    ],
)
def test_runs_are_maximal(removed: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(removed) == expected


def test_pieces_of_a_run() -> None:
    run = Segment(3, 6)
    assert pieces(run, "run") == [run]
    assert pieces(run, "layer") == [(3, 4), (4, 5), (5, 6)]


def test_name_round_trip() -> None:
    assert Segment(12, 19).name == "12-19"
    assert Segment.parse("12-19") == Segment(12, 19)
