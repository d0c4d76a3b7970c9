"""Stage `collect`: the sufficient statistics of every boundary of a selection, from one pass over the calibration text.

Reads ``data/select/<key>.parquet``, ``data/text/<model>/calibration.parquet`` and the model. Forwards each sequence
once, up to the last boundary's layer. Writes the sums, ``data/collect/<key>.safetensors``.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.checkpoint import load_model
from stages.base.decoder import (
    decoder_layers,
    decoder_stack,
    down_projection,
    input_device,
    module_inputs,
    remove_layers,
    residual_states,
    whole_weight,
)
from stages.base.device import batch_tokens, batches, float64_device, forward_device
from stages.boundaries import Segment, pieces, runs
from stages.hadamard import constructible, hadamard
from stages.project import params
from stages.project.artifacts import read_table, write_tensors
from stages.project.errors import run
from stages.project.keys import parse_row
from stages.project.paths import calibration_file, collect_file, select_file
from stages.project.schemas import CALIBRATION_TEXT, SELECT
from stages.sums import BoundarySums, MlpSums, boundary_sums, mlp_sums, to_tensors

NO_MLP = (
    "solves a new down projection of the layer before the cut, and there is none: no layer is left before it, or its "
    "MLP output passes a norm before it joins the residual stream (Gemma 3, OLMo 2)"
)
"""Why a segment has no sums inside the layer before it, when they were asked for."""


def main() -> None:
    """Run the stage for one selection."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    selection = read_table(select_file(row), SELECT)
    calibration = read_table(calibration_file(row.model), CALIBRATION_TEXT)
    source = settings.models[row.model]
    removed = runs(selection["layer"])
    segments = sorted({*removed, *(piece for cut in removed for piece in pieces(cut, settings.collect.boundary))})
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    inner = settings.collect.mlp
    sums = collect(model, calibration["input_ids"].tolist(), segments, batch_tokens(), removed if inner else ())
    metadata = {
        "calibration": calibration["calibration"].iloc[0],
        "dtype": source.dtype,
        "boundary": settings.collect.boundary,
        "no_mlp": NO_MLP if inner else "needs sums inside the layer before the cut; set collect.mlp: true",
    }
    write_tensors(collect_file(row), to_tensors(sums), metadata)


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    segments: Sequence[Segment],
    tokens: int,
    inner: Collection[Segment] = (),
) -> dict[Segment, BoundarySums]:
    """The sums of every segment over all `sequences`, in one forward pass per batch of at most `tokens` tokens.

    For the segments that are in `inner` too, with those inside the layer before, where it has a down projection for it.
    Cuts the decoder layers after the last segment off `model`, in place: nothing beyond them is computed. Memory does
    not grow with the number of sequences.
    """
    last = max(segment.end for segment in segments)
    remove_layers(model, range(last, len(decoder_layers(model))))
    stack = decoder_stack(model)
    device = float64_device(forward_device())
    channels = model.config.hidden_size
    rotation = hadamard(channels).to(device) if constructible(channels) else None
    indices = {index for segment in segments for index in segment}
    starts = {segment.start for segment in inner if segment.start > 0}
    projections = {start: module for start in starts if (module := down_projection(model, start - 1)) is not None}
    weights = {start: whole_weight(module).to(device).double().T for start, module in projections.items()}
    totals: dict[tuple[Segment, int], BoundarySums] = {}
    inside: dict[Segment, MlpSums] = {}
    seen = 0
    for ids in tqdm(list(batches(sequences, tokens, input_device(model))), desc="statistics", leave=False):
        with residual_states(model, indices) as states, module_inputs(projections) as inputs:
            stack(input_ids=ids, use_cache=False)
        exact = {index: state.to(device).double() for index, state in states.items()}
        for segment in segments:
            pre, post = exact[segment.start], exact[segment.end]
            for half in {0, 1} if len(ids) > 1 else {seen % 2}:
                of_half = slice((seen + half) % 2, None, 2)
                sums = boundary_sums(pre[of_half], post[of_half], rotation)
                totals[segment, half] = totals[segment, half] + sums if (segment, half) in totals else sums
            if segment in inner and segment.start in projections:
                given = inputs[segment.start].to(device).double()
                found = mlp_sums(given, pre, post, weights[segment.start])
                inside[segment] = inside[segment] + found if segment in inside else found
        seen += len(ids)
    return {segment: joined(totals[segment, 0], totals.get((segment, 1)), inside.get(segment)) for segment in segments}


def joined(first: BoundarySums, second: BoundarySums | None, inner: MlpSums | None) -> BoundarySums:
    """The sums of both halves of the sequences, with those inside the layer before; no second half, no halves."""
    whole = first if second is None else replace(first + second, halves=(first, second))
    return replace(whole, mlp=inner)


if __name__ == "__main__":
    run(main)
