"""What a model makes of text: the likelihood of whole sequences of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.decoder import input_device
from stages.base.device import batches
from stages.project.errors import UserError


@torch.no_grad()
def window_nll(model: PreTrainedModel, windows: Sequence[Sequence[int]], tokens: int, what: str) -> list[float]:
    """Sum of the negative log-likelihoods of tokens 1.. of each window given those before, nats.

    One forward pass per batch of at most `tokens` tokens. Raises UserError, naming `what` and the window, when a sum is
    not finite.
    """
    sums: list[float] = []
    for ids in tqdm(list(batches(windows, tokens, input_device(model))), desc=what, leave=False):
        sums += sequence_nll(model(input_ids=ids, use_cache=False).logits, ids).tolist()
    for window, nll in enumerate(sums):
        if not torch.isfinite(torch.tensor(nll)):
            raise UserError(f"{what}, window {window}: the negative log-likelihood is {nll}")
    return sums


def sequence_nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Per sequence the summed negative log-likelihood of ids[:, 1:] under logits[:, :-1], nats, float64 [batch].

    `logits` is [batch, tokens, vocabulary], `ids` [batch, tokens]. Log-softmax in float32, the sum in float64.
    """
    sums = []
    for row, target in zip(logits[:, :-1], ids[:, 1:], strict=True):
        # In pieces that stay in a processor's cache; all at once takes twice the time.
        pieces = zip(row.split(64), target.split(64), strict=True)
        nll = [torch.nn.functional.cross_entropy(piece.float(), wanted, reduction="none") for piece, wanted in pieces]
        sums.append(torch.cat(nll).cpu().double().sum())
    return torch.stack(sums)
