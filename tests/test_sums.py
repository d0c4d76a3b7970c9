from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.boundaries import Segment
from stages.bridge import Bridge
from stages.diagnostics import antisymmetric_share, residual, token_residual
from stages.hadamard import hadamard
from stages.project.errors import UserError
from stages.sums import (
    BoundarySums,
    boundary_sums,
    from_tensors,
    mlp_sums,
    to_tensors,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def states() -> tuple[Tensor, Tensor]:
    """h_start and h_end of six sequences of ten tokens and eight channels."""
    pre, post = torch.randn(2, 6, 10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return pre, post + 0.5 * pre


def test_every_sum_against_its_formula(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    H = hadamard(8)
    sums = boundary_sums(pre, post, H)
    rows_pre, rows_post = pre.reshape(60, 8), post.reshape(60, 8)
    assert (sums.tokens, sums.sequences) == (60, 6)
    assert torch.allclose(sums.gram, sum(torch.outer(x, x) for x in rows_pre))
    assert torch.allclose(sums.cross, sum(torch.outer(x, y) for x, y in zip(rows_pre, rows_post, strict=True)))
    assert torch.isclose(sums.post_square, sum(y @ y for y in rows_post))
    assert torch.allclose(sums.pre_sum, rows_pre.sum(0))
    assert torch.allclose(sums.post_sum, rows_post.sum(0))
    pairs = list(zip(rows_pre, rows_post, strict=True))
    assert torch.allclose(sums.weighted_gram, sum(torch.outer(x, x) / (y @ y) for x, y in pairs))
    assert torch.allclose(sums.weighted_cross, sum(torch.outer(x, y) / (y @ y) for x, y in pairs))
    assert torch.allclose(sums.weighted_pre_sum, sum(x / (y @ y) for x, y in pairs))
    assert torch.allclose(sums.weighted_post_sum, sum(y / (y @ y) for x, y in pairs))
    assert torch.isclose(sums.weights, sum(1 / (y @ y) for y in rows_post))
    assert torch.isclose(sums.pre_norm, sum(x.norm() for x in rows_pre))
    assert torch.isclose(sums.post_norm, sum(y.norm() for y in rows_post))
    for found, rotation in ((sums.ratio, torch.eye(8).double()), (sums.ratio_rotated, H)):
        expected = sum(
            (y @ rotation).abs().mean(0) / (x @ rotation).abs().mean(0) for x, y in zip(pre, post, strict=True)
        )
        assert torch.allclose(found, expected)


def test_sums_of_two_batches_add(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    H = hadamard(8)
    whole = boundary_sums(pre, post, H)
    parts = boundary_sums(pre[:2], post[:2], H) + boundary_sums(pre[2:], post[2:], H)
    for field, value in to_tensors({Segment(0, 1): whole}).items():
        assert torch.allclose(to_tensors({Segment(0, 1): parts})[field], value), field


def test_a_dead_channel_has_ratio_one(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    dead = pre.clone()
    dead[:, :, 3] = 0
    sums = boundary_sums(dead, post, None)
    assert sums.ratio[3] == 6
    assert sums.ratio_rotated is None


def test_sums_are_where_the_states_are(states: tuple[Tensor, Tensor]) -> None:
    # No second device holds numbers on every machine; `meta` holds shapes and tells where a tensor is.
    pre, post = (state.to("meta") for state in states)
    moved = boundary_sums(*states, hadamard(8)).to(torch.device("meta"))
    for sums in (boundary_sums(pre, post, hadamard(8).to("meta")), moved, moved + moved):
        assert {tensor.device.type for tensor in to_tensors({Segment(0, 1): sums}).values()} == {"meta"}
    assert boundary_sums(*states, None).to(torch.device("meta")).ratio_rotated is None


def test_a_token_without_a_norm_has_no_weight(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    zero = post.clone()
    zero[0, 0] = 0
    sums = boundary_sums(pre, zero, None)
    rest = [(x, y) for x, y in zip(pre.reshape(60, 8), zero.reshape(60, 8), strict=True) if y.any()]
    assert torch.allclose(sums.weighted_gram, sum(torch.outer(x, x) / (y @ y) for x, y in rest))


BRIDGES = {
    "none": None,
    "matrix": Bridge.of_matrix(normal(8, 8, seed=1)),
    "factors": Bridge(reduce=normal(8, 3, seed=2), expand=normal(3, 8, seed=3)),
    "affine": Bridge(change=normal(8, 8, seed=4), bias=normal(8, seed=5)),
}
MATRICES = {
    "none": torch.eye(8).double(),
    "matrix": normal(8, 8, seed=1),
    "factors": torch.eye(8).double() + normal(8, 3, seed=2) @ normal(3, 8, seed=3),
    "affine": torch.eye(8).double() + normal(8, 8, seed=4),
}


@pytest.mark.parametrize("name", BRIDGES)
def test_residuals_against_the_states(name: str, states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    sums = boundary_sums(pre, post, None)
    predicted = pre @ MATRICES[name] + (normal(8, seed=5) if name == "affine" else 0)
    squares, norms = ((predicted - post) ** 2).sum(-1), (post**2).sum(-1)
    assert residual(sums, BRIDGES[name]) == pytest.approx((squares.sum() / norms.sum()).item(), rel=1e-12)
    assert token_residual(sums, BRIDGES[name]) == pytest.approx((squares / norms).mean().item(), rel=1e-12)


@pytest.mark.parametrize("matrix", [None, normal(8, 8, seed=1)], ids=["alone", "with an operator"])
def test_residual_of_a_new_down_projection(matrix: Tensor | None, states: tuple[Tensor, Tensor]) -> None:
    before, post = states
    inner, old, new = normal(6, 10, 5, seed=6), normal(5, 8, seed=7), normal(5, 8, seed=8)
    pre = before + inner @ old
    sums = replace(boundary_sums(pre, post, None), mlp=mlp_sums(inner, pre, post, old))
    bridge = Bridge(change=None if matrix is None else matrix - torch.eye(8).double(), down_projection=new)
    predicted = before + inner @ new
    predicted = predicted if matrix is None else predicted @ matrix
    expected = ((predicted - post) ** 2).sum() / (post**2).sum()
    assert residual(sums, bridge) == pytest.approx(expected.item(), rel=1e-10)
    assert token_residual(sums, bridge) is None


def test_why_there_are_no_sums_inside(states: tuple[Tensor, Tensor]) -> None:
    sums = replace(boundary_sums(*states, None), no_mlp="there is no layer before")
    with pytest.raises(UserError, match="there is no layer before"):
        sums.inner()


def test_antisymmetric_share() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert antisymmetric_share(None) is None
    assert antisymmetric_share(Bridge(change=0 * eye)) is None
    assert antisymmetric_share(Bridge(change=turn)) == pytest.approx(1)
    assert antisymmetric_share(Bridge(reduce=turn, expand=eye)) == pytest.approx(1)
    assert antisymmetric_share(Bridge(change=torch.diag(torch.tensor([1.0, 2.0])).double())) == 0
    assert antisymmetric_share(Bridge(change=turn + eye)) == pytest.approx(0.5**0.5)


def test_halves_and_inner_sums_round_trip(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    inner, weight = normal(6, 10, 5, seed=6), normal(5, 8, seed=7)
    halves = boundary_sums(pre[::2], post[::2], None), boundary_sums(pre[1::2], post[1::2], None)
    whole = replace(halves[0] + halves[1], halves=halves, mlp=mlp_sums(inner, pre, post, weight))
    back = from_tensors(to_tensors({Segment(1, 3): whole}), "why not")[Segment(1, 3)]
    assert torch.allclose(back.gram, boundary_sums(pre, post, None).gram)
    assert torch.equal(back.halves[1].cross, halves[1].cross)
    assert torch.equal(back.inner().gram, whole.inner().gram)
    moved = back.to(torch.device("meta"))
    assert {moved.halves[0].gram.device.type, moved.inner().post.device.type, moved.weights.device.type} == {"meta"}


def test_tensors_round_trip(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    sums = {Segment(12, 19): boundary_sums(pre, post, hadamard(8)), Segment(3, 4): boundary_sums(post, pre, None)}
    back = from_tensors(to_tensors(sums))
    assert set(back) == set(sums)
    assert isinstance(back[Segment(3, 4)], BoundarySums)
    assert back[Segment(3, 4)].ratio_rotated is None
    assert torch.equal(back[Segment(12, 19)].gram, sums[Segment(12, 19)].gram)
