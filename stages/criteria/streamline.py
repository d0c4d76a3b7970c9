"""LLM-Streamline: the contiguous block whose input and output are most alike."""

import pandas as pd

from stages.criteria import best_block


def choose(scores: pd.DataFrame, n: int, allowed: range) -> list[int]:
    """The block [s, s + n) inside `allowed` with the highest mean cos(h_s, h_{s+n}); ties go to the lower s.

    LLM-Streamline (arXiv 2403.19135).
    """
    return best_block(scores, n, allowed, scores["cosine"])
