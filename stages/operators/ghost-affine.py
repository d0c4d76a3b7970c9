"""Ghosted Layers with a bias: the affine map that takes the states before the cut to those after it."""

import torch

from stages.bridge import Bridge
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, ridge: NotNegative) -> Bridge:
    """M and b with the least ||X_pre (I + M) + 1 b - X_post||^2 + ridge ||M||^2; [C, C] and [C] float64.

    The ghost solution of centred states, M = (G - m m^T / t + ridge I)^-1 (B - G - m (p - m)^T / t), with m and p the
    column sums of X_pre and X_post over t tokens; then b = (p - m - m M) / t. Raises UserError as `ghost` does.
    """
    moved = sums.post_sum - sums.pre_sum
    gram = sums.gram - torch.outer(sums.pre_sum, sums.pre_sum) / sums.tokens
    larger = f"{1e-4 * mean_diagonal(gram):.1e}"
    check_conditioning(gram, ridge, sums.tokens, f"solve.ghost-affine.ridge = {ridge:g}", larger)
    change = solution(gram, sums.cross - sums.gram - torch.outer(sums.pre_sum, moved) / sums.tokens, ridge)
    return Bridge(change=change, bias=(moved - sums.pre_sum @ change) / sums.tokens)
