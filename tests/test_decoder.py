from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from transformers import BertConfig, PreTrainedModel

from stages.base.decoder import (
    DOWN_PROJECTION,
    check_architecture,
    decoder_layers,
    decoder_stack,
    down_projection,
    layers_removed,
    linear_maps,
    module_inputs,
    remove_layers,
    replace_weight,
    residual_states,
    whole_weight,
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


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything that removing layers touches."""
    layers = list(decoder_layers(model))
    indices = [[m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")] for layer in layers]
    return [id(layer) for layer in layers], indices, model.config.to_dict(), list(model.state_dict())


@architectures
@removals
def test_layers_are_gone_inside_a_context_only(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: torch.Tensor
) -> None:
    model, pruned = tiny_model(architecture), tiny_model(architecture)
    remove_layers(pruned, removed)
    before = state_of(model)
    with torch.no_grad():
        dense = model(input_ids=token_ids).logits
        with layers_removed(model, removed):
            assert torch.equal(model(input_ids=token_ids).logits, pruned(input_ids=token_ids).logits)
            assert model.config.to_dict() == pruned.config.to_dict()
            assert state_of(model)[1:] == state_of(pruned)[1:]
        assert state_of(model) == before
        assert torch.equal(model(input_ids=token_ids).logits, dense)
        cached = model.generate(token_ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert torch.equal(
            cached, tiny_model(architecture).generate(token_ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        )


@architectures
def test_layers_are_back_after_an_error(architecture: str, tiny_model: Build) -> None:
    model = tiny_model(architecture)
    before = state_of(model)
    seen = []

    def fail() -> None:
        with layers_removed(model, [2, 3]):
            seen.append(len(decoder_layers(model)))
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        fail()
    assert seen == [LAYERS - 2]
    assert state_of(model) == before


@pytest.mark.parametrize("removed", [[LAYERS], [-1], list(range(LAYERS))], ids=str)
def test_impossible_removals_leave_everything(removed: list[int], tiny_model: Build) -> None:
    model = tiny_model("gemma3_text")
    before = state_of(model)
    with pytest.raises(ValueError, match="cannot remove"), layers_removed(model, removed):
        raise AssertionError("entered")
    assert state_of(model) == before


def test_layers_removed_inside_one_another(tiny_model: Build, token_ids: torch.Tensor) -> None:
    model, pruned = tiny_model("qwen2"), tiny_model("qwen2")
    remove_layers(pruned, [1, 3, 4])
    before = state_of(model)
    with torch.no_grad(), layers_removed(model, [1]):
        inside = state_of(model)
        # Counted in what is left: the layers 3 and 4 of the whole.
        with layers_removed(model, [2, 3]):
            assert torch.equal(model(input_ids=token_ids).logits, pruned(input_ids=token_ids).logits)
        assert state_of(model) == inside
    assert state_of(model) == before


@pytest.mark.parametrize("architecture", DOWN_PROJECTION)
def test_a_down_projection_s_output_is_a_part_of_its_layer_s(
    architecture: str, tiny_model: Build, token_ids: torch.Tensor
) -> None:
    """Twice the weight adds once more what the map itself makes of its input."""
    model = tiny_model(architecture)
    module = down_projection(model, 2)
    assert module is not None
    with torch.no_grad(), residual_states(model, [3]) as states, module_inputs({7: module}) as inputs:
        model(input_ids=token_ids)
        before, entered = states[3], inputs[7]
        product = entered @ whole_weight(module).T
        replace_weight(module, 2 * whole_weight(module))
        model(input_ids=token_ids)
        assert torch.allclose(states[3], before + product, atol=1e-5)
        assert torch.equal(inputs[7], entered)
        assert product.abs().max() > 0.1


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(DOWN_PROJECTION)))
def test_no_down_projection_where_a_norm_follows(architecture: str, tiny_model: Build) -> None:
    model = tiny_model(architecture)
    assert any("post_feedforward_layernorm" in name for name, _ in decoder_layers(model)[0].named_modules())
    assert down_projection(model, 0) is None


def test_module_inputs_are_the_latest_and_the_hooks_go(tiny_model: Build, token_ids: torch.Tensor) -> None:
    model = tiny_model()
    module = down_projection(model, 0)
    with torch.no_grad():
        with module_inputs({0: module}) as inputs:
            assert inputs == {}
            model(input_ids=token_ids[:1])
            assert inputs[0].shape == (1, 12, 32)
            model(input_ids=token_ids[:3, :5])
        model(input_ids=token_ids)
    assert inputs[0].shape == (3, 5, 32)


@architectures
def test_linear_maps_are_all_matrices_of_a_layer(architecture: str, tiny_model: Build) -> None:
    model = tiny_model(architecture)
    found = sum(module.weight.numel() for module in linear_maps(model, 3))
    assert found == sum(weight.numel() for weight in decoder_layers(model)[3].parameters() if weight.dim() == 2) > 0


@pytest.mark.parametrize("bias", [False, True])
def test_weight_of_a_plain_map(bias: bool) -> None:
    module = torch.nn.Linear(4, 3, bias=bias, dtype=torch.bfloat16)
    kept = module.bias.detach().clone() if bias else None
    weight = torch.randn(3, 4, dtype=torch.float64)
    replace_weight(module, weight)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.weight, weight.to(torch.bfloat16))
    assert module.weight.is_contiguous()
    assert torch.equal(module.bias, kept) if bias else module.bias is None
    copied = whole_weight(module)
    assert torch.equal(copied, module.weight)
    assert not copied.requires_grad
    copied.zero_()
    assert module.weight.abs().sum() > 0
    states = torch.randn(2, 4, dtype=torch.bfloat16)
    assert torch.equal(module(states), torch.nn.functional.linear(states, weight.to(torch.bfloat16), kept))
