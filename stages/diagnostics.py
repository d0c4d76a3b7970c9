"""How well what bridges a cut fits the calibration states, from their sums alone."""

from torch import Tensor

from stages.bridge import Bridge
from stages.sums import BoundarySums


def residual(sums: BoundarySums, bridge: Bridge | None) -> float:
    """||X' W + b - X_post||_F^2 / ||X_post||_F^2, with what `bridge` makes of the cut; None stands for W = I.

    X' = X_pre + F (D' - D) is the layer's output with its new down projection D', X_pre where it has none. From the
    sums alone: with P = W and Q = (D' - D) W it is the sum of tr(P^T G P), 2 tr(P^T X_pre^T F Q), tr(Q^T F^T F Q),
    -2 tr(P^T B), -2 tr(Q^T F^T X_post), ||X_post||^2 and the bias' terms, G the Gram matrix and B the cross sums.
    """
    square = _square(sums.gram, sums.cross, sums.post_square, None if bridge is None else bridge.matrix())
    if bridge is not None and bridge.bias is not None:
        square = square + _bias(bridge, sums.tokens, sums.pre_sum, sums.post_sum)
    if bridge is not None and bridge.down_projection is not None:
        mlp = sums.inner()
        matrix, change = bridge.matrix(), bridge.down_projection - mlp.weight
        inner = change if matrix is None else change @ matrix
        outer = mlp.pre if matrix is None else mlp.pre @ matrix
        square = square + (inner * (mlp.gram @ inner + 2 * outer - 2 * mlp.post)).sum()
    return (square / sums.post_square).item()


def token_residual(sums: BoundarySums, bridge: Bridge | None) -> float | None:
    """Mean over tokens of ||x_pre W + b - x_post||^2 / ||x_post||^2; None stands for W = I.

    Every token counts alike, whatever its norm. None where `bridge` has a new down projection: the sums do not tell.
    """
    if bridge is not None and bridge.down_projection is not None:
        return None
    # Each token's ||x_post||^2 / ||x_post||^2 is 1.
    square = _square(sums.weighted_gram, sums.weighted_cross, sums.tokens, None if bridge is None else bridge.matrix())
    if bridge is not None and bridge.bias is not None:
        square = square + _bias(bridge, sums.weights, sums.weighted_pre_sum, sums.weighted_post_sum)
    return (square / sums.tokens).item()


def _square(gram: Tensor, cross: Tensor, post_square: Tensor, matrix: Tensor | None) -> Tensor:
    """tr(W^T G W) - 2 tr(W^T B) + ||X_post||^2."""
    if matrix is None:
        return gram.trace() - 2 * cross.trace() + post_square
    return (matrix * (gram @ matrix - 2 * cross)).sum() + post_square


def _bias(bridge: Bridge, count: Tensor, pre_sum: Tensor, post_sum: Tensor) -> Tensor:
    """What a bias adds to the square: n ||b||^2 + 2 b (sum x_pre W - sum x_post)."""
    matrix, bias = bridge.matrix(), bridge.bias
    moved = pre_sum if matrix is None else pre_sum @ matrix
    assert bias is not None
    return count * (bias @ bias) + 2 * (moved - post_sum) @ bias


def antisymmetric_share(bridge: Bridge | None) -> float | None:
    """||M - M^T||_F / (2 ||M||_F) of M = W - I, in [0, 1]; None where M = 0 (Ghosted Layers, arXiv 2605.15491)."""
    change = None if bridge is None else bridge.whole_change()
    norm = None if change is None else change.norm()
    return None if change is None or norm is None or norm == 0 else ((change - change.T).norm() / (2 * norm)).item()
