"""Prune&Comp: one scale for the whole residual stream."""

from torch import Tensor

from stages.bridge import identity
from stages.sums import BoundarySums


def solve(sums: BoundarySums) -> Tensor:
    """W = a I, a the mean norm of the states after the cut over that of the states before it; [C, C] float64.

    Prune&Comp (arXiv 2507.18212), which then folds a into the weights before the cut; here it is an operator.
    """
    return sums.post_norm / sums.pre_norm * identity(sums.gram)
