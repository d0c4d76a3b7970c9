"""The user's own list of layers."""

import pandas as pd

from stages.project.errors import UserError


def choose(_scores: pd.DataFrame, n: int, allowed: range, *, layers: list[int]) -> list[int]:
    """`layers` itself. Raises UserError unless it names n different layers of `allowed`."""
    if len(set(layers)) != len(layers) or len(layers) != n or not set(layers) <= set(allowed):
        raise UserError(
            f"params.yaml: select.explicit.layers = {layers}: must name {n} different layers (grid.n) of "
            f"{allowed.start} to {allowed.stop - 1}"
        )
    return layers
