"""Selection criteria, one module each.

A module defines one of two functions. ``choose(scores, n, allowed, *, option, ...)`` goes by the table of similarities
(columns of ``stages.project.schemas.SCORE``) alone; ``search(model, calibration, n, allowed, *, option, ...)`` by what
it computes with the model and the token ids of the calibration sequences that layers are selected from. Both return the
indices of n removed layers, all within the range `allowed`, which has at least n layers. Their keyword-only parameters
are the criterion's options in ``params.yaml``, under ``select.<name>``, their annotations what these may be
(:mod:`stages.project.options`), beside ``protect_first`` and ``protect_last``, from which the stage makes `allowed`. A
new criterion is one new module, named in ``params.yaml``.
"""

import pandas as pd


def best_block(scores: pd.DataFrame, n: int, allowed: range, value: "pd.Series[float]") -> list[int]:
    """The block [s, s + n) inside `allowed` whose row of `scores` has the highest `value`; ties go to the lower s."""
    block = scores["end"] - scores["start"] == n
    inside = (scores["start"] >= allowed.start) & (scores["end"] <= allowed.stop)
    values = value[block & inside].set_axis(scores["start"][block & inside]).sort_index()
    start = int(values.index[int(values.to_numpy().argmax())])
    return list(range(start, start + n))


def lowest(values: "pd.Series[float]", n: int) -> list[int]:
    """The n layers, the index of `values`, with the lowest values, in order; ties go to the lower index."""
    return sorted(int(layer) for layer in values.sort_index().sort_values(kind="stable").index[:n])
