"""Where the computation runs: the environment variables, the device of the statistics, a model on several devices."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import dispatch_model
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.checkpoint import SOURCE, load_model
from stages.base.decoder import LAYERS as LAYERS_AT
from stages.base.decoder import (
    decoder_layers,
    decoder_stack,
    down_projection,
    execution_device,
    input_device,
    layers_removed,
    remove_layers,
    replace_weight,
    whole_weight,
)
from stages.base.device import device_map, float64_device, forward_device
from stages.boundaries import Segment, runs
from stages.bridge import Bridge
from stages.collect import collect
from stages.likelihood import window_nll
from stages.project.errors import UserError
from stages.project.paths import model_folder
from stages.recovered.boundary_operator import BoundaryOperator
from stages.recovered.patched import patch_model
from stages.score import pairwise_similarity
from stages.sums import to_tensors
from stages.weights import parameters

SEGMENTS = [Segment(0, 2), Segment(3, 4)]

Build = Callable[..., PreTrainedModel]


def test_statistics_stay_on_a_device_with_float64() -> None:
    for name in ("cpu", "meta"):
        assert float64_device(torch.device(name)) == torch.device(name)


def test_statistics_leave_a_device_without_float64(refuse_float64: Callable[[str], None]) -> None:
    refuse_float64("meta")
    assert float64_device(torch.device("meta")) == torch.device("cpu")
    assert float64_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "meta", ""])
def test_a_device_that_cannot_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOSTED_DEVICE", name)
    with pytest.raises(UserError, match=f"GHOSTED_DEVICE={name}: "):
        forward_device()


@pytest.mark.parametrize("setting", [None, "auto", "balanced", "balanced_low_0", "sequential"])
def test_no_device_map_or_a_strategy_is_passed_on(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting is not None:
        monkeypatch.setenv("GHOSTED_DEVICE_MAP", setting)
    assert device_map() == setting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "=: must be auto, balanced, balanced_low_0, sequential, or a JSON object"),
        ("automatic", "=automatic: must be auto"),
        ('["cpu"]', "must be auto"),
        ("{}", "must be auto"),
        ("0", "must be auto"),
        ('{"model": null}', "'model': None: must be a GPU's number, the name of a device, or \"disk\""),
        ('{"model": true}', "'model': True: must be a GPU's number"),
        ('{"model": 1.5}', "'model': 1.5: must be a GPU's number"),
        ('{"model": -1}', "'model': -1: .*negative"),
        ('{"model": 99}', "'model': 99: "),
        ('{"model": 1000000000000000000000}', "'model': 1000000000000000000000: "),
        ('{"model": "cuda:99"}', "'model': 'cuda:99': "),
        ('{"model": "Disk"}', "'model': 'Disk': "),
        ('{"model": "meta"}', "'model': 'meta': "),
        ('{"": "cpu", "lm_head": "disk"}', "'': 'cpu': 'lm_head', which lies inside it, has a device of its own"),
        ('{"model.layers": "disk", "model": "cpu"}', "'model': 'cpu': 'model.layers', which lies inside it"),
    ],
)
def test_a_device_map_that_is_none(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOSTED_DEVICE_MAP", text)
    with pytest.raises(UserError, match=f"^GHOSTED_DEVICE_MAP.*{message}"):
        device_map()


def test_one_device_and_a_map_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOSTED_DEVICE", "cpu")
    monkeypatch.setenv("GHOSTED_DEVICE_MAP", "auto")
    for setting in (forward_device, device_map):
        with pytest.raises(UserError, match="GHOSTED_DEVICE and GHOSTED_DEVICE_MAP are both set"):
            setting()


# A model that a device map spreads. The processor and the disk are two places that every machine has.


def spread(model: PreTrainedModel, on_disk: Collection[str]) -> str:
    """A device map, as JSON, with every layer and every module beside them by name; `on_disk` names those on disk."""
    layers = LAYERS_AT[model.config.model_type]
    names = [f"{layers}.{index}" for index in range(LAYERS)]
    beside = [f"{layers.partition('.')[0]}.{name}" for name, _ in decoder_stack(model).named_children()]
    names += [name for name in beside if name != layers]
    names += [name for name, _ in model.named_children() if name != layers.partition(".")[0]]
    assert set(on_disk) <= {name.rpartition(".")[2] for name in names}
    return json.dumps({name: "disk" if name.rpartition(".")[2] in on_disk else "cpu" for name in names})


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Build) -> Callable[..., PreTrainedModel]:
    """A function that writes the checkpoint of a tiny model, called `tiny`, and returns the model."""
    monkeypatch.chdir(tmp_path)

    def save(architecture: str, **changes: Any) -> PreTrainedModel:
        model = tiny_model(architecture, **changes)
        model.save_pretrained(model_folder("tiny"))
        (model_folder("tiny") / SOURCE).write_text('{"kind": "gguf", "files": {}}')
        return model

    return save


def load(devices: str | None, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> PreTrainedModel:
    """The saved model on one device, or with a device map."""
    if devices is None:
        monkeypatch.delenv("GHOSTED_DEVICE_MAP", raising=False)
    else:
        monkeypatch.setenv("GHOSTED_DEVICE_MAP", devices)
    return load_model("tiny", dtype, False)


def places(module: torch.nn.Module) -> set[str]:
    return {parameter.device.type for parameter in module.parameters()}


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits
    return found


OUTER = {"embed_tokens", "embed_in", "lm_head", "embed_out", "norm", "final_layer_norm"}
"""Modules beside the layers, under every architecture's names."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("outer_on_disk", [False, True], ids=["outer modules in memory", "outer modules on disk"])
def test_a_spread_model_computes_what_the_whole_one_does(
    architecture: str,
    outer_on_disk: bool,
    saved: Build,
    token_ids: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = saved(architecture)
    outer = {name.rpartition(".")[2] for name, _ in model.named_modules()} & OUTER if outer_on_disk else set()
    devices = spread(model, {"1", "2", "4", *outer})
    # Operators before a layer in memory, before one on disk, and behind the last layer, which is in memory.
    removed = [0, 2, LAYERS - 2, LAYERS - 1] if outer_on_disk else [2, 3]
    projection = down_projection(model, 0)
    changes = {
        run: Bridge(
            change=0.2 * torch.randn(CHANNELS, CHANNELS),
            down_projection=torch.randn(projection.weight.T.shape) if projection and run.start else None,
        )
        for run in runs(removed)
    }
    sequences = token_ids.tolist()
    found = []
    for setting in (None, devices):
        loaded = load(setting, monkeypatch)
        assert places(decoder_layers(loaded)[1]) == {"meta" if setting else "cpu"}
        assert places(decoder_layers(loaded)[3]) == {"cpu"}
        assert places(loaded.get_input_embeddings()) == {"meta" if setting and outer_on_disk else "cpu"}
        counted = parameters(loaded)
        scores = pairwise_similarity(loaded, sequences, tokens=24)
        nll = window_nll(loaded, sequences, 24, "x")
        assert parameters(loaded) == counted == model.num_parameters()
        sums = to_tensors(collect(load(setting, monkeypatch), sequences, SEGMENTS, 24, SEGMENTS))
        patched = load(setting, monkeypatch)
        patch_model(patched, removed, changes)
        operators = [module for module in patched.modules() if isinstance(module, BoundaryOperator)]
        assert [places(operator) for operator in operators] == [{"cpu"}] * len(changes)
        found.append((scores, nll, sums, logits(patched, token_ids)))
    (scores, nll, sums, patched_logits), (spread_scores, spread_nll, spread_sums, spread_logits) = found
    pd.testing.assert_frame_equal(spread_scores, scores, check_exact=True)
    assert spread_nll == nll
    assert all(torch.equal(spread_sums[name], tensor) for name, tensor in sums.items())
    assert torch.equal(spread_logits, patched_logits)


def test_a_spread_model_generates_what_the_whole_one_does(
    saved: Build, token_ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = spread(saved("llama"), {"1", "2", "4"})
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    changes = {Segment(2, 4): Bridge(change=0.2 * torch.randn(CHANNELS, CHANNELS))}
    found = []
    for setting in (None, devices):
        model = load(setting, monkeypatch)
        patch_model(model, [2, 3], changes)
        found.append(model.generate(token_ids, **settings))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "changes"), [("llama", {}), ("llama", {"mlp_bias": True}), ("gpt_neox", {})])
def test_weights_on_disk_are_read_and_replaced(
    architecture: str,
    changes: dict[str, Any],
    dtype: str,
    saved: Build,
    token_ids: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = spread(saved(architecture, **changes), {"1", "2", "4"})
    whole, split = (load(setting, monkeypatch, dtype) for setting in (None, devices))
    weight = torch.randn(CHANNELS, 32, dtype=torch.float64)
    for index, places_before in ((1, "meta"), (3, "cpu")):
        inside, outside = down_projection(whole, index), down_projection(split, index)
        assert outside.weight.device.type == places_before
        read = whole_weight(outside)
        assert read.device.type == "cpu"
        assert torch.equal(read, inside.weight)
        # Reading leaves it where it was.
        assert outside.weight.device.type == places_before
        for module in (inside, outside):
            replace_weight(module, weight)
        assert outside.weight.dtype == getattr(torch, dtype)
        assert torch.equal(outside.weight, weight.to(outside.weight.dtype))
        assert torch.equal(whole_weight(outside), whole_weight(inside))
        assert places(outside) == {"cpu"}
        assert (inside.bias is None) == (outside.bias is None)
        assert inside.bias is None or torch.equal(inside.bias, outside.bias)
        # The rest of the layer stays on disk.
        assert (places(decoder_layers(split)[index]) == {"cpu"}) == (places_before == "cpu")
    found = [logits(model, token_ids) for model in (whole, split, split)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_layers_of_a_spread_model_come_and_go(saved: Build, token_ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = spread(saved("llama"), {"1", "2", "4"})
    pruned, split = load(None, monkeypatch), load(devices, monkeypatch)
    dense = logits(pruned, token_ids)
    remove_layers(pruned, [2, 3])
    for _ in range(2):
        with layers_removed(split, [2, 3]):
            assert torch.equal(logits(split, token_ids), logits(pruned, token_ids))
        assert torch.equal(logits(split, token_ids), dense)


def test_half_precision_from_disk(saved: Build, token_ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is in float32; what comes from disk is rounded on its way."""
    devices = spread(saved("llama"), {"1", "2", "4"})
    whole, split = (logits(load(setting, monkeypatch, "bfloat16"), token_ids) for setting in (None, devices))
    assert split.dtype == torch.bfloat16
    assert torch.equal(split, whole)
    assert [path.name for path in Path().iterdir()] == ["data"]


@pytest.mark.parametrize("devices", ["auto", "balanced", "balanced_low_0", "sequential", '{"": "disk"}', '{"": "cpu"}'])
def test_a_strategy_or_one_place_for_all(
    devices: str, saved: Build, token_ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(saved("llama"), token_ids)
    assert torch.equal(logits(load(devices, monkeypatch), token_ids), expected)


def test_operator_and_states_meet_on_the_device_of_the_layer_after_the_cut(
    tiny_model: Build, token_ids: Tensor
) -> None:
    """The second half of the model on `meta`, a device of shapes alone: what gets there, and in which order."""
    model = tiny_model()
    names = [f"model.layers.{index}" for index in range(LAYERS)]
    devices = {"model.embed_tokens": "cpu", **dict.fromkeys(names[:3], "cpu"), **dict.fromkeys(names[3:], "meta")}
    dispatch_model(model, {**devices, "model.norm": "meta", "lm_head": "meta"}, main_device="cpu")
    patch_model(model, [1, 2], {Segment(1, 3): Bridge(change=torch.zeros(CHANNELS, CHANNELS))})
    before, after = decoder_layers(model)[:2]
    operator = after.get_submodule("boundary_before")
    seen = []
    operator.register_forward_hook(lambda _module, given, output: seen.extend([given[0].device, output.device]))
    assert execution_device(before) == input_device(model) == torch.device("cpu")
    assert execution_device(after) == torch.device("meta")
    assert places(operator) == {"meta"}
    with torch.no_grad():
        decoder_stack(model)(input_ids=token_ids)
    assert seen == [torch.device("cpu"), torch.device("meta")]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            {"model": "cpu", "lm_haed": "cpu"},
            "'lm_haed' is no module of .*/tiny; it consists of model, lm_head",
        ),
        ({"model.layers.1": "disk"}, "has no device for 48 parameters of .*/tiny, first model.embed_tokens.weight"),
        ({"model": "disk", "lm_head": "cpu"}, "lm_head.weight and model.embed_tokens.weight are one weight: both"),
        ({"model": "cpu", "lm_head": "disk"}, "lm_head.weight and model.embed_tokens.weight are one weight: both"),
    ],
    ids=str,
)
def test_a_device_map_that_does_not_fit_the_model(
    devices: dict[str, str], message: str, saved: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama")
    with pytest.raises(UserError, match=f"^GHOSTED_DEVICE_MAP: {message}"):
        load(json.dumps(devices), monkeypatch)


def test_weights_that_are_not_tied_may_be_apart(
    saved: Build, token_ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(saved("llama", tie_word_embeddings=False), token_ids)
    assert torch.equal(logits(load('{"model": "cpu", "lm_head": "disk"}', monkeypatch), token_ids), expected)
