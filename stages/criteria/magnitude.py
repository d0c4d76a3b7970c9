"""Shortened LLaMA's Magnitude+: the layers with the smallest weights."""

from collections.abc import Sequence

import pandas as pd
from transformers import PreTrainedModel

from stages.base.decoder import linear_maps, whole_weight
from stages.base.device import exact
from stages.criteria import lowest


def search(model: PreTrainedModel, _calibration: Sequence[Sequence[int]], n: int, allowed: range) -> list[int]:
    """The n layers of `allowed` with the lowest sum of |w| over the weights w of their linear maps.

    Shortened LLaMA (arXiv 2402.02834), where the first four and the last two layers stay: `protect_first` and
    `protect_last`. Ties go to the lower index.
    """
    sums = {
        layer: sum(exact(whole_weight(module)).abs().sum().item() for module in linear_maps(model, layer))
        for layer in allowed
    }
    return lowest(pd.Series(sums), n)
