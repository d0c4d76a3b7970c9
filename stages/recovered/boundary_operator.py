"""Boundary operators on the residual stream of a decoder (Ghosted Layers, arXiv 2605.15491)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

BEFORE = "boundary_before"
"""Name, in a decoder layer, of the operator on its input."""
AFTER = "boundary_after"
"""Name, in the last decoder layer, of the operator on its output."""


class BoundaryOperator(nn.Module):
    """x -> x + x M + b on the residual stream, for the operator W = I + M and the bias b.

    Kept as M, so that in half precision the states themselves are not rounded by a product; with `rank`, as two factors
    of M. Starts as M = 0 and b = 0, which changes nothing. Computes in the dtype of M and returns the states'.
    """

    def __init__(self, channels: int, rank: int | None = None, bias: bool = False):
        super().__init__()
        if rank is None:
            self.change = nn.Parameter(torch.zeros(channels, channels))
        else:
            self.reduce = nn.Parameter(torch.zeros(channels, rank))
            self.expand = nn.Parameter(torch.zeros(rank, channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.rank = rank

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the operator to states of shape [..., C]."""
        # With a device map the states come from the layer before: accelerate moves them only inside the next one.
        states = hidden_states.to(self.change if self.rank is None else self.reduce)
        changed = states + (states @ self.change if self.rank is None else states @ self.reduce @ self.expand)
        if self.bias is not None:
            changed = changed + self.bias
        return changed.to(hidden_states.dtype)


def attach(layer: nn.Module, name: str, operator: BoundaryOperator) -> RemovableHandle:
    """Make `operator` a part of a decoder layer, applied to its input (`name` BEFORE) or to its output (AFTER).

    Returns the handle of the hook that applies it.
    """
    layer.add_module(name, operator)
    if name == BEFORE:
        return layer.register_forward_pre_hook(_before, with_kwargs=True)
    return layer.register_forward_hook(_after)


# The operator is looked up in each call: a module that trains a copy of it may have taken its place.
def _before(layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    operator = layer.get_submodule(BEFORE)
    if positional:
        return (operator(positional[0]), *positional[1:]), named
    return positional, {**named, "hidden_states": operator(named["hidden_states"])}


def _after(layer: nn.Module, _positional: tuple[Any, ...], output: Tensor) -> Tensor:
    changed: Tensor = layer.get_submodule(AFTER)(output)
    return changed
