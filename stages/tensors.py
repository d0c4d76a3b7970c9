"""Reading and writing safetensors artifacts."""

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

from stages.project.artifacts import corrupted, require, writing

METADATA = "stage"
"""The one entry of a file's header metadata: safetensors writes several in an order that differs from run to run."""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors atomically; `metadata` goes into the file's header."""
    ready = {name: tensor.detach().to(torch.get_default_device()).contiguous() for name, tensor in tensors.items()}
    with writing(path) as partial:
        safetensors.torch.save_file(ready, partial, {METADATA: json.dumps(metadata or {}, sort_keys=True)})


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors artifact and its metadata. Raises UserError naming a missing or corrupted file."""
    require(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise corrupted(path, error) from error
