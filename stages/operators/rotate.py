"""LinearPatch-R: one scale per channel of the Hadamard-rotated residual stream."""

import torch
from torch import Tensor

from stages.hadamard import hadamard
from stages.project.errors import UserError
from stages.sums import BoundarySums


def solve(sums: BoundarySums) -> Tensor:
    """W = H diag(d) H^T, d_c the ratio mean|x_post H| / mean|x_pre H| of column c, averaged over sequences.

    H is the orthonormal Hadamard matrix of order C; W is [C, C] float64. LinearPatch (arXiv 2505.24680). Raises
    UserError where no Hadamard matrix of order C can be constructed.
    """
    if sums.ratio_rotated is None:
        raise UserError(
            f"no Hadamard matrix of order {len(sums.ratio)}, the model's hidden size, can be constructed; "
            f"use `diag`, which needs none"
        )
    rotation = hadamard(len(sums.ratio)).to(sums.ratio.device)
    return torch.einsum("ic,c,jc->ij", rotation, sums.ratio_rotated / sums.sequences, rotation)
