"""The recovered model: a base model without the removed layers, a boundary operator at each cut.

:func:`load_patched` puts an adapter (:mod:`stages.recovered.adapter`) on a base model; the result is still of the
ordinary class.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from stages.base.checkpoint import SOURCE, load_model
from stages.base.decoder import (
    decoder_layers,
    down_projection,
    execution_device,
    layer_at_cut,
    remove_layers,
    replace_weight,
)
from stages.boundaries import Segment, runs
from stages.bridge import Bridge
from stages.project.artifacts import read_json
from stages.project.errors import UserError
from stages.project.keys import Row
from stages.project.paths import model_folder, patch_folder
from stages.project.sections import OperatorDtype, Params
from stages.recovered.adapter import read_bridges, read_description
from stages.recovered.boundary_operator import AFTER, BEFORE, BoundaryOperator, attach


def patch_model(
    model: PreTrainedModel,
    removed: list[int],
    bridges: Mapping[Segment, Bridge],
    operator_dtype: OperatorDtype = "model",
) -> None:
    """Remove layers in place and put in what bridges the removed runs.

    An operator is applied to the input of the layer after the cut, or, where none is left after it, to the output of
    the last layer, before the final norm, on the device of that layer and in its dtype (`model`) or in float32. A down
    projection is that of the layer before the cut. Raises ValueError when a bridge's run is not one of the removed
    runs, or its down projection has no place.
    """
    unknown = set(bridges) - set(runs(removed))
    if unknown:
        raise ValueError(f"operators for {sorted(unknown)}, which are no removed runs of {removed}")
    for segment, bridge in bridges.items():
        if bridge.down_projection is not None:
            module = down_projection(model, segment.start - 1) if segment.start else None
            if module is None or module.weight.shape != bridge.down_projection.T.shape:
                raise ValueError(
                    f"a down projection for {segment}, and no such before it in a {model.config.model_type} model"
                )
            replace_weight(module, bridge.down_projection.T.contiguous())
    if removed:
        remove_layers(model, removed)
    for segment, bridge in bridges.items():
        if not bridge.is_operator:
            continue
        operator = boundary_operator(bridge)
        layer, follows = layer_at_cut(model, segment.end, removed)
        dtype = torch.float32 if operator_dtype == "float32" else next(layer.parameters()).dtype
        operator.to(device=execution_device(layer), dtype=dtype)
        attach(layer, BEFORE if follows else AFTER, operator)


def boundary_operator(bridge: Bridge) -> BoundaryOperator:
    """The module of a bridge that is an operator."""
    parts = bridge.parts()
    parts.pop("down_projection", None)
    channels = len(next(parts[name] for name in ("change", "reduce", "bias") if name in parts))
    operator = BoundaryOperator(channels, len(parts["expand"]) if "expand" in parts else None, "bias" in parts)
    for name, part in parts.items():
        getattr(operator, name).data = part
    return operator


def load_patched(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Put the adapter in `folder` on `base`, in place, and return it.

    Raises UserError when the adapter is damaged, or does not fit the base's architecture, layers or hidden size.
    """
    description = read_description(folder)
    found = base_shape(base)
    for name, value in found.items():
        if description["base"].get(name) != value:
            wanted = description["base"].get(name)
            raise UserError(f"{folder}: made for a model with {name} {wanted!r}, the base has {value!r}")
    bridges = read_bridges(folder, description)
    try:
        patch_model(base, description["removed_layers"], bridges, description["operator_dtype"])
    except ValueError as error:
        raise UserError(f"{folder}: does not fit the base: {error}") from error
    return base


def base_shape(model: PreTrainedModel) -> dict[str, Any]:
    """What an adapter's base must agree in: architecture, number of decoder layers, hidden size."""
    config = model.config
    return {
        "model_type": config.model_type,
        "num_hidden_layers": len(decoder_layers(model)),
        "hidden_size": config.hidden_size,
    }


class LoadedRow(NamedTuple):
    """A row's model, ready to evaluate, and what it was made with."""

    model: PreTrainedModel
    made_with: dict[str, str | None]
    """The columns calibration, boundary, options and operator_dtype of the evaluation tables.

    All None for the dense row, and operator_dtype for a row without operators.
    """


def load_row(row: Row, settings: Params) -> LoadedRow:
    """Load the model of a row of the tables: the base, with the row's adapter unless it is the dense row."""
    made_with = dict.fromkeys(("calibration", "boundary", "options", "operator_dtype"))
    if not row.dense:
        description = read_description(patch_folder(row))
        check_current(row, description, settings)
        made_with = {name: description[name] for name in ("boundary", "operator_dtype")}
        made_with["calibration"] = description["calibration"]["name"]
        made_with["options"] = json.dumps(description["options"], sort_keys=True)
    source = settings.models[row.model]
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    return LoadedRow(model if row.dense else load_patched(model, patch_folder(row)), made_with)


def check_current(row: Row, description: dict[str, Any], settings: Params) -> None:
    """Raise UserError unless a row's adapter was made from the base that is there now, as params.yaml says now."""
    names = ("corpus", "sequences", "seqlen", "seed")
    wanted = {
        "dtype": settings.models[row.model].dtype,
        "boundary": settings.collect.boundary,
        "options": settings.solve[row.operator],
        "operator_dtype": settings.patch.operator_dtype if description["operators"] else None,
        "calibration": {name: getattr(settings.text.calibration, name) for name in names},
        "base": read_json(model_folder(row.model) / SOURCE),
    }
    calibration = {name: description["calibration"][name] for name in names}
    found = {**description, "calibration": calibration, "base": description["base"]["source"]}
    for name, now in wanted.items():
        if found[name] != now:
            raise UserError(f"{patch_folder(row)}: {name} was {found[name]}, is now {now}; run `dvc repro`")


def load_compared(row: Row, settings: Params) -> Iterator[tuple[Row, PreTrainedModel]]:
    """The models that a pruned row is compared with, then its own: dense, without operators, with them.

    Loaded one at a time, as they are asked for; where nothing bridges the cuts, no third one.
    """
    source = settings.models[row.model]
    description = read_description(patch_folder(row))
    check_current(row, description, settings)
    dense, bare = Row(row.model), Row(row.model, row.criterion, row.n)
    yield dense, load_model(row.model, source.dtype, source.trust_remote_code)
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    patch_model(model, description["removed_layers"], {})
    yield bare, model
    if description["bridged"]:
        yield row, load_row(row, settings).model
