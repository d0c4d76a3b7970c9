"""Where the computation runs: run-time settings that never change an artifact beyond rounding.

Three environment variables. ``GHOSTED_DEVICE``: any torch device; by default an accelerator when there is one.
``GHOSTED_DEVICE_MAP``, in its place, for a model larger than one device: a strategy of transformers (`auto`,
`balanced`, `balanced_low_0`, `sequential`), or a JSON object from names of modules to devices, each a GPU's number, the
name of a torch device, or `"disk"`. ``GHOSTED_BATCH_TOKENS``: tokens in one forward pass. Threads follow the usual
``OMP_NUM_THREADS``.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stages.project.errors import UserError

DEFAULT_BATCH_TOKENS = 2048
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"

DeviceMap = dict[str, int | str]
"""The device of every module named, which holds for all that is in it."""


def forward_device() -> torch.device:
    """The device for forward passes, and for statistics and solves if it has float64.

    Raises UserError when ``GHOSTED_DEVICE`` names one that is not there, or is set beside ``GHOSTED_DEVICE_MAP``.
    """
    _refuse_both()
    name = os.environ.get("GHOSTED_DEVICE")
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.get_default_device()
    return _existing(name, f"GHOSTED_DEVICE={name}")


def device_map() -> DeviceMap | str | None:
    """What ``GHOSTED_DEVICE_MAP`` asks for: the device of every module, or a strategy of transformers; None if unset.

    Raises UserError when it is neither, names a device that is not there or a module inside another one that it names,
    or is set beside ``GHOSTED_DEVICE``.
    """
    _refuse_both()
    text = os.environ.get("GHOSTED_DEVICE_MAP")
    if text is None or text in STRATEGIES:
        return text
    try:
        devices = json.loads(text)
    except ValueError:
        devices = None
    if not isinstance(devices, dict) or not devices:
        raise UserError(
            f"GHOSTED_DEVICE_MAP={text}: must be {', '.join(STRATEGIES)}, or a JSON object from names of modules to "
            f'devices, such as {{"model": 0, "lm_head": "cpu"}}'
        )
    for module, device in devices.items():
        where = f"GHOSTED_DEVICE_MAP: {module!r}: {device!r}"
        if isinstance(device, bool) or not isinstance(device, int | str):
            raise UserError(f'{where}: must be a GPU\'s number, the name of a device, or "{DISK}"')
        if device != DISK:
            _existing(device, where)
        inside = [name for name in devices if name != module and covers(module, name)]
        if inside:
            raise UserError(f"{where}: {inside[0]!r}, which lies inside it, has a device of its own; name one of them")
    return devices


def covers(module: str, name: str) -> bool:
    """Whether the module or parameter `name` is `module`, or lies inside it; the whole model is named by ``""``."""
    return module in ("", name) or name.startswith(f"{module}.")


def _refuse_both() -> None:
    if {"GHOSTED_DEVICE", "GHOSTED_DEVICE_MAP"} <= set(os.environ):
        raise UserError("GHOSTED_DEVICE and GHOSTED_DEVICE_MAP are both set; one of them says where a model goes")


def _existing(name: str | int, where: str) -> torch.device:
    try:
        device = torch.device(name)
        # Read back, so that a device without data (`meta`) is none.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from error
    return device


def float64_device(device: torch.device) -> torch.device:
    """`device` if it computes in float64, else the host's (Apple's GPUs have no float64)."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.get_default_device()
    return device


def exact(values: Tensor) -> Tensor:
    """`values` in float64, on their device if it computes in it, else on the host."""
    return values.to(float64_device(values.device)).double()


def batch_tokens() -> int:
    """Tokens in one forward pass, at least one sequence. Raises UserError when the variable is not a whole number."""
    text = os.environ.get("GHOSTED_BATCH_TOKENS", str(DEFAULT_BATCH_TOKENS))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"GHOSTED_BATCH_TOKENS={text}: must be a whole number of tokens, at least 1")
    return int(text)


def batches(sequences: Sequence[Sequence[int]], tokens: int, device: torch.device) -> Iterator[Tensor]:
    """Consecutive sequences of equal length as [batch, length] int64 tensors of at most `tokens` ids, in order.

    A batch has at least one sequence. Whole sequences of one length: no padding enters any computation.
    """
    for length, group in groupby(sequences, key=len):
        alike = list(group)
        size = max(1, tokens // length)
        for start in range(0, len(alike), size):
            yield torch.tensor([list(ids) for ids in alike[start : start + size]], dtype=torch.int64, device=device)
