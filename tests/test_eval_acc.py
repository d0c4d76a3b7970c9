import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import lm_eval.evaluator
import pandas as pd
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages import answers, assets, eval_acc, task
from stages.base import checkpoint
from stages.harness import prepared
from stages.project.artifacts import read_table
from stages.project.errors import UserError
from stages.project.paths import ASSETS, task_folder
from stages.project.schemas import EVAL_ACC
from stages.recovered import patched

SOURCE = Path(__file__).parents[1]
LOCAL = ASSETS / "tasks"
LINES = {
    "piqa": [
        {"question": "ice box", "options": "A. add water \nB. add some soda", "answer": "B. add some soda"},
        {"question": "A longer question than that:", "options": "A. tape\nB. glue", "answer": "A. tape"},
        {"question": "Jar?", "options": "A. café\nB. a lid", "answer": "B. a lid"},
        {"question": "dresser", "options": "A. nail\nB. pin", "answer": "A. nail"},
        {"question": "pen", "options": "A. a b c d e f\nB. q", "answer": "A. a b c d e f"},
    ],
    # The first three choices differ in the last token only: the harness forwards them once.
    "openbookqa": [
        {"question": "Cats eat ", "options": "A. rat\nB. ram\nC. rap\nD. mice", "answer": "D. mice"},
        {"question": "Grass is ", "options": "A. red\nB. rex\nC. rev\nD. green, of course", "answer": "B. rex"},
        {"question": "Water is ", "options": "A. wet\nB. wit\nC. dry\nD. dr", "answer": "C. dry"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with params.yaml and both tasks' questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shutil.copytree(SOURCE / "stages/tasks", tmp_path / "stages/tasks")
    for folder in ("data/model/smollm2", "data/patch/smollm2-streamline-7-ghost"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/model/smollm2" / checkpoint.SOURCE).write_text('{"kind": "gguf", "files": {}}', encoding="utf-8")
    (tmp_path / "params.yaml").write_text(
        (SOURCE / "profiles/embedded.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    for name, lines in LINES.items():
        asset = assets.ALL_ASSETS[name]
        folder = tmp_path / LOCAL / asset.hub_id
        (folder / asset.config).mkdir(parents=True)
        content = "\n".join(json.dumps(line) for line in lines).encode()
        (folder / asset.config / f"{asset.split}.parquet").write_bytes(
            assets.parquet(assets.convert(content, asset, name))
        )
        (folder / "README.md").write_text(assets.card(asset), encoding="utf-8")
        prepare(monkeypatch, name)
    return tmp_path


def prepare(monkeypatch, name: str) -> None:
    """Run the stage `task` for one task."""
    monkeypatch.setattr(sys, "argv", ["task", "--task", name])
    task.main()


@pytest.fixture
def run_stage(monkeypatch, model, tokenizer):
    """Call the stage's main with a command line; the model and the calibration come from memory."""

    def call(*arguments: str) -> None:
        made_with = {
            "calibration": "wiki:1x2:seed0:01234567",
            "boundary": "run",
            "options": "{}",
            "operator_dtype": "model",
        }
        made_with = made_with if "--n" in arguments else dict.fromkeys(made_with)
        monkeypatch.setattr(sys, "argv", ["eval_acc", *arguments])
        monkeypatch.setattr(patched, "load_row", lambda *_: patched.LoadedRow(model, made_with))
        monkeypatch.setattr(checkpoint, "load_tokenizer", lambda *_: tokenizer)
        eval_acc.main()

    return call


@torch.no_grad()
def naive_loglikelihood(model, tokenizer, context: str, continuation: str) -> float:
    ids = torch.tensor([tokenizer.encode(context + continuation)])
    start = len(tokenizer.encode(context))
    logprobs = model(ids).logits[0].double().log_softmax(-1)
    return sum(logprobs[position - 1, ids[0, position]].item() for position in range(start, ids.shape[1]))


def prompts(name: str, line: dict[str, str]) -> tuple[str, list[str], int]:
    """Context, choices and the right one, written down independently of the task files."""
    labels = "AB" if name == "piqa" else "ABCD"
    choices = [text.split(". ", 1)[1] for text in line["options"].split("\n")]
    context = f"Question: {line['question']}\nAnswer:" if name == "piqa" else line["question"].rstrip()
    return context, choices, labels.index(line["answer"][0])


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", sorted(LINES))
@pytest.mark.usefixtures("project")
def test_answers_agree_with_one_forward_pass_per_choice(name, batch_size, model, tokenizer, monkeypatch):
    reported = {}
    evaluate = lm_eval.evaluator.evaluate

    def spy(*arguments, **named):
        found = evaluate(*arguments, **named)
        reported.update(found["results"][name])
        return found

    monkeypatch.setattr(lm_eval.evaluator, "evaluate", spy)
    tasks, _ = prepared(name)
    frame = eval_acc.answers(tasks, model, tokenizer, None, batch_size, Path("answers"))
    assert (frame["member"] == name).all()
    assert frame["question"].tolist() == list(range(len(LINES[name])))
    for line, found in zip(LINES[name], frame.itertuples(), strict=True):
        context, choices, right = prompts(name, line)
        expected = [naive_loglikelihood(model, tokenizer, context, f" {choice}") for choice in choices]
        assert found.loglikelihoods == pytest.approx(expected, abs=1e-4)
        assert found.answer == right
        assert found.correct == (max(expected) == expected[right])
        normed = [value / len(choice) for value, choice in zip(expected, choices, strict=True)]
        assert found.correct_norm == (max(normed) == normed[right])
    assert frame["correct"].mean() == reported["acc,none"]
    assert frame["correct_norm"].mean() == reported["acc_norm,none"]
    assert (frame["correct"] != frame["correct_norm"]).any(), "the questions do not tell the two metrics apart"


@pytest.mark.parametrize("name", sorted(LINES))
def test_answers_of_a_model_partly_on_disk(name, project, model, tokenizer, monkeypatch):
    folder = project / "data/model/smollm2"
    model.save_pretrained(folder)
    (folder / checkpoint.SOURCE).write_text('{"kind": "gguf", "files": {}}', encoding="utf-8")
    places = {"embed_tokens": "disk", "layers.0": "cpu", "layers.1": "disk", "layers.2": "cpu", "norm": "disk"}
    devices = {f"model.{module}": place for module, place in places.items()}
    monkeypatch.setenv("GHOSTED_DEVICE_MAP", json.dumps({**devices, "lm_head": "disk"}))
    spread = checkpoint.load_model("smollm2", "float32", False)
    assert spread.device.type == "meta"
    tasks, _ = prepared(name)
    found, expected = (
        eval_acc.answers(tasks, of, tokenizer, None, 4, Path(f"answers-{number}"))
        for number, of in enumerate((spread, model))
    )
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_limit_takes_the_first_questions(project, run_stage):
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(re.sub(r"limit: \d+", "limit: 2", text), encoding="utf-8")
    run_stage("--model", "smollm2", "--task", "piqa")
    run_stage("--model", "smollm2", "--criterion", "streamline", "--n", "7", "--operator", "ghost", "--task", "piqa")
    dense = read_table(Path("data/eval_acc/smollm2-dense-piqa.parquet"), EVAL_ACC)
    recovered = read_table(Path("data/eval_acc/smollm2-streamline-7-ghost-piqa.parquet"), EVAL_ACC)
    assert dense["question"].tolist() == [0, 1]
    assert dense["answer"].tolist() == [1, 0]
    columns = {"task": "piqa", "member": "piqa", "version": "1.0", "limit": 2, "available": 5}
    columns |= {"source": "data/assets/tasks/baber/piqa default validation"}
    columns |= {"num_fewshot": 0, "batch_size": 16, "dtype": "float32", "model": "smollm2"}
    for name, value in columns.items():
        assert (dense[name] == value).all()
        assert (recovered[name] == value).all()
    assert dense["calibration"].isna().all()
    assert (recovered["calibration"] == "wiki:1x2:seed0:01234567").all()
    assert recovered.iloc[0][["criterion", "n", "operator"]].tolist() == ["streamline", 7, "ghost"]
    pd.testing.assert_series_equal(dense["loglikelihoods"], recovered["loglikelihoods"])


def test_no_limit_takes_all(project, run_stage):
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(re.sub(r"limit: \d+", "limit: null", text), encoding="utf-8")
    run_stage("--model", "smollm2", "--task", "openbookqa")
    frame = read_table(Path("data/eval_acc/smollm2-dense-openbookqa.parquet"), EVAL_ACC)
    assert len(frame) == frame["available"].iloc[0] == 3
    assert frame["limit"].isna().all()
    assert frame["source"].iloc[0] == "data/assets/tasks/allenai/openbookqa main test"


@pytest.mark.usefixtures("project")
def test_not_finite_stops_with_the_question(model, tokenizer):
    broken = LlamaForCausalLM(model.config).eval()
    broken.load_state_dict(model.state_dict())
    # The first question has no such letter, the second has.
    with torch.no_grad():
        broken.model.embed_tokens.weight[tokenizer.encode("l")] = torch.nan
    with pytest.raises(UserError, match="task piqa, question 1: a choice's log-likelihood is nan"):
        eval_acc.answers(prepared("piqa")[0], broken, tokenizer, None, 2, Path("answers"))


def test_answer_outside_the_choices_is_an_error(project, model, tokenizer):
    file = project / task_folder("piqa") / "questions/data/assets/tasks/baber/piqa/default/validation.parquet"
    frame = pd.read_parquet(file)
    frame.assign(label=[1, 0, -1, 0, 1]).to_parquet(file)
    with pytest.raises(UserError, match=r"question 2: the right answer is -1, which is none of its 2 choices"):
        eval_acc.answers(prepared("piqa")[0], model, tokenizer, None, 2, Path("answers"))


NO_NETWORK = """
import socket

def refuse(*arguments, **_):
    open("network", "a").write(f"{arguments}\\n")
    raise OSError("no network in this test")

socket.getaddrinfo = refuse
socket.socket.connect = refuse
"""


def test_process_is_quiet_and_stays_inside_the_project(project, model, tokenizer):
    """A whole process: nothing on stderr, no network, an empty home stays empty."""
    folder = project / checkpoint.model_folder("smollm2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (project / "site").mkdir()
    (project / "site/sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    for name in ("home", "temporary"):
        (project / name).mkdir()
    kept = {name: value for name, value in os.environ.items() if not re.match(r"HF_|XDG_|TRANSFORMERS_|TQDM", name)}
    paths = {"PYTHONPATH": f"{project / 'site'}:{SOURCE}", "HOME": str(project / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "stages.eval_acc", "--model", "smollm2", "--task", "piqa"],
        env={**kept, **paths, "TMPDIR": str(project / "temporary")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(read_table(Path("data/eval_acc/smollm2-dense-piqa.parquet"), EVAL_ACC)) == 5
    assert not (project / "network").exists()
    assert not list((project / "home").iterdir())
    assert not list((project / "temporary").iterdir())
    assert {path.name for path in project.iterdir()} == {
        *("params.yaml", "stages", "data", "site", "home", "temporary")
    }
    assert not list((project / "data/.cache/answers").iterdir())


def test_a_killed_evaluation_ends_with_the_same_answers(project, run_stage, monkeypatch):
    """Killed in the middle, started again: finished batches are not repeated, and no bit differs."""
    forwards = []
    forward = LlamaForCausalLM.forward

    def counted(self, *arguments, **named):
        forwards.append(1)
        if len(forwards) == stop_at:
            raise KeyboardInterrupt
        return forward(self, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("batch_size: 16", "batch_size: 2"), encoding="utf-8")
    arguments, file = ("--model", "smollm2", "--task", "piqa"), Path("data/eval_acc/smollm2-dense-piqa.parquet")
    stop_at = 0
    run_stage(*arguments)
    whole, expected = len(forwards), file.read_bytes()
    assert whole == 5
    file.unlink()
    forwards.clear()
    stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        run_stage(*arguments)
    assert not file.exists()
    stop_at = 0
    run_stage(*arguments)
    assert file.read_bytes() == expected
    assert len(forwards) == whole + 1
    assert not list(answers.ANSWERS.iterdir())


@pytest.mark.parametrize("changed", ["model", "adapter", "dtype", "task"])
def test_a_killed_evaluation_leaves_no_answers_to_another(project, run_stage, monkeypatch, changed):
    """Whatever the answers depend on: changed between the kill and the next start, all questions are asked."""
    calls, answered = [], []
    forward, take = HFLM._model_call, answers.Kept.add_partial

    def counted(self, *inputs, **named):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(1)
        return forward(self, *inputs, **named)

    def noted(self, kind, texts, answer):
        answered.append(texts)
        take(self, kind, texts, answer)

    monkeypatch.setattr(HFLM, "_model_call", counted)
    monkeypatch.setattr(answers.Kept, "add_partial", noted)
    adapter = project / "data/patch/smollm2-streamline-7-ghost/adapter.json"
    adapter.write_text("{}", encoding="utf-8")
    settings = (project / "params.yaml").read_text(encoding="utf-8").replace("batch_size: 16", "batch_size: 2")
    (project / "params.yaml").write_text(settings, encoding="utf-8")
    row = ("--model", "smollm2", "--criterion", "streamline", "--n", "7", "--operator", "ghost")
    stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_stage(*row, "--task", "piqa")
    kept = set(answers.ANSWERS.rglob("*.json"))
    assert len(kept) == 2
    answered.clear()
    stop_at = -1
    task_name = "piqa"
    if changed == "model":
        (project / "data/model/smollm2" / checkpoint.SOURCE).write_text('{"kind": "path"}', encoding="utf-8")
    elif changed == "adapter":
        adapter.write_text('{"another": 1}', encoding="utf-8")
    elif changed == "dtype":
        (project / "params.yaml").write_text(settings.replace("dtype: float32", "dtype: bfloat16"), encoding="utf-8")
    else:
        task_name = "openbookqa"
    run_stage(*row, "--task", task_name)
    assert len(answered) == {"piqa": 5 * 2, "openbookqa": 3 * 4}[task_name]
    assert kept <= set(answers.ANSWERS.rglob("*.json"))


@pytest.mark.usefixtures("project")
def test_log_probabilities_of_a_half_precision_model_are_not_rounded(model, tokenizer):
    half = LlamaForCausalLM(model.config).eval()
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    found = eval_acc.answers(prepared("piqa")[0], half, tokenizer, None, 1, Path("answers"))
    for line, values in zip(LINES["piqa"], found["loglikelihoods"], strict=True):
        context, choices, _ = prompts("piqa", line)
        expected = [naive_loglikelihood(half, tokenizer, context, f" {choice}") for choice in choices]
        assert values == pytest.approx(expected, abs=1e-4)
