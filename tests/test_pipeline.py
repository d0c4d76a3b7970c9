"""The pipeline as DVC runs it: what dvc.yaml says, a whole run on a tiny model, what an edit or a kill reruns."""

import hashlib
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import yaml
from gguf import GGUFWriter
from pipeline import (
    CHECKPOINT,
    ROOT,
    Project,
    Repro,
    alive,
    imported_modules,
    new_project,
    read_repro,
    wait_until,
    write_checkpoint,
    write_inputs,
)

import stages.checkpoint
from stages import paths
from stages.keys import Row

PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
STAGES: dict[str, Any] = PIPELINE["stages"]
PROGRESS = re.compile(r"[^\r\n]*\d+%\|[^\r\n]*|\r")
ITEM = re.compile(r"\$\{item\.(\w+)\}")
DYNAMIC = {"select": ("criteria", "criterion"), "solve": ("operators", "operator")}
"""Stages that import a module named in params.yaml: the package that it is in, the matrix axis that names it."""

SELECTION = Row("tiny", "streamline", 2)
GHOST = Row("tiny", "streamline", 2, "ghost")
ROWS = [Row("tiny"), GHOST]
EVERYTHING = [
    *("grid", "assets", "model@tiny", "text@tiny", "task@quiz", "score@tiny"),
    *("select@tiny-streamline-2", "collect@tiny-streamline-2"),
    *("solve@tiny-streamline-2-ghost", "patch@tiny-streamline-2-ghost"),
    *("eval_ppl_dense@tiny", "eval_ppl@tiny-streamline-2-ghost"),
    *("eval_acc_dense@tiny-quiz", "eval_acc@tiny-streamline-2-ghost-quiz"),
    "report",
]
REPORTED = ("score", "select", "solve", "eval_ppl", "eval_acc")
"""Folders of `data` that the report depends on as a whole."""
RESULTS = (*(f"data/{name}" for name in (*REPORTED, "text", "task", "collect", "patch")), "reports")


# dvc.yaml


def module_of(stage: str) -> str:
    """The module that a stage runs."""
    return re.match(r"python -m stages\.(\w+)", STAGES[stage]["cmd"])[1]


def outputs_of(stage: str) -> list[str]:
    """The paths under `outs`, `plots` and `metrics`."""
    listed = [*STAGES[stage].get("outs", []), *STAGES[stage].get("plots", []), *STAGES[stage].get("metrics", [])]
    return [next(iter(out)) if isinstance(out, dict) else out for out in listed]


def code_of(module: str, root: Path = ROOT) -> set[str]:
    """What must be among the deps of a stage that runs `module`: every file of the package that it imports.

    A criterion or an operator is a dependency of its own instances alone; what any of them imports besides, of all.
    """
    found = imported_modules(root / "stages" / f"{module}.py", root)
    if module in DYNAMIC:
        package, axis = DYNAMIC[module]
        for file in sorted((root / "stages" / package).glob("*.py")):
            found |= imported_modules(file, root) - {file.relative_to(root).as_posix()}
        found |= {f"stages/{package}/__init__.py", f"stages/{package}/${{item.{axis}}}.py"}
    found |= {"assets": {"stages/assets.txt"}, "task": {"stages/tasks"}}.get(module, set())
    return found


def dependency_faults(declared: list[str], needed: set[str]) -> list[str]:
    """What is wrong with the code among a stage's deps."""
    code = [dep for dep in declared if dep.startswith("stages/")]
    return [
        *(f"lacks {name}, which it imports" for name in sorted(needed - set(code))),
        *(f"has {name}, which it does not import" for name in sorted(set(code) - needed)),
        *(f"has {name} twice" for name in sorted({name for name in code if code.count(name) > 1})),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_stage_depends_on_the_code_it_imports_and_on_no_other(stage):
    faults = dependency_faults(STAGES[stage]["deps"], code_of(module_of(stage)))
    assert not faults, f"dvc.yaml: {stage}.deps " + "; ".join(faults)


def test_imports_are_found_wherever_they_stand(tmp_path):
    files = {
        "__init__.py": "",
        "a.py": "import os\nimport stages.b\ndef f():\n    from stages import c\n",
        "b.py": "from stages.package.inner import x, y\n",
        "c.py": "from . import d\nfrom .package import e\n",
        "d.py": "",
        "unused.py": "import stages.a\n",
        "package/__init__.py": "from stages import f\n",
        "package/inner.py": "if True:\n    import stages.package.deep as deep\n",
        "package/deep.py": "",
        "package/e.py": "",
        "f.py": "import json\n",
    }
    for name, text in files.items():
        file = tmp_path / "stages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    found = imported_modules(tmp_path / "stages/a.py", tmp_path)
    assert found == {f"stages/{name}" for name in files if name != "unused.py"}


def test_faults_of_a_wrong_list_are_named():
    faults = dependency_faults(["data/x", "stages/a.py", "stages/c.py", "stages/c.py"], {"stages/a.py", "stages/b.py"})
    assert faults == [
        "lacks stages/b.py, which it imports",
        "has stages/c.py, which it does not import",
        "has stages/c.py twice",
    ]


def declared_outputs(row: Row, task: str) -> dict[str, list[Path]]:
    """What stages/paths.py says that each stage writes."""
    dense = Row(row.model)
    return {
        "grid": [paths.GRID],
        "assets": [paths.ASSETS],
        "model": [paths.model_folder(row.model)],
        "text": [paths.calibration_file(row.model).parent],
        "task": [paths.task_folder(task)],
        "score": [paths.score_file(row.model)],
        "select": [paths.select_file(row)],
        "collect": [paths.collect_file(row)],
        "solve": [paths.solve_file(row), paths.diagnostics_file(row)],
        "patch": [paths.patch_folder(row)],
        "eval_ppl_dense": [paths.perplexity_file(dense)],
        "eval_ppl": [paths.perplexity_file(row)],
        "eval_acc_dense": [paths.accuracy_file(dense, task)],
        "eval_acc": [paths.accuracy_file(row, task)],
    }


ITEMS = {"model": "m-1", "criterion": "crit", "n": "7", "operator": "op", "task": "t-2"}


def filled(text: str) -> str:
    """A text of dvc.yaml for one instance of its stage."""
    return ITEM.sub(lambda match: ITEMS[match[1]], text)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "report"])
def test_stage_writes_where_paths_says(stage):
    expected = declared_outputs(Row("m-1", "crit", 7, "op"), "t-2")[stage]
    assert [filled(out) for out in outputs_of(stage)] == [path.as_posix() for path in expected]


@pytest.mark.parametrize("stage", STAGES)
def test_instance_is_named_on_the_command_line(stage):
    # An axis that is not on the command line, or an argument that is no axis, would compute one instance several times.
    axes = STAGES[stage].get("matrix", {})
    assert STAGES[stage]["cmd"] == " ".join(
        [f"python -m stages.{module_of(stage)}", *(f"--{axis} ${{item.{axis}}}" for axis in axes)]
    )


@pytest.mark.parametrize("stage", STAGES)
def test_every_artifact_that_a_stage_reads_is_written_by_another(stage):
    written = [Path(filled(out)) for other in STAGES for out in outputs_of(other) if other != stage]
    # A corpus of the user's own has no stage that writes it.
    read = [Path(filled(dep)) for dep in STAGES[stage]["deps"] if dep.startswith("data/") and dep != "data/local"]
    orphans = [
        str(dep) for dep in read if not any(dep == out or out in dep.parents or dep in out.parents for out in written)
    ]
    assert not orphans, f"dvc.yaml: {stage} reads {orphans}, which no stage writes"


# Single stages, in this process


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
    project.stage("report")
    return project


def arguments(row: Row) -> list[str]:
    """The command line of a stage for one row."""
    return [text for name, value in row.columns().items() for text in (f"--{name}", str(value))]


def table(project: Project, path: Path) -> pd.DataFrame:
    return pq.read_table(project.folder / path).to_pandas()


def csv(project: Project, name: str) -> pd.DataFrame:
    return pd.read_csv(project.folder / f"reports/{name}.csv", keep_default_na=False, na_values=[""])


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
        gram, cross = sums[f"{name}.gram"], sums[f"{name}.cross"]
        torch.testing.assert_close(operator, identity + torch.linalg.solve(gram + 1e-6 * identity, cross - gram))
    assert safetensors.torch.load_file(prepared.folder / f"data/solve/{key}-none.safetensors") == {}


@pytest.fixture
def project(prepared, tmp_path) -> Project:
    return prepared.copy(tmp_path / "project")


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

    monkeypatch.setattr(stages.checkpoint, "load_model", load)
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
    project.set(text__calibration={"corpus": "notes", "sequences": 1, "seqlen": 12, "seed": 0})
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


# Whole runs


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Runs DVC in two folders at once: most of the time goes to the imports of stages that compute next to nothing."""
    pool = ThreadPoolExecutor(2)
    yield pool
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, tiny_model, tiny_tokenizer) -> Project:
    """A project in which nothing ran yet."""
    folder = tmp_path_factory.mktemp("fresh") / "project"
    folder.mkdir()
    return new_project(folder, tiny_model(), tiny_tokenizer)


@pytest.fixture(scope="module")
def running(fresh, pool, request) -> "Running":
    """The runs from scratch, begun together: the one that all edits start from, and if a test wants it the killed one.

    The killed run takes longer; the edits go beside it.
    """
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    base, killed = (fresh.copy(fresh.folder.parent / name) for name in ("base", "killed"))
    done = pool.submit(base.repro)
    return Running(base, done, pool.submit(interrupt, killed) if "interrupted" in wanted else None)


@dataclass(frozen=True)
class Running:
    """Runs from scratch: a project, what DVC does there, and what becomes of the run that is killed."""

    base: Project
    done: Future[Repro]
    interrupted: "Future[Interrupted] | None"


@pytest.fixture(scope="module")
def interrupted(running) -> "Interrupted":
    return running.interrupted.result()


@pytest.fixture(scope="module")
def base(running) -> Project:
    """A project in which `dvc repro` ran once. Not to be changed: edits are made in copies."""
    done = running.done.result()
    assert done.code == 0, done.output
    assert done.ran == EVERYTHING, done.output
    return running.base


@pytest.mark.slow
def test_every_artifact_is_there_with_its_columns(base):
    text, selection = {"model", "sequence", "input_ids"}, {"model": "tiny", "criterion": "streamline", "n": 2}
    expected: dict[str, tuple[set[str], dict[str, Any]]] = {
        "text/tiny/calibration": (text, {"model": "tiny", "corpus": "notes"}),
        "text/tiny/wiki": (text, {"model": "tiny", "corpus": "wiki"}),
        "text/tiny/web": (text, {"model": "tiny", "corpus": "web"}),
        "score/tiny": ({"start", "end", "cosine", "angular", "tokens"}, {"model": "tiny"}),
        "select/tiny-streamline-2": ({"layer"}, selection),
    }
    for row in ROWS:
        expected[f"eval_ppl/{row.key}"] = ({"corpus", "window", "tokens", "nll"}, row.columns())
        answers = {"question", "correct", "correct_norm", "loglikelihoods"}
        expected[f"eval_acc/{row.key}-quiz"] = (answers, {**row.columns(), "task": "quiz"})
        if not row.dense:
            diagnostics = {"start", "end", "residual_before", "residual_after", "antisymmetric_share"}
            expected[f"solve/{row.key}"] = (diagnostics, row.columns())
            adapter = json.loads((base.folder / f"data/patch/{row.key}/adapter.json").read_text(encoding="utf-8"))
            assert {name: adapter[name] for name in row.columns()} == row.columns()
    for name, (columns, values) in expected.items():
        frame = table(base, Path(f"data/{name}.parquet"))
        assert columns <= set(frame.columns), name
        assert frame[[*values]].drop_duplicates().to_dict("records") == [values], name
    others = {"text", "score", "select", "solve", "eval_ppl", "eval_acc"}
    found = {path for path in base.digests(*(f"data/{name}" for name in others)) if path.endswith(".parquet")}
    assert found == {f"data/{name}.parquet" for name in expected}
    scores = table(base, Path("data/score/tiny.parquet"))
    pairs = [(start, end) for start in range(6) for end in range(start + 1, 7)]
    assert [*zip(scores["start"], scores["end"], strict=True)] == pairs
    assert set(scores["tokens"]) == {8 * 32}
    assert base.partial() == []


@pytest.mark.slow
def test_no_assets_need_no_network(base):
    indexes = [f"data/assets/{folder}/index.json" for folder in ("corpora", "models", "tasks")]
    assert sorted(base.digests("data/assets")) == indexes
    for index in indexes:
        assert json.loads((base.folder / index).read_text(encoding="utf-8")) == {"files": {}}
    assert not (base.folder / "data/.wheels").exists()


@pytest.mark.slow
def test_the_tables_follow_from_the_artifacts(base):
    perplexities, accuracies = csv(base, "perplexity"), csv(base, "accuracy")
    metrics = json.loads((base.folder / "reports/metrics.json").read_text(encoding="utf-8"))["tiny"]
    document = (base.folder / "reports/report.md").read_text(encoding="utf-8")
    assert [*zip(perplexities["criterion"], perplexities["operator"], perplexities["corpus"], strict=True)] == [
        (row.criterion, row.operator, corpus) for row in ROWS for corpus in ("wiki", "web")
    ]
    assert [*zip(accuracies["criterion"], accuracies["operator"], accuracies["task"], strict=True)] == [
        (row.criterion, row.operator, "quiz") for row in ROWS
    ]
    for row in ROWS:
        metric = metrics["dense"] if row.dense else metrics["streamline-2"][row.operator]
        windows = table(base, Path(f"data/eval_ppl/{row.key}.parquet"))
        for corpus, of_corpus in windows.groupby("corpus"):
            expected = math.exp(of_corpus["nll"].sum() / of_corpus["tokens"].sum())
            line = perplexities[
                (perplexities["criterion"] == row.criterion)
                & (perplexities["operator"] == row.operator)
                & (perplexities["corpus"] == corpus)
            ].iloc[0]
            assert line["perplexity"] == pytest.approx(expected, rel=1e-12)
            assert (line["windows"], line["tokens"]) == (5, 5 * 31)
            assert metric["perplexity"][corpus] == pytest.approx(expected, rel=1e-12)
            assert f"{expected:.2f}" in document
        questions = table(base, Path(f"data/eval_acc/{row.key}-quiz.parquet"))
        line = accuracies[(accuracies["criterion"] == row.criterion) & (accuracies["operator"] == row.operator)].iloc[0]
        for name, column in (("acc", "correct"), ("acc_norm", "correct_norm")):
            hits = questions[column].astype(float)
            assert line[name] == pytest.approx(hits.mean(), rel=1e-12)
            assert line[f"{name}_stderr"] == pytest.approx(hits.std(ddof=1) / math.sqrt(len(hits)), rel=1e-12)
        best = questions["loglikelihoods"].map(lambda values: max(range(len(values)), key=values.__getitem__))
        assert ((best == questions["answer"]) == questions["correct"]).all()
        assert (line["questions"], line["available"]) == (6, 8)
        assert metric["acc"]["quiz"] == pytest.approx(line["acc"], rel=1e-12)


@pytest.mark.slow
def test_the_tables_of_operators_and_similarities_copy_the_artifacts(base):
    solved = [table(base, Path(f"data/solve/{row.key}.parquet")) for row in ROWS if not row.dense]
    columns = [*("operator", "start", "end", "residual_before", "residual_after", "antisymmetric_share", "condition")]
    expected = pd.concat(solved, ignore_index=True)[columns]
    pd.testing.assert_frame_equal(csv(base, "operators")[columns], expected, check_exact=False, rtol=1e-12)
    assert (expected["residual_after"] <= expected["residual_before"]).all()
    scores = table(base, Path("data/score/tiny.parquet"))
    blocks = scores[scores["end"] - scores["start"] == 2].sort_values("start").reset_index(drop=True)
    shown = csv(base, "similarity")
    pd.testing.assert_frame_equal(shown[["start", "end", "cosine"]], blocks[["start", "end", "cosine"]], rtol=1e-12)
    removed = sorted(table(base, Path("data/select/tiny-streamline-2.parquet"))["layer"])
    inside = blocks[(blocks["start"] >= 1) & (blocks["end"] <= 5)]
    assert removed[0] == inside.loc[inside["cosine"].idxmax(), "start"]
    assert shown.loc[shown["removed_by"] == "streamline", "start"].tolist() == [removed[0]]


@pytest.mark.slow
def test_a_second_run_has_nothing_to_do(base):
    again = base.repro()
    assert (again.code, again.ran, again.restored) == (0, [], []), again.output
    status = base.run("dvc", "status")
    assert status.returncode == 0, status.stdout
    assert "Data and pipelines are up to date." in status.stdout


@pytest.mark.slow
def test_run_time_settings_rerun_nothing(base):
    done = base.repro(GHOSTED_DEVICE="cpu", GHOSTED_BATCH_TOKENS="64", OMP_NUM_THREADS="2")
    assert (done.code, done.ran, done.restored) == (0, [], []), done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("dag", "eval_acc@tiny-streamline-2-ghost-quiz"),
        ("metrics show", "reports/metrics.json"),
        ("plots show --out {aside}", "index.html"),
        ("params diff", ""),
    ],
)
def test_dvc_shows_the_run(base, tmp_path, command, shown):
    done = base.run("dvc", *command.format(aside=tmp_path / "plots").split())
    assert done.returncode == 0, done.stdout
    assert shown in done.stdout
    assert "ERROR" not in done.stdout


# Edits


@dataclass(frozen=True)
class Edit:
    """A change to params.yaml, or a comment appended to a file, and what it must run, no more and no less."""

    runs: set[str]
    params: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    gone: tuple[str, ...] = ()
    """Names of removed rows, which nothing may mention any more."""


# Where tasks do not matter they are left out, to save time: removed rows rerun no more than the report.
EDITS = {
    "calibration": Edit(
        params={"text__calibration": {"corpus": "notes", "sequences": 9, "seqlen": 30, "seed": 1}},
        runs={
            *("text@tiny", "score@tiny", "select@tiny-streamline-2", "collect@tiny-streamline-2"),
            *(f"{stage}@tiny-streamline-2-ghost" for stage in ("solve", "patch", "eval_ppl")),
            *("eval_acc@tiny-streamline-2-ghost-quiz", "report"),
        },
    ),
    "another n": Edit(
        params={"grid__n": [3], "grid__tasks": []},
        runs={
            *("grid", "select@tiny-streamline-3", "collect@tiny-streamline-3", "report"),
            *(f"{stage}@tiny-streamline-3-ghost" for stage in ("solve", "patch", "eval_ppl")),
        },
        gone=("streamline-2", "quiz"),
    ),
    "another criterion": Edit(
        params={"grid__criteria": ["shortgpt"], "grid__tasks": []},
        runs={
            *("grid", "select@tiny-shortgpt-2", "collect@tiny-shortgpt-2", "report"),
            *(f"{stage}@tiny-shortgpt-2-ghost" for stage in ("solve", "patch", "eval_ppl")),
        },
        gone=("streamline", "quiz"),
    ),
    "one more operator": Edit(
        params={"grid__operators": ["none", "ghost"]},
        runs={
            *("grid", "solve@tiny-streamline-2-none", "patch@tiny-streamline-2-none", "report"),
            *("eval_ppl@tiny-streamline-2-none", "eval_acc@tiny-streamline-2-none-quiz"),
        },
    ),
    "one more task": Edit(
        params={"grid__tasks": ["quiz", "riddles"]},
        runs={
            *("grid", "task@riddles", "eval_acc_dense@tiny-riddles", "eval_acc@tiny-streamline-2-ghost-riddles"),
            "report",
        },
    ),
    # What they compute stays the same, so nothing after them runs.
    "an operator's code": Edit(file="stages/operators/ghost.py", runs={"solve@tiny-streamline-2-ghost"}),
    "a stage's code": Edit(file="stages/similarity.py", runs={"score@tiny"}),
}


@dataclass(frozen=True)
class Edited:
    """What DVC did after an edit and after its reverse, and what it left each time."""

    edit: Repro
    results: dict[str, str]
    mentions: dict[str, list[str]]
    reverse: Repro
    restored: dict[str, str]


def carry_out(project: Project, edit: Edit) -> Edited:
    """Make an edit in a project, run DVC, and do the same with the edit's reverse."""
    if edit.file is not None:
        file = project.folder / edit.file
        code = file.read_bytes()
        file.write_bytes(code + b"# A comment.\n")
    else:
        project.set(**edit.params)
    first = project.repro()
    results, mentions = project.digests(*RESULTS), mentioned(project, edit.gone)
    if edit.file is not None:
        file.write_bytes(code)
    else:
        project.set()
    return Edited(first, results, mentions, project.repro(), project.digests(*RESULTS))


def mentioned(project: Project, names: tuple[str, ...]) -> dict[str, list[str]]:
    """The files of the reports, and of the folders that the report reads, that mention a name, by that name."""
    found: dict[str, list[str]] = {}
    for name in names:
        word = re.compile(rf"(?<![a-z]){name}(?![a-z])".encode())
        for file in sorted((project.folder / "reports").iterdir()):
            if file.suffix != ".png" and word.search(file.read_bytes()):
                found.setdefault(name, []).append(file.name)
        for folder in REPORTED:
            found.setdefault(name, []).extend(
                file.name for file in (project.folder / "data" / folder).iterdir() if word.search(file.name.encode())
            )
    return {name: files for name, files in found.items() if files}


@pytest.fixture(scope="module")
def edited(base, pool, request) -> dict[str, "Future[Edited]"]:
    """The edits that the chosen tests ask for, each in a copy of its own."""
    wanted = dict.fromkeys(
        item.callspec.params["edit"] for item in request.session.items if "edit" in getattr(item, "fixturenames", ())
    )
    return {
        name: pool.submit(carry_out, base.copy(base.folder.parent / name.replace(" ", "-")), EDITS[name])
        for name in wanted
    }


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_runs_what_it_touches_and_no_more(edit, edited):
    done = edited[edit].result().edit
    assert done.code == 0, done.output
    assert sorted(done.ran) == sorted(EDITS[edit].runs), done.output


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_the_reverse_of_an_edit_computes_nothing(edit, edited, base):
    done = edited[edit].result()
    assert done.reverse.code == 0, done.reverse.output
    # `grid` only lists the declared rows again.
    grid = ["grid"] if "grid" in EDITS[edit].runs else []
    assert done.reverse.ran == grid, done.reverse.output
    assert {path: done.restored.get(path) for path in base.digests(*RESULTS)} == base.digests(*RESULTS)
    assert {path for path in done.restored if path.startswith("reports/")} == set(base.digests("reports"))


@pytest.mark.slow
@pytest.mark.parametrize("edit", [name for name, edit in EDITS.items() if edit.gone])
def test_removed_rows_leave_no_trace(edit, edited):
    assert edited[edit].result().mentions == {}


@pytest.mark.slow
def test_another_calibration_text_changes_what_depends_on_it(edited, base):
    results, before = edited["calibration"].result().results, base.digests(*RESULTS)
    same = {path for path in results if results[path] == before.get(path)}
    assert {"data/eval_ppl/tiny-dense.parquet", "data/eval_acc/tiny-dense-quiz.parquet"} <= same
    assert not same & {"data/score/tiny.parquet", "data/eval_ppl/tiny-streamline-2-ghost.parquet", "reports/report.md"}


# Killed runs


@dataclass(frozen=True)
class Interrupted:
    """A run from scratch that was killed twice, and what it left."""

    runs: list[Repro]
    unfinished: list[list[str]]
    """What lay in data/.partial after each kill, and at the end."""
    results: dict[str, str]
    late_results: dict[str, str]
    """After the stage that outlived DVC has ended as well."""
    late_unfinished: list[str]


def interrupt(project: Project) -> Interrupted:
    """Kill a run with all its processes in the stage `collect`, the next one's DVC alone in `solve`; finish."""
    runs, unfinished = [], []
    gate = project.folder.parent / "first gate"
    with project.gated("collect", gate) as (process, stage):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not alive(stage))
        runs.append(read_repro(process.returncode, (gate / "output").read_text()))
        unfinished.append(project.partial())
    gate = project.folder.parent / "second gate"
    with project.gated("solve", gate) as (process, stage):
        process.kill()
        process.wait()
        runs.append(read_repro(process.returncode, (gate / "output").read_text()))
        unfinished.append(project.partial())
        runs.append(project.repro())
        results = project.digests(*RESULTS)
        assert alive(stage), "the stage that DVC left behind ended before it was told to"
        (gate / "open").touch()
        wait_until(lambda: not alive(stage))
    return Interrupted(runs, unfinished, results, project.digests(*RESULTS), project.partial())


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(interrupted):
    first, second, last = interrupted.runs
    assert first.ran[-1] == "collect@tiny-streamline-2"
    assert second.ran == ["collect@tiny-streamline-2", "solve@tiny-streamline-2-ghost"], second.output
    assert last.code == 0, last.output
    assert first.ran[:-1] + second.ran[:-1] + last.ran == EVERYTHING
    assert not first.restored + second.restored + last.restored


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_unfinished(interrupted):
    # The kills hit a file that was being written.
    assert [len(names) for names in interrupted.unfinished] == [1, 1]
    assert "collect" in interrupted.unfinished[0][0]
    assert "solve" in interrupted.unfinished[1][0]
    assert interrupted.late_unfinished == []


@pytest.mark.slow
def test_two_runs_from_scratch_agree_byte_for_byte(interrupted, base):
    expected = base.digests(*RESULTS)
    assert {path.partition("/")[0] for path in expected} == {"data", "reports"}
    assert interrupted.results == expected
    # What a stage that outlived its DVC writes later is the same again.
    assert interrupted.late_results == expected
