"""Gromov et al.: the contiguous block whose input and output are at the least angle."""

import pandas as pd

from stages.criteria import best_block
from stages.project.errors import UserError

COLUMNS = {"last": "angular_last", "all": "angular"}


def choose(scores: pd.DataFrame, n: int, allowed: range, *, tokens: str) -> list[int]:
    """The block [s, s + n) inside `allowed` with the least mean arccos(cos(h_s, h_{s+n})) / pi; ties go to the lower s.

    *The Unreasonable Ineffectiveness of the Deeper Layers* (arXiv 2403.17887; PruneMe). `tokens` says over which tokens
    the mean is: the `last` one of each sequence, as in the paper, or `all`. Raises UserError when it is neither.
    """
    if tokens not in COLUMNS:
        raise UserError(f"params.yaml: select.angular.tokens = {tokens!r}: must be one of {', '.join(COLUMNS)}")
    return best_block(scores, n, allowed, -scores[COLUMNS[tokens]])
