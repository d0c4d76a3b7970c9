"""Sufficient statistics of a boundary: float64 sums over calibration tokens, from which every operator is solved.

They are sums, so those of two batches, processes or machines add. They are kept for two halves of the sequences, so
that what is solved from one can be tried on the other without a second pass.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from stages.boundaries import Segment
from stages.project.errors import UserError


@dataclass(frozen=True)
class MlpSums:
    """Sums over F, the input of the down projection of the layer before the cut (rows are tokens), float64.

    The layer's output is X_pre = A + F D, D its down projection and A the residual stream before its MLP.
    """

    weight: Tensor
    """D, [F, C]: what was there when the sums were made, no sum."""
    gram: Tensor
    """F^T F, [F, F]."""
    pre: Tensor
    """F^T X_pre, [F, C]."""
    post: Tensor
    """F^T X_post, [F, C]."""

    def __add__(self, other: Self) -> "MlpSums":
        """The sums over both sets of sequences, of one model."""
        return MlpSums(self.weight, self.gram + other.gram, self.pre + other.pre, self.post + other.post)


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
    weighted_gram: Tensor
    """Sum over tokens of x_pre^T x_pre / ||x_post||^2, [C, C]."""
    weighted_cross: Tensor
    """Sum over tokens of x_pre^T x_post / ||x_post||^2, [C, C]."""
    pre_sum: Tensor
    """Column sums of X_pre, [C]."""
    post_sum: Tensor
    """Column sums of X_post, [C]."""
    weighted_pre_sum: Tensor
    """Sum over tokens of x_pre / ||x_post||^2, [C]."""
    weighted_post_sum: Tensor
    """Sum over tokens of x_post / ||x_post||^2, [C]."""
    weights: Tensor
    """Sum over tokens of 1 / ||x_post||^2, scalar."""
    pre_norm: Tensor
    """Sum over tokens of ||x_pre||, scalar."""
    post_norm: Tensor
    """Sum over tokens of ||x_post||, scalar."""
    ratio: Tensor
    """Sum over sequences of mean|x_post| / mean|x_pre| of every channel, [C]."""
    ratio_rotated: Tensor | None = None
    """The same of the rotated states X H, H the Hadamard matrix of order C; None where that order has none."""
    halves: "tuple[BoundarySums, BoundarySums] | None" = None
    """The sums over the sequences of even and of odd number; None for those of a half, or of one sequence."""
    mlp: MlpSums | None = None
    """Sums inside the layer before the cut; None where there are none."""
    no_mlp: str = ""
    """Why `mlp` is None."""

    def __add__(self, other: Self) -> "BoundarySums":
        """The sums over both sets of sequences, without halves."""
        rotated = None
        if self.ratio_rotated is not None and other.ratio_rotated is not None:
            rotated = self.ratio_rotated + other.ratio_rotated
        plain = {name: getattr(self, name) + getattr(other, name) for name in ALWAYS}
        return BoundarySums(ratio_rotated=rotated, **plain)

    def to(self, device: torch.device) -> "BoundarySums":
        """The same sums on `device`, which must have float64."""
        moved = {name: getattr(self, name).to(device) for name in ALWAYS}
        mlp = self.mlp and MlpSums(**{name: getattr(self.mlp, name).to(device) for name in MLP})
        return replace(
            self,
            ratio_rotated=None if self.ratio_rotated is None else self.ratio_rotated.to(device),
            halves=self.halves and (self.halves[0].to(device), self.halves[1].to(device)),
            mlp=mlp,
            **moved,
        )

    def inner(self) -> MlpSums:
        """The sums inside the layer before the cut. Raises UserError, saying why, where there are none."""
        if self.mlp is None:
            raise UserError(self.no_mlp)
        return self.mlp


OPTIONAL = ("ratio_rotated", "halves", "mlp", "no_mlp")
ALWAYS = [field.name for field in fields(BoundarySums) if field.name not in OPTIONAL]
"""Sums that every model has."""
MLP = [field.name for field in fields(MlpSums)]


def boundary_sums(pre: Tensor, post: Tensor, rotation: Tensor | None) -> BoundarySums:
    """The sums of one batch.

    `pre` and `post` are h_start and h_end of whole sequences without padding, [sequences, tokens, C] in float64;
    `rotation` is the Hadamard matrix [C, C] in float64, or None. All on one device, where the sums are too. A token
    whose h_end is zero has weight 0 in the weighted sums.
    """
    flat_pre, flat_post = pre.flatten(0, 1), post.flatten(0, 1)
    squares = flat_post.square().sum(dim=1, keepdim=True)
    weights = torch.where(squares > 0, 1 / squares, 0.0)
    weighted_pre, weighted_post = weights * flat_pre, weights * flat_post
    return BoundarySums(
        tokens=torch.tensor(len(flat_pre), device=pre.device),
        sequences=torch.tensor(len(pre), device=pre.device),
        gram=flat_pre.T @ flat_pre,
        cross=flat_pre.T @ flat_post,
        post_square=squares.sum(),
        weighted_gram=weighted_pre.T @ flat_pre,
        weighted_cross=weighted_pre.T @ flat_post,
        pre_sum=flat_pre.sum(dim=0),
        post_sum=flat_post.sum(dim=0),
        weighted_pre_sum=weighted_pre.sum(dim=0),
        weighted_post_sum=weighted_post.sum(dim=0),
        weights=weights.sum(),
        pre_norm=flat_pre.norm(dim=1).sum(),
        post_norm=squares.sqrt().sum(),
        ratio=_ratio(pre, post),
        ratio_rotated=None if rotation is None else _ratio(pre @ rotation, post @ rotation),
    )


def mlp_sums(inner: Tensor, pre: Tensor, post: Tensor, weight: Tensor) -> MlpSums:
    """The sums of one batch inside the layer before the cut.

    `inner` is the input of its down projection, [sequences, tokens, F], `weight` that projection, [F, C]; `pre` and
    `post` as in :func:`boundary_sums`. All float64, on one device.
    """
    flat = inner.flatten(0, 1)
    return MlpSums(weight, flat.T @ flat, flat.T @ pre.flatten(0, 1), flat.T @ post.flatten(0, 1))


def _ratio(pre: Tensor, post: Tensor) -> Tensor:
    """Sum over sequences of mean|post| / mean|pre| of every channel; 1 where `pre` is zero throughout a sequence,
    since no scale can change that channel.
    """
    below = pre.abs().mean(dim=1)
    above = post.abs().mean(dim=1)
    return torch.where(below > 0, above / below, 1.0).sum(dim=0)


def to_tensors(sums: dict[Segment, BoundarySums]) -> dict[str, Tensor]:
    """Named tensors of the sums of several segments, ``<start>-<end>.<part>.<field>``.

    The parts are ``0`` and ``1`` for the halves, or ``all`` where there are none; and ``mlp``.
    """
    tensors = {}
    for segment, boundary in sums.items():
        parts = dict(enumerate(boundary.halves)) if boundary.halves else {"all": boundary}
        for part, values in parts.items():
            for name in (*ALWAYS, "ratio_rotated"):
                if getattr(values, name) is not None:
                    tensors[f"{segment.name}.{part}.{name}"] = getattr(values, name)
        for name in MLP if boundary.mlp else ():
            tensors[f"{segment.name}.mlp.{name}"] = getattr(boundary.mlp, name)
    return tensors


def from_tensors(tensors: dict[str, Tensor], no_mlp: str = "") -> dict[Segment, BoundarySums]:
    """The inverse of :func:`to_tensors`; `no_mlp` says why sums inside a layer are missing.

    Raises KeyError when a field is missing.
    """
    found = {}
    for name in sorted({name.partition(".")[0] for name in tensors}, key=Segment.parse):
        if f"{name}.0.tokens" in tensors:
            halves = (_part(tensors, f"{name}.0"), _part(tensors, f"{name}.1"))
            boundary = replace(halves[0] + halves[1], halves=halves)
        else:
            boundary = _part(tensors, f"{name}.all")
        mlp = None
        if f"{name}.mlp.gram" in tensors:
            mlp = MlpSums(**{field: tensors[f"{name}.mlp.{field}"] for field in MLP})
        found[Segment.parse(name)] = replace(boundary, mlp=mlp, no_mlp=no_mlp)
    return found


def _part(tensors: dict[str, Tensor], prefix: str) -> BoundarySums:
    always: dict[str, Any] = {field: tensors[f"{prefix}.{field}"] for field in ALWAYS}
    return BoundarySums(ratio_rotated=tensors.get(f"{prefix}.ratio_rotated"), **always)
