"""Shortened LLaMA's Taylor+: the layers whose loss would change least, to first order, without their weights."""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.base.decoder import input_device, linear_maps
from stages.base.device import batch_tokens, batches, exact
from stages.criteria import lowest
from stages.likelihood import sequence_nll
from stages.project.errors import UserError
from stages.project.options import Count


def search(
    model: PreTrainedModel, calibration: Sequence[Sequence[int]], n: int, allowed: range, *, sequences: Count
) -> list[int]:
    """The n layers of `allowed` with the lowest sum of |w dL/dw| over the weights w of their linear maps.

    Shortened LLaMA (arXiv 2402.02834), where the first four and the last two layers stay: `protect_first` and
    `protect_last`. L is the negative log-likelihood of the first `sequences` calibration sequences. Ties go to the
    lower index. Raises UserError when a gradient is not finite, naming the layer, or when a device map keeps weights
    off the devices that compute.
    """
    modules = {layer: linear_maps(model, layer) for layer in allowed}
    model.requires_grad_(False)
    for of_layer in modules.values():
        for module in of_layer:
            if module.weight.is_meta:
                raise UserError("the criterion taylor needs all weights on devices that compute; GHOSTED_DEVICE_MAP")
            module.weight.requires_grad_(True)
    # Backward, a batch adds to what is there in the weights' dtype: gradients are summed in float32 instead.
    gradients: dict[nn.Module, torch.Tensor] = {}
    with torch.enable_grad():
        for ids in tqdm(list(batches(calibration[:sequences], batch_tokens(), input_device(model))), leave=False):
            nll = sequence_nll(model(input_ids=ids, use_cache=False).logits, ids).sum()
            nll.backward()  # type: ignore[no-untyped-call]  # torch's
            for module in (module for of_layer in modules.values() for module in of_layer):
                assert module.weight.grad is not None
                found = module.weight.grad.float()
                gradients[module] = gradients[module] + found if module in gradients else found
                module.weight.grad = None
    salience = {}
    for layer, of_layer in modules.items():
        products = [exact(module.weight.detach() * gradients[module]).abs().sum().item() for module in of_layer]
        salience[layer] = sum(products)
        if not torch.isfinite(torch.tensor(salience[layer])):
            raise UserError(f"layer {layer}: NaN or infinity in the gradients; try another `dtype` for the model")
    return lowest(pd.Series(salience), n)
