"""The layers without which the perplexity of calibration text stays lowest: SLEB, and Shortened LLaMA's PPL."""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.decoder import layers_removed
from stages.base.device import batch_tokens
from stages.criteria import lowest
from stages.likelihood import window_nll
from stages.project.options import Count


@torch.no_grad()
def search(
    model: PreTrainedModel,
    calibration: Sequence[Sequence[int]],
    n: int,
    allowed: range,
    *,
    method: Literal["greedy", "once"],
    sequences: Count,
) -> list[int]:
    """N layers of `allowed`, by the perplexity of the first `sequences` calibration sequences without them.

    `greedy` (SLEB, arXiv 2402.09025): one after the other, each time the layer without which, and without those gone
    before, the perplexity is lowest. `once` (Shortened LLaMA, arXiv 2402.02834): the n layers that are lowest alone.
    Ties go to the lower index.
    """
    removed: list[int] = []
    steps = tqdm(total=sum(len(allowed) - step for step in range(n if method == "greedy" else 1)), leave=False)
    while len(removed) < n:
        values = {}
        for layer in set(allowed) - set(removed):
            with layers_removed(model, [*removed, layer]):
                what = f"calibration, without layers {[*removed, layer]}"
                values[layer] = sum(window_nll(model, calibration[:sequences], batch_tokens(), what))
            steps.update()
        removed += lowest(pd.Series(values), 1 if method == "greedy" else n)
    return removed
