"""The whole down projection of the layer before the cut, solved anew: no extra parameter, the stock architecture."""

from stages.bridge import Bridge
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, fraction: NotNegative) -> Bridge:
    """D' with the least ||A + F D' - X_post||^2 + e ||D' - D||^2, [F, C] float64.

    F is the input of the down projection D and A = X_pre - F D the residual stream before the MLP, so that
    D' = D + (F^T F + e I)^-1 F^T (X_post - X_pre), with e = fraction * trace(F^T F) / F's width. ReplaceMe's D T is one
    of the candidates. Raises UserError when `fraction` is too small, or where there are no sums inside that layer.
    """
    mlp = sums.inner()
    ridge = fraction * mean_diagonal(mlp.gram)
    check_conditioning(mlp.gram, ridge, sums.tokens, f"solve.refit.fraction = {fraction:g}", "1e-4")
    return Bridge(down_projection=mlp.weight + solution(mlp.gram, mlp.post - mlp.pre, ridge))
