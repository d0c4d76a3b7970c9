import pytest
import torch
from torch import Tensor

from stages.boundaries import Segment
from stages.hadamard import hadamard
from stages.sums import BoundarySums, antisymmetric_share, boundary_sums, from_tensors, residual, to_tensors


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


def test_residual_against_the_states(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    sums = boundary_sums(pre, post, None)
    W = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for operator, predicted in ((None, pre), (W, pre @ W)):
        expected = ((predicted - post) ** 2).sum() / (post**2).sum()
        assert residual(sums, operator) == pytest.approx(expected.item(), rel=1e-12)


def test_antisymmetric_share() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert antisymmetric_share(eye) is None
    assert antisymmetric_share(eye + turn) == pytest.approx(1)
    assert antisymmetric_share(eye + torch.diag(torch.tensor([1.0, 2.0]))) == 0
    assert antisymmetric_share(eye + turn + eye) == pytest.approx(0.5**0.5)


def test_tensors_round_trip(states: tuple[Tensor, Tensor]) -> None:
    pre, post = states
    sums = {Segment(12, 19): boundary_sums(pre, post, hadamard(8)), Segment(3, 4): boundary_sums(post, pre, None)}
    back = from_tensors(to_tensors(sums))
    assert set(back) == set(sums)
    assert isinstance(back[Segment(3, 4)], BoundarySums)
    assert back[Segment(3, 4)].ratio_rotated is None
    assert torch.equal(back[Segment(12, 19)].gram, sums[Segment(12, 19)].gram)
