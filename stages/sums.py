"""Sufficient statistics of a boundary: float64 sums over calibration tokens, from which every operator is solved.

They are sums, so those of two batches, processes or machines add.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from stages.boundaries import Segment


@dataclass(frozen=True)
class BoundarySums:
    """Sums over the residual states X_pre = h_start and X_post = h_end (rows are tokens, C channels), float64."""

    tokens: Tensor
    """Number of tokens, int64 scalar."""
    sequences: Tensor
    """Number of sequences, int64 scalar."""
    gram: Tensor
    """X_pre^T X_pre, [C, C]."""
    cross: Tensor
    """X_pre^T X_post, [C, C]."""
    post_square: Tensor
    """Sum over tokens of ||x_post||^2, scalar."""
    pre_sum: Tensor
    """Column sums of X_pre, [C]."""
    post_sum: Tensor
    """Column sums of X_post, [C]."""
    ratio: Tensor
    """Sum over sequences of mean|x_post| / mean|x_pre| of every channel, [C]."""
    ratio_rotated: Tensor | None
    """The same of the rotated states X H, H the Hadamard matrix of order C; None where that order has none."""

    def __add__(self, other: Self) -> "BoundarySums":
        """The sums over both sets of sequences."""
        rotated = None
        if self.ratio_rotated is not None and other.ratio_rotated is not None:
            rotated = self.ratio_rotated + other.ratio_rotated
        plain = {name: getattr(self, name) + getattr(other, name) for name in ALWAYS}
        return BoundarySums(ratio_rotated=rotated, **plain)

    def to(self, device: torch.device) -> "BoundarySums":
        """The same sums on `device`, which must have float64."""
        rotated = None if self.ratio_rotated is None else self.ratio_rotated.to(device)
        return BoundarySums(ratio_rotated=rotated, **{name: getattr(self, name).to(device) for name in ALWAYS})


ALWAYS = [field.name for field in fields(BoundarySums) if field.name != "ratio_rotated"]
"""Sums that every model has."""


def boundary_sums(pre: Tensor, post: Tensor, rotation: Tensor | None) -> BoundarySums:
    """The sums of one batch.

    `pre` and `post` are h_start and h_end of whole sequences without padding, [sequences, tokens, C] in float64;
    `rotation` is the Hadamard matrix [C, C] in float64, or None. All on one device, where the sums are too.
    """
    flat_pre, flat_post = pre.flatten(0, 1), post.flatten(0, 1)
    return BoundarySums(
        tokens=torch.tensor(len(flat_pre), device=pre.device),
        sequences=torch.tensor(len(pre), device=pre.device),
        gram=flat_pre.T @ flat_pre,
        cross=flat_pre.T @ flat_post,
        post_square=flat_post.square().sum(),
        pre_sum=flat_pre.sum(dim=0),
        post_sum=flat_post.sum(dim=0),
        ratio=_ratio(pre, post),
        ratio_rotated=None if rotation is None else _ratio(pre @ rotation, post @ rotation),
    )


def _ratio(pre: Tensor, post: Tensor) -> Tensor:
    """Sum over sequences of mean|post| / mean|pre| of every channel; 1 where `pre` is zero throughout a sequence,
    since no scale can change that channel.
    """
    below = pre.abs().mean(dim=1)
    above = post.abs().mean(dim=1)
    return torch.where(below > 0, above / below, 1.0).sum(dim=0)


def residual(sums: BoundarySums, operator: Tensor | None) -> float:
    """||X_pre W - X_post||_F^2 / ||X_post||_F^2 for the operator W, [C, C] float64; None stands for W = I.

    From the sums alone: ||X_pre W - X_post||^2 = tr(W^T G W) - 2 tr(W^T B) + ||X_post||^2, G the Gram matrix and
    B the cross sums.
    """
    if operator is None:
        square = sums.gram.trace() - 2 * sums.cross.trace() + sums.post_square
    else:
        square = (operator * (sums.gram @ operator - 2 * sums.cross)).sum() + sums.post_square
    return (square / sums.post_square).item()


def antisymmetric_share(operator: Tensor) -> float | None:
    """||M - M^T||_F / (2 ||M||_F) of M = W - I, in [0, 1]; None where M = 0 (Ghosted Layers, arXiv 2605.15491)."""
    change = operator - torch.eye(len(operator), dtype=operator.dtype, device=operator.device)
    norm = change.norm()
    return None if norm == 0 else ((change - change.T).norm() / (2 * norm)).item()


def to_tensors(sums: dict[Segment, BoundarySums]) -> dict[str, Tensor]:
    """Named tensors of the sums of several segments, ``<start>-<end>.<field>``."""
    return {
        f"{segment.name}.{field.name}": value
        for segment, boundary in sums.items()
        for field in fields(boundary)
        if (value := getattr(boundary, field.name)) is not None
    }


def from_tensors(tensors: dict[str, Tensor]) -> dict[Segment, BoundarySums]:
    """The inverse of :func:`to_tensors`. Raises KeyError when a field is missing."""
    names = sorted({name.partition(".")[0] for name in tensors}, key=Segment.parse)
    return {
        Segment.parse(name): BoundarySums(
            **{field: tensors[f"{name}.{field}"] for field in ALWAYS},
            ratio_rotated=tensors.get(f"{name}.ratio_rotated"),
        )
        for name in names
    }
