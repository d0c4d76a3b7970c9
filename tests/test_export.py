"""The exported checkpoint: that it loads without this project, is the model that was evaluated, and hides no fault."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHANNELS, LAYERS
from safetensors.torch import load_file, save_file
from test_patched import architectures, bridges_of, logits, removals
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stages.export import export
from stages.modeling_ghosted import FINGERPRINTS
from stages.project.errors import UserError
from stages.recovered.boundary_operator import BoundaryOperator
from stages.recovered.patched import patch_model

Build = Callable[..., PreTrainedModel]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
MIDDLE = [2, 3]


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """The exported model, as anyone loads it."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
    return loaded


def patched(build: Build, architecture: str = "llama", removed: list[int] = MIDDLE, **changes: Any) -> PreTrainedModel:
    model = build(architecture, **changes)
    patch_model(model, removed, bridges_of(removed))
    return model


@pytest.fixture
def exported(tmp_path: Path, tiny_model: Build) -> Path:
    """The tiny Llama without its layers 1, 3 and 4, exported."""
    folder = tmp_path / "exported"
    folder.mkdir()
    export(patched(tiny_model, removed=[1, 3, 4]), folder, "model")
    return folder


@architectures
@removals
def test_checkpoint_is_the_patched_model(
    architecture: str, removed: list[int], tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    direct = patched(tiny_model, architecture, removed)
    folder = tmp_path / f"{architecture}-{'-'.join(map(str, removed))}"
    export(direct, folder, "model")
    loaded = load(folder)
    again = tmp_path / f"again-{folder.name}"
    loaded.save_pretrained(again)
    for model in (loaded, load(again)):
        assert type(model).__name__ == f"Ghosted{type(direct).__name__}"
        assert torch.equal(logits(model, token_ids), logits(direct, token_ids))
        assert torch.equal(model.generate(token_ids, **GREEDY), direct.generate(token_ids, **GREEDY))
        layers = getattr(model, model.base_model_prefix).layers
        assert len(layers) == model.config.num_hidden_layers == LAYERS - len(removed)
        indices = [m.layer_idx for layer in layers for m in layer.modules() if hasattr(m, "layer_idx")]
        assert sorted(set(indices)) == list(range(len(layers)))
        assert indices == sorted(indices)
        dense = getattr(tiny_model(architecture).config, "layer_types", None)
        kept = dense and [kind for index, kind in enumerate(dense) if index not in removed]
        assert getattr(model.config, "layer_types", None) == kept


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_untied_embeddings_and_biases(
    changes: dict[str, Any], tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    direct = patched(tiny_model, **changes)
    export(direct, tmp_path / "exported", "model")
    assert torch.equal(logits(load(tmp_path / "exported"), token_ids), logits(direct, token_ids))


def test_model_without_operators_is_of_the_stock_architecture(
    tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    pruned = tiny_model("qwen2")
    patch_model(pruned, MIDDLE, {})
    export(pruned, tmp_path / "exported", None)
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert not {"auto_map", "boundary_operators"} & set(config)
    assert not list((tmp_path / "exported").glob("*.py"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(logits(stock, token_ids), logits(pruned, token_ids))


def test_loads_where_this_project_is_not(exported: Path, tiny_model: Build, token_ids: Tensor) -> None:
    script = f"""
import sys
sys.modules["stages"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
torch.save(model(input_ids=torch.tensor({token_ids.tolist()})).logits, {str(exported / "logits")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=exported.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = logits(patched(tiny_model, removed=[1, 3, 4]), token_ids)
    assert torch.equal(torch.load(exported / "logits"), expected)


def test_without_trust_nothing_loads(exported: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
    assert AutoConfig.from_pretrained(exported, trust_remote_code=True).num_hidden_layers == LAYERS - 3


def test_weights_in_several_files(tiny_model: Build, token_ids: Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("stages.export.MAX_SHARD_SIZE", "10KB")
    direct = patched(tiny_model)
    export(direct, tmp_path / "exported", "model")
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "exported"), token_ids), logits(direct, token_ids))


@pytest.mark.parametrize(("operator_dtype", "kept"), [("model", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_of_the_operators(
    operator_dtype: Any, kept: torch.dtype, tiny_model: Build, token_ids: Tensor, tmp_path: Path
) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    # Loaded, not converted: its buffers stay in float32.
    direct = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    patch_model(direct, MIDDLE, bridges_of(MIDDLE), operator_dtype)
    export(direct, tmp_path / "exported", operator_dtype)
    loaded = load(tmp_path / "exported")
    assert loaded.dtype == torch.bfloat16
    assert [operator.change.dtype for operator in operators_of(loaded)] == [kept]
    assert torch.equal(logits(loaded, token_ids), logits(direct, token_ids))


def operators_of(model: torch.nn.Module) -> list[Any]:
    """By name: the class is the checkpoint's own, not this project's."""
    return [module for module in model.modules() if type(module).__name__ == BoundaryOperator.__name__]


def edit_config(folder: Path, **changes: Any) -> None:
    """Edit the configuration as if it had been exported that way."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (folder / FINGERPRINTS).unlink(missing_ok=True)


MATRIX = {"rank": None, "bias": False}
OPERATORS = {"format_version": 2, "dtype": "model", "modules": {"model.layers.1.boundary_before": MATRIX}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "'model.layers.2.boundary_before': ModuleList has no attribute `2`"),
        ({"num_hidden_layers": 4}, r"missing keys: model.layers.3"),
        ({"boundary_operators": OPERATORS}, "unexpected keys: model.layers.2.boundary_before.change"),
        ({"boundary_operators": None}, "config.json: boundary_operators = None: must be an object"),
        ({"boundary_operators": {**OPERATORS, "format_version": 3}}, "format_version = 3; this code reads 2"),
        ({"boundary_operators": {**OPERATORS, "dtype": "float64"}}, "dtype = 'float64': must be model or float32"),
        (
            {"boundary_operators": {**OPERATORS, "modules": {"model.layers.9.boundary_before": MATRIX}}},
            "'model.layers.9",
        ),
        (
            {"boundary_operators": {**OPERATORS, "modules": {"model.layers.1.boundary": MATRIX}}},
            "neither boundary_before nor",
        ),
        (
            {"boundary_operators": {**OPERATORS, "modules": {"a.boundary_before": {"rank": 0, "bias": False}}}},
            "a rank or",
        ),
        ({"boundary_operators": {**OPERATORS, "modules": {"a.boundary_before": {"rank": 2}}}}, "bias true or false"),
        ({"boundary_operators": {**OPERATORS, "modules": None}}, "modules = None: must be an object"),
        ({"tie_word_embeddings": False}, "missing keys: lm_head.weight"),
    ],
    ids=str,
)
def test_configuration_that_does_not_describe_the_weights(changes: Any, message: str, exported: Path) -> None:
    edit_config(exported, **changes)
    with pytest.raises(ValueError, match=message):
        load(exported)


@pytest.mark.parametrize("name", ["model.layers.1.boundary_before.change", "model.layers.0.mlp.up_proj.weight"])
def test_missing_and_unexpected_weights(name: str, exported: Path) -> None:
    file = exported / "model.safetensors"
    weights = load_file(file)
    removed = weights.pop(name)
    (exported / FINGERPRINTS).unlink()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing keys: {name}"):
        load(exported)
    save_file({**weights, name: removed, "model.layers.7.extra": removed.clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected keys: model.layers.7.extra"):
        load(exported)


@pytest.mark.parametrize("name", ["config.json", "boundary_operator.py", "modeling_ghosted.py"])
def test_edited_files_are_named(name: str, exported: Path) -> None:
    with (exported / name).open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=f"{name}: is damaged or was edited since the export"):
        load(exported)


@pytest.mark.parametrize("content", ["{", "[1]", "{}"])
def test_damaged_fingerprints_are_named(content: str, exported: Path) -> None:
    (exported / FINGERPRINTS).write_text(content)
    with pytest.raises(ValueError, match=f"{FINGERPRINTS}: is damaged"):
        load(exported)


@architectures
def test_class_is_one_and_the_same(architecture: str, tiny_model: Build, tmp_path: Path) -> None:
    export(patched(tiny_model, architecture), tmp_path / architecture, "model")
    first, second = load(tmp_path / architecture), load(tmp_path / architecture)
    assert type(first) is type(second)
    buffer = io.BytesIO()
    torch.save(first, buffer)


def test_damaged_files_are_named(exported: Path) -> None:
    file = exported / "model.safetensors"
    whole = file.read_bytes()
    flipped = bytes([whole[-1] ^ 1])
    for damaged in (whole[:-10], whole[:-1] + flipped):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model.safetensors: is damaged or was edited since the export; .*delete"):
            load(exported)
    file.unlink()
    with pytest.raises(ValueError, match="model.safetensors: is missing"):
        load(exported)


def test_saved_anew_the_model_may_have_changed(exported: Path, token_ids: Tensor) -> None:
    model = load(exported)
    with torch.no_grad():
        operators_of(model)[0].change.add_(1.0)
    model.save_pretrained(exported)
    assert torch.equal(logits(load(exported), token_ids), logits(model, token_ids))


def test_class_that_is_not_of_transformers_is_refused(exported: Path, tmp_path: Path) -> None:
    model = load(exported)
    model.model.layers[0].own = BoundaryOperator(CHANNELS)
    with pytest.raises(UserError, match="GhostedLlamaForCausalLM is code of the checkpoint's own"):
        export(model, tmp_path / "again", "model")
