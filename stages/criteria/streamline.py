"""LLM-Streamline: the contiguous block whose input and output are most alike."""

import pandas as pd


def choose(scores: pd.DataFrame, n: int, allowed: range) -> list[int]:
    """The block [s, s + n) inside `allowed` with the highest mean cos(h_s, h_{s+n}); ties go to the lower s.

    LLM-Streamline (arXiv 2403.19135).
    """
    length = scores["end"] - scores["start"]
    inside = (scores["start"] >= allowed.start) & (scores["end"] <= allowed.stop)
    cosines = scores[inside & (length == n)].set_index("start")["cosine"].sort_index()
    start = int(cosines.to_numpy().argmax()) + allowed.start
    return list(range(start, start + n))
