"""Ghosted Layers: the linear map that takes the states before the cut to those after it, by least squares."""

from torch import Tensor

from stages.bridge import identity
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, ridge: NotNegative) -> Tensor:
    """W = I + M with M = (X_pre^T X_pre + ridge I)^-1 X_pre^T (X_post - X_pre); [C, C] float64, by Cholesky.

    Ghosted Layers (arXiv 2605.15491). `ridge` has the units of the Gram matrix. Raises UserError when `ridge` is
    too small for a Gram matrix that is singular or ill-conditioned.
    """
    larger = f"{1e-4 * mean_diagonal(sums.gram):.1e}"
    check_conditioning(sums.gram, ridge, sums.tokens, f"solve.ghost.ridge = {ridge:g}", larger)
    return identity(sums.gram) + solution(sums.gram, sums.cross - sums.gram, ridge)
