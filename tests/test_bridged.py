"""Patched models whose cuts are bridged by more than a matrix: two factors, a bias, a new down projection."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from test_patched import architectures, logits, operators_of, removals
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.decoder import DOWN_PROJECTION, decoder_layers, down_projection, remove_layers
from stages.boundaries import Segment, runs
from stages.bridge import Bridge
from stages.project.errors import UserError
from stages.project.sections import OperatorDtype
from stages.recovered.adapter import write_adapter
from stages.recovered.patched import base_shape, load_patched, patch_model

Build = Callable[..., PreTrainedModel]
INNER = 32
RANK = 3
PARTS = {
    "factors": ("reduce", "expand"),
    "bias": ("bias",),
    "matrix and bias": ("change", "bias"),
    "factors and bias": ("reduce", "expand", "bias"),
    "projection": ("down_projection",),
    "matrix and projection": ("change", "down_projection"),
    "bias and projection": ("bias", "down_projection"),
    "all": ("reduce", "expand", "bias", "down_projection"),
}
"""The fields of every kind of bridge beside the plain matrix."""
REFUSED = [name for name in ARCHITECTURES if name not in DOWN_PROJECTION]


def bridges_of(removed: list[int], kind: str) -> dict[Segment, Bridge]:
    """Small random float64 bridges of one kind, one for every removed run."""
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "change": (CHANNELS, CHANNELS),
        "reduce": (CHANNELS, RANK),
        "expand": (RANK, CHANNELS),
        "bias": (CHANNELS,),
        "down_projection": (INNER, CHANNELS),
    }

    def draw(name: str) -> Tensor:
        return 0.3 * torch.randn(*shapes[name], generator=generator, dtype=torch.float64)

    return {run: Bridge(**{name: draw(name) for name in PARTS[kind]}) for run in runs(removed)}


def allowed(architecture: str, removed: list[int], kind: str) -> bool:
    """Whether bridges of a kind have their place in a model: a down projection needs a layer before every run."""
    return "down_projection" not in PARTS[kind] or (architecture in DOWN_PROJECTION and removed[0] > 0)


def cases(removals: list[list[int]]) -> Any:
    """Every architecture, removal and kind of bridge that go together."""
    every = [(a, r, k) for a in ARCHITECTURES for r in removals for k in PARTS if allowed(a, r, k)]
    return pytest.mark.parametrize(("architecture", "removed", "kind"), every, ids=str)


def by_hand(model: PreTrainedModel, removed: list[int], bridges: dict[Segment, Bridge]) -> None:
    """In the dense model: set the weight before every run, replace the run's layers by x + x M + b."""
    for run, bridge in bridges.items():
        if bridge.down_projection is not None:
            path = DOWN_PROJECTION[model.config.model_type]
            weight = decoder_layers(model)[run.start - 1].get_submodule(path).weight
            with torch.no_grad():
                weight.copy_(bridge.down_projection.T)
    for index in removed:
        run = next(run for run in bridges if run.start <= index < run.end)

        def replace(
            _module: Any, positional: Any, named: Any, _output: Any, index: int = index, run: Segment = run
        ) -> Tensor:
            state: Tensor = positional[0] if positional else named["hidden_states"]
            if index < run.end - 1:
                return state
            bridge, exact = bridges[run], state.double()
            changed = exact
            if bridge.change is not None:
                changed = changed + exact @ bridge.change
            if bridge.reduce is not None:
                changed = changed + exact @ (bridge.reduce @ bridge.expand)
            if bridge.bias is not None:
                changed = changed + bridge.bias
            return changed.to(state.dtype)

        decoder_layers(model)[index].register_forward_hook(replace, with_kwargs=True)


@cases([[0], [2, 3], [1, 3, 4], [LAYERS - 2, LAYERS - 1]])
def test_bridge_meets_the_residual_stream_at_the_cut(
    architecture: str, removed: list[int], kind: str, tiny_model: Build, token_ids: Tensor
) -> None:
    bridges = bridges_of(removed, kind)
    patched, dense, pruned = (tiny_model(architecture) for _ in range(3))
    patch_model(patched, removed, bridges)
    by_hand(dense, removed, bridges)
    remove_layers(pruned, removed)
    expected = logits(dense, token_ids)
    assert torch.allclose(logits(patched, token_ids), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(pruned, token_ids), expected, atol=1e-2)
    found = [set(dict(operator.named_parameters())) for operator in operators_of(patched)]
    expected_names = set(PARTS[kind]) - {"down_projection"}
    if expected_names == {"bias"}:
        expected_names |= {"change"}  # of zeros
    assert found == ([expected_names] * len(bridges) if expected_names else [])


@architectures
@removals
def test_factors_are_their_product(architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor) -> None:
    factors = bridges_of(removed, "factors")
    matrices = {run: Bridge(change=bridge.reduce @ bridge.expand) for run, bridge in factors.items()}
    thin, square = tiny_model(architecture), tiny_model(architecture)
    patch_model(thin, removed, factors)
    patch_model(square, removed, matrices)
    assert torch.allclose(logits(thin, token_ids), logits(square, token_ids), atol=1e-5, rtol=1e-5)
    assert square.num_parameters() - thin.num_parameters() == len(factors) * (CHANNELS**2 - 2 * CHANNELS * RANK)
    assert [operator.rank for operator in operators_of(thin)] == [RANK] * len(factors)


@pytest.mark.parametrize("architecture", DOWN_PROJECTION)
@pytest.mark.parametrize("removed", [[2, 3], [1, 3, 4], [LAYERS - 2, LAYERS - 1]], ids=str)
def test_a_new_down_projection_alone_is_of_the_stock_class(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    bridges = bridges_of(removed, "projection")
    patched, pruned = tiny_model(architecture), tiny_model(architecture)
    patch_model(patched, removed, bridges)
    for run, bridge in bridges.items():
        layer = decoder_layers(pruned)[run.start - 1]
        layer.get_submodule(DOWN_PROJECTION[architecture]).weight.data = bridge.down_projection.T.float()
    remove_layers(pruned, removed)
    assert type(patched) is type(pruned)
    assert operators_of(patched) == []
    # Same names, same shapes, same values: nothing but the weights of the stock model.
    found, expected = patched.state_dict(), pruned.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert torch.equal(logits(patched, token_ids), logits(pruned, token_ids))


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_whose_mlp_output_is_normed_refuse_a_down_projection(
    architecture: str, tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model(architecture)
    assert down_projection(model, 1) is None
    for kind in ("projection", "all"):
        with pytest.raises(ValueError, match=r"a down projection for Segment\(start=2, end=4\)"):
            patch_model(model, [2, 3], bridges_of([2, 3], kind))
    assert torch.equal(logits(model, token_ids), logits(tiny_model(architecture), token_ids))


def test_refused_architectures() -> None:
    assert REFUSED == ["gemma3_text", "olmo2"]


@architectures
def test_a_run_at_the_start_refuses_a_down_projection(architecture: str, tiny_model: Build, token_ids: Tensor) -> None:
    """Layer -1 would be the last one."""
    model = tiny_model(architecture)
    with pytest.raises(ValueError, match=r"a down projection for Segment\(start=0, end=1\), and no such before it"):
        patch_model(model, [0], bridges_of([0], "projection"))
    assert torch.equal(logits(model, token_ids), logits(tiny_model(architecture), token_ids))


def test_a_down_projection_of_another_width_is_refused(tiny_model: Build) -> None:
    with pytest.raises(ValueError, match="a down projection for"):
        patch_model(tiny_model(intermediate_size=48), [2, 3], bridges_of([2, 3], "projection"))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_the_bias_of_a_down_projection_stays(architecture: str, tiny_model: Build, token_ids: Tensor) -> None:
    changes = {"mlp_bias": True} if architecture == "llama" else {}
    bridges = bridges_of([2, 3], "projection")
    patched, dense = tiny_model(architecture, **changes), tiny_model(architecture, **changes)
    bias = down_projection(dense, 1).bias.detach().clone()
    assert bias.abs().max() > 0.1
    patch_model(patched, [2, 3], bridges)
    by_hand(dense, [2, 3], bridges)
    assert torch.equal(down_projection(patched, 1).bias, bias)
    assert torch.allclose(logits(patched, token_ids), logits(dense, token_ids), atol=1e-5, rtol=1e-5)


@architectures
@removals
def test_cached_generation_equals_uncached(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model(architecture)
    patch_model(
        model, removed, bridges_of(removed, "all" if allowed(architecture, removed, "all") else "factors and bias")
    )
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached = model.generate(token_ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(token_ids, use_cache=False, **settings))


@pytest.mark.parametrize("operator_dtype", ["model", "float32"])
@pytest.mark.parametrize("removed", [[2, 3], [LAYERS - 2, LAYERS - 1]], ids=["before a layer", "behind the last"])
def test_half_precision(
    operator_dtype: OperatorDtype, removed: list[int], tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model().to(torch.bfloat16)
    bridges = bridges_of(removed, "all")
    (bridge,) = bridges.values()
    patch_model(model, removed, bridges, operator_dtype)
    projection = down_projection(model, removed[0] - 1).weight
    assert torch.equal(projection, bridge.down_projection.T.to(torch.bfloat16))
    (operator,) = operators_of(model)
    kept = torch.float32 if operator_dtype == "float32" else torch.bfloat16
    reduce, expand, bias = (getattr(operator, name) for name in ("reduce", "expand", "bias"))
    for name, part in (("reduce", reduce), ("expand", expand), ("bias", bias)):
        assert torch.equal(part, getattr(bridge, name).to(kept)), name
    states: list[Tensor] = []
    operator.register_forward_hook(lambda _module, given, output: states.extend([given[0], output]))
    assert logits(model, token_ids).dtype == torch.bfloat16
    given, found = states
    assert given.dtype == found.dtype == torch.bfloat16
    assert torch.equal(found, (given.to(kept) + given.to(kept) @ reduce @ expand + bias).to(torch.bfloat16))
    exact = given.double() + given.double() @ bridge.reduce @ bridge.expand + bridge.bias
    # Half a unit in the last place, and float32's own error: what rounding the exact result alone costs.
    rounded_once = (found.double() - exact).abs() <= 0.505 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-6
    assert bool(rounded_once.all()) == (operator_dtype == "float32")


def test_float32_operators_of_a_float32_model_change_nothing(tiny_model: Build, token_ids: Tensor) -> None:
    found = []
    for operator_dtype in ("model", "float32"):
        model = tiny_model()
        patch_model(model, [2, 3], bridges_of([2, 3], "all"), operator_dtype)
        found.append(logits(model, token_ids))
    assert torch.equal(*found)


def write(
    folder: Path, model: PreTrainedModel, removed: list[int], bridges: dict[Segment, Bridge], **said: Any
) -> Path:
    """Write the adapter that the stage `patch` would, for `model` before it was patched; its folder."""
    operators = any(bridge.is_operator for bridge in bridges.values())
    description = {
        "base": base_shape(model),
        "removed_layers": removed,
        "boundaries": [list(run) for run in runs(removed)],
        "bridged": bool(bridges),
        "operators": operators,
        "operator_dtype": "model" if operators else None,
    }
    write_adapter(folder, {**description, **said}, bridges)
    return folder


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where adapters may be written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cases([[2, 3], [1, 3, 4]])
def test_adapter_round_trip(
    architecture: str, removed: list[int], kind: str, tiny_model: Build, token_ids: Tensor, adapters: Path
) -> None:
    bridges, direct = bridges_of(removed, kind), tiny_model(architecture)
    folder = write(adapters / "adapter", direct, removed, bridges)
    patch_model(direct, removed, bridges)
    loaded = load_patched(tiny_model(architecture), folder)
    # The adapter is in float32, which is what the model makes of the bridges too.
    found, expected = loaded.state_dict(), direct.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert torch.equal(logits(loaded, token_ids), logits(direct, token_ids))


def test_adapter_without_bridges(tiny_model: Build, token_ids: Tensor, adapters: Path) -> None:
    folder = write(adapters / "adapter", tiny_model(), [2, 3], {})
    pruned = tiny_model()
    remove_layers(pruned, [2, 3])
    assert torch.equal(logits(load_patched(tiny_model(), folder), token_ids), logits(pruned, token_ids))


@pytest.mark.parametrize(
    ("bridge", "said", "message"),
    [
        (Bridge(reduce=torch.zeros(CHANNELS, 2), expand=torch.zeros(3, CHANNELS)), {}, "reduce has shape"),
        (Bridge(expand=torch.zeros(2, CHANNELS)), {"operators": True, "operator_dtype": "model"}, "do not make an"),
        (Bridge(change=torch.zeros(CHANNELS, CHANNELS), bias=torch.zeros(3)), {}, r"2-4: bias has shape \[3\]"),
        (Bridge(down_projection=torch.full((INNER, CHANNELS), float("nan"))), {}, "down_projection is not finite"),
        (
            Bridge(down_projection=torch.zeros(INNER, CHANNELS)),
            {"operators": True, "operator_dtype": "model"},
            "not what adapter.json says, operators: True",
        ),
        (
            Bridge(change=torch.zeros(CHANNELS, CHANNELS)),
            {"operators": False, "operator_dtype": None},
            "not what adapter.json says, operators: False",
        ),
        (Bridge(bias=torch.zeros(CHANNELS)), {"bridged": False}, r"has tensors of \['2-4'\], expected of \[\]"),
    ],
    ids=["factors", "lone factor", "bias", "nan", "no operator", "operator", "not bridged"],
)
def test_damaged_adapters_are_refused(
    bridge: Bridge, said: dict[str, Any], message: str, tiny_model: Build, adapters: Path
) -> None:
    folder = write(adapters / "adapter", tiny_model(), [2, 3], {Segment(2, 4): bridge}, **said)
    with pytest.raises(UserError, match=f"operators.safetensors: .*{message}"):
        load_patched(tiny_model(), folder)


def test_runs_that_are_bridged_each_in_its_own_way(tiny_model: Build, token_ids: Tensor, adapters: Path) -> None:
    removed = [1, 3]
    projection = bridges_of(removed, "projection")[Segment(1, 2)]
    operator = Bridge(change=0.1 * torch.eye(CHANNELS))
    bridges = {Segment(1, 2): projection, Segment(3, 4): operator}
    folder = write(adapters / "adapter", tiny_model(), removed, bridges, operators=True, operator_dtype="model")
    expected = tiny_model()
    patch_model(expected, removed, bridges)
    assert torch.equal(logits(load_patched(tiny_model(), folder), token_ids), logits(expected, token_ids))


@pytest.mark.parametrize(
    ("architecture", "changes"), [("gemma3_text", {}), ("llama", {"intermediate_size": 48})], ids=["normed", "wider"]
)
def test_an_adapter_whose_down_projection_has_no_place_is_a_users_error(
    architecture: str, changes: dict[str, Any], tiny_model: Build, adapters: Path
) -> None:
    model = tiny_model(architecture, **changes)
    folder = write(adapters / "adapter", model, [2, 3], bridges_of([2, 3], "projection"))
    with pytest.raises(UserError, match="down projection"):
        load_patched(model, folder)
