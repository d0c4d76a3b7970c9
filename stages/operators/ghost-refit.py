"""Ghosted Layers and a new down projection before the cut, in one least-squares problem."""

import torch

from stages.bridge import Bridge, identity
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.errors import UserError
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, ridge: NotNegative, fraction: NotNegative) -> Bridge:
    """W = I + M, [C, C], and D', [F, C], float64, with (A + F D') W as near to X_post as both together can make it.

    F is the input of the down projection D and A the residual stream before the MLP. (A + F D') W = X_pre W + F R with
    R = (D' - D) W, so W and R are one least-squares problem on [X_pre, F]: least ||X_pre W + F R - X_post||^2 +
    ridge ||M||^2 + e ||R||^2, with e = fraction * trace(F^T F) / F's width; then D' = D + R W^-1. A large `fraction`
    gives `ghost`. R is eliminated first, so that the system for M has size C. Raises UserError when `ridge` or
    `fraction` are too small, where there are no sums inside that layer, or when W cannot be inverted.
    """
    mlp = sums.inner()
    inner_ridge = fraction * mean_diagonal(mlp.gram)
    check_conditioning(mlp.gram, inner_ridge, sums.tokens, f"solve.ghost-refit.fraction = {fraction:g}", "1e-4")
    # (F^T F + e I)^-1 F^T [X_pre, X_post - X_pre].
    explained, wanted = solution(mlp.gram, torch.cat([mlp.pre, mlp.post - mlp.pre], dim=1), inner_ridge).chunk(2, dim=1)
    gram = sums.gram - mlp.pre.T @ explained
    gram = (gram + gram.T) / 2
    larger = f"{1e-4 * mean_diagonal(gram):.1e}"
    check_conditioning(gram, ridge, sums.tokens, f"solve.ghost-refit.ridge = {ridge:g}", larger)
    change = solution(gram, sums.cross - sums.gram - mlp.pre.T @ wanted, ridge)
    matrix = identity(change) + change
    moved = torch.linalg.solve_ex(matrix.T, (wanted - explained @ change).T).result.T
    # D' undoes what W does: the layer's output may be far larger than what W makes of it, in an adapter's float32.
    square = sums.gram.trace() + 2 * (moved * mlp.pre).sum() + (moved * (mlp.gram @ moved)).sum()
    largest = (square / sums.post_square).sqrt() * torch.linalg.matrix_norm(matrix, 2)
    if not largest * torch.finfo(torch.float32).eps <= 1e-2:
        raise UserError("W is too near to a singular matrix; use a larger solve.ghost-refit.ridge")
    return Bridge(change=change, down_projection=mlp.weight + moved)
