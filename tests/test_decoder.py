from collections.abc import Callable

import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from transformers import BertConfig, PreTrainedModel

from stages.base.decoder import (
    check_architecture,
    decoder_layers,
    decoder_stack,
    remove_layers,
    residual_states,
)
from stages.project.errors import UserError

Build = Callable[..., PreTrainedModel]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
removals = pytest.mark.parametrize("removed", [[0], [2, 3], [1, 3, 4], [LAYERS - 1]], ids=str)


@architectures
def test_states_are_those_of_transformers(architecture: str, tiny_model: Build, token_ids: torch.Tensor) -> None:
    model = tiny_model(architecture)
    with torch.no_grad(), residual_states(model, range(LAYERS + 1)) as states:
        expected = decoder_stack(model)(input_ids=token_ids, use_cache=False, output_hidden_states=True).hidden_states
    for index in range(LAYERS):
        assert torch.equal(states[index], expected[index]), index
    # The last of transformers is normed already; h_L is not.
    assert states[LAYERS].shape == (5, 12, CHANNELS)
    assert not torch.equal(states[LAYERS], expected[LAYERS])


@architectures
def test_last_state_is_before_the_final_norm(architecture: str, tiny_model: Build, token_ids: torch.Tensor) -> None:
    model = tiny_model(architecture)
    with torch.no_grad(), residual_states(model, [LAYERS]) as states:
        normed = decoder_stack(model)(input_ids=token_ids, use_cache=False).last_hidden_state
    norm = next(module for name, module in decoder_stack(model).named_children() if "norm" in name)
    assert torch.equal(norm(states[LAYERS]), normed)


@architectures
@removals
def test_layers_caches_and_configuration_follow(architecture: str, removed: list[int], tiny_model: Build) -> None:
    model = tiny_model(architecture)
    before = list(decoder_layers(model))
    types = getattr(model.config, "layer_types", None)
    remove_layers(model, removed)
    kept = [index for index in range(LAYERS) if index not in removed]
    assert list(decoder_layers(model)) == [before[index] for index in kept]
    assert model.config.num_hidden_layers == len(kept)
    if types is not None:
        assert model.config.layer_types == [types[index] for index in kept]
    for position, layer in enumerate(decoder_layers(model)):
        found = [module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")]
        assert found
        assert set(found) == {position}


@architectures
@removals
def test_what_is_left_is_a_plain_stack_of_the_kept_layers(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: torch.Tensor
) -> None:
    """A model built small from the start, with the kept layers' weights, gives the same logits."""
    model, whole = tiny_model(architecture), tiny_model(architecture)
    remove_layers(model, removed)
    kept = [index for index in range(LAYERS) if index not in removed]
    changes = {"num_hidden_layers": len(kept)}
    if getattr(whole.config, "layer_types", None) is not None:
        changes["layer_types"] = [whole.config.layer_types[index] for index in kept]
    small = tiny_model(architecture, **changes)
    small.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(input_ids=token_ids).logits, small(input_ids=token_ids).logits)


@architectures
@removals
def test_cached_generation_equals_uncached(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: torch.Tensor
) -> None:
    model = tiny_model(architecture)
    remove_layers(model, removed)
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    cached = model.generate(token_ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(token_ids, use_cache=False, **settings))


@pytest.mark.parametrize("removed", [[LAYERS], [-1], list(range(LAYERS))], ids=str)
def test_impossible_removals(removed: list[int], tiny_model: Build) -> None:
    with pytest.raises(ValueError, match="cannot remove"):
        remove_layers(tiny_model(), removed)


@pytest.mark.parametrize(("index", "name"), [(0, "input of model.layers.0"), (3, "output of model.layers.2")])
def test_a_nan_names_the_layer(index: int, name: str, tiny_model: Build, token_ids: torch.Tensor) -> None:
    model = tiny_model()
    with torch.no_grad():
        if index == 0:
            model.model.embed_tokens.weight[token_ids[0, 0]] = float("nan")
        else:
            decoder_layers(model)[index - 1].mlp.down_proj.weight[0, 0] = float("inf")
        with (
            residual_states(model, range(LAYERS + 1)),
            pytest.raises(UserError, match=rf"{name}: NaN or infinity"),
        ):
            model(input_ids=token_ids)


def test_hooks_are_gone_afterwards(tiny_model: Build, token_ids: torch.Tensor) -> None:
    model = tiny_model()
    with residual_states(model, range(LAYERS + 1)) as states:
        pass
    model(input_ids=token_ids)
    assert not states


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(UserError, match=r"models\.x: model_type 'bert' is not supported.*llama"):
        check_architecture(BertConfig(), "models.x")
