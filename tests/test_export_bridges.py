"""The exported checkpoint of rows whose cuts are bridged by more than a matrix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from safetensors.torch import load_file, save_file
from test_bridged import PARTS, RANK, allowed, bridges_of
from test_export import GREEDY, MIDDLE, edit_config, load, operators_of
from test_patched import logits
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.base.decoder import DOWN_PROJECTION
from stages.export import export
from stages.modeling_ghosted import FINGERPRINTS
from stages.recovered.patched import patch_model

Build = Callable[..., PreTrainedModel]
KINDS = ["factors", "matrix and bias", "factors and bias", "matrix and projection", "all"]
"""Kinds of bridges that leave an operator at the cut: low rank, affine, both, and with a new down projection."""
REMOVALS = [[0], MIDDLE, [1, 3, 4], [LAYERS - 2, LAYERS - 1]]


def patched(build: Build, kind: str, architecture: str = "llama", removed: list[int] = MIDDLE) -> PreTrainedModel:
    model = build(architecture)
    patch_model(model, removed, bridges_of(removed, kind))
    return model


def described(folder: Path) -> dict[str, Any]:
    """What the configuration says of the operators."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["boundary_operators"]["modules"]
    return found


@pytest.mark.parametrize(
    ("architecture", "removed", "kind"),
    [(a, r, k) for a in ARCHITECTURES for r in REMOVALS for k in KINDS if allowed(a, r, k)],
    ids=str,
)
def test_checkpoint_is_the_patched_model(
    architecture: str, removed: list[int], kind: str, tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    direct = patched(tiny_model, kind, architecture, removed)
    # A name of its own for each: transformers keeps the code of a checkpoint under its folder's name.
    folder = tmp_path / f"{architecture}-{'-'.join(map(str, removed))}-{kind.replace(' ', '-')}"
    export(direct, folder, "model")
    shape = {"rank": RANK if "reduce" in PARTS[kind] else None, "bias": "bias" in PARTS[kind]}
    named = [name for name, module in direct.named_modules() if name.endswith(("boundary_before", "boundary_after"))]
    assert described(folder) == dict.fromkeys(named, shape)
    assert named
    loaded = load(folder)
    again = tmp_path / f"again-{folder.name}"
    loaded.save_pretrained(again)
    assert described(again) == described(folder)
    expected, written = logits(direct, token_ids), direct.generate(token_ids, **GREEDY)
    for model in (loaded, load(again)):
        assert type(model).__name__ == f"Ghosted{type(direct).__name__}"
        assert torch.equal(logits(model, token_ids), expected)
        assert torch.equal(model.generate(token_ids, **GREEDY), written)
        assert model.state_dict().keys() == direct.state_dict().keys()


@pytest.mark.parametrize("architecture", DOWN_PROJECTION)
@pytest.mark.parametrize("removed", [MIDDLE, [1, 3, 4], [LAYERS - 2, LAYERS - 1]], ids=str)
def test_a_new_down_projection_alone_is_an_ordinary_checkpoint(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    direct = patched(tiny_model, "projection", architecture, removed)
    export(direct, tmp_path / "exported", None)
    assert not list((tmp_path / "exported").glob("*.py"))
    assert not (tmp_path / "exported" / FINGERPRINTS).exists()
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["model_type"] == architecture
    assert not {"auto_map", "boundary_operators"} & set(config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=False)
    loaded.save_pretrained(tmp_path / "again")
    for model in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=False)):
        assert type(model) is type(direct)
        assert torch.equal(logits(model, token_ids), logits(direct, token_ids))
        assert torch.equal(model.generate(token_ids, **GREEDY), direct.generate(token_ids, **GREEDY))


@pytest.mark.parametrize(("operator_dtype", "kept"), [("model", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_of_factors_and_bias(
    operator_dtype: Any, kept: torch.dtype, tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    direct = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    patch_model(direct, MIDDLE, bridges_of(MIDDLE, "all"), operator_dtype)
    export(direct, tmp_path / f"exported-{operator_dtype}", operator_dtype)
    loaded = load(tmp_path / f"exported-{operator_dtype}")
    (operator,) = operators_of(loaded)
    assert {name: part.dtype for name, part in operator.named_parameters()} == dict.fromkeys(
        ("reduce", "expand", "bias"), kept
    )
    assert loaded.model.layers[1].mlp.down_proj.weight.dtype == torch.bfloat16
    assert torch.equal(logits(loaded, token_ids), logits(direct, token_ids))


# A configuration that says something else than the weights: loading must not make up an operator.

NAME = "model.layers.2.boundary_before"
SHAPES = {
    "factors": {"rank": RANK, "bias": False},
    "factors and bias": {"rank": RANK, "bias": True},
    "matrix and bias": {"rank": None, "bias": True},
}


@pytest.mark.parametrize(
    ("kind", "said", "key"),
    [
        ("factors", {"rank": RANK + 1}, f"{NAME}.expand"),
        ("factors", {"rank": RANK - 1}, f"{NAME}.expand"),
        ("factors", {"rank": CHANNELS}, f"{NAME}.expand"),
        ("factors", {"rank": None}, f"missing keys: {NAME}.change"),
        ("factors", {"bias": True}, f"missing keys: {NAME}.bias"),
        ("factors and bias", {"rank": RANK + 1}, f"{NAME}.expand"),
        ("factors and bias", {"bias": False}, f"unexpected keys: {NAME}.bias"),
        ("matrix and bias", {"rank": RANK}, f"missing keys: {NAME}.expand, {NAME}.reduce"),
        ("matrix and bias", {"rank": CHANNELS}, f"missing keys: {NAME}.expand, {NAME}.reduce"),
        ("matrix and bias", {"bias": False}, f"unexpected keys: {NAME}.bias"),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}], ids=str)
def test_configuration_that_does_not_describe_the_operator(
    kind: str, said: dict[str, Any], key: str, options: dict[str, Any], tiny_model: Build, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    export(patched(tiny_model, kind), folder, "model")
    assert described(folder) == {NAME: SHAPES[kind]}
    whole = json.loads((folder / "config.json").read_text())["boundary_operators"]
    edit_config(folder, boundary_operators={**whole, "modules": {NAME: {**SHAPES[kind], **said}}})
    with pytest.raises(ValueError, match=key):
        load(folder, **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"rank": 0, "bias": True}, "must have a rank or null"),
        ({"rank": -1, "bias": True}, "must have a rank or null"),
        ({"rank": True, "bias": True}, "must have a rank or null"),
        ({"rank": 3.0, "bias": True}, "must have a rank or null"),
        ({"rank": "3", "bias": True}, "must have a rank or null"),
        ({"rank": 3, "bias": 1}, "bias true or false"),
        ({"rank": 3, "bias": None}, "bias true or false"),
        ({"rank": 3}, "bias true or false"),
        ({"rank": 3, "bias": True, "scale": 1}, "must have a rank or null"),
        (None, "must have a rank or null"),
        ([3, True], "must have a rank or null"),
    ],
    ids=str,
)
def test_shapes_that_are_none(shape: Any, message: str, tiny_model: Build, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export(patched(tiny_model, "factors and bias"), folder, "model")
    whole = json.loads((folder / "config.json").read_text())["boundary_operators"]
    edit_config(folder, boundary_operators={**whole, "modules": {NAME: shape}})
    with pytest.raises(ValueError, match=f"boundary_operators.modules: '{NAME}' = .*{message}"):
        load(folder)


@pytest.mark.parametrize("part", ["reduce", "expand", "bias"])
def test_missing_parts_of_an_operator(part: str, tiny_model: Build, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export(patched(tiny_model, "factors and bias"), folder, "model")
    weights = load_file(folder / "model.safetensors")
    del weights[f"{NAME}.{part}"]
    (folder / FINGERPRINTS).unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing keys: {NAME}.{part}"):
        load(folder)
