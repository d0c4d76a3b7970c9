import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.linalg import solve_continuous_lyapunov
from torch import Tensor

from stages import solve as stage
from stages.boundaries import Segment
from stages.bridge import Bridge
from stages.diagnostics import antisymmetric_share, residual, token_residual
from stages.hadamard import hadamard
from stages.operators import diag, ghost, magnitude, none, refit, replaceme, rotate, symmetric
from stages.project.errors import UserError
from stages.project.params import available, load
from stages.sums import BoundarySums, boundary_sums, mlp_sums

C, F = 12, 20
EYE = torch.eye(C, dtype=torch.float64)
OPTIONS = load(Path(__file__).parents[1] / "profiles/methods.yaml").solve | {
    "ghost-lowrank": {"rank": 4, "ridge": 1e-6}
}
DOWN = ("replaceme", "refit", "ghost-refit")
"""Operators that give the layer before the cut a new down projection."""


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"stages.operators.{name}")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sums_of(pre: Tensor, post: Tensor) -> BoundarySums:
    """All that there is to know of a boundary: halves, and an MLP whose output is a part of `pre`."""
    halves = boundary_sums(pre[::2], post[::2], hadamard(C)), boundary_sums(pre[1::2], post[1::2], hadamard(C))
    inner, weight = inner_of(pre), normal(F, C, seed=91)
    return replace(boundary_sums(pre, post, hadamard(C)), halves=halves, mlp=mlp_sums(inner, pre, post, weight))


def inner_of(pre: Tensor) -> Tensor:
    """The input of the down projection in the layer that `pre` comes from."""
    return normal(*pre.shape[:2], F, seed=90)


def bridge_of(solved: Bridge | Tensor | None) -> Bridge | None:
    return Bridge.of_matrix(solved) if isinstance(solved, Tensor) else solved


def drifted() -> tuple[Tensor, Tensor]:
    """States before a cut, and after it: mostly a linear map of them, a shift, and noise."""
    pre = normal(4, 50, C)
    return pre, pre @ (EYE + 0.2 * normal(C, C, seed=1)) + normal(C, seed=4) + 0.1 * normal(4, 50, C, seed=2)


@pytest.mark.parametrize("name", available("operators"))
def test_every_operator(name: str) -> None:
    """What holds for each: documented, and float64 tensors that fit and are finite, or none at all."""
    assert module_of(name).__doc__
    assert module_of(name).solve.__doc__
    bridge = bridge_of(module_of(name).solve(sums_of(*drifted()), **OPTIONS[name]))
    if bridge is not None:
        assert not bridge.faults(C)
        assert {part.dtype for part in bridge.parts().values()} == {torch.float64}
        assert ("down_projection" in bridge.parts()) == (name in DOWN)


@pytest.mark.parametrize("name", available("operators"))
def test_states_that_do_not_change_need_no_operator(name: str) -> None:
    pre = normal(4, 50, C)
    bridge = bridge_of(module_of(name).solve(sums_of(pre, pre), **OPTIONS[name]))
    matrix = None if bridge is None else bridge.matrix()
    assert matrix is None or torch.allclose(matrix, EYE, atol=1e-9)
    if bridge is not None and bridge.bias is not None:
        assert torch.allclose(bridge.bias, torch.zeros(C).double(), atol=1e-9)
    if bridge is not None and bridge.down_projection is not None:
        assert torch.allclose(bridge.down_projection, normal(F, C, seed=91), atol=1e-9)


def test_no_scale_is_better_than_the_symmetric_optimum_and_that_is_no_better_than_ghost() -> None:
    """Ghosted Layers, Theorem 4.1: in a row, whatever happens at the cut."""
    for seed in range(5):
        pre = normal(4, 50, C, seed=seed)
        post = pre @ (EYE + 0.3 * normal(C, C, seed=seed + 10)) + 0.1 * normal(4, 50, C, seed=seed + 20)
        sums = sums_of(pre, post)
        found = {name: residual(sums, bridge_of(module_of(name).solve(sums, **OPTIONS[name]))) for name in OPTIONS}
        assert min(found["diag"], found["rotate"], found["magnitude"]) >= found["symmetric"] >= found["ghost"]
        assert found["none"] >= found["ghost-lowrank"] >= found["ghost"] >= found["ghost-affine"]
        assert found["none"] >= found["replaceme"] >= found["refit"] >= found["ghost-refit"]
        assert found["ghost"] >= found["ghost-refit"]


def test_symmetric_against_scipy() -> None:
    pre, post = drifted()
    sums, ridge = sums_of(pre, post), 0.3
    gram, cross = (sums.gram + ridge * EYE).numpy(), (sums.cross + ridge * EYE).numpy()
    found = symmetric.solve(sums, ridge=ridge)
    assert torch.equal(found, found.T)
    assert found.numpy() == pytest.approx(solve_continuous_lyapunov(gram, cross + cross.T), abs=1e-10)


@pytest.mark.parametrize("rank", [1, 4, C])
def test_low_rank_is_the_optimum_in_the_metric_of_the_data(rank: int) -> None:
    """Reduced-rank regression by the singular value decomposition of the fitted change X_pre M."""
    pre, post = drifted()
    pre = pre * torch.linspace(0.1, 3, C)
    sums = sums_of(pre, post)
    found = module_of("ghost-lowrank").solve(sums, rank=rank, ridge=0.0)
    rows, change = pre.reshape(-1, C), (post - pre).reshape(-1, C)
    fitted = rows @ torch.linalg.lstsq(rows, change).solution
    U, S, Vh = torch.linalg.svd(fitted, full_matrices=False)
    expected = U[:, :rank] @ torch.diag(S[:rank]) @ Vh[:rank]
    assert found.reduce.shape == (C, rank)
    assert torch.allclose(rows @ found.reduce @ found.expand, expected, atol=1e-9)


def test_low_rank_refuses_a_rank_above_the_number_of_channels() -> None:
    with pytest.raises(UserError, match=r"solve\.ghost-lowrank\.rank = 13: must be from 1 to 12"):
        module_of("ghost-lowrank").solve(sums_of(*drifted()), rank=C + 1, ridge=0.0)


def test_affine_against_numpy_least_squares() -> None:
    pre, post = drifted()
    found = module_of("ghost-affine").solve(sums_of(pre, post), ridge=0.7)
    ones, zeros = torch.ones(200, 1).double(), torch.zeros(C, 1).double()
    rows = torch.cat([torch.cat([pre.reshape(200, C), ones], 1), torch.cat([0.7**0.5 * EYE, zeros], 1)])
    targets = torch.cat([(post - pre).reshape(200, C), torch.zeros(C, C).double()])
    expected = torch.linalg.lstsq(rows, targets).solution
    assert torch.allclose(torch.cat([found.change, found.bias[None]]), expected, atol=1e-10)


def test_ridge_is_a_fraction_of_the_mean_diagonal() -> None:
    sums = sums_of(*drifted())
    found = module_of("ghost-ridge").solve(sums, fraction=0.5)
    assert torch.allclose(EYE + found.change, ghost.solve(sums, ridge=0.5 * sums.gram.trace().item() / C), atol=1e-12)
    assert found.chosen == {"fraction": 0.5}


def test_ridge_is_chosen_on_held_out_sequences() -> None:
    """Few noisy tokens need a large ridge, many exact ones none; no other fraction does better on the other half."""
    W = EYE + 0.1 * normal(C, C, seed=1)
    few, many = normal(2, 8, C), normal(4, 500, C)
    noisy, exact = sums_of(few, few @ W + 2 * normal(2, 8, C, seed=2)), sums_of(many, many @ W)
    ridge = module_of("ghost-ridge")
    chosen = ridge.solve(noisy, fraction="auto").chosen["fraction"]
    assert chosen >= 0.1 > 1e-9 >= ridge.solve(exact, fraction="auto").chosen["fraction"]

    def held_out(fraction: float) -> float:
        first, second = noisy.halves
        return sum(
            token_residual(held, ridge.solve(fit, fraction=fraction))
            for fit, held in ((first, second), (second, first))
        )

    assert held_out(chosen) == min(held_out(10.0**power) for power in range(-4, 1))


def test_ridge_cannot_be_chosen_from_a_single_sequence() -> None:
    sums = sums_of(*drifted())
    with pytest.raises(UserError, match="needs two calibration sequences"):
        module_of("ghost-ridge").solve(replace(sums, halves=None), fraction="auto")


def test_magnitude_is_the_ratio_of_mean_norms() -> None:
    pre, post = drifted()
    assert torch.allclose(magnitude.solve(sums_of(pre, post)), post.norm(dim=-1).mean() / pre.norm(dim=-1).mean() * EYE)


def least_squares(rows: Tensor, targets: Tensor, start: Tensor, weight: float) -> Tensor:
    """The D of least ||rows D - targets||^2 + weight ||D - start||^2."""
    regular = weight**0.5 * torch.eye(rows.shape[1]).double()
    return torch.linalg.lstsq(torch.cat([rows, regular]), torch.cat([targets, regular @ start])).solution


@pytest.mark.parametrize("fraction", [1e-12, 0.3])
def test_new_down_projections_against_least_squares(fraction: float) -> None:
    pre, post = drifted()
    sums, D = sums_of(pre, post), normal(F, C, seed=91)
    inner, x, y = inner_of(pre).reshape(-1, F), pre.reshape(-1, C), post.reshape(-1, C)
    before = x - inner @ D
    output = inner @ D
    weight = fraction * (output**2).sum().item() / C
    T = least_squares(output, y - before, EYE, weight)
    assert torch.allclose(replaceme.solve(sums, fraction=fraction).down_projection, D @ T, atol=1e-7)
    weight = fraction * (inner**2).sum().item() / F
    expected = least_squares(inner, y - before, D, weight)
    assert torch.allclose(refit.solve(sums, fraction=fraction).down_projection, expected, atol=1e-8)


def test_ghost_refit_is_one_least_squares_problem() -> None:
    pre, post = drifted()
    found = module_of("ghost-refit").solve(sums_of(pre, post), ridge=0.0, fraction=1e-13)
    inner, x, y = inner_of(pre).reshape(-1, F), pre.reshape(-1, C), post.reshape(-1, C)
    both = torch.cat([x - inner @ normal(F, C, seed=91), inner], dim=1)
    expected = both @ torch.linalg.lstsq(both, y).solution
    assert torch.allclose((both[:, :C] + inner @ found.down_projection) @ found.matrix(), expected, atol=1e-7)


def test_ghost_refit_with_a_large_fraction_is_ghost() -> None:
    sums = sums_of(*drifted())
    found = module_of("ghost-refit").solve(sums, ridge=1e-6, fraction=1e12)
    assert torch.allclose(found.matrix(), ghost.solve(sums, ridge=1e-6), atol=1e-8)
    assert torch.allclose(found.down_projection, normal(F, C, seed=91), atol=1e-8)


@pytest.mark.parametrize("name", DOWN)
def test_operators_that_need_the_layer_before_say_why_there_is_none(name: str) -> None:
    sums = replace(sums_of(*drifted()), mlp=None, no_mlp="no layer is left before it")
    with pytest.raises(UserError, match="no layer is left before it"):
        module_of(name).solve(sums, **OPTIONS[name])


@pytest.mark.parametrize("name", [name for name in available("operators") if name.startswith(("ghost", "symm"))])
def test_too_few_tokens_name_the_remedy(name: str) -> None:
    sums = sums_of(normal(1, C - 1, C), normal(1, C - 1, C, seed=1))
    options = {key: 1e-9 if key in ("ridge", "fraction") else value for key, value in OPTIONS[name].items()}
    with pytest.raises(UserError, match=rf"11 calibration tokens for .*text\.calibration\.sequences.*solve\.{name}"):
        module_of(name).solve(sums, **options)


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
        figures = (residual(sums, Bridge.of_matrix(found)), antisymmetric_share(Bridge.of_matrix(found)))
    assert torch.equal(found, expected)
    assert figures == (residual(sums, Bridge.of_matrix(expected)), antisymmetric_share(Bridge.of_matrix(expected)))


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


def test_ghost_with_fewer_tokens_than_channels_names_the_remedy() -> None:
    sums = sums_of(normal(1, C - 1, C), normal(1, C - 1, C, seed=1))
    with pytest.raises(UserError, match=r"11 calibration tokens for 12 channels.*text\.calibration\.sequences.*ridge"):
        ghost.solve(sums, ridge=1e-6)
    assert torch.isfinite(ghost.solve(sums, ridge=1e-3)).all()


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


def test_one_operator_per_layer_one_after_the_other() -> None:
    """States go through what bridges the first layer, then what bridges the second, biases and chosen options too."""
    states = normal(4, 50, C), normal(4, 50, C, seed=1), normal(4, 50, C, seed=2)
    cut, pieces = Segment(2, 4), [Segment(2, 3), Segment(3, 4)]
    sums = {piece: sums_of(*states[at : at + 2]) for at, piece in enumerate(pieces)}
    sums[cut] = sums_of(states[0], states[2])
    for name in ("ghost", "ghost-ridge", "ghost-affine", "ghost-lowrank", "diag"):
        operator, expected = module_of(name).solve, states[0]
        parts = [bridge_of(operator(sums[piece], **OPTIONS[name])) for piece in pieces]
        for part in parts:
            expected = expected @ part.matrix() + (0 if part.bias is None else part.bias)
        found = stage.solve(operator, OPTIONS[name], sums, [cut], "layer")[cut]
        bias = 0 if found.bias is None else found.bias
        torch.testing.assert_close(states[0] @ found.matrix() + bias, expected)
        assert len(found.chosen) == (2 if name == "ghost-ridge" else 0)
        for piece, part in zip(pieces, parts, strict=True):
            for option, value in part.chosen.items():
                assert found.chosen[f"{option} [{piece.start}, {piece.end})"] == value


@pytest.mark.parametrize("name", DOWN)
def test_a_new_down_projection_is_one_for_a_whole_run(name: str) -> None:
    cut = Segment(2, 4)
    sums = {segment: sums_of(*drifted()) for segment in (cut, Segment(2, 3), Segment(3, 4))}
    with pytest.raises(UserError, match=r"layers \[2, 4\): .* whole run .* needs collect.boundary: run"):
        stage.solve(module_of(name).solve, OPTIONS[name], sums, [cut], "layer")


@pytest.mark.parametrize("left", [0.0, 1e-9])
def test_ghost_refit_refuses_what_float32_cannot_hold(left: float) -> None:
    """A channel that hangs on the MLP alone: what W nearly takes away, the down projection would have to blow up."""
    pre = normal(4, 50, C)
    post = pre.clone()
    post[..., 0] = left * pre[..., 0] + inner_of(pre)[..., 0]
    with pytest.raises(UserError, match=r"too near to a singular matrix; use a larger solve\.ghost-refit\.ridge"):
        module_of("ghost-refit").solve(sums_of(pre, post), ridge=0.0, fraction=1e-13)
    post[..., 0] = 0.1 * pre[..., 0] + inner_of(pre)[..., 0]
    assert not module_of("ghost-refit").solve(sums_of(pre, post), ridge=0.0, fraction=1e-13).faults(C)
