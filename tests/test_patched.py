import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.decoder import decoder_layers, decoder_stack, remove_layers, residual_states
from stages.boundaries import Segment, runs
from stages.bridge import Bridge
from stages.project.errors import UserError
from stages.project.sections import OperatorDtype
from stages.recovered.adapter import digest, write_adapter
from stages.recovered.boundary_operator import BoundaryOperator
from stages.recovered.patched import base_shape, load_patched, patch_model

Build = Callable[..., PreTrainedModel]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
removals = pytest.mark.parametrize("removed", [[0], [2, 3], [1, 3, 4], [LAYERS - 2, LAYERS - 1]], ids=str)


def changes_of(removed: list[int]) -> dict[Segment, Tensor]:
    """A small random M for every removed run."""
    generator = torch.Generator().manual_seed(3)
    return {run: 0.2 * torch.randn(CHANNELS, CHANNELS, generator=generator) for run in runs(removed)}


def bridges_of(removed: list[int]) -> dict[Segment, Bridge]:
    """The operators of `changes_of`."""
    return {run: Bridge(change=change) for run, change in changes_of(removed).items()}


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits
    return found


@architectures
def test_removing_nothing_is_dense(architecture: str, tiny_model: Build, token_ids: Tensor) -> None:
    patched = tiny_model(architecture)
    patch_model(patched, [], {})
    assert torch.equal(logits(patched, token_ids), logits(tiny_model(architecture), token_ids))


@architectures
@removals
def test_identity_operators_are_plain_removal(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    patched, pruned = tiny_model(architecture), tiny_model(architecture)
    patch_model(patched, removed, {run: Bridge(change=torch.zeros(CHANNELS, CHANNELS)) for run in runs(removed)})
    remove_layers(pruned, removed)
    assert torch.equal(logits(patched, token_ids), logits(pruned, token_ids))


@architectures
@removals
def test_operator_meets_the_residual_stream_at_the_cut(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    """Each removed run's layers replaced, in the dense model, by the matrix product itself."""
    changes = changes_of(removed)
    patched, dense = tiny_model(architecture), tiny_model(architecture)
    patch_model(patched, removed, bridges_of(removed))
    states: dict[int, Tensor] = {}
    for index, layer in enumerate(decoder_layers(dense)):
        run = next((run for run in changes if run.start <= index < run.end), None)
        if run is None:
            continue

        def replace(
            _module: Any, positional: Any, named: Any, _output: Any, index: int = index, run: Segment = run
        ) -> Tensor:
            state: Tensor = positional[0] if positional else named["hidden_states"]
            states[index] = state
            return state + state @ changes[run] if index == run.end - 1 else state

        layer.register_forward_hook(replace, with_kwargs=True)
    assert torch.allclose(logits(patched, token_ids), logits(dense, token_ids), atol=1e-5, rtol=1e-5)
    assert set(states) == set(removed)


@architectures
@removals
def test_cached_generation_equals_uncached(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model(architecture)
    patch_model(model, removed, bridges_of(removed))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached = model.generate(token_ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(token_ids, use_cache=False, **settings))


def test_a_perfect_operator_repairs_a_linear_block(tiny_model: Build, token_ids: Tensor) -> None:
    """Layers that only apply a matrix are lost without a trace when the operator is that matrix."""
    dense, patched = tiny_model(), tiny_model()
    change = changes_of([2, 3])[Segment(2, 4)]
    for index in (2, 3):
        decoder_layers(dense)[index].register_forward_hook(lambda _m, positional, _o: positional[0] @ (eye + change))
    eye = torch.eye(CHANNELS)
    patch_model(patched, [2, 3], {Segment(2, 4): Bridge.of_matrix((eye + change) @ (eye + change))})
    assert torch.allclose(logits(patched, token_ids), logits(dense, token_ids), atol=1e-4)


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF
@pytest.mark.parametrize("operator_dtype", ["model", "float32"])
@pytest.mark.parametrize("removed", [[2, 3], [LAYERS - 2, LAYERS - 1]], ids=["before a layer", "behind the last"])
def test_operators_in_half_precision(
    dtype: torch.dtype, operator_dtype: OperatorDtype, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model().to(dtype)
    dense = model.num_parameters()
    (change,) = changes_of(removed).values()
    patch_model(model, removed, bridges_of(removed), operator_dtype)
    ((name, operator),) = [item for item in model.named_modules() if isinstance(item[1], BoundaryOperator)]
    states: list[Tensor] = []
    operator.register_forward_hook(lambda _module, given, output: states.extend([given[0], output]))
    assert logits(model, token_ids).dtype == dtype
    given, found = states
    assert (given.dtype, found.dtype) == (dtype, dtype)
    exact = given.double() + given.double() @ change.double()
    # Half a unit in the last place: what rounding the exact result alone costs.
    rounded_once = (found.double() - exact).abs() <= 0.505 * torch.finfo(dtype).eps * exact.abs()
    if operator_dtype == "model":
        assert torch.equal(operator.change, change.to(dtype))
        assert torch.equal(found, given + given @ change.to(dtype))
        assert not rounded_once.all()
    else:
        assert torch.equal(operator.change, change)
        assert torch.equal(found, (given.float() + given.float() @ change).to(dtype))
        assert rounded_once.all()
    assert f"{name}.change" in model.state_dict()
    removed_weights = sum(p.numel() for i in removed for p in decoder_layers(tiny_model())[i].parameters())
    assert model.num_parameters() == dense - removed_weights + CHANNELS**2


def test_in_a_float32_model_both_dtypes_of_operators_are_one(tiny_model: Build, token_ids: Tensor) -> None:
    found = []
    for operator_dtype in get_args(OperatorDtype):
        model = tiny_model()
        patch_model(model, [2, 3], bridges_of([2, 3]), operator_dtype)
        found.append(logits(model, token_ids))
    assert torch.equal(*found)


def test_identity_on_creation() -> None:
    states = torch.randn(2, 3, CHANNELS)
    assert torch.equal(BoundaryOperator(CHANNELS)(states), states)


def test_operator_of_no_run_is_refused(tiny_model: Build) -> None:
    with pytest.raises(ValueError, match="no removed runs"):
        patch_model(tiny_model(), [2, 3], {Segment(2, 3): Bridge(change=torch.zeros(CHANNELS, CHANNELS))})


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Build) -> Path:
    """An adapter that removes layers 1, 3 and 4 of the tiny Llama."""
    monkeypatch.chdir(tmp_path)
    removed = [1, 3, 4]
    description = {
        "base": base_shape(tiny_model()),
        "removed_layers": removed,
        "boundaries": [list(run) for run in runs(removed)],
        "bridged": True,
        "operators": True,
        "operator_dtype": "model",
    }
    write_adapter(tmp_path / "adapter", description, bridges_of(removed))
    return tmp_path / "adapter"


def test_adapter_round_trip(adapter: Path, tiny_model: Build, token_ids: Tensor) -> None:
    direct = tiny_model()
    patch_model(direct, [1, 3, 4], bridges_of([1, 3, 4]))
    loaded = load_patched(tiny_model(), adapter)
    assert torch.allclose(logits(loaded, token_ids), logits(direct, token_ids), atol=1e-5)
    assert loaded.config.num_hidden_layers == LAYERS - 3
    with residual_states(loaded, range(LAYERS - 2)) as states, torch.no_grad():
        decoder_stack(loaded)(input_ids=token_ids)
    assert len(states) == LAYERS - 2


def edit(adapter: Path, **changes: Any) -> None:
    """Make an adapter say something else, as if it had been written that way."""
    file = adapter / "adapter.json"
    description = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({**description, "sha256": digest(description)}))


def test_adapter_of_another_base_is_refused(adapter: Path, tiny_model: Build) -> None:
    with pytest.raises(UserError, match="num_hidden_layers 6, the base has 5"):
        load_patched(tiny_model(num_hidden_layers=5), adapter)
    with pytest.raises(UserError, match="hidden_size 16, the base has 32"):
        load_patched(tiny_model(hidden_size=32), adapter)
    with pytest.raises(UserError, match="model_type 'llama', the base has 'qwen3'"):
        load_patched(tiny_model("qwen3"), adapter)


def test_newer_format_is_refused(adapter: Path, tiny_model: Build) -> None:
    edit(adapter, format_version=5)
    with pytest.raises(UserError, match="format_version 5; this version of the project reads 4"):
        load_patched(tiny_model(), adapter)


def operators_of(model: PreTrainedModel) -> list[BoundaryOperator]:
    return [module for module in model.modules() if isinstance(module, BoundaryOperator)]


@pytest.mark.parametrize(("operator_dtype", "kept"), [("model", torch.bfloat16), ("float32", torch.float32)])
def test_adapter_says_the_dtype_of_its_operators(
    operator_dtype: str, kept: torch.dtype, adapter: Path, tiny_model: Build, token_ids: Tensor
) -> None:
    edit(adapter, operator_dtype=operator_dtype)
    model = load_patched(tiny_model().to(torch.bfloat16), adapter)
    assert [operator.change.dtype for operator in operators_of(model)] == [kept, kept]
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert torch.isfinite(logits(model, token_ids)).all()


@pytest.mark.parametrize("value", ["float64", None, ["model"]], ids=str)
def test_a_dtype_of_operators_that_is_none(value: Any, adapter: Path, tiny_model: Build) -> None:
    edit(adapter, operator_dtype=value)
    with pytest.raises(UserError, match=r"adapter.json: operator_dtype .*; must be one of \('model', 'float32'\)"):
        load_patched(tiny_model(), adapter)


def test_edited_adapters_are_refused(adapter: Path, tiny_model: Build) -> None:
    file = adapter / "adapter.json"
    whole = file.read_text()
    file.write_text(whole.replace('"model"', '"float32"'))
    with pytest.raises(UserError, match="adapter.json: was edited or damaged: its content is not what its `sha256`"):
        load_patched(tiny_model(), adapter)
    file.write_text(whole)
    operators = adapter / "operators.safetensors"
    content = operators.read_bytes()
    operators.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="operators.safetensors: was edited or damaged: it is not the file that"):
        load_patched(tiny_model(), adapter)


def test_damaged_adapters_are_refused(adapter: Path, tiny_model: Build) -> None:
    edit(adapter, boundaries=[[1, 2]])
    with pytest.raises(UserError, match=r"has tensors of \['1-2', '3-5'\], expected of \['1-2'\]"):
        load_patched(tiny_model(), adapter)
    file = adapter / "operators.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="operators.safetensors: cannot be read"):
        load_patched(tiny_model(), adapter)
    file.unlink()
    with pytest.raises(UserError, match="operators.safetensors: not found"):
        load_patched(tiny_model(), adapter)
