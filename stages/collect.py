"""Stage `collect`: the sufficient statistics of every boundary of a selection, from one pass over the calibration text.

Reads ``data/select/<key>.parquet``, ``data/text/<model>/calibration.parquet`` and the model. Forwards each sequence
once, up to the last boundary's layer. Writes the sums, ``data/collect/<key>.safetensors``.
"""

from collections.abc import Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.checkpoint import load_model
from stages.base.decoder import decoder_layers, decoder_stack, input_device, remove_layers, residual_states
from stages.base.device import batch_tokens, batches, float64_device, forward_device
from stages.boundaries import Segment, pieces, runs
from stages.hadamard import constructible, hadamard
from stages.project import params
from stages.project.artifacts import read_table, write_tensors
from stages.project.errors import run
from stages.project.keys import parse_row
from stages.project.paths import calibration_file, collect_file, select_file
from stages.project.schemas import CALIBRATION_TEXT, SELECT
from stages.sums import BoundarySums, boundary_sums, to_tensors


def main() -> None:
    """Run the stage for one selection."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    boundary = settings.collect.boundary
    selection = read_table(select_file(row), SELECT)
    calibration = read_table(calibration_file(row.model), CALIBRATION_TEXT)
    source = settings.models[row.model]
    removed = runs(selection["layer"])
    segments = sorted({*removed, *(piece for cut in removed for piece in pieces(cut, boundary))})
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    sums = collect(model, calibration["input_ids"].tolist(), segments, batch_tokens())
    metadata = {"calibration": calibration["calibration"].iloc[0], "dtype": source.dtype, "boundary": boundary}
    write_tensors(collect_file(row), to_tensors(sums), metadata)


@torch.no_grad()
def collect(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], segments: Sequence[Segment], tokens: int
) -> dict[Segment, BoundarySums]:
    """The sums of every segment over all `sequences`, in one forward pass per batch of at most `tokens` tokens.

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
    totals: dict[Segment, BoundarySums] = {}
    for ids in tqdm(list(batches(sequences, tokens, input_device(model))), desc="statistics", leave=False):
        with residual_states(model, indices) as states:
            stack(input_ids=ids, use_cache=False)
        exact = {index: state.to(device).double() for index, state in states.items()}
        for segment in segments:
            sums = boundary_sums(exact[segment.start], exact[segment.end], rotation)
            totals[segment] = totals[segment] + sums if segment in totals else sums
    return totals


if __name__ == "__main__":
    run(main)
