"""An adapter: a folder that says what was removed from which base, and holds the operators.

``adapter.json`` describes it, with the SHA-256 of ``operators.safetensors`` (float32, the names of
:func:`stages.bridge.to_tensors`) and of the description itself.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from stages.boundaries import Segment
from stages.bridge import Bridge, from_tensors, to_tensors
from stages.project.artifacts import REMEDY, read_json, read_tensors, sha256, write_json, write_tensors
from stages.project.errors import UserError
from stages.project.sections import OperatorDtype

FORMAT = 4
DESCRIPTION = "adapter.json"
OPERATORS = "operators.safetensors"


def write_adapter(folder: Path, description: dict[str, Any], bridges: Mapping[Segment, Bridge]) -> None:
    """Write an adapter into `folder`: its description, and what bridges the removed runs, float64."""
    folder.mkdir()
    write_tensors(folder / OPERATORS, {name: part.float() for name, part in to_tensors(bridges).items()})
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


def read_bridges(folder: Path, description: dict[str, Any]) -> dict[Segment, Bridge]:
    """What bridges the removed runs, float32; empty for a row where nothing does.

    Raises UserError when it is missing, damaged or not what the description says.
    """
    file = folder / OPERATORS
    tensors, _ = read_tensors(file)
    if sha256(file) != description["operators_sha256"]:
        raise UserError(f"{file}: was edited or damaged: it is not the file that {DESCRIPTION} describes; {REMEDY}")
    try:
        bridges = from_tensors(tensors)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    names = sorted(f"{start}-{end}" for start, end in description["boundaries"]) if description["bridged"] else []
    if sorted(segment.name for segment in bridges) != names:
        raise UserError(f"{file}: has tensors of {sorted(segment.name for segment in bridges)}, expected of {names}")
    for segment, bridge in bridges.items():
        faults = bridge.faults(description["base"]["hidden_size"])
        if faults:
            raise UserError(f"{file}: {segment.name}: {'; '.join(faults)}")
    if any(bridge.is_operator for bridge in bridges.values()) != description["operators"]:
        raise UserError(f"{file}: not what {DESCRIPTION} says, operators: {description['operators']}")
    return bridges
