"""A criterion or an operator of one's own is one file, named in params.yaml."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pipeline import Project, arguments, new_project, table, write_inputs

import stages.criteria
import stages.operators
from stages.boundaries import Segment
from stages.bridge import Bridge
from stages.likelihood import window_nll
from stages.project import params
from stages.project.keys import Row
from stages.recovered.patched import patch_model

OPERATOR = '''
"""A part of the mean's move, and a part of the mean's own rank-one map."""

import torch

from stages.bridge import Bridge


def solve(sums, *, share: float, thin: bool = True) -> Bridge:
    pre, post = sums.pre_sum / sums.tokens, sums.post_sum / sums.tokens
    reduce, expand = share * pre[:, None] / (pre @ pre), (post - pre)[None, :]
    if not thin:
        return Bridge(change=reduce @ expand)
    return Bridge(reduce=reduce, expand=expand, bias=(1 - share) * (post - pre))
'''
SEARCH = '''
"""Every so many-th layer, once the model and the text are there."""


def search(model, calibration, n, allowed, *, every: int):
    assert model.config.num_hidden_layers == 6 and not model.training
    assert [len(ids) for ids in calibration] == [32] * 6 and all(0 <= token < 300 for token in calibration[0])
    return list(allowed[::every][:n])[::-1]
'''
CHOOSE = '''
"""The layers told, if the table is whole."""


def choose(scores, n, allowed, *, layers: list[int]):
    assert len(scores) == 21 and len(layers) == n
    return layers
'''
FILES = {"operators/mean-move.py": OPERATOR, "criteria/every.py": SEARCH, "criteria/told.py": CHOOSE}
CHANGES = {
    "grid__criteria": ["every"],
    "grid__operators": ["mean-move"],
    "grid__tasks": [],
    "select": {
        "every": {"protect_first": 1, "protect_last": 1, "every": 2},
        "told": {"protect_first": 0, "protect_last": 0, "layers": [4, 3]},
    },
    "solve": {"mean-move": {"share": 0.25}},
}
REMOVED = {"every": [1, 3], "told": [3, 4]}
RUNS = {"every": [Segment(1, 2), Segment(3, 4)], "told": [Segment(3, 5)]}


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_model, tiny_tokenizer) -> Project:
    """A project with files of one's own, whose text and scores are there."""
    stages_folder = tmp_path / "project/stages"
    for package in ("criteria", "operators"):
        shutil.copytree(params.ROOT / package, stages_folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (stages_folder / name).write_text(text, encoding="utf-8")
        # Of this test alone: imported by name, then forgotten.
        module = f"stages.{name.removesuffix('.py').replace('/', '.')}"
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(params, "ROOT", stages_folder)
    for package in (stages.criteria, stages.operators):
        folder = stages_folder / package.__name__.rpartition(".")[2]
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    project = Project(tmp_path / "project")
    write_inputs(project, tiny_model(), tiny_tokenizer)
    project.set(**CHANGES)
    for stage in ("model", "text", "score"):
        project.stage(stage, "--model", "tiny")
    return project


@pytest.mark.parametrize("criterion", ["every", "told"])
def test_stages_run_files_of_one_s_own(criterion, project, tiny_model):
    project.set(**{**CHANGES, "grid__criteria": [criterion]})
    row = Row("tiny", criterion, 2, "mean-move")
    for stage in ("select", "collect"):
        project.stage(stage, *arguments(row)[:-2])
    for stage in ("solve", "patch", "eval_ppl"):
        project.stage(stage, *arguments(row))
    chosen = table(project, Path(f"data/select/tiny-{criterion}-2.parquet"))
    assert chosen["layer"].tolist() == REMOVED[criterion]
    assert json.loads(chosen["criterion_options"].iloc[0]) == CHANGES["select"][criterion]

    sums = safetensors.torch.load_file(project.folder / f"data/collect/tiny-{criterion}-2.safetensors")
    bridges = {}
    for run in RUNS[criterion]:
        pre, post, tokens = (
            sums[f"{run.name}.0.{part}"] + sums[f"{run.name}.1.{part}"] for part in ("pre_sum", "post_sum", "tokens")
        )
        assert tokens == 8 * 32
        pre, post = pre / tokens, post / tokens
        bridges[run] = Bridge(
            reduce=0.25 * pre[:, None] / (pre @ pre), expand=(post - pre)[None, :], bias=0.75 * (post - pre)
        )
    written = safetensors.torch.load_file(project.folder / f"data/solve/{row.key}.safetensors")
    assert set(written) == {f"{run.name}.{part}" for run in bridges for part in ("reduce", "expand", "bias")}
    for run, bridge in bridges.items():
        for name, part in bridge.parts().items():
            torch.testing.assert_close(written[f"{run.name}.{name}"], part, rtol=1e-14, atol=1e-14)

    description = json.loads((project.folder / f"data/patch/{row.key}/adapter.json").read_text())
    assert description["removed_layers"] == REMOVED[criterion]
    assert description["operators"] is description["bridged"] is True
    assert description["options"] == {"share": 0.25}

    model = tiny_model()
    patch_model(model, REMOVED[criterion], bridges)
    likelihoods = table(project, Path(f"data/eval_ppl/{row.key}.parquet"))
    assert len(likelihoods) == 10
    for corpus in ("wiki", "web"):
        text = table(project, Path(f"data/text/tiny/{corpus}.parquet"))["input_ids"]
        expected = window_nll(model, [list(ids) for ids in text], 1000, corpus)
        assert likelihoods[likelihoods["corpus"] == corpus]["nll"].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_mistake_in_the_options_of_a_file_of_one_s_own(project, capfd):
    project.set(**{**CHANGES, "solve": {"mean-move": {"shares": 0.25}}})
    with pytest.raises(SystemExit):
        project.stage("solve", *arguments(Row("tiny", "every", 2, "mean-move")))
    assert "solve.mean-move: 'shares' is unknown (did you mean 'share'" in capfd.readouterr().err


@pytest.mark.slow
def test_dvc_runs_files_of_one_s_own_and_sees_their_edits(tmp_path, tiny_model, tiny_tokenizer):
    (tmp_path / "project").mkdir()
    project = new_project(tmp_path / "project", tiny_model(), tiny_tokenizer)
    for name, text in FILES.items():
        (project.folder / "stages" / name).write_text(text, encoding="utf-8")
    project.set(**CHANGES)
    done = project.repro()
    assert done.code == 0, done.output
    key = "tiny-every-2-mean-move"
    assert {"select@tiny-every-2", f"solve@{key}", f"patch@{key}", f"eval_ppl@{key}"} <= set(done.ran)
    assert table(project, Path("data/select/tiny-every-2.parquet"))["layer"].tolist() == [1, 3]
    edited = OPERATOR.replace("(1 - share) *", "(2 - share) *")
    (project.folder / "stages/operators/mean-move.py").write_text(edited, encoding="utf-8")
    done = project.repro()
    assert done.code == 0, done.output
    assert done.ran == [f"solve@{key}", f"patch@{key}", f"eval_ppl@{key}", "report"]
