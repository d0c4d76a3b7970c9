"""The best symmetric operator: a bound on every diagonal or rotated scale."""

import torch
from torch import Tensor

from stages.bridge import identity
from stages.least_squares import check_conditioning, mean_diagonal
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, ridge: NotNegative) -> Tensor:
    """The symmetric W with the least ||X_pre W - X_post||^2 + ridge ||W - I||^2, [C, C] float64.

    It solves the Lyapunov equation G W + W G = B + B^T, G = X_pre^T X_pre + ridge I, B = X_pre^T X_post + ridge I: in
    the basis of G's eigenvectors, with eigenvalues g, W_ij = (B + B^T)_ij / (g_i + g_j). No operator of LinearPatch
    (W = H diag(d) H^T for orthonormal H) has a lower residual, as Ghosted Layers (arXiv 2605.15491, Theorem 4.1) uses.
    Raises UserError as `ghost` does.
    """
    larger = f"{1e-4 * mean_diagonal(sums.gram):.1e}"
    check_conditioning(sums.gram, ridge, sums.tokens, f"solve.symmetric.ridge = {ridge:g}", larger)
    values, vectors = torch.linalg.eigh(sums.gram)
    values = values + ridge
    # Of M = W - I, so that what needs no change stays exactly as it is.
    wanted = vectors.T @ (sums.cross + sums.cross.T - 2 * sums.gram) @ vectors
    change = vectors @ (wanted / (values[:, None] + values[None, :])) @ vectors.T
    operator: Tensor = identity(change) + (change + change.T) / 2
    return operator
