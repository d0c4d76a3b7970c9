import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stages import model as stage
from stages.base.checkpoint import MEMO, SOURCE, load_config, load_model, load_tokenizer, location
from stages.project.errors import UserError
from stages.project.paths import model_folder

Build = Callable[..., PreTrainedModel]
EMBEDDED = Path(__file__).parents[1] / "profiles/embedded.yaml"
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_gguf(file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, without: str = "") -> None:
    """The tiny Llama as a GGUF file of float32 tensors, one of them left out on demand."""
    config = model.config
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = model.state_dict()
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{part}": f"model.layers.{layer}.{name}" for part, name in PARTS.items()}
    for name, source in tensors.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", weights[f"{source}.weight"].numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_gguf_is_an_ordinary_checkpoint(tiny_model: Build, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    original = tiny_model()
    write_gguf(Path("tiny.gguf"), original, tiny_tokenizer)
    stage.convert_gguf(Path("tiny.gguf"), "float32", model_folder("tiny"), "models.tiny.gguf")
    found = load_model("tiny", "float32", False)
    for name in ("model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(found.state_dict()[name], original.state_dict()[name]), name
    assert load_tokenizer("tiny", False)("the river")["input_ids"] == tiny_tokenizer("the river")["input_ids"]
    source = json.loads((model_folder("tiny") / SOURCE).read_text())
    files = source.pop("files")
    assert source == {"kind": "gguf", "location": "tiny.gguf", "sha256": stage.sha256(Path("tiny.gguf"))}
    weights = model_folder("tiny") / "model.safetensors"
    assert files[weights.name]["sha256"] == stage.sha256(weights)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"model.safetensors: changed since it was recorded"):
        load_tokenizer("tiny", False)


def test_gguf_without_a_tensor_is_refused(tiny_model: Build, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    write_gguf(Path("tiny.gguf"), tiny_model(), tiny_tokenizer, without="blk.1.ffn_down")
    with pytest.raises(UserError, match=r"models.tiny.gguf: missing keys .*layers.1.mlp.down_proj"):
        stage.convert_gguf(Path("tiny.gguf"), "float32", model_folder("tiny"), "models.tiny.gguf")
    assert not model_folder("tiny").exists()


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.9])
def test_truncated_gguf_is_refused(kept: float, tiny_model: Build, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    file = Path("tiny.gguf")
    write_gguf(file, tiny_model(), tiny_tokenizer)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match="models.tiny.gguf: (truncated|not a GGUF)"):
        stage.convert_gguf(file, "float32", model_folder("tiny"), "models.tiny.gguf")
    assert not model_folder("tiny").exists()


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, tiny_model: Build) -> Path:
    """A local checkpoint, recorded by the stage as the model `smollm2`."""
    tiny_model().save_pretrained("checkpoint")
    text = EMBEDDED.read_text().replace("gguf: data/assets/models/SmolLM2-135M-Instruct.Q4_1.gguf", "path: checkpoint")
    Path("params.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["model", "--model", "smollm2"])
    stage.main()
    return Path("checkpoint")


def test_local_checkpoint_is_only_recorded(checkpoint: Path) -> None:
    assert [file.name for file in model_folder("smollm2").iterdir()] == [SOURCE]
    assert location("smollm2") == (str(checkpoint), {})
    assert load_config("smollm2", False).num_hidden_layers == 6


def test_checkpoint_changed_in_place_is_refused(checkpoint: Path) -> None:
    load_model("smollm2", "float32", False)
    assert MEMO.exists()
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        UserError, match=r"model.safetensors: changed since it was recorded; `dvc repro -f model@smollm2`"
    ):
        load_model("smollm2", "float32", False)
    weights.unlink()
    with pytest.raises(UserError, match="model.safetensors: is gone since"):
        load_model("smollm2", "float32", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "cannot be loaded|mismatched"),
        ({"hidden_size": 17}, "cannot be loaded"),
        ({"num_hidden_layers": 7}, "missing keys .*layers.6"),
        ({"num_hidden_layers": 5}, "unexpected keys .*layers.5"),
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": "nonsense"}, "cannot be loaded"),
    ],
    ids=str,
)
def test_configuration_that_does_not_fit_the_weights(
    checkpoint: Path, changes: dict[str, object], message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    stage.main()
    with pytest.raises(UserError, match=message):
        load_model("smollm2", "float32", False)


def test_folders_that_are_no_checkpoints() -> None:
    with pytest.raises(UserError, match=r"models.x.path = nowhere: no such folder"):
        stage.fingerprints(Path("nowhere"), "models.x.path")
    Path("empty").mkdir()
    with pytest.raises(UserError, match=r"not a checkpoint: needs config.json and \*.safetensors"):
        stage.fingerprints(Path("empty"), "models.x.path")
