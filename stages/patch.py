"""Stage `patch`: the recovered model as a small self-describing adapter, checked by loading it.

Reads ``data/select/<selection>.parquet``, ``data/solve/<key>.safetensors`` and ``.parquet``, and the model. Writes
``data/patch/<key>/``.
"""

import json

import torch
from transformers import PreTrainedModel

from stages.base.checkpoint import SOURCE, load_config, load_model
from stages.base.decoder import input_device
from stages.boundaries import runs
from stages.bridge import from_solved
from stages.project import params
from stages.project.artifacts import REMEDY, read_json, read_table, read_tensors, writing
from stages.project.errors import UserError, run
from stages.project.keys import Calibration, parse_row
from stages.project.paths import diagnostics_file, model_folder, patch_folder, select_file, solve_file
from stages.project.schemas import SELECT, SOLVE
from stages.recovered.adapter import write_adapter
from stages.recovered.patched import load_patched


def main() -> None:
    """Run the stage for one row."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    selection = read_table(select_file(row), SELECT)
    solved = read_table(diagnostics_file(row), SOLVE)
    tensors, _ = read_tensors(solve_file(row))
    source = settings.models[row.model]
    config = load_config(row.model, source.trust_remote_code)
    removed = sorted(int(layer) for layer in selection["layer"])
    boundaries = runs(removed)
    try:
        bridges = from_solved(tensors)
    except ValueError as error:
        raise UserError(f"{solve_file(row)}: {error}; {REMEDY}") from error
    if bridges and set(bridges) != set(boundaries):
        raise UserError(f"{solve_file(row)}: has operators {sorted(tensors)}, expected one for each of {boundaries}")
    operators = any(bridge.is_operator for bridge in bridges.values())
    first = solved.iloc[0]
    calibration = Calibration.parse(first["calibration"])
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
        "bridged": bool(bridges),
        "operators": operators,
        "options": json.loads(first["options"]),
        "operator_dtype": settings.patch.operator_dtype if operators else None,
        "dtype": first["dtype"],
        "calibration": {"name": calibration.name, **calibration._asdict(), "tokens": int(first["tokens"])},
        "residual_before": solved["residual_before"].tolist(),
        "residual_after": solved["residual_after"].tolist(),
    }
    base = load_model(row.model, source.dtype, source.trust_remote_code)
    with writing(patch_folder(row)) as folder:
        write_adapter(folder, description, bridges)
        check(load_patched(base, folder), f"{row.key} in {source.dtype}")


@torch.no_grad()
def check(model: PreTrainedModel, what: str) -> None:
    """Raise UserError, naming `what`, unless a short forward pass gives finite logits."""
    ids = torch.arange(8, device=input_device(model))[None] % model.config.vocab_size
    if not torch.isfinite(model(input_ids=ids).logits).all():
        raise UserError(f"{what}: the patched model's logits have NaN or infinity; try another `dtype` for the model")


if __name__ == "__main__":
    run(main)
