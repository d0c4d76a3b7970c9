"""What bridges a cut, on its own: its matrix, its names in files, what makes it faulty."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stages.boundaries import Segment
from stages.bridge import PARTS, Bridge, from_solved, from_tensors, solved, to_tensors

CHANNELS, INNER, RANK = 4, 6, 2


def draw(*shape: int) -> Tensor:
    """Random float64 numbers, the same ones for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


CHANGE, BIAS, PROJECTION = draw(CHANNELS, CHANNELS), draw(CHANNELS), draw(INNER, CHANNELS)
FACTORS = {"reduce": draw(CHANNELS, RANK), "expand": draw(RANK, CHANNELS)}
KINDS: dict[str, dict[str, Tensor]] = {
    "matrix": {"change": CHANGE},
    "factors": FACTORS,
    "bias": {"bias": BIAS},
    "matrix and bias": {"change": CHANGE, "bias": BIAS},
    "factors and bias": {**FACTORS, "bias": BIAS},
    "projection": {"down_projection": PROJECTION},
    "matrix and projection": {"change": CHANGE, "down_projection": PROJECTION},
    "all": {**FACTORS, "bias": BIAS, "down_projection": PROJECTION},
}
kinds = pytest.mark.parametrize("kind", KINDS)
SEGMENTS = [Segment(2, 4), Segment(10, 11)]


def same(found: dict[Segment, Bridge], expected: dict[Segment, Bridge]) -> None:
    """Fail unless both hold the same bridges, bit for bit, in the order of the segments."""
    assert list(found) == sorted(expected)
    for segment, bridge in expected.items():
        assert list(found[segment].parts()) == list(bridge.parts())
        for name, part in bridge.parts().items():
            assert torch.equal(found[segment].parts()[name], part), name


@kinds
def test_tensors_and_back(kind: str) -> None:
    # In the wrong order, and where names in order of the alphabet are not the segments in order.
    bridges = {segment: Bridge(**KINDS[kind]) for segment in reversed(SEGMENTS)}
    tensors = to_tensors(bridges)
    assert set(tensors) == {f"{name}.{part}" for name in ("2-4", "10-11") for part in KINDS[kind]}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    same(from_tensors(tensors), bridges)


@kinds
def test_solved_and_back(kind: str) -> None:
    bridges = {segment: Bridge(**KINDS[kind]) for segment in SEGMENTS}
    tensors = solved(bridges)
    for name in ("2-4", "10-11"):
        assert f"{name}.change" not in tensors
        assert (name in tensors) == ("change" in KINDS[kind])
        if name in tensors:
            assert torch.equal(tensors[name], torch.eye(CHANNELS, dtype=torch.float64) + CHANGE)
    assert set(tensors) - {"2-4", "10-11"} == {
        f"{name}.{part}" for name in ("2-4", "10-11") for part in KINDS[kind] if part != "change"
    }
    found = from_solved(tensors)
    assert list(found) == SEGMENTS
    for bridge in found.values():
        assert list(bridge.parts()) == list(Bridge(**KINDS[kind]).parts())
        for name, part in bridge.parts().items():
            torch.testing.assert_close(part, KINDS[kind][name], rtol=0, atol=1e-15 if name == "change" else 0)


def test_several_kinds_in_one_file() -> None:
    bridges = {Segment(2 * place, 2 * place + 1): Bridge(**parts) for place, parts in enumerate(KINDS.values())}
    same(from_tensors(to_tensors(bridges)), bridges)
    assert from_tensors({}) == from_solved({}) == {}


UNKNOWN = [("2-4.weight", "unknown tensor '2-4.weight'"), ("2-4.change.more", "unknown"), ("2-4.", "unknown tensor")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *UNKNOWN,
        *(("2-4", "unknown tensor"), ("", "unknown tensor ''"), (".change", "not enough values")),
        *(("2.change", "not enough"), ("2-4-6.change", "too many values"), ("a-b.change", "invalid literal")),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_tensors({"0-1.change": CHANGE, name: CHANGE})


@pytest.mark.parametrize(
    ("name", "message"),
    [*UNKNOWN, ("2", "not enough"), ("", "not enough"), ("2-4-6", "too many values"), ("a-b", "invalid literal")],
)
def test_unknown_names_of_what_was_solved_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_solved({"0-1": CHANGE, name: CHANGE})


@kinds
def test_matrix(kind: str) -> None:
    bridge, identity = Bridge(**KINDS[kind]), torch.eye(CHANNELS, dtype=torch.float64)
    change, matrix = bridge.whole_change(), bridge.matrix()
    if "change" in KINDS[kind]:
        expected = CHANGE
    elif "reduce" in KINDS[kind]:
        expected = torch.einsum("ir,rj->ij", *FACTORS.values())
    else:
        assert change is matrix is None
        return
    torch.testing.assert_close(change, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(matrix, identity + expected, rtol=1e-14, atol=1e-14)


def test_of_matrix() -> None:
    bridge = Bridge.of_matrix(CHANGE)
    assert list(bridge.parts()) == ["change"]
    assert torch.equal(bridge.change, CHANGE - torch.eye(CHANNELS, dtype=torch.float64))


@kinds
def test_whether_anything_is_left_to_compute_at_the_cut(kind: str) -> None:
    assert Bridge(**KINDS[kind]).is_operator == (kind != "projection")


@kinds
def test_whole_bridges_have_no_faults(kind: str) -> None:
    assert Bridge(**KINDS[kind]).faults(CHANNELS) == []


SHAPES = [
    ({"change": draw(CHANNELS, CHANNELS + 1)}, "change has shape [4, 5], expected [4, 4]"),
    ({"change": draw(CHANNELS)}, "change has shape [4], expected [4, 4]"),
    ({"down_projection": draw()}, "down_projection has shape [], expected [0, 4]"),
    ({"change": draw(CHANNELS + 1, CHANNELS + 1)}, "change has shape [5, 5], expected [4, 4]"),
    ({**FACTORS, "reduce": draw(CHANNELS, RANK + 1)}, "reduce has shape [4, 3], expected [4, 2]"),
    ({**FACTORS, "reduce": draw(RANK, CHANNELS)}, "reduce has shape [2, 4], expected [4, 2]"),
    ({**FACTORS, "expand": draw(RANK, CHANNELS + 1)}, "expand has shape [2, 5], expected [2, 4]"),
    ({"change": CHANGE, "bias": draw(CHANNELS - 1)}, "bias has shape [3], expected [4]"),
    ({"change": CHANGE, "bias": draw(1, CHANNELS)}, "bias has shape [1, 4], expected [4]"),
    ({"down_projection": draw(CHANNELS, INNER)}, "down_projection has shape [4, 6], expected [4, 4]"),
]


@pytest.mark.parametrize(("parts", "message"), SHAPES, ids=[message for _, message in SHAPES])
def test_wrong_shapes(parts: dict[str, Tensor], message: str) -> None:
    assert Bridge(**parts).faults(CHANNELS) == [message]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", PARTS)
def test_values_that_are_not_finite(name: str, value: float) -> None:
    kind: dict[str, Any] = KINDS["all"] if name != "change" else KINDS["matrix"]
    spoilt = kind[name].clone()
    spoilt.view(-1)[-1] = value
    assert Bridge(**{**kind, name: spoilt}).faults(CHANNELS) == [f"{name} is not finite"]


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({}, []),
        ({"reduce": FACTORS["reduce"][:, :0]}, ["reduce"]),
        ({"expand": FACTORS["expand"]}, ["expand"]),
        ({"expand": FACTORS["expand"], "bias": BIAS}, ["bias", "expand"]),
        ({"change": CHANGE, **FACTORS}, ["change", "expand", "reduce"]),
        ({"change": CHANGE, "expand": FACTORS["expand"]}, ["change", "expand"]),
    ],
    ids=str,
)
def test_tensors_that_do_not_make_an_operator(parts: dict[str, Tensor], names: list[str]) -> None:
    assert Bridge(**parts).faults(CHANNELS) == [f"tensors {names} do not make an operator"]


def test_a_lone_first_factor() -> None:
    found = Bridge(reduce=FACTORS["reduce"]).faults(CHANNELS)
    assert found == ["reduce has shape [4, 2], expected [4, 0]", "tensors ['reduce'] do not make an operator"]


@pytest.mark.parametrize("beside", [{}, {"change": CHANGE}], ids=["alone", "beside a matrix"])
def test_factors_of_rank_zero_are_no_operator(beside: dict[str, Tensor]) -> None:
    """Nothing that a rank of at least 1 says: the exported model refuses a rank of 0."""
    factors = {"reduce": torch.empty(CHANNELS, 0), "expand": torch.empty(0, CHANNELS)}
    assert Bridge(**factors, **beside).faults(CHANNELS) != []


def test_all_faults_are_named() -> None:
    spoilt = Bridge(change=draw(3, 3), bias=torch.full((5,), float("nan")))
    assert spoilt.faults(CHANNELS) == [
        "bias is not finite",
        "change has shape [3, 3], expected [4, 4]",
        "bias has shape [5], expected [4]",
    ]
