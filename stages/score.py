"""Stage `score`: the similarity of every pair of residual states, from one pass over the calibration sequences.

Reads ``data/text/<model>/selection.parquet`` and the model. Forwards each sequence once, through the decoder stack
only. Writes ``data/score/<model>.parquet``.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.checkpoint import load_config, load_model
from stages.base.decoder import decoder_layers, decoder_stack, input_device, residual_states
from stages.base.device import batch_tokens, batches, float64_device, forward_device
from stages.project import params
from stages.project.artifacts import read_table, write_table
from stages.project.errors import run
from stages.project.keys import parse_row
from stages.project.paths import score_file, selection_file
from stages.project.schemas import CALIBRATION_TEXT, SCORE
from stages.protection import removable
from stages.similarity import similarity_sums


def main() -> None:
    """Run the stage for one model."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    source = settings.models[row.model]
    layers = load_config(row.model, source.trust_remote_code).num_hidden_layers
    for criterion in settings.grid.criteria:
        for n in settings.grid.n:
            removable(layers, n, criterion, settings.select[criterion])
    calibration = read_table(selection_file(row.model), CALIBRATION_TEXT)
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    frame = pairwise_similarity(model, calibration["input_ids"].tolist(), batch_tokens())
    shared = ["model", "corpus", "source", "bos", "cut", "seqlen", "seed", "calibration"]
    columns = {name: calibration[name].iloc[0] for name in shared}
    write_table(score_file(row.model), frame.assign(dtype=source.dtype, sequences=len(calibration), **columns), SCORE)


@torch.no_grad()
def pairwise_similarity(model: PreTrainedModel, sequences: Sequence[Sequence[int]], tokens: int) -> pd.DataFrame:
    """Mean cosine and angular distance of h_i and h_j for every 0 <= i < j <= L, over all tokens of `sequences`.

    Columns start (i), end (j), cosine, angular, angular_last (over the last token of each sequence alone), tokens. One
    forward pass per batch of at most `tokens` tokens; memory does not grow with the number of sequences.
    """
    count = len(decoder_layers(model)) + 1
    stack = decoder_stack(model)
    device = float64_device(forward_device())
    cosine = torch.zeros(count, count, dtype=torch.float64, device=device)
    angular = torch.zeros_like(cosine)
    last = torch.zeros_like(cosine)
    seen = 0
    for ids in tqdm(list(batches(sequences, tokens, input_device(model))), desc="similarity", leave=False):
        with residual_states(model, range(count)) as states:
            stack(input_ids=ids, use_cache=False)
        stacked = torch.stack([states[index].to(device) for index in range(count)]).double()
        sums = similarity_sums(stacked.flatten(1, 2))
        cosine += sums[0]
        angular += sums[1]
        last += similarity_sums(stacked[:, :, -1])[1]
        seen += ids.numel()
    pairs = torch.triu_indices(count, count, offset=1)
    return pd.DataFrame(
        {
            "start": pairs[0].numpy(),
            "end": pairs[1].numpy(),
            "cosine": (cosine.cpu()[pairs[0], pairs[1]] / seen).numpy(),
            "angular": (angular.cpu()[pairs[0], pairs[1]] / seen).numpy(),
            "angular_last": (last.cpu()[pairs[0], pairs[1]] / len(sequences)).numpy(),
            "tokens": seen,
        }
    )


if __name__ == "__main__":
    run(main)
