"""ShortGPT: the layers that change the residual stream least, wherever they are."""

import pandas as pd

from stages.criteria import lowest


def choose(scores: pd.DataFrame, n: int, allowed: range) -> list[int]:
    """The n layers i of `allowed` with the lowest Block Influence 1 - cos(h_i, h_{i+1}); ties go to the lower i.

    ShortGPT (arXiv 2403.03853).
    """
    single = scores[(scores["end"] - scores["start"] == 1) & scores["start"].isin(allowed)]
    return lowest(1 - single.set_index("start")["cosine"], n)
