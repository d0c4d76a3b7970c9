"""The recovered model: a base model without the removed layers, a boundary operator at each cut.

An adapter is a folder: ``adapter.json`` says what it is and which base it fits, ``operators.safetensors`` holds the
operators. :func:`load_patched` puts it on a base model; the result is still the ordinary model class.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.base.checkpoint import load_model
from stages.base.decoder import decoder_layers, execution_device, remove_layers
from stages.boundaries import Segment, runs
from stages.project.artifacts import read_json, write_json
from stages.project.errors import UserError
from stages.project.keys import Row
from stages.project.paths import patch_folder
from stages.project.sections import OperatorDtype, Params
from stages.tensors import read_tensors, write_tensors

FORMAT = 2
"""Version 1 lacked `operator_dtype`: its operators were applied in the model's dtype."""
DESCRIPTION = "adapter.json"
OPERATORS = "operators.safetensors"


class BoundaryOperator(nn.Module):
    """x -> x + x M on the residual stream, for the operator W = I + M.

    Kept as M, so that in half precision the states themselves are not rounded by a product. Starts as M = 0: a
    checkpoint that lacks it leaves the model pruned, not random. Computes in the dtype of M and returns the states'.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.change = nn.Parameter(torch.zeros(channels, channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the operator to states of shape [..., C]."""
        # With a device map the states come from the layer before: accelerate moves them only inside the next one.
        states = hidden_states.to(self.change)
        return (states + states @ self.change).to(hidden_states.dtype)


def patch_model(
    model: PreTrainedModel,
    removed: list[int],
    changes: Mapping[Segment, Tensor],
    operator_dtype: OperatorDtype = "model",
) -> None:
    """Remove layers in place and put the operators in, given as M = W - I, [C, C], by the removed run they bridge.

    An operator is applied to the input of the layer after the cut, or, where none is left after it, to the output of
    the last layer, before the final norm, on the device of that layer and in its dtype (`model`) or in float32. Raises
    ValueError when an operator's run is not one of the removed runs.
    """
    unknown = set(changes) - set(runs(removed))
    if unknown:
        raise ValueError(f"operators for {sorted(unknown)}, which are no removed runs of {removed}")
    if removed:
        remove_layers(model, removed)
    layers = decoder_layers(model)
    for segment, change in changes.items():
        operator = BoundaryOperator(len(change))
        operator.change.data = change
        following = segment.end - sum(layer < segment.end for layer in removed)
        layer = layers[min(following, len(layers) - 1)]
        dtype = torch.float32 if operator_dtype == "float32" else next(layer.parameters()).dtype
        operator.to(device=execution_device(layer), dtype=dtype)
        if following < len(layers):
            layer.boundary_before = operator
            layer.register_forward_pre_hook(_before, with_kwargs=True)
        else:
            layer.boundary_after = operator
            layer.register_forward_hook(_after)


def _before(layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    operator = layer.get_submodule("boundary_before")
    if positional:
        return (operator(positional[0]), *positional[1:]), named
    return positional, {**named, "hidden_states": operator(named["hidden_states"])}


def _after(layer: nn.Module, _positional: tuple[Any, ...], output: Tensor) -> Tensor:
    changed: Tensor = layer.get_submodule("boundary_after")(output)
    return changed


def write_adapter(folder: Path, description: dict[str, Any], operators: Mapping[Segment, Tensor]) -> None:
    """Write an adapter into `folder`: `description` with the format version, and the operators W, float64 [C, C]."""
    changes = {
        segment.name: (matrix - torch.eye(len(matrix), dtype=matrix.dtype)).float()
        for segment, matrix in operators.items()
    }
    folder.mkdir()
    write_tensors(folder / OPERATORS, changes)
    write_json(folder / DESCRIPTION, {**description, "format_version": FORMAT})


def read_description(folder: Path) -> dict[str, Any]:
    """An adapter's description, as the current format has it.

    Raises UserError when it is missing, damaged, of a newer format, or has an `operator_dtype` that is none.
    """
    file = folder / DESCRIPTION
    description = read_json(file)
    version = description.get("format_version")
    if version == 1:
        description["operator_dtype"] = "model" if description["operators"] else None
    elif version != FORMAT:
        raise UserError(f"{file}: format_version {version!r}; this version reads 1 and {FORMAT}")
    allowed = get_args(OperatorDtype) if description["operators"] else (None,)
    if description.get("operator_dtype") not in allowed:
        raise UserError(f"{file}: operator_dtype {description.get('operator_dtype')!r}; must be one of {allowed}")
    return description


def load_patched(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Put the adapter in `folder` on `base`, in place, and return it.

    Raises UserError when the adapter is damaged, or does not fit the base's architecture, layers or hidden size.
    """
    description = read_description(folder)
    tensors, _ = read_tensors(folder / OPERATORS)
    found = base_shape(base)
    for name, value in found.items():
        if description["base"].get(name) != value:
            wanted = description["base"].get(name)
            raise UserError(f"{folder}: made for a model with {name} {wanted!r}, the base has {value!r}")
    size = found["hidden_size"]
    wanted_names = {f"{start}-{end}" for start, end in description["boundaries"]} if description["operators"] else set()
    if set(tensors) != wanted_names:
        raise UserError(f"{folder / OPERATORS}: has tensors {sorted(tensors)}, expected {sorted(wanted_names)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (size, size) or not torch.isfinite(tensor).all():
            raise UserError(f"{folder / OPERATORS}: {name} is not a finite [{size}, {size}] matrix")
    changes = {Segment.parse(name): change for name, change in tensors.items()}
    patch_model(base, description["removed_layers"], changes, description["operator_dtype"])
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
        made_with = {name: description[name] for name in ("calibration", "boundary", "operator_dtype")}
        made_with["options"] = json.dumps(description["options"], sort_keys=True)
    source = settings.models[row.model]
    model = load_model(row.model, source.dtype, source.trust_remote_code)
    return LoadedRow(model if row.dense else load_patched(model, patch_folder(row)), made_with)
