"""The layers without which the perplexity of calibration text stays lowest: SLEB, and Shortened LLaMA's PPL."""

from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.decoder import layers_removed
from stages.base.device import batch_tokens
from stages.criteria import first_sequences, lowest
from stages.likelihood import window_nll
from stages.project.errors import UserError

METHODS = ("greedy", "once")


@torch.no_grad()
def search(
    model: PreTrainedModel,
    calibration: Sequence[Sequence[int]],
    n: int,
    allowed: range,
    *,
    method: str,
    sequences: int,
) -> list[int]:
    """N layers of `allowed`, by the perplexity of the first `sequences` calibration sequences without them.

    `greedy` (SLEB, arXiv 2402.09025): one after the other, each time the layer without which, and without those gone
    before, the perplexity is lowest. `once` (Shortened LLaMA, arXiv 2402.02834): the n layers that are lowest alone.
    Ties go to the lower index. Raises UserError when `method` is neither.
    """
    if method not in METHODS:
        raise UserError(f"params.yaml: select.perplexity.method = {method!r}: must be one of {', '.join(METHODS)}")
    text = first_sequences(calibration, sequences, "perplexity")
    removed: list[int] = []
    steps = tqdm(total=sum(len(allowed) - step for step in range(n if method == "greedy" else 1)), leave=False)
    while len(removed) < n:
        values = {}
        for layer in set(allowed) - set(removed):
            with layers_removed(model, [*removed, layer]):
                values[layer] = sum(
                    window_nll(model, text, batch_tokens(), f"calibration, without layers {[*removed, layer]}")
                )
            steps.update()
        removed += lowest(pd.Series(values), 1 if method == "greedy" else n)
    return removed
