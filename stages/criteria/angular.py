"""Gromov et al.: the contiguous block whose input and output are at the least angle."""

from typing import Literal

import pandas as pd

from stages.criteria import best_block


def choose(scores: pd.DataFrame, n: int, allowed: range, *, tokens: Literal["last", "all"]) -> list[int]:
    """The block [s, s + n) inside `allowed` with the least mean arccos(cos(h_s, h_{s+n})) / pi; ties go to the lower s.

    *The Unreasonable Ineffectiveness of the Deeper Layers* (arXiv 2403.17887; PruneMe). `tokens` says over which tokens
    the mean is: the `last` one of each sequence, as in the paper, or `all`.
    """
    return best_block(scores, n, allowed, -scores["angular_last" if tokens == "last" else "angular"])
