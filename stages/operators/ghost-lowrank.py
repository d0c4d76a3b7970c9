"""Ghosted Layers with M of low rank: two thin factors instead of a square matrix."""

import torch

from stages.bridge import Bridge
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.errors import UserError
from stages.project.options import Count, NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, rank: Count, ridge: NotNegative) -> Bridge:
    """M = M* V V^T of rank `rank`, kept as its factors M* V, [C, rank], and V^T, [rank, C], float64.

    M* is the ghost solution and V holds the leading eigenvectors of its fit M*^T (X_pre^T X_pre + ridge I) M*: reduced-
    rank regression (Izenman 1975), the M of that rank with the least ||X_pre M - (X_post - X_pre)||^2 + ridge ||M||^2.
    A truncated singular value decomposition of M* would weigh all directions alike, seen in the data or not. Raises
    UserError as `ghost` does, and when `rank` is above C.
    """
    channels = len(sums.gram)
    if rank > channels:
        raise UserError(f"solve.ghost-lowrank.rank = {rank}: must be from 1 to {channels}, the model's hidden size")
    larger = f"{1e-4 * mean_diagonal(sums.gram):.1e}"
    check_conditioning(sums.gram, ridge, sums.tokens, f"solve.ghost-lowrank.ridge = {ridge:g}", larger)
    wanted = sums.cross - sums.gram
    change = solution(sums.gram, wanted, ridge)
    # M*^T (G + ridge I) M* = M*^T (B - G); its rounding is not symmetric.
    fit = change.T @ wanted
    _, vectors = torch.linalg.eigh((fit + fit.T) / 2)
    leading = vectors[:, -rank:].flip(1)
    return Bridge(reduce=change @ leading, expand=leading.T.contiguous())
