"""Ghosted Layers: the linear map that takes the states before the cut to those after it, by least squares."""

import torch
from torch import Tensor

from stages.project.errors import UserError
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, ridge: float) -> Tensor:
    """W = I + M with M = (X_pre^T X_pre + ridge I)^-1 X_pre^T (X_post - X_pre); [C, C] float64, by Cholesky.

    Ghosted Layers (arXiv 2605.15491). `ridge` has the units of the Gram matrix. Raises UserError when `ridge` is
    negative, when the Gram matrix is singular and `ridge` under a millionth of its mean diagonal (the solution would
    then hang on rounding), and when the regularised one leaves fewer than three of float64's digits.
    """
    if not 0 <= ridge < float("inf"):
        raise UserError(f"solve.ghost.ridge = {ridge}: must be a finite number, at least 0")
    channels = len(sums.gram)
    values = torch.linalg.eigvalsh(sums.gram)
    precision = torch.finfo(values.dtype).eps
    diagonal = (sums.gram.trace() / channels).item()
    singular = values[0] <= values[-1] * channels * precision
    if (singular and ridge < 1e-6 * diagonal) or values[0] + ridge <= (values[-1] + ridge) * 1e3 * precision:
        raise UserError(
            f"the Gram matrix is singular or too ill-conditioned for solve.ghost.ridge = {ridge:g} ({sums.tokens} "
            f"calibration tokens for {channels} channels); use more calibration tokens (text.calibration.sequences, "
            f"text.calibration.seqlen), or a larger solve.ghost.ridge, such as {1e-4 * diagonal:.1e}"
        )
    identity = torch.eye(channels, dtype=sums.gram.dtype, device=sums.gram.device)
    factor = torch.linalg.cholesky(sums.gram + ridge * identity)
    return identity + torch.cholesky_solve(sums.cross - sums.gram, factor)
