"""An adapter: a folder that says what was removed from which base, and holds the operators.

``adapter.json`` describes it, with the SHA-256 of ``operators.safetensors`` (float32 M = W - I, [C, C], by removed run)
and of the description itself.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from stages.boundaries import Segment
from stages.project.artifacts import REMEDY, read_json, read_tensors, sha256, write_json, write_tensors
from stages.project.errors import UserError
from stages.project.sections import OperatorDtype

FORMAT = 3
DESCRIPTION = "adapter.json"
OPERATORS = "operators.safetensors"


def write_adapter(folder: Path, description: dict[str, Any], operators: Mapping[Segment, Tensor]) -> None:
    """Write an adapter into `folder`: its description, and the operators W, float64 [C, C], by removed run."""
    changes = {
        segment.name: (matrix - torch.eye(len(matrix), dtype=matrix.dtype)).float()
        for segment, matrix in operators.items()
    }
    folder.mkdir()
    write_tensors(folder / OPERATORS, changes)
    complete = {**description, "format_version": FORMAT, "operators_sha256": sha256(folder / OPERATORS)}
    write_json(folder / DESCRIPTION, {**complete, "sha256": digest(complete)})


def digest(description: dict[str, Any]) -> str:
    """SHA-256 in hex of a description without its key `sha256`, as JSON with sorted keys and no white space."""
    rest = {name: value for name, value in description.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_description(folder: Path) -> dict[str, Any]:
    """An adapter's description.

    Raises UserError when it is missing, damaged, of another format, edited, or has an `operator_dtype` that is none.
    """
    file = folder / DESCRIPTION
    description = read_json(file)
    version = description.get("format_version")
    if version != FORMAT:
        raise UserError(f"{file}: format_version {version!r}; this version of the project reads {FORMAT}")
    if description.get("sha256") != digest(description):
        raise UserError(f"{file}: was edited or damaged: its content is not what its `sha256` says; {REMEDY}")
    allowed = get_args(OperatorDtype) if description["operators"] else (None,)
    if description.get("operator_dtype") not in allowed:
        raise UserError(f"{file}: operator_dtype {description.get('operator_dtype')!r}; must be one of {allowed}")
    return description


def read_changes(folder: Path, description: dict[str, Any]) -> dict[Segment, Tensor]:
    """The operators of an adapter as M = W - I, float32 [C, C], by removed run; empty for a row without operators.

    Raises UserError when they are missing, damaged or not those that the description says.
    """
    file = folder / OPERATORS
    tensors, _ = read_tensors(file)
    if sha256(file) != description["operators_sha256"]:
        raise UserError(f"{file}: was edited or damaged: it is not the file that {DESCRIPTION} describes; {REMEDY}")
    names = {f"{start}-{end}" for start, end in description["boundaries"]} if description["operators"] else set()
    if set(tensors) != names:
        raise UserError(f"{file}: has tensors {sorted(tensors)}, expected {sorted(names)}")
    size = description["base"]["hidden_size"]
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (size, size) or not torch.isfinite(tensor).all():
            raise UserError(f"{file}: {name} is not a finite [{size}, {size}] matrix")
    return {Segment.parse(name): change for name, change in tensors.items()}
