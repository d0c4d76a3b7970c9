"""Stage `patch`: the recovered model as a small self-describing adapter, checked by loading it.

Reads ``data/select/<selection>.parquet``, ``data/solve/<key>.safetensors`` and ``.parquet``, and the model. Writes
``data/patch/<key>/``.
"""

import json

import torch

from stages import params
from stages.artifacts import read_json, read_table
from stages.boundaries import Segment, runs
from stages.checkpoint import SOURCE, load_config
from stages.device import forward_device
from stages.errors import UserError, run
from stages.keys import parse_row
from stages.patched import load_row, write_adapter
from stages.paths import diagnostics_file, model_folder, patch_folder, select_file, solve_file
from stages.schemas import SELECT, SOLVE
from stages.tensors import read_tensors


def main() -> None:
    """Run the stage for one row."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    selection = read_table(select_file(row), SELECT)
    solved = read_table(diagnostics_file(row), SOLVE)
    tensors, _ = read_tensors(solve_file(row))
    config = load_config(row.model, settings.models[row.model].trust_remote_code)
    removed = sorted(int(layer) for layer in selection["layer"])
    boundaries = runs(removed)
    if tensors and set(tensors) != {boundary.name for boundary in boundaries}:
        raise UserError(f"{solve_file(row)}: has operators {sorted(tensors)}, expected one for each of {boundaries}")
    first = solved.iloc[0]
    description = {
        **row.columns(),
        "base": {
            "source": read_json(model_folder(row.model) / SOURCE),
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
        },
        "removed_layers": removed,
        "boundaries": [list(boundary) for boundary in boundaries],
        "boundary": first["boundary"],
        "operators": bool(tensors),
        "options": json.loads(first["options"]),
        "dtype": first["dtype"],
        "calibration": first["calibration"],
        "calibration_tokens": int(first["tokens"]),
        "residual_before": solved["residual_before"].tolist(),
        "residual_after": solved["residual_after"].tolist(),
    }
    operators = {Segment.parse(name): matrix for name, matrix in tensors.items()}
    write_adapter(patch_folder(row), description, operators)
    model = load_row(row, settings).model
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8, device=forward_device())[None] % config.vocab_size).logits
    if not torch.isfinite(logits).all():
        raise UserError(f"{patch_folder(row)}: the patched model's logits have NaN or infinity")


if __name__ == "__main__":
    run(main)
