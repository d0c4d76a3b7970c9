"""The decoder layers of a causal language model: the one place that knows how to reach, record and remove them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from stages.project.errors import UserError

LAYERS = {
    "gemma3_text": "model.layers",
    "gpt_neox": "gpt_neox.layers",
    "llama": "model.layers",
    "mistral": "model.layers",
    "olmo2": "model.layers",
    "phi3": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
}
"""Where the ``nn.ModuleList`` of decoder layers is, by the configuration's ``model_type``."""

DOWN_PROJECTION = {
    "gpt_neox": "mlp.dense_4h_to_h",
    "llama": "mlp.down_proj",
    "mistral": "mlp.down_proj",
    "phi3": "mlp.down_proj",
    "qwen2": "mlp.down_proj",
    "qwen3": "mlp.down_proj",
}
"""Where a decoder layer has the last linear map of its MLP, if that map's output joins the residual stream as it is."""

PER_LAYER = ("layer_types",)
"""Configuration lists with one entry per layer."""


def check_architecture(config: PreTrainedConfig, where: str) -> None:
    """Raise UserError when the architecture is not one whose layers can be reached."""
    if config.model_type not in LAYERS:
        raise UserError(
            f"{where}: model_type {config.model_type!r} is not supported; supported are {', '.join(sorted(LAYERS))}"
        )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `model`, in order. Raises UserError for an unknown architecture."""
    check_architecture(model.config, type(model).__name__)
    return cast(nn.ModuleList, model.get_submodule(LAYERS[model.config.model_type]))


def layer_at_cut(model: PreTrainedModel, end: int, removed: Collection[int]) -> tuple[nn.Module, bool]:
    """The layer of `model`, without `removed` layers, that was `end` or the first one left after it, and True.

    Where none is left there, the last layer and False. Layers are numbered as before the removal.
    """
    layers = decoder_layers(model)
    following = end - sum(layer < end for layer in removed)
    return layers[min(following, len(layers) - 1)], following < len(layers)


def decoder_stack(model: PreTrainedModel) -> nn.Module:
    """`model` without its language-model head: embeddings, decoder layers, final norm."""
    return cast(nn.Module, model.get_submodule(LAYERS[model.config.model_type].rpartition(".")[0]))


def execution_device(module: nn.Module) -> torch.device:
    """The device that `module` computes on.

    With a device map, accelerate may keep parameters elsewhere between calls (they are on `meta` then); its hooks,
    which bring weights and inputs together, know the device.
    """
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to: that of the embeddings."""
    return execution_device(model.get_input_embeddings())


def down_projection(model: PreTrainedModel, index: int) -> nn.Linear | None:
    """The down projection of the MLP of decoder layer `index`, whose output is a part of the layer's.

    None in an architecture where that output passes a norm before it joins the residual stream.
    """
    place = DOWN_PROJECTION.get(model.config.model_type)
    return None if place is None else cast(nn.Linear, decoder_layers(model)[index].get_submodule(place))


def linear_maps(model: PreTrainedModel, index: int) -> list[nn.Linear]:
    """The linear maps of decoder layer `index`: the projections of its attention and its MLP."""
    return [module for module in decoder_layers(model)[index].modules() if isinstance(module, nn.Linear)]


def whole_weight(module: nn.Linear) -> Tensor:
    """A copy of a linear map's weight, [out, in], even where a device map keeps it elsewhere between calls."""
    # Imported where it is needed: it takes seconds, in every stage.
    from accelerate.utils.modeling import align_module_device

    with align_module_device(module):
        return module.weight.detach().clone()


def replace_weight(module: nn.Linear, weight: Tensor) -> None:
    """Give a linear map another weight, [out, in], in the dtype of the old one, on the device it computes on.

    Where a device map keeps weights elsewhere between calls, this one stays.
    """
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils.modeling import align_module_device

    device, dtype = execution_device(module), module.weight.dtype
    with align_module_device(module):
        bias = None if module.bias is None else module.bias.detach().clone()
    remove_hook_from_module(module)
    module.weight = nn.Parameter(weight.to(device=device, dtype=dtype))
    if bias is not None:
        module.bias = nn.Parameter(bias.to(device))


def layer_name(model: PreTrainedModel, index: int) -> str:
    """The name of decoder layer `index` in the model's state dict, such as ``model.layers.12``."""
    return f"{LAYERS[model.config.model_type]}.{index}"


def remove_layers(model: PreTrainedModel, removed: Collection[int]) -> None:
    """Remove decoder layers in place; the layers kept, their cache indices and the configuration follow.

    Raises ValueError when an index is not a layer's, or when no layer would be left.
    """
    layers = decoder_layers(model)
    kept = [index for index in range(len(layers)) if index not in set(removed)]
    if len(layers) - len(kept) != len(set(removed)) or not kept:
        raise ValueError(f"cannot remove layers {sorted(removed)} of {len(layers)}")
    parent = decoder_stack(model)
    name = LAYERS[model.config.model_type].rpartition(".")[2]
    setattr(parent, name, nn.ModuleList(layers[index] for index in kept))
    number_layers(layers[index] for index in kept)
    keep_config_layers(model.config, kept)


@contextmanager
def layers_removed(model: PreTrainedModel, removed: Collection[int]) -> Iterator[None]:
    """Inside the context `model` lacks some decoder layers; behind it, it is as it was. Raises as `remove_layers`."""
    parent, name = decoder_stack(model), LAYERS[model.config.model_type].rpartition(".")[2]
    whole, config = decoder_layers(model), {key: getattr(model.config, key, None) for key in PER_LAYER}
    try:
        remove_layers(model, removed)
        yield
    finally:
        setattr(parent, name, whole)
        model.config.num_hidden_layers = len(whole)
        for key, values in config.items():
            if values is not None:
                setattr(model.config, key, values)
        number_layers(whole)


def number_layers(layers: Iterable[nn.Module]) -> None:
    """Give every layer its place in `layers` as its index in the cache."""
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", position)  # noqa: B010 (typed as a submodule)


def keep_config_layers(config: PreTrainedConfig, kept: list[int]) -> None:
    """Make a configuration describe the layers `kept` (indices into the layers it describes now), in place."""
    per_layer = {name: getattr(config, name, None) for name in PER_LAYER}
    config.num_hidden_layers = len(kept)
    for name, values in per_layer.items():
        if values is not None:
            setattr(config, name, [values[index] for index in kept])


@contextmanager
def residual_states(model: PreTrainedModel, indices: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Record residual states h_i of the forward passes made inside the context, for every i of `indices`.

    h_i is the input of decoder layer i; h_L, with L layers, is the output of the last layer before the final norm. The
    dictionary yielded maps i to the latest pass' state, of shape [batch, tokens, C] in the model's dtype. Raises
    UserError, naming the layer, when a recorded state has a NaN or an infinity.
    """
    layers = decoder_layers(model)
    states: dict[int, Tensor] = {}

    def record(index: int, state: Tensor, source: str) -> None:
        if not torch.isfinite(state).all():
            raise UserError(
                f"{source}: NaN or infinity in the hidden states (h_{index}); check the checkpoint's weights, or try "
                f"another `dtype` for the model in params.yaml"
            )
        states[index] = state

    def before_first(_module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        record(0, positional[0] if positional else named["hidden_states"], f"input of {layer_name(model, 0)}")

    def after(index: int) -> Any:
        def hook(_module: nn.Module, _positional: tuple[Any, ...], output: Tensor) -> None:
            record(index, output, f"output of {layer_name(model, index - 1)}")

        return hook

    handles = []
    try:
        for index in indices:
            if index == 0:
                handles.append(layers[0].register_forward_pre_hook(before_first, with_kwargs=True))
            else:
                handles.append(layers[index - 1].register_forward_hook(after(index)))
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def module_inputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Record what enters each of `modules` in the forward passes made inside the context, the latest pass', by key."""
    inputs: dict[int, Tensor] = {}

    def before(key: int) -> Any:
        def hook(_module: nn.Module, positional: tuple[Any, ...]) -> None:
            inputs[key] = positional[0]

        return hook

    handles = [module.register_forward_pre_hook(before(key)) for key, module in modules.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
