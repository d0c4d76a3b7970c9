"""How well the operator `ghost` bridges each of many blocks of layers, whatever the model or the cut."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.decoder import (
    decoder_stack,
    execution_device,
    input_device,
    layer_at_cut,
    layers_removed,
    residual_states,
)
from stages.base.device import batch_tokens, batches, float64_device, forward_device
from stages.boundaries import Segment
from stages.least_squares import conditioned, mean_diagonal, solution
from stages.likelihood import window_nll
from stages.project.errors import UserError
from stages.recovered.boundary_operator import AFTER, BEFORE, BoundaryOperator, attach

FRACTION = 1e-9
"""Ridge of the operators, as a fraction of the Gram matrices' mean diagonal."""
HELD_OUT = 4
"""Every so many-th sequence is held out."""


def split(calibration: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """The calibration sequences that operators are solved from, and those that they are tried on."""
    held = list(calibration[HELD_OUT - 1 :: HELD_OUT])
    return [ids for number, ids in enumerate(calibration) if number % HELD_OUT != HELD_OUT - 1], held


@torch.no_grad()
def fit(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], blocks: Collection[Segment]
) -> dict[Segment, Tensor]:
    """M = W - I of the operator of every block, [C, C] float64, each sequence forwarded once.

    Memory grows with the number of blocks, not with that of the sequences. Raises UserError when there are too few
    tokens.
    """
    grams: dict[int, Tensor] = {}
    crosses: dict[Segment, Tensor] = {}
    tokens = 0
    for states in _passes(model, sequences, blocks, "blocks"):
        for start in {block.start for block in blocks}:
            gram = states[start].T @ states[start]
            grams[start] = grams[start] + gram if start in grams else gram
        for block in blocks:
            cross = states[block.start].T @ (states[block.end] - states[block.start])
            crosses[block] = crosses[block] + cross if block in crosses else cross
        tokens += len(next(iter(states.values())))
    if not all(conditioned(gram, FRACTION * mean_diagonal(gram)) for gram in grams.values()):
        raise UserError(
            f"{tokens} calibration tokens are too few to solve operators for {len(gram)} channels from; use more "
            f"(text.calibration.selection_sequences, text.calibration.seqlen)"
        )
    changes: dict[Segment, Tensor] = {}
    for start, gram in tqdm(grams.items(), desc="operators", leave=False):
        own = [block for block in blocks if block.start == start]
        # All blocks of one start in one solve, their sums let go, so that those of many need not be held beside it.
        target = torch.cat([crosses.pop(block) for block in own], dim=1)
        changes |= zip(own, solution(gram, target, FRACTION * mean_diagonal(gram)).chunk(len(own), dim=1), strict=True)
    return changes


@torch.no_grad()
def residuals(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], changes: Mapping[Segment, Tensor]
) -> dict[Segment, float]:
    """Mean over tokens of ||x_pre + x_pre M - x_post||^2 / ||x_post||^2 of every block; `changes` holds the M.

    Every token counts alike: a sum of squares would hide all others behind the few of massive activation.
    """
    sums = dict.fromkeys(changes, 0.0)
    tokens = 0
    for states in _passes(model, sequences, changes, "held-out blocks"):
        for block, change in changes.items():
            pre, post = states[block.start], states[block.end]
            square = (pre + pre @ change - post).square().sum(dim=1)
            sums[block] += (square / post.square().sum(dim=1)).nan_to_num().sum().item()
        tokens += len(post)
    return {block: value / tokens for block, value in sums.items()}


def best_sets(values: Mapping[Segment, float], n: int, count: int, keep: int) -> list[tuple[Segment, ...]]:
    """The `keep` sets of `count` blocks with the least sum of `values`, best first; ties go to the lower layers.

    The blocks of a set have n layers in all, and at least one layer between any two.
    """

    @cache
    def sets(first: int, left: int, count: int) -> list[tuple[float, tuple[Segment, ...]]]:
        if count == 0:
            return [] if left else [(0.0, ())]
        found = [
            (value + rest, (block, *others))
            for block, value in values.items()
            if block.start >= first and block.end - block.start <= left
            for rest, others in sets(block.end + 1, left - (block.end - block.start), count - 1)
        ]
        return sorted(found)[:keep]

    return [blocks for _, blocks in sets(0, n, count)]


@torch.no_grad()
def bridged_nll(model: PreTrainedModel, sequences: Sequence[Sequence[int]], changes: Mapping[Segment, Tensor]) -> float:
    """Negative log-likelihood of `sequences`, nats, without some blocks, I + M of `changes` in the place of each."""
    removed = [layer for block in changes for layer in range(*block)]
    attached = []
    with layers_removed(model, removed):
        try:
            for block, change in changes.items():
                layer, follows = layer_at_cut(model, block.end, removed)
                name = BEFORE if follows else AFTER
                operator = BoundaryOperator(len(change))
                operator.change.data = change
                operator.to(device=execution_device(layer), dtype=next(layer.parameters()).dtype)
                attached.append((layer, name, attach(layer, name, operator)))
            return sum(window_nll(model, sequences, batch_tokens(), f"without layers {removed}"))
        finally:
            for layer, name, handle in attached:
                handle.remove()
                delattr(layer, name)


def _passes(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], blocks: Collection[Segment], what: str
) -> Iterator[dict[int, Tensor]]:
    """The residual states at both ends of every block, [tokens, C] in float64, one batch after the other."""
    device = float64_device(forward_device())
    stack, indices = decoder_stack(model), {index for block in blocks for index in block}
    for ids in tqdm(list(batches(sequences, batch_tokens(), input_device(model))), desc=what, leave=False):
        with residual_states(model, indices) as states:
            stack(input_ids=ids, use_cache=False)
        yield {index: state.to(device).double().flatten(0, 1) for index, state in states.items()}
