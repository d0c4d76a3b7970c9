"""The exported checkpoint in use: generation, compilation, training, quantisation, lm-evaluation-harness."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from pipeline import ROOT
from test_export import GREEDY, load, operators_of, patched
from test_patched import logits
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stages.export import export

Build = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_model: Build, tiny_tokenizer: Any) -> Path:
    """The tiny Llama without two layers in the middle and the last one, exported with its tokenizer."""
    folder = tmp_path_factory.mktemp("used") / "exported"
    export(patched(tiny_model, removed=[2, 3, 5]), folder, "model")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_static_cache(architecture: str, tiny_model: Build, token_ids: Tensor, tmp_path: Path) -> None:
    export(patched(tiny_model, architecture), tmp_path / architecture, "model")
    model = load(tmp_path / architecture)
    dynamic = model.generate(token_ids, **GREEDY)
    assert torch.equal(model.generate(token_ids, cache_implementation="static", **GREEDY), dynamic)


def test_batch_with_left_padding(exported: Path, token_ids: Tensor) -> None:
    model = load(exported)
    whole, short = token_ids[:1], token_ids[1:2, :7]
    padded = torch.full_like(whole, model.config.pad_token_id)
    padded[:, -7:] = short
    ids, mask = torch.cat([whole, padded]), torch.ones(2, whole.shape[1], dtype=torch.long)
    mask[1, :-7] = 0
    found = model.generate(ids, attention_mask=mask, **GREEDY)[:, whole.shape[1] :]
    assert torch.equal(found[:1], model.generate(whole, **GREEDY)[:, whole.shape[1] :])
    assert torch.equal(found[1:], model.generate(short, **GREEDY)[:, 7:])


def test_compiled(exported: Path, token_ids: Tensor) -> None:
    model = load(exported)
    expected = logits(model, token_ids)
    # In one graph; without the code generator, which needs a compiler on the machine.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=token_ids).logits, expected)


def gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_gradient_checkpointing(exported: Path, token_ids: Tensor) -> None:
    model = load(exported)
    expected = gradients(model, token_ids)
    assert sum(name.endswith(".change") for name in expected) == 2
    model.gradient_checkpointing_enable()
    runs: list[int] = []
    model.model.layers[2].self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    found = gradients(model, token_ids)
    assert len(runs) == 2, "the layer was not computed again in the backward pass"
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("trained", [[], ["boundary_before", "boundary_after"]], ids=["frozen", "trained"])
def test_step_of_lora(trained: list[str], exported: Path, token_ids: Tensor) -> None:
    before = load(exported)
    wanted = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=trained or None, task_type="CAUSAL_LM"
    )
    model = get_peft_model(copy.deepcopy(before), wanted)
    assert torch.equal(logits(model, token_ids), logits(before, token_ids))
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("lora_A" in name for name in trainable)
    assert sum(name.endswith(".change") for name in trainable) == len(trained)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merged = model.merge_and_unload()
    changed = [
        not torch.equal(old.change, new.change)
        for old, new in zip(operators_of(before), operators_of(merged), strict=True)
    ]
    assert changed == [bool(trained)] * 2


QUANTISED = """
import sys, torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig
quantised, whole = (
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, quantization_config=wanted)
    for wanted in (TorchAoConfig(Int8WeightOnlyConfig()), None)
)
names = {"model.layers.2.boundary_before.change", "model.layers.2.boundary_after.change"}
changed = set()
for (name, weight), (_, original) in zip(quantised.named_parameters(), whole.named_parameters(), strict=True):
    if type(weight) is not torch.nn.Parameter:
        changed.add(name)
    else:
        assert torch.equal(weight, original), name
linear = {f"{name}.weight" for name, module in whole.named_modules() if type(module) is torch.nn.Linear}
assert changed == linear - {"lm_head.weight"}, changed ^ linear
assert names <= set(dict(quantised.named_parameters())) - changed
ids = torch.arange(3, 15)[None]
with torch.no_grad():
    found, expected = quantised(input_ids=ids).logits, whole(input_ids=ids).logits
assert 0 < (found - expected).norm() / expected.norm() < 0.05
"""


@pytest.mark.slow
def test_weight_only_quantisation_leaves_the_operators(exported: Path, tmp_path: Path) -> None:
    # Beside the environment, not in it: transformers would import it in every stage of the pipeline.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "torchao")]
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    installed = subprocess.run([*pip, *constraint, "torchao"], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"needs torchao from a package index: {installed.stderr.splitlines()[-1:]}")
    command = [sys.executable, "-c", QUANTISED, str(exported)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "torchao")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_answers_in_the_harness(exported: Path, tiny_model: Build, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    requests = [
        Instance("loglikelihood", {}, arguments, number)
        for number, arguments in enumerate(
            [("The river", " rises"), ("A layer", " of the model"), ("In winter", " the")]
        )
    ]
    own = HFLM(pretrained=patched(tiny_model, removed=[2, 3, 5]), tokenizer=tiny_tokenizer, batch_size=2)
    theirs = HFLM(pretrained=str(exported), trust_remote_code=True, dtype="float32", device="cpu", batch_size=2)
    assert theirs.loglikelihood(requests, disable_tqdm=True) == own.loglikelihood(requests, disable_tqdm=True)
