"""The layers whose loss a linear operator makes up for best: selection by what the recovery can repair."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from stages.blocks import best_sets, bridged_nll, fit, residuals, split
from stages.boundaries import Segment
from stages.project.errors import UserError
from stages.project.options import Count


def search(
    model: PreTrainedModel,
    calibration: Sequence[Sequence[int]],
    n: int,
    allowed: range,
    *,
    blocks: Count,
    candidates: Count,
) -> list[int]:
    """N layers of `allowed`, as one to `blocks` contiguous blocks, that `ghost` operators W reconstruct best.

    A block's value is the mean over tokens of ||x_pre W - x_post||^2 / ||x_post||^2 on the fourth of the sequences that
    its W was not solved from; a set of blocks has the sum of its blocks' values. All blocks from one pass. Cosine
    similarity, the measure of LLM-Streamline, says how much a block changes the stream; this says how much of the
    change no linear operator can make up for. Sums tell sets of one number of blocks apart, not of two: of the
    `candidates` best of every number, the one is taken that leaves the least perplexity on the held-out sequences with
    its operators in place. Ties go to fewer blocks, then to the lower layers.

    Memory grows with the number of blocks that are tried: those of n layers, with `blocks` above 1 of 1 to n layers.
    Raises UserError when there are too few sequences to hold any out.
    """
    solved_from, held_out = split(calibration)
    if not held_out:
        raise UserError(
            f"params.yaml: text.calibration.selection_sequences: the criterion residual needs at least 4, to hold one "
            f"out; found {len(calibration)}"
        )
    lengths = range(1, n + 1) if blocks > 1 else (n,)
    tried = [
        Segment(start, start + length) for length in lengths for start in allowed if start + length <= allowed.stop
    ]
    changes = fit(model, solved_from, tried)
    values = residuals(model, held_out, changes)
    sets = [found for count in range(1, blocks + 1) for found in best_sets(values, n, count, candidates)]
    best = sets[0]
    if len(sets) > 1:
        best = min(sets, key=lambda found: bridged_nll(model, held_out, {block: changes[block] for block in found}))
    return [layer for block in best for layer in range(*block)]
