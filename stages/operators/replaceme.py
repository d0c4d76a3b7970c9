"""ReplaceMe: a linear map on the MLP output of the layer before the cut, folded into its down projection."""

from stages.bridge import Bridge
from stages.least_squares import check_conditioning, mean_diagonal, solution
from stages.project.options import NotNegative
from stages.sums import BoundarySums


def solve(sums: BoundarySums, *, fraction: NotNegative) -> Bridge:
    """D' = D T, [F, C] float64, with the T of least ||A + Y T - X_post||^2 + e ||T - I||^2.

    ReplaceMe (arXiv 2505.02819), linear variant by least squares. Y = F D is the MLP output (without a bias, which
    stays as it is), A = X_pre - Y the residual stream before it, e = fraction * trace(Y^T Y) / C. So
    T = I + (Y^T Y + e I)^-1 Y^T (X_post - X_pre). Raises UserError when `fraction` is too small, or where there are no
    sums inside that layer.
    """
    mlp = sums.inner()
    gram = mlp.weight.T @ mlp.gram @ mlp.weight
    ridge = fraction * mean_diagonal(gram)
    check_conditioning(gram, ridge, sums.tokens, f"solve.replaceme.fraction = {fraction:g}", "1e-4")
    return Bridge(down_projection=mlp.weight + mlp.weight @ solution(gram, mlp.weight.T @ (mlp.post - mlp.pre), ridge))
