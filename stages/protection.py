"""Protected layers: which decoder layers a criterion may remove."""

from typing import Any

from stages.project.errors import UserError


def removable(layers: int, n: int, criterion: str, options: dict[str, Any]) -> range:
    """The layers between the first `protect_first` and the last `protect_last` of a model with `layers` layers.

    Raises UserError when fewer than n are left, or when n would remove every layer.
    """
    first, last = options["protect_first"], options["protect_last"]
    allowed = range(first, max(first, layers - last))
    if n > len(allowed) or n >= layers:
        most = min(len(allowed), layers - 1)
        raise UserError(
            f"params.yaml: grid.n: {n} layers cannot be removed by {criterion}: the model has {layers} layers, of "
            f"which select.{criterion} protects the first {first} and the last {last}; n can be 1 to {most}"
        )
    return allowed
