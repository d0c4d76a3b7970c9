"""The pipeline as DVC runs it: a whole run on a tiny model, what an edit or a kill reruns."""

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
import pytest
from pipeline import (
    Project,
    Repro,
    alive,
    csv,
    new_project,
    read_repro,
    table,
    wait_until,
)

from stages.project.keys import Row

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
        "text/tiny/selection": (text, {"model": "tiny", "corpus": "notes"}),
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
    assert set(scores["tokens"]) == {6 * 32}
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
        params={
            "text__calibration": {"corpus": "notes", "sequences": 9, "selection_sequences": 9, "seqlen": 30, "seed": 1}
        },
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
    "dtype of operators": Edit(
        params={"patch__operator_dtype": "float32", "grid__tasks": []},
        runs={"grid", "patch@tiny-streamline-2-ghost", "eval_ppl@tiny-streamline-2-ghost", "report"},
        gone=("quiz",),
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
