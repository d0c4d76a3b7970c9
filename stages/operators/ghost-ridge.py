"""Ghosted Layers with a ridge in proportion to the Gram matrix, chosen on held-out sequences."""

from typing import Literal

from torch import Tensor

from stages.bridge import Bridge
from stages.diagnostics import token_residual
from stages.least_squares import check_conditioning, conditioned, mean_diagonal, solution
from stages.project.errors import UserError
from stages.project.options import NotNegative
from stages.sums import BoundarySums

FRACTIONS = tuple(10.0**power for power in range(-13, 1))
"""The fractions that `auto` chooses among."""


def solve(sums: BoundarySums, *, fraction: NotNegative | Literal["auto"]) -> Bridge:
    """M = (G + e I)^-1 X_pre^T (X_post - X_pre), e = fraction * trace(G) / C, G = X_pre^T X_pre; [C, C] float64.

    `fraction: auto` takes the one of FRACTIONS that reconstructs held-out sequences best: least mean over tokens of
    ||x_pre W - x_post||^2 / ||x_post||^2, solved from either half of the sequences and tried on the other. Raises
    UserError when the fraction is too small, or `auto` and there is one sequence only.
    """
    if isinstance(fraction, str):
        fraction = _held_out(sums)
    name = f"solve.ghost-ridge.fraction = {fraction:g}"
    check_conditioning(sums.gram, fraction * mean_diagonal(sums.gram), sums.tokens, name, "1e-4")
    return Bridge(change=_change(sums, fraction), chosen={"fraction": fraction})


def _change(sums: BoundarySums, fraction: float) -> Tensor:
    return solution(sums.gram, sums.cross - sums.gram, fraction * mean_diagonal(sums.gram))


def _held_out(sums: BoundarySums) -> float:
    if sums.halves is None:
        raise UserError("solve.ghost-ridge.fraction = auto: needs two calibration sequences, one to hold out")
    first, second = sums.halves

    def residual(fraction: float) -> float:
        tried = [
            token_residual(held, Bridge(change=_change(fit, fraction)))
            for fit, held in ((first, second), (second, first))
            if conditioned(fit.gram, fraction * mean_diagonal(fit.gram))
        ]
        return sum(value for value in tried if value is not None) if len(tried) == 2 else float("inf")

    return min(FRACTIONS, key=residual)
