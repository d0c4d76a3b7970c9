"""Regularised least squares from a Gram matrix, and when one cannot be trusted."""

import torch
from torch import Tensor

from stages.project.errors import UserError


def mean_diagonal(gram: Tensor) -> float:
    """trace(G) / size of a Gram matrix: the scale of a ridge."""
    return (gram.trace() / len(gram)).item()


def conditioned(gram: Tensor, ridge: float) -> bool:
    """Whether a solution by G + ridge I does not hang on rounding; `gram` is [C, C].

    Not so when G is singular and the ridge under a millionth of its mean diagonal, or when G + ridge I leaves fewer
    than three of float64's digits.
    """
    values = torch.linalg.eigvalsh(gram)
    precision = torch.finfo(values.dtype).eps
    singular = values[0] <= values[-1] * len(gram) * precision
    digits = values[0] + ridge > (values[-1] + ridge) * 1e3 * precision
    return bool(digits) and not (bool(singular) and ridge < 1e-6 * mean_diagonal(gram))


def check_conditioning(gram: Tensor, ridge: float, tokens: Tensor, option: str, larger: str) -> None:
    """Raise UserError, naming the remedy, unless G + ridge I is well conditioned.

    `option` is what makes the ridge, with its value, such as ``solve.ghost.ridge = 1e-06``; `larger` is a value of it
    that will do.
    """
    if not conditioned(gram, ridge):
        raise UserError(
            f"the Gram matrix is singular or too ill-conditioned for {option} ({tokens} calibration tokens for "
            f"{len(gram)} channels); use more calibration tokens (text.calibration.sequences, "
            f"text.calibration.seqlen), or a larger {option.partition(' ')[0]}, such as {larger}"
        )


def solution(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """(G + ridge I)^-1 T by Cholesky, float64; `gram` is [C, C], `target` [C, K], on one device."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(target, torch.linalg.cholesky(gram + ridge * identity))
