"""The decoder layers of a causal language model: the one place that knows how to reach, record and remove them."""

from collections.abc import Collection, Iterator
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
    for position, index in enumerate(kept):
        for module in layers[index].modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", position)  # noqa: B010 (typed as a submodule)
    keep_config_layers(model.config, kept)


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
