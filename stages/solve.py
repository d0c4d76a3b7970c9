"""Stage `solve`: the operator of every boundary, from the statistics; no model in memory.

Reads ``data/select/<selection>.parquet`` and ``data/collect/<selection>.safetensors``. Writes
``data/solve/<key>.safetensors``, per removed run what bridges it in float64 (its names: :func:`stages.bridge.solved`),
and the diagnostics, ``data/solve/<key>.parquet``.
"""

import importlib
import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from stages.base.device import float64_device, forward_device
from stages.boundaries import Segment, pieces, runs
from stages.bridge import Bridge, identity, solved
from stages.diagnostics import antisymmetric_share, residual, token_residual
from stages.project import params
from stages.project.artifacts import REMEDY, read_table, read_tensors, write_table, write_tensors
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import collect_file, diagnostics_file, select_file, solve_file
from stages.project.schemas import SELECT, SOLVE
from stages.sums import BoundarySums, from_tensors

Operator = Callable[..., Bridge | Tensor | None]

RUNS_ONLY = "a new down projection is solved for a whole run of removed layers; it needs collect.boundary: run"


def main() -> None:
    """Run the stage for one row."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: grid.operators", row.operator, settings.solve)
    options = settings.solve[row.operator]
    device = float64_device(forward_device())
    selection = read_table(select_file(row), SELECT)
    tensors, metadata = read_tensors(collect_file(row))
    removed = runs(selection["layer"])
    try:
        sums = from_tensors(tensors, metadata.get("no_mlp", "") if metadata["boundary"] == "run" else RUNS_ONLY)
        needed = {*removed, *(piece for cut in removed for piece in pieces(cut, metadata["boundary"]))}
        sums = {segment: sums[segment].to(device) for segment in sorted(needed)}
    except (KeyError, ValueError) as error:
        raise UserError(f"{collect_file(row)}: lacks {error}; {REMEDY}") from error
    operator = importlib.import_module(f"stages.operators.{row.operator}").solve
    bridges = solve(operator, options, sums, removed, metadata["boundary"])
    frame = diagnostics(bridges, sums, removed).assign(
        **row.columns(),
        dtype=metadata["dtype"],
        calibration=metadata["calibration"],
        boundary=metadata["boundary"],
        options=json.dumps(options, sort_keys=True),
    )
    write_tensors(solve_file(row), solved(bridges))
    write_table(diagnostics_file(row), frame, SOLVE)


def solve(
    operator: Operator,
    options: dict[str, Any],
    sums: dict[Segment, BoundarySums],
    removed: list[Segment],
    boundary: str,
) -> dict[Segment, Bridge]:
    """What bridges every removed run, float64 on the sums' device; empty where `operator` gives none.

    With boundary `layer`, one per removed layer, applied one after the other, in the order of the layers. Raises
    UserError when an operator cannot be solved or is not finite, naming the layers.
    """
    found = {}
    for cut in removed:
        parts = {}
        for piece in pieces(cut, boundary):
            try:
                part = operator(sums[piece], **options)
            except UserError as error:
                raise UserError(f"layers [{piece.start}, {piece.end}): {error}") from error
            if part is not None:
                parts[piece] = part if isinstance(part, Bridge) else Bridge.of_matrix(part)
        bridge = _joined(parts, cut)
        if bridge is not None:
            faults = bridge.faults(len(sums[cut].gram))
            if faults:
                raise UserError(f"layers [{cut.start}, {cut.end}): {'; '.join(faults)}")
            found[cut] = bridge
    return found


def _joined(parts: dict[Segment, Bridge], cut: Segment) -> Bridge | None:
    """What bridges a cut: the one part, or what x -> x W + b of each part makes one after the other."""
    if len(parts) < 2:
        return next(iter(parts.values()), None)
    matrix = bias = None
    for bridge in parts.values():
        if bridge.down_projection is not None:
            raise UserError(f"layers [{cut.start}, {cut.end}): {RUNS_ONLY}")
        factor = bridge.matrix()
        if factor is not None:
            matrix = factor if matrix is None else matrix @ factor
            bias = bias if bias is None else bias @ factor
        if bridge.bias is not None:
            bias = bridge.bias if bias is None else bias + bridge.bias
    chosen = {
        f"{name} [{piece.start}, {piece.end})": value
        for piece, bridge in parts.items()
        for name, value in bridge.chosen.items()
    }
    return Bridge(change=None if matrix is None else matrix - identity(matrix), bias=bias, chosen=chosen)


def diagnostics(
    bridges: dict[Segment, Bridge], sums: dict[Segment, BoundarySums], removed: list[Segment]
) -> pd.DataFrame:
    """One row per removed run: the columns of ``stages.project.schemas.SOLVE`` that the sums and bridges give.

    Sums of the whole run are needed, whatever the boundary. The run of a row without operator has W = I.
    """
    rows = []
    for cut in removed:
        boundary, bridge = sums[cut], bridges.get(cut)
        values = torch.linalg.eigvalsh(boundary.gram)
        rows.append(
            {
                "start": cut.start,
                "end": cut.end,
                "tokens": boundary.tokens.item(),
                "residual_before": residual(boundary, None),
                "residual_after": residual(boundary, bridge),
                "token_residual_before": token_residual(boundary, None),
                "token_residual_after": token_residual(boundary, bridge),
                "antisymmetric_share": antisymmetric_share(bridge),
                "condition": (values[-1] / values[0]).item() if values[0] > 0 else float("inf"),
                "chosen": json.dumps(dict(bridge.chosen) if bridge else {}, sort_keys=True),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    run(main)
