"""How large a model is."""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.recovered.boundary_operator import BoundaryOperator


def parameters(model: PreTrainedModel) -> int:
    """Number of the model's parameters, tied ones once."""
    return sum(weight.numel() for weight in _untied(model))


def operator_parameters(model: nn.Module) -> int:
    """Number of the parameters of its boundary operators alone."""
    operators = [module for module in model.modules() if isinstance(module, BoundaryOperator)]
    return sum(weight.numel() for operator in operators for weight in operator.parameters())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the model's parameters, tied ones once, and of its buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*_untied(model), *model.buffers()])


def _untied(model: PreTrainedModel) -> Iterator[Tensor]:
    # By name: offloading to disk parts tied parameters, and `num_parameters` would then count them twice.
    named = model.named_parameters(remove_duplicate=False)
    return (weight for name, weight in named if name not in model.all_tied_weights_keys)
