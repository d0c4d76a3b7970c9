"""LinearPatch-D: one scale per channel."""

import torch
from torch import Tensor

from stages.sums import BoundarySums


def solve(sums: BoundarySums) -> Tensor:
    """W = diag(d), d_c the ratio mean|x_post| / mean|x_pre| of channel c, averaged over sequences; [C, C] float64.

    LinearPatch (arXiv 2505.24680) without the rotation.
    """
    return torch.diag(sums.ratio / sums.sequences)
