"""Where the computation runs: run-time settings that never change an artifact beyond rounding.

Two environment variables: ``GHOSTED_DEVICE`` (any torch device; by default an accelerator when there is one) and
``GHOSTED_BATCH_TOKENS`` (tokens in one forward pass). Threads follow the usual ``OMP_NUM_THREADS``.
"""

import os

import torch

from stages.project.errors import UserError

DEFAULT_BATCH_TOKENS = 2048


def forward_device() -> torch.device:
    """The device for forward passes. Raises UserError when ``GHOSTED_DEVICE`` names one that is not there."""
    name = os.environ.get("GHOSTED_DEVICE")
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.get_default_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"GHOSTED_DEVICE={name}: {str(error).splitlines()[0]}") from error
    return device


def float64_device(device: torch.device) -> torch.device:
    """`device` if it computes in float64, else the host's (Apple's GPUs have no float64)."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.get_default_device()
    return device


def batch_tokens() -> int:
    """Tokens in one forward pass, at least one sequence. Raises UserError when the variable is not a whole number."""
    text = os.environ.get("GHOSTED_BATCH_TOKENS", str(DEFAULT_BATCH_TOKENS))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"GHOSTED_BATCH_TOKENS={text}: must be a whole number of tokens, at least 1")
    return int(text)
