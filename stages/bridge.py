"""What bridges a cut: an operator on the residual stream, a new down projection of the layer before it, or both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from stages.boundaries import Segment

PARTS = ("change", "reduce", "expand", "bias", "down_projection")
"""The fields of a bridge that are tensors."""


def identity(like: Tensor) -> Tensor:
    """The identity matrix of the size, dtype and device of a square matrix."""
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Bridge:
    """The states before the cut become x W + b, W = I + M, after the layer before it has got a new down projection.

    M is either `change` or the product `reduce` `expand`; without any, W = I. What is None is left as it is.
    """

    change: Tensor | None = None
    """M, [C, C]."""
    reduce: Tensor | None = None
    """First factor of M, [C, r]."""
    expand: Tensor | None = None
    """Second factor of M, [r, C]."""
    bias: Tensor | None = None
    """b, [C]."""
    down_projection: Tensor | None = None
    """Weight that takes the place of the down projection's, [F, C]: it maps a row vector f to f D."""
    chosen: Mapping[str, float] = field(default_factory=dict)
    """Options that the operator chose itself."""

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> Self:
        """The operator W, [C, C]."""
        return cls(change=matrix - identity(matrix))

    @property
    def is_operator(self) -> bool:
        """Whether anything is left to compute at the cut; otherwise the model is of the stock architecture."""
        return any(part is not None for part in (self.change, self.reduce, self.bias))

    def whole_change(self) -> Tensor | None:
        """M as one matrix, [C, C]; None where W = I."""
        if self.reduce is not None and self.expand is not None:
            return self.reduce @ self.expand
        return self.change

    def matrix(self) -> Tensor | None:
        """W = I + M as one matrix, [C, C]; None where W = I."""
        change = self.whole_change()
        return None if change is None else identity(change) + change

    def parts(self) -> dict[str, Tensor]:
        """Its tensors by field; those that are None are not among them."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def faults(self, channels: int) -> list[str]:
        """What is wrong with the shapes and values of its tensors, for a hidden size of `channels`."""
        rank, inner = _rows(self.expand), _rows(self.down_projection)
        shapes = {
            "change": (channels, channels),
            "reduce": (channels, rank),
            "expand": (rank, channels),
            "bias": (channels,),
            "down_projection": (inner, channels),
        }
        parts = self.parts()
        found = [f"{n} is not finite" for n, part in parts.items() if not torch.isfinite(part).all()]
        found += [
            f"{n} has shape {list(p.shape)}, expected {list(shapes[n])}"
            for n, p in parts.items()
            if p.shape != shapes[n]
        ]
        lone = (self.reduce is None) != (self.expand is None)
        if not parts or lone or (self.expand is not None and (rank == 0 or self.change is not None)):
            found.append(f"tensors {sorted(parts)} do not make an operator")
        return found


def _rows(part: Tensor | None) -> int:
    return part.shape[0] if part is not None and part.dim() else 0


def to_tensors(bridges: Mapping[Segment, Bridge]) -> dict[str, Tensor]:
    """Named tensors of bridges, ``<start>-<end>.<field>``."""
    return {
        f"{segment.name}.{name}": part.contiguous()
        for segment, bridge in bridges.items()
        for name, part in bridge.parts().items()
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[Segment, Bridge]:
    """The inverse of :func:`to_tensors`. Raises ValueError when a name is not of that form."""
    found: dict[Segment, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        segment, _, part = name.partition(".")
        if part not in PARTS:
            raise ValueError(f"unknown tensor {name!r}")
        found.setdefault(Segment.parse(segment), {})[part] = tensor
    return {segment: Bridge(**found[segment]) for segment in sorted(found)}


def solved(bridges: Mapping[Segment, Bridge]) -> dict[str, Tensor]:
    """As :func:`to_tensors`, but W itself, named ``<start>-<end>``, instead of M."""
    found = to_tensors(bridges)
    for segment, bridge in bridges.items():
        if bridge.change is not None:
            del found[f"{segment.name}.change"]
            found[segment.name] = identity(bridge.change) + bridge.change
    return found


def from_solved(tensors: Mapping[str, Tensor]) -> dict[Segment, Bridge]:
    """The inverse of :func:`solved`, to rounding. Raises ValueError when a name is not of that form."""
    named = {name if "." in name else f"{name}.change": part for name, part in tensors.items()}
    for name, part in named.items():
        if name.endswith(".change") and (part.dim() != 2 or len(part) != part.shape[1]):
            raise ValueError(f"{name.removesuffix('.change')} has shape {list(part.shape)}, expected a square matrix")
    return from_tensors({n: p - identity(p) if n.endswith(".change") else p for n, p in named.items()})
