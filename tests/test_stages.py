"""Single stages in this process: a whole run without DVC, and what a mistake in their input prints."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
from gguf import GGUFWriter
from pipeline import (
    CHECKPOINT,
    ROOT,
    Project,
    arguments,
    outputs_of,
    table,
    write_checkpoint,
    write_inputs,
)

import stages.base.checkpoint
import stages.base.device
import stages.operators.ghost
import stages.recovered.patched
from stages.project.errors import UserError
from stages.project.keys import Row

PROGRESS = re.compile(r"[^\r\n]*\d+%\|[^\r\n]*|\r")
SELECTION = Row("tiny", "streamline", 2)
GHOST = Row("tiny", "streamline", 2, "ghost")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_model, tiny_tokenizer) -> Project:
    """A project in which every stage ran once in this process, without DVC, up to the report; no tasks."""
    project = Project(tmp_path_factory.mktemp("prepared") / "project")
    project.folder.mkdir()
    write_inputs(project, tiny_model(), tiny_tokenizer)
    project.set(grid__criteria=["streamline", "shortgpt"], grid__operators=["none", "ghost"], grid__tasks=[])
    project.stage("grid")
    project.stage("assets")
    for stage in ("model", "text", "score", "eval_ppl"):
        project.stage(stage, "--model", "tiny")
    for criterion in ("streamline", "shortgpt"):
        for stage in ("select", "collect"):
            project.stage(stage, *arguments(Row("tiny", criterion, 2))[:-2])
        for operator in ("none", "ghost"):
            for stage in ("solve", "patch", "eval_ppl"):
                project.stage(stage, *arguments(Row("tiny", criterion, 2, operator)))
    project.set(
        grid__criteria=["streamline", "shortgpt"],
        grid__operators=["none", "ghost"],
        grid__tasks=[],
        cost__rows=["tiny-shortgpt-2-ghost"],
    )
    project.stage("cost", "--row", "tiny-shortgpt-2-ghost")
    project.stage("report")
    return project


def test_report_writes_what_dvc_yaml_declares(prepared):
    assert sorted(prepared.digests("reports")) == sorted(outputs_of("report"))


def test_nothing_unfinished_is_left(prepared):
    assert prepared.partial() == []


@pytest.mark.parametrize("criterion", ["streamline", "shortgpt"])
def test_operators_follow_from_the_sums(prepared, criterion):
    key, identity = f"tiny-{criterion}-2", torch.eye(16, dtype=torch.float64)
    removed = sorted(table(prepared, Path(f"data/select/{key}.parquet"))["layer"])
    adjacent = removed[1] == removed[0] + 1
    names = [f"{removed[0]}-{removed[1] + 1}"] if adjacent else [f"{layer}-{layer + 1}" for layer in removed]
    sums = safetensors.torch.load_file(prepared.folder / f"data/collect/{key}.safetensors")
    operators = safetensors.torch.load_file(prepared.folder / f"data/solve/{key}-ghost.safetensors")
    assert sorted(operators) == names
    for name, operator in operators.items():
        gram, cross = (sums[f"{name}.0.{part}"] + sums[f"{name}.1.{part}"] for part in ("gram", "cross"))
        torch.testing.assert_close(operator, identity + torch.linalg.solve(gram + 1e-6 * identity, cross - gram))
    assert safetensors.torch.load_file(prepared.folder / f"data/solve/{key}-none.safetensors") == {}


@pytest.fixture
def project(prepared, tmp_path) -> Project:
    return prepared.copy(tmp_path / "project")


OPERATORS = ("data/solve/tiny-streamline-2-ghost.safetensors", "data/solve/tiny-streamline-2-ghost.parquet")


def test_solve_moves_the_sums_to_the_forward_device(project, monkeypatch):
    seen = []

    def solve(sums, **_):
        seen.extend(tensor.device.type for tensor in (sums.gram, sums.cross, sums.ratio, sums.tokens))
        raise UserError("seen enough")

    # A device of shapes alone: enough to see what arrives there.
    monkeypatch.setattr(stages.base.device, "forward_device", lambda: torch.device("meta"))
    monkeypatch.setattr(stages.operators.ghost, "solve", solve)
    with pytest.raises(SystemExit):
        project.stage("solve", *arguments(GHOST))
    assert seen == ["meta"] * 4


def test_solve_on_a_device_without_float64_takes_the_host(project, monkeypatch, refuse_float64):
    before = project.digests("data/solve")
    for name in OPERATORS:
        (project.folder / name).unlink()
    refuse_float64("meta")
    monkeypatch.setattr(stages.base.device, "forward_device", lambda: torch.device("meta"))
    project.stage("solve", *arguments(GHOST))
    assert project.digests("data/solve") == before


def test_a_device_map_changes_no_artifact(project, monkeypatch):
    folders = [f"data/{name}" for name in ("score", "collect", "solve", "patch", "eval_ppl")]
    before = project.digests(*folders)
    for name in folders:
        shutil.rmtree(project.folder / name)
    names = ["model.embed_tokens", *(f"model.layers.{index}" for index in range(6)), "model.norm", "lm_head"]
    on_disk = {"model.embed_tokens", "model.layers.1", "model.layers.4", "model.norm", "lm_head"}
    monkeypatch.setenv("GHOSTED_DEVICE_MAP", json.dumps({name: "disk" if name in on_disk else "cpu" for name in names}))
    places = []
    load_model = stages.base.checkpoint.load_model

    def load(*given):
        model = load_model(*given)
        places.append({parameter.device.type for parameter in model.parameters()})
        return model

    monkeypatch.setattr(stages.base.checkpoint, "load_model", load)
    monkeypatch.setattr(stages.recovered.patched, "load_model", load)
    for stage in ("score", "eval_ppl"):
        project.stage(stage, "--model", "tiny")
    for criterion in ("streamline", "shortgpt"):
        project.stage("collect", *arguments(Row("tiny", criterion, 2))[:-2])
        for operator in ("none", "ghost"):
            for stage in ("solve", "patch", "eval_ppl"):
                project.stage(stage, *arguments(Row("tiny", criterion, 2, operator)))
    assert places == [{"cpu", "meta"}] * 12
    assert project.digests(*folders) == before


def test_the_operators_dtype_is_in_the_adapter_and_in_the_tables(project):
    def evaluate(row: Row) -> tuple[Any, pd.DataFrame]:
        project.stage("collect", *arguments(row)[:-2])
        for stage in ("solve", "patch", "eval_ppl"):
            project.stage(stage, *arguments(row))
        adapter = json.loads((project.folder / f"data/patch/{row.key}/adapter.json").read_text())
        return adapter["operator_dtype"], table(project, Path(f"data/eval_ppl/{row.key}.parquet"))

    none, found = Row("tiny", "streamline", 2, "none"), {}
    half = {"path": str(CHECKPOINT), "dtype": "bfloat16"}
    for operator_dtype in ("model", "float32"):
        project.set(models={"tiny": half}, grid__operators=["none", "ghost"], patch__operator_dtype=operator_dtype)
        said, found[operator_dtype] = evaluate(GHOST)
        assert said == operator_dtype
        assert (found[operator_dtype]["operator_dtype"] == operator_dtype).all()
        assert (found[operator_dtype]["dtype"] == "bfloat16").all()
        said, pruned = evaluate(none)
        assert said is None
        assert pruned["operator_dtype"].isna().all()
    assert table(project, Path("data/eval_ppl/tiny-dense.parquet"))["operator_dtype"].isna().all()
    for column in ("parameters", "operator_parameters", "tokens"):
        assert (found["model"][column] == found["float32"][column]).all()
    assert (found["model"]["operator_parameters"] == 16 * 16).all()
    assert (found["model"]["nll"] != found["float32"]["nll"]).any()


@pytest.fixture
def fails(project, capfd):
    """Run a stage that must end with one message and exit code 2, and leave everything as it was; the message."""

    def call(stage: str, *given: str) -> str:
        before = artifacts(project)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended_with:
            project.stage(stage, *given)
        printed = capfd.readouterr()
        assert ended_with.value.code == 2
        assert printed.out == ""
        # Progress bars, which a process without a terminal has not, are on in this one if tqdm was imported before.
        message = PROGRESS.sub("", printed.err).lstrip()
        assert message.startswith("error: "), printed.err
        assert "Traceback" not in printed.err
        assert artifacts(project) == before
        assert project.partial() == []
        return message

    return call


def artifacts(project: Project) -> dict[str, str]:
    """Every file of the project and its digest, but for what the stages only remember to save time."""
    return {file: digest for file, digest in project.digests(".").items() if not file.startswith("data/.cache/")}


def set_model(project: Project, **source: str) -> None:
    project.set(models={"tiny": source})


def record(project: Project) -> None:
    """Have the stage `model` see the checkpoint as it is now."""
    project.stage("model", "--model", "tiny")


def test_a_model_path_that_does_not_exist(project, fails):
    set_model(project, path="nowhere")
    assert "models.tiny.path = nowhere: no such folder" in fails("model", "--model", "tiny")


def test_a_model_path_without_a_checkpoint(project, fails):
    (project.folder / "empty").mkdir()
    set_model(project, path="empty")
    assert "models.tiny.path = empty: not a checkpoint: needs config.json" in fails("model", "--model", "tiny")


@pytest.mark.parametrize("kept", [0, 3, 5000], ids=["empty", "header", "weights"])
def test_a_checkpoint_with_truncated_weights(project, fails, kept):
    weights = project.folder / CHECKPOINT / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    record(project)
    message = fails("score", "--model", "tiny")
    assert str(CHECKPOINT) in message
    assert "cannot be" in message


def test_a_checkpoint_that_changed_after_it_was_recorded(project, fails):
    weights = project.folder / CHECKPOINT / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    message = fails("score", "--model", "tiny")
    assert f"{CHECKPOINT / 'model.safetensors'}: changed since it was recorded" in message
    assert "dvc repro -f model@tiny" in message


def test_an_unsupported_architecture(project, fails):
    config = project.folder / CHECKPOINT / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "gpt2"}))
    record(project)
    message = fails("score", "--model", "tiny")
    assert "models.tiny: model_type 'gpt2' is not supported; supported are" in message
    assert "llama" in message


def gguf_bytes(folder: Path) -> bytes:
    """A well-formed GGUF file of one tensor."""
    writer = GGUFWriter(folder / "whole.gguf", "llama")
    writer.add_tensor("token_embd.weight", torch.ones(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "whole.gguf").read_bytes()


@pytest.mark.parametrize("damage", ["empty", "text", "garbage", "in the header", "in the weights", "missing"])
def test_a_gguf_file_that_is_none(project, fails, tmp_path, damage):
    whole = gguf_bytes(tmp_path)
    content = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "garbage": b"GGUF" + hashlib.sha256(b"garbage").digest() * 8,
        "in the header": whole[:40],
        "in the weights": whole[:-1000],
    }
    if damage in content:
        (project.folder / "model.gguf").write_bytes(content[damage])
    set_model(project, gguf="model.gguf")
    assert "params.yaml: models.tiny.gguf = model.gguf: " in fails("model", "--model", "tiny")


@pytest.mark.parametrize(("criterion", "most"), [("streamline", 4), ("shortgpt", 5)])
def test_more_layers_to_remove_than_the_model_can_lose(project, fails, monkeypatch, criterion, most):
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded before n was checked")

    monkeypatch.setattr(stages.base.checkpoint, "load_model", load)
    project.set(grid__criteria=[criterion], grid__n=[2, most + 1])
    message = fails("score", "--model", "tiny")
    assert f"params.yaml: grid.n: {most + 1} layers cannot be removed by {criterion}" in message
    assert f"n can be 1 to {most}" in message


@pytest.mark.parametrize("corpus", ["notes", "web"])
def test_a_corpus_shorter_than_one_window(project, fails, corpus):
    (project.folder / f"data/local/{corpus}.txt").write_text("Too short.", encoding="utf-8")
    message = fails("text", "--model", "tiny")
    assert f"corpus {corpus} (text." in message
    assert "fewer than one window of 32" in message


def test_fewer_calibration_tokens_than_channels(project, fails):
    project.set(
        text__calibration={"corpus": "notes", "sequences": 1, "selection_sequences": 1, "seqlen": 12, "seed": 0}
    )
    project.stage("text", "--model", "tiny")
    project.stage("score", "--model", "tiny")
    project.stage("select", *arguments(SELECTION)[:-2])
    project.stage("collect", *arguments(SELECTION)[:-2])
    message = fails("solve", *arguments(GHOST))
    assert "12 calibration tokens for 16 channels" in message
    assert "text.calibration.sequences" in message
    assert "solve.ghost.ridge" in message


def test_weights_that_are_not_finite(project, fails, tiny_model, tiny_tokenizer):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[0, 0] = float("nan")
    write_checkpoint(project.folder / CHECKPOINT, model, tiny_tokenizer)
    record(project)
    assert "output of model.layers.3: NaN or infinity" in fails("score", "--model", "tiny")


@pytest.mark.parametrize(
    ("artifact", "stage", "given"),
    [
        ("data/text/tiny/calibration.parquet", "collect", arguments(SELECTION)[:-2]),
        ("data/score/tiny.parquet", "select", arguments(SELECTION)[:-2]),
        ("data/collect/tiny-streamline-2.safetensors", "solve", arguments(GHOST)),
        ("data/solve/tiny-streamline-2-ghost.safetensors", "patch", arguments(GHOST)),
        ("data/solve/tiny-streamline-2-ghost.parquet", "report", []),
        ("data/patch/tiny-streamline-2-ghost/operators.safetensors", "eval_ppl", arguments(GHOST)),
        ("data/eval_ppl/tiny-dense.parquet", "report", []),
    ],
)
@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_a_damaged_artifact(project, fails, artifact, stage, given, damage):
    file = project.folder / artifact
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    message = fails(stage, *given)
    assert f"error: {artifact}: cannot be read" in message
    assert "delete it and run `dvc repro`" in message


def test_a_misspelt_key(project, fails):
    project.set(text__calibration__seqlne=32)
    assert "text.calibration.seqlne: unknown key (did you mean 'seqlen'?)" in fails("grid")


@pytest.mark.slow
def test_a_mistake_is_all_that_a_process_prints(project, tiny_model, tiny_tokenizer):
    model = tiny_model()
    model.model.layers[3].mlp.down_proj.weight.data[0, 0] = float("inf")
    write_checkpoint(project.folder / CHECKPOINT, model, tiny_tokenizer)
    record(project)
    done = project.run("python", "-m", "stages.score", "--model", "tiny", PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert re.fullmatch(r"error: output of model\.layers\.3: NaN or infinity .+\n", done.stdout), done.stdout


def test_export_of_a_row(project, capfd):
    project.stage("export", *arguments(GHOST))
    folder = project.folder / f"data/export/{GHOST.key}"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("README.md", "boundary_operator.py", "config.json", "fingerprints.json", "generation_config.json"),
        *("model.safetensors", "modeling_ghosted.py", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert f"{GHOST.key}: data/export/{GHOST.key}" in capfd.readouterr().out
    card = (folder / "README.md").read_text()
    report = (project.folder / "reports/report.md").read_text()
    of_row = [line for line in report.splitlines() if line.startswith("| streamline") and "ghost" in line]
    numbers = of_row[0].replace("*", "").split(" | ")
    shown = next(line for line in card.splitlines() if line.startswith("| streamline | ghost")).replace("*", "")
    assert [cell.strip() for cell in shown.split(" | ")] == [cell.strip() for cell in numbers]
    recipe = json.loads(card.split("```json")[1].split("```")[0])
    assert recipe["removed_layers"] == sorted(table(project, Path("data/select/tiny-streamline-2.parquet"))["layer"])
    assert recipe["calibration"]["tokens"] == 8 * 32
    assert {name: recipe["calibration"][name] for name in ("corpus", "sequences", "seqlen", "seed")} == {
        "corpus": "notes",
        "sequences": 8,
        "seqlen": 32,
        "seed": 0,
    }
    assert "trust_remote_code=True" in card
    assert project.partial() == []


def test_export_of_rows_that_need_no_operator(project):
    for row in (Row("tiny"), Row("tiny", "streamline", 2, "none")):
        project.stage("export", *arguments(row))
        folder = project.folder / f"data/export/{row.key}"
        assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
        assert not list(folder.glob("*.py"))
        card = (folder / "README.md").read_text()
        assert "trust_remote_code" not in card
        assert "| dense " in card
        assert ("It needs no operator" in card) == (not row.dense)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row("tiny", "streamline", 3, "ghost"), "'tiny-streamline-3-ghost' is unknown"),
        (Row("tiny", "shortgpt", 2, "ghost"), "data/patch/tiny-shortgpt-2-ghost/adapter.json: not found"),
    ],
)
def test_export_of_what_is_not_there(row, message, project, fails):
    shutil.rmtree(project.folder / "data/patch/tiny-shortgpt-2-ghost")
    assert message in fails("export", *arguments(row))
    assert not (project.folder / "data/export").exists()


def test_export_after_another_dtype(project, fails):
    project.set(models={"tiny": {"path": str(CHECKPOINT), "dtype": "bfloat16"}})
    assert "dtype was float32, is now bfloat16; run `dvc repro`" in fails("export", *arguments(GHOST))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solve__ghost": {"ridge": 0.1}}, "options was {'ridge': 1e-06}, is now {'ridge': 0.1}"),
        ({"patch__operator_dtype": "float32"}, "operator_dtype was model, is now float32"),
        ({"text__calibration__seed": 1}, "'seed': 0}, is now"),
        ({"collect__boundary": "layer"}, "boundary was run, is now layer"),
        (
            {"select__streamline": {"protect_first": 0, "protect_last": 1}},
            r"made with {'protect_first': 1, 'protect_last': 1}, params.yaml says {'protect_first': 0, ",
        ),
        (
            {"models": {"tiny": {"path": "elsewhere", "dtype": "float32"}}},
            "data/model/tiny: made with {'path': 'checkpoint'}, params.yaml says {'path': 'elsewhere'}",
        ),
    ],
    ids=str,
)
def test_export_of_what_params_yaml_no_longer_says(changes, message, project, fails):
    project.set(**changes)
    assert message in fails("export", *arguments(GHOST))


def test_export_onto_another_base(project, fails):
    weights = project.folder / CHECKPOINT / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    assert "model.safetensors: changed since it was recorded" in fails("export", *arguments(GHOST))
    record(project)
    assert "base was {'files'" in fails("export", *arguments(GHOST))


def test_export_beside_what_was_evaluated(project):
    folder = project.folder / "data/eval_ppl"
    (folder / "tiny-streamline-2-none.parquet").unlink()
    card = project.folder / f"data/export/{GHOST.key}/README.md"
    project.stage("export", *arguments(GHOST))
    assert "| streamline | ghost" in card.read_text()
    assert "| streamline | none" not in card.read_text()
    (folder / "tiny-dense.parquet").unlink()
    project.stage("export", *arguments(GHOST))
    assert "This row and the dense one were not both evaluated." in card.read_text()


def test_export_where_nothing_can_be_written(project, fails):
    (project.folder / "data/export").write_text("a file")
    assert f"data/export/{GHOST.key}: cannot be written" in fails("export", *arguments(GHOST))
