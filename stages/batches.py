"""Batches of token sequences: whole sequences of one length, so that no padding enters any computation."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor


def batches(sequences: Sequence[Sequence[int]], tokens: int, device: torch.device) -> Iterator[Tensor]:
    """Consecutive sequences of equal length as [batch, length] int64 tensors of at most `tokens` ids, in order.

    A batch has at least one sequence.
    """
    for length, group in groupby(sequences, key=len):
        alike = list(group)
        size = max(1, tokens // length)
        for start in range(0, len(alike), size):
            yield torch.tensor([list(ids) for ids in alike[start : start + size]], dtype=torch.int64, device=device)
