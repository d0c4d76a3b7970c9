"""Reading and writing safetensors artifacts."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

from stages.artifacts import corrupted, require, writing


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors atomically; `metadata` goes into the file's header."""
    ready = {name: tensor.detach().to(torch.get_default_device()).contiguous() for name, tensor in tensors.items()}
    with writing(path) as partial:
        safetensors.torch.save_file(ready, partial, metadata)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors artifact and its metadata. Raises UserError naming a missing or corrupted file."""
    require(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise corrupted(path, error) from error
