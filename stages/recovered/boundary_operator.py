"""Boundary operators on the residual stream of a decoder (Ghosted Layers, arXiv 2605.15491)."""

from typing import Any

import torch
from torch import Tensor, nn

BEFORE = "boundary_before"
"""Name, in a decoder layer, of the operator on its input."""
AFTER = "boundary_after"
"""Name, in the last decoder layer, of the operator on its output."""


class BoundaryOperator(nn.Module):
    """x -> x + x M on the residual stream, for the operator W = I + M.

    Kept as M, so that in half precision the states themselves are not rounded by a product. Starts as M = 0, which
    changes nothing. Computes in the dtype of M and returns the states'.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.change = nn.Parameter(torch.zeros(channels, channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the operator to states of shape [..., C]."""
        # With a device map the states come from the layer before: accelerate moves them only inside the next one.
        states = hidden_states.to(self.change)
        return (states + states @ self.change).to(hidden_states.dtype)


def attach(layer: nn.Module, name: str, operator: BoundaryOperator) -> None:
    """Make `operator` a part of a decoder layer, applied to its input (`name` BEFORE) or to its output (AFTER)."""
    layer.add_module(name, operator)
    if name == BEFORE:
        layer.register_forward_pre_hook(_before, with_kwargs=True)
    else:
        layer.register_forward_hook(_after)


# The operator is looked up in each call: a module that trains a copy of it may have taken its place.
def _before(layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    operator = layer.get_submodule(BEFORE)
    if positional:
        return (operator(positional[0]), *positional[1:]), named
    return positional, {**named, "hidden_states": operator(named["hidden_states"])}


def _after(layer: nn.Module, _positional: tuple[Any, ...], output: Tensor) -> Tensor:
    changed: Tensor = layer.get_submodule(AFTER)(output)
    return changed
