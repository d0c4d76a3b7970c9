import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.hadamard import hadamard
from stages.operators import diag, ghost, none, rotate
from stages.project.errors import UserError
from stages.project.params import available, load
from stages.sums import BoundarySums, antisymmetric_share, boundary_sums, residual

C = 12
OPTIONS = load(Path(__file__).parents[1] / "profiles/embedded.yaml").solve


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sums_of(pre: Tensor, post: Tensor) -> BoundarySums:
    return boundary_sums(pre, post, hadamard(C))


@pytest.mark.parametrize("name", available("operators"))
def test_every_operator(name: str) -> None:
    """What holds for each: documented, and a finite float64 [C, C] matrix or None, whatever happens at the cut."""
    module = importlib.import_module(f"stages.operators.{name}")
    assert module.__doc__
    assert module.solve.__doc__
    pre = normal(4, 50, C)
    W = module.solve(sums_of(pre, pre + 0.1 * normal(4, 50, C, seed=1)), **OPTIONS[name])
    if W is not None:
        assert W.shape == (C, C)
        assert W.dtype == torch.float64
        assert torch.isfinite(W).all()


@pytest.mark.parametrize("name", available("operators"))
def test_states_that_do_not_change_need_no_operator(name: str) -> None:
    pre = normal(4, 50, C)
    W = importlib.import_module(f"stages.operators.{name}").solve(sums_of(pre, pre), **OPTIONS[name])
    assert W is None or torch.allclose(W, torch.eye(C, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("name", ["diag", "rotate"])
def test_the_operator_is_where_the_sums_are(name: str) -> None:
    sums = sums_of(normal(2, 20, C), normal(2, 20, C, seed=1)).to(torch.device("meta"))
    assert importlib.import_module(f"stages.operators.{name}").solve(sums).device.type == "meta"


def test_ghost_and_the_diagnostics_make_no_tensor_elsewhere() -> None:
    """What they made on the default device, here one without numbers, would not meet the sums."""
    sums = sums_of(normal(4, 50, C), normal(4, 50, C, seed=1))
    expected = ghost.solve(sums, ridge=1e-6)
    with torch.device("meta"):
        found = ghost.solve(sums, ridge=1e-6)
        figures = (residual(sums, found), antisymmetric_share(found))
    assert torch.equal(found, expected)
    assert figures == (residual(sums, expected), antisymmetric_share(expected))


def test_none_has_no_operator() -> None:
    assert none.solve(sums_of(normal(2, 20, C), normal(2, 20, C, seed=1))) is None


def test_ghost_recovers_a_planted_operator() -> None:
    pre, W = normal(4, 50, C), normal(C, C, seed=1)
    found = ghost.solve(sums_of(pre, pre @ W), ridge=1e-9)
    assert torch.allclose(found, W, atol=1e-9)


def test_ghost_against_numpy_least_squares() -> None:
    pre, post = normal(4, 50, C), normal(4, 50, C, seed=1)
    rows = torch.cat([pre.reshape(200, C), 0.7**0.5 * torch.eye(C).double()])
    targets = torch.cat([(post - pre).reshape(200, C), torch.zeros(C, C).double()])
    expected = torch.eye(C).double() + torch.linalg.lstsq(rows, targets).solution
    assert torch.allclose(ghost.solve(sums_of(pre, post), ridge=0.7), expected, atol=1e-10)


def test_ghost_with_a_large_ridge_is_the_identity() -> None:
    found = ghost.solve(sums_of(normal(4, 50, C), normal(4, 50, C, seed=1)), ridge=1e15)
    assert torch.allclose(found, torch.eye(C).double(), atol=1e-9)


def test_ghost_is_the_best_of_all() -> None:
    pre = normal(4, 50, C)
    sums = sums_of(pre, pre @ (torch.eye(C).double() + 0.2 * normal(C, C, seed=1)) + 0.1 * normal(4, 50, C, seed=2))
    best = residual(sums, ghost.solve(sums, ridge=1e-9))
    for other in (None, diag.solve(sums), rotate.solve(sums), normal(C, C, seed=3)):
        assert residual(sums, other) > best


def test_ghost_with_fewer_tokens_than_channels_names_the_remedy() -> None:
    sums = sums_of(normal(1, C - 1, C), normal(1, C - 1, C, seed=1))
    with pytest.raises(UserError, match=r"11 calibration tokens for 12 channels.*text\.calibration\.sequences.*ridge"):
        ghost.solve(sums, ridge=1e-6)
    assert torch.isfinite(ghost.solve(sums, ridge=1e-3)).all()


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_ghost_refuses_a_bad_ridge(ridge: float) -> None:
    with pytest.raises(UserError, match=r"solve\.ghost\.ridge"):
        ghost.solve(sums_of(normal(2, 20, C), normal(2, 20, C)), ridge=ridge)


def test_diag_is_the_mean_over_sequences_of_the_channel_ratios() -> None:
    pre, post = normal(3, 20, C), normal(3, 20, C, seed=1)
    ratios = torch.stack([y.abs().mean(0) / x.abs().mean(0) for x, y in zip(pre, post, strict=True)])
    assert torch.allclose(diag.solve(sums_of(pre, post)), torch.diag(ratios.mean(0)))


def test_diag_recovers_planted_scales_whatever_the_number_of_sequences() -> None:
    scales = normal(C, seed=1).exp()
    for sequences in (1, 3, 7):
        pre = normal(sequences, 20, C)
        assert torch.allclose(diag.solve(sums_of(pre, pre * scales)), torch.diag(scales))


def test_rotate_recovers_scales_planted_in_the_rotated_basis() -> None:
    H, scales = hadamard(C), normal(C, seed=1).exp()
    pre = normal(3, 20, C)
    W = H @ torch.diag(scales) @ H.T
    assert torch.allclose(rotate.solve(sums_of(pre, pre @ W)), W)


def test_rotate_without_a_hadamard_matrix_names_the_order() -> None:
    sums = boundary_sums(normal(2, 20, 6), normal(2, 20, 6), None)
    with pytest.raises(UserError, match="order 6"):
        rotate.solve(sums)
