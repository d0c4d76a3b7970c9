"""The report from small fabricated artifacts; every expected number is computed here, from what was fabricated."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from world import CALIBRATION, World, csv, table, text

from stages import report
from stages.project import artifacts, schemas
from stages.project.artifacts import write_table
from stages.project.errors import UserError
from stages.reporting import pictures


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, request):
    """Run below tmp_path; draw only where a test asks for `drawn`, which takes most of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "versions", lambda: {"lm-eval": "0.4.13", "torch": "2.13.0"})
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(pictures, "save", lambda _draw, path: path.write_bytes(b""))


@pytest.fixture
def drawn():
    """Really draw the pictures."""


# What the tables hold


def test_perplexity_csv_recomputed():
    world = World(corpora=["wiki", "web"])
    key = "pico-streamline-2-ghost"
    world.tokens[key, "web"][:] = [15, 15, 15, 15, 15, 4]
    for row in world.rows:
        world.tokens[row.key, "web"] = world.tokens[key, "web"]
    world.write()
    report.main()
    table = csv("perplexity").set_index(["criterion", "operator", "corpus"])
    assert len(table) == 5 * 2
    found = table.loc["streamline", "ghost", "web"]
    nll, tokens = world.nll[key, "web"], world.tokens[key, "web"]
    mean = nll.sum() / tokens.sum()
    shares = tokens / tokens.sum()
    error = math.sqrt(6 / 5 * (shares**2 * (nll / tokens - mean) ** 2).sum())
    dense = world.nll["pico-dense", "web"].sum() / tokens.sum()
    assert found["nll"] == pytest.approx(mean)
    assert found["perplexity"] == pytest.approx(math.exp(mean))
    assert found["nll_stderr"] == pytest.approx(error)
    assert found["retained"] == pytest.approx(math.exp(dense) / math.exp(mean))
    assert (found["windows"], found["tokens"], found["seqlen"], found["bos"]) == (6, 79, 16, "once")
    assert (found["source"], found["dtype"], found["calibration"]) == ("texts/web", "float32", CALIBRATION)
    assert (found["parameters"], found["operator_parameters"]) == (850, 50)
    assert pd.isna(table.loc["none", "none", "web"]["calibration"])


def test_accuracy_csv_recomputed():
    world = World()
    world.write()
    report.main()
    table = csv("accuracy").set_index(["criterion", "operator", "task"])
    assert len(table) == 5 * 2
    piqa = table.loc["shortgpt", "ghost", "piqa"]
    for column, hits in (
        ("acc", world.correct["pico-shortgpt-2-ghost", "piqa"]),
        ("acc_norm", world.correct_norm["pico-shortgpt-2-ghost", "piqa"]),
    ):
        assert piqa[column] == pytest.approx(hits.mean())
        assert piqa[f"{column}_stderr"] == pytest.approx(hits.std(ddof=1) / math.sqrt(40))
    assert (piqa["questions"], piqa["available"], piqa["limit"], str(piqa["version"])) == (40, 1838, 40, "1.0")
    boolq = table.loc["shortgpt", "ghost", "boolq"]
    assert boolq[["acc_norm", "acc_norm_stderr"]].isna().all()


def test_document_tables_recomputed():
    world = World()
    world.write()
    report.main()
    rows = {(line["criterion"], line["operator"]): line for line in table(text(), "arithmetic mean")}
    assert next(iter(rows)) == ("dense", "-")
    perplexities = {
        key: [math.exp(world.nll[key, corpus].sum() / 90) for corpus in ("wiki", "web")]
        for key in ("pico-dense", "pico-shortgpt-2-ghost")
    }
    found = rows["shortgpt", "ghost"]
    dense, mean = (sum(values) / 2 for values in perplexities.values())
    assert [found[c].strip("*") for c in ("wiki", "web")] == [f"{p:.2f}" for p in perplexities["pico-shortgpt-2-ghost"]]
    assert found["arithmetic mean"].strip("*") == f"{mean:.2f}"
    assert found["retained (dense mean / row mean)"] == f"{100 * dense / mean:.1f}%"
    assert (found["parameters"], found["removed"], found["extra parameters"]) == ("850", "15.0%", "50")
    assert rows["shortgpt", "none"]["removed"] == "20.0%"
    stock = {key: line["stock architecture"] for key, line in rows.items()}
    assert {key for key, answer in stock.items() if answer == "no"} == {("streamline", "ghost"), ("shortgpt", "ghost")}
    assert set(stock.values()) == {"yes", "no"}

    rows = {(line["criterion"], line["operator"]): line for line in table(text(), "mean acc")}
    found = rows["streamline", "none"]
    hits = [world.correct["pico-streamline-2-none", task] for task in ("piqa", "boolq")]
    mean = np.mean([hit.mean() for hit in hits])
    error = math.sqrt(sum(hit.var(ddof=1) / 40 for hit in hits)) / 2
    dense = np.mean([world.correct["pico-dense", task].mean() for task in ("piqa", "boolq")])
    assert found["mean acc"] == f"{100 * mean:.2f} ± {100 * error:.2f}"
    assert found["retained (row mean acc / dense mean acc)"] == f"{100 * mean / dense:.1f}%"
    normed = world.correct_norm["pico-streamline-2-none", "piqa"]
    assert found["mean acc_norm"].startswith(f"{100 * normed.mean():.2f} ±")
    assert "mean acc_norm is over piqa, the tasks that have it" in text()


def test_metrics_are_plain_nested_numbers():
    world = World()
    world.write()
    report.main()
    metrics = json.loads(Path("reports/metrics.json").read_text())["pico"]
    assert set(metrics) == {"dense", "streamline-2", "shortgpt-2"}
    values = metrics["streamline-2"]["ghost"]
    expected = {c: math.exp(world.nll["pico-streamline-2-ghost", c].sum() / 90) for c in ("wiki", "web")}
    assert values["perplexity"] == pytest.approx({**expected, "mean": sum(expected.values()) / 2})
    accuracies = {t: world.correct["pico-dense", t].mean() for t in ("piqa", "boolq")}
    assert metrics["dense"]["acc"] == pytest.approx({**accuracies, "mean": sum(accuracies.values()) / 2})


def test_operators_and_similarity():
    world = World(layers=8)
    own = {"chosen": '{"fraction": 0.01}', "token_residual_after": None}
    world.columns["pico-shortgpt-2-ghost", "solve"] = own
    world.write()
    report.main()
    operators = csv("operators")
    assert list(operators["operator"]) == ["ghost", "ghost"]
    assert list(operators.columns) == schemas.SOLVE.names
    assert operators["residual_after"][0] == 0.00306
    lines = table(text(), "token residual before")
    assert [line["condition"] for line in lines] == ["singular"] * 2
    assert [line["chosen"] for line in lines] == ["-", '{"fraction": 0.01}']
    assert [line["token residual before"] for line in lines] == ["0.310", "0.310"]
    assert [line["token residual after"] for line in lines] == ["0.125", "-"]
    similarity = csv("similarity")
    assert list(similarity["start"]) == list(range(7))
    assert similarity["cosine"].tolist() == pytest.approx([world.cosine(s, s + 2) for s in range(7)])
    marked = similarity.dropna(subset="removed_by")
    assert marked[["start", "removed_by"]].values.tolist() == [[3, "streamline"]]


def test_averages_are_in_the_summary():
    world = World()
    world.write()
    report.main()
    summary = csv("summary")
    perplexity, accuracy = csv("perplexity"), csv("accuracy")
    identity = ["model", "criterion", "n", "operator"]
    assert len(summary) == len(world.rows)
    means = perplexity.groupby(identity)["perplexity"].mean()
    accuracies = accuracy.groupby(identity)[["acc", "acc_norm"]].mean()
    dense = ("pico", "none", 0, "none")
    for record in summary.to_dict("records"):
        row = tuple(record[name] for name in identity)
        assert record["perplexity"] == pytest.approx(means[row])
        assert record["perplexity_retained"] == pytest.approx(means[dense] / means[row])
        assert record["acc"] == pytest.approx(accuracies.loc[row, "acc"])
        assert record["acc_norm"] == pytest.approx(accuracies.loc[row, "acc_norm"])
        assert record["acc_retained"] == pytest.approx(accuracies.loc[row, "acc"] / accuracies.loc[dense, "acc"])
        assert record["dense_parameters"] == 1000


def test_the_gap_recovered_by_hand():
    world = World(criteria=["streamline"], operators=["none", "diag", "ghost"], tasks=[])
    nlls = {"pico-dense": (3.0, 3.2), "pico-streamline-2-none": (4.0, 5.0)}
    nlls |= {"pico-streamline-2-diag": (4.5, 5.2), "pico-streamline-2-ghost": (3.5, 4.1)}
    for key, levels in nlls.items():
        for corpus, level in zip(("wiki", "web"), levels, strict=True):
            world.nll[key, corpus] = np.full(6, level * 15)
    world.write()
    report.main()
    # Means over the corpora: dense 3.1, none 4.5, diag 4.85, ghost 3.8. The gap is 1.4.
    shown = {line["operator"]: line["gap recovered"] for line in table(text(), "gap recovered")}
    assert shown == {"-": "-", "none": "0.0%", "diag": "-25.0%", "ghost": "50.0%"}
    summary = csv("summary").set_index(["n", "operator"])
    assert summary.loc[2, "gap_recovered"].to_dict() == pytest.approx({"none": 0, "diag": -0.25, "ghost": 0.5})
    assert pd.isna(summary.loc[(0, "none"), "gap_recovered"])
    assert summary["stock_architecture"].tolist() == [True, True, False, False]
    of_corpus = csv("perplexity").set_index(["n", "operator", "corpus"])["gap_recovered"]
    assert of_corpus[2, "ghost", "wiki"] == pytest.approx(0.5)
    assert of_corpus[2, "ghost", "web"] == pytest.approx(0.9 / 1.8)
    assert of_corpus[2, "diag", "wiki"] == pytest.approx(-0.5)
    assert "*Gap recovered* is the share" in text()


@pytest.mark.parametrize("without", ["row", "gap"])
def test_no_gap_without_the_row_without_operator_or_where_the_cut_costs_nothing(without):
    world = World(criteria=["streamline"], tasks=[], operators=["ghost"] if without == "row" else ["none", "ghost"])
    if without == "gap":
        for corpus in world.corpora:
            world.nll["pico-streamline-2-none", corpus] = world.nll["pico-dense", corpus]
    world.write()
    report.main()
    assert {line["gap recovered"] for line in table(text(), "gap recovered")} == {"-"}
    assert csv("summary")["gap_recovered"].isna().all()
    assert csv("perplexity")["gap_recovered"].isna().all()


def test_settings_are_stated():
    World().write()
    report.main()
    document = text()
    calibration = (
        "wiki (texts/wiki[0:5]), windows of 16 tokens cut from its stream, chosen with seed 0, BOS once, float32"
    )
    assert f"Calibration text: {calibration}. Layers selected from 4 sequences, 64 tokens: `{CALIBRATION}`." in document
    assert f"Operators solved from 64 tokens: `{CALIBRATION}`." in document
    assert 'options {"protect_last": 1}' in document
    corpus = table(document, "predicted tokens")[1]
    assert corpus == {
        "corpus": "web",
        "source": "texts/web",
        "windows": "6",
        "predicted tokens": "90",
        "seqlen": "16",
        "BOS": "once",
        "cut from": "stream",
        "chosen by seed": "-",
        "dtype": "float32",
    }
    task = table(document, "asked")[0]
    assert (task["task"], task["asked"], task["of"], task["version"]) == ("piqa", "40", "1,838", "1.0")
    assert "Only the first questions were asked (eval_acc.limit), not all: 40 of piqa, 40 of boolq" in document
    assert "lm-eval 0.4.13, torch 2.13.0" in document


@pytest.mark.parametrize(
    ("operator_dtype", "said"),
    [
        ("model", "Operators are kept and applied in the model's dtype, float32."),
        (
            "float32",
            "Operators are kept and applied in float32, the states upcast for them and rounded back to the model's "
            "dtype, float32.",
        ),
    ],
)
@pytest.mark.parametrize("empty", [{}, {"tasks": []}, {"corpora": []}], ids=str)
def test_the_operators_dtype_is_stated(operator_dtype, said, empty):
    world = World(**empty)
    world.operator_dtype = operator_dtype
    world.write()
    report.main()
    assert said in text()


def test_nothing_is_said_of_the_dtype_of_operators_where_there_are_none():
    World(operators=["none"]).write()
    report.main()
    assert "Operators are kept" not in text()


def test_the_order_of_the_rows_in_a_file_does_not_matter():
    World().write()
    report.main()
    expected = text()
    for path, schema in (
        (Path("data/eval_ppl/pico-shortgpt-2-ghost.parquet"), schemas.EVAL_PPL),
        (Path("data/eval_acc/pico-streamline-2-none-piqa.parquet"), schemas.EVAL_ACC),
    ):
        write_table(path, artifacts.read_table(path, schema).iloc[::-1], schema)
    report.main()
    assert text() == expected


def test_nothing_is_said_of_a_limit_when_all_questions_were_asked():
    world = World()
    for row in world.rows:
        for task in world.grid["tasks"]:
            world.columns[row.key, task] = {"available": 40, "limit": None}
    world.write()
    report.main()
    assert "Only the first questions" not in text()
    assert csv("accuracy")["limit"].isna().all()


# Which rows


def test_rows_are_those_declared_whatever_lies_in_data():
    World(models=["pico", "nano"], n=[1, 2], operators=["none", "diag", "ghost"], tasks=["piqa", "boolq"]).write()
    world = World(models=["nano"], n=[2], operators=["none", "ghost"], tasks=["piqa"], corpora=["web"])
    fewer = World(models=["nano"], n=[2], operators=["none", "ghost"], tasks=["piqa"])
    fewer.write()
    report.main()
    assert set(csv("perplexity")["corpus"]) == {"wiki", "web"}
    for name in ("perplexity", "accuracy"):
        assert set(csv(name)["model"]) == {"nano"}
        assert set(csv(name)["n"]) == {0, 2}
        assert set(csv(name)["operator"]) == {"none", "ghost"}
    assert set(csv("accuracy")["task"]) == {"piqa"}
    assert set(csv("similarity")["n"]) == {2}
    assert "pico" not in text()
    assert "diag" not in text()
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["text"]["perplexity"]["corpora"] = world.corpora
    Path("params.yaml").write_text(yaml.safe_dump(params))
    report.main()
    assert set(csv("perplexity")["corpus"]) == {"web"}


def test_several_models_and_n():
    World(models=["pico", "nano"], n=[1, 3]).write()
    report.main()
    rows = list(dict.fromkeys(csv("perplexity")[["model", "n"]].itertuples(index=False, name=None)))
    assert rows == [("pico", 0), ("pico", 1), ("pico", 3), ("nano", 0), ("nano", 1), ("nano", 3)]
    headings = [line for line in text().splitlines() if line.startswith("##")]
    of_model = ["### 1 layers removed", "### 3 layers removed"]
    assert headings[:3] == ["## pico", *of_model]
    assert headings[4:7] == ["## nano", *of_model]
    starts = csv("similarity").groupby(["model", "n"])["start"].max().to_dict()
    assert starts == {("pico", 1): 7, ("pico", 3): 5, ("nano", 1): 7, ("nano", 3): 5}


def test_removed_layers_and_identical_choices():
    world = World(n=[2, 3], layers=12)
    world.removed["pico", "shortgpt", 2] = world.removed["pico", "streamline", 2]
    world.removed["pico", "shortgpt", 3] = [1, 8, 9]
    world.write()
    report.main()
    first, second = text().split("### 3 layers removed")
    assert f"streamline: 5-6 (cos(h_5, h_7) = {world.cosine(5, 7):.4f})" in first
    assert "streamline and shortgpt chose identical layers: 5-6." in first
    assert "shortgpt: 1, 8-9 (cos(h_1, h_2)" in second
    assert "identical" not in second
    similarity = csv("similarity").dropna(subset="removed_by")
    assert similarity[["n", "start", "removed_by"]].values.tolist() == [
        [2, 5, "streamline and shortgpt"],
        [3, 5, "streamline"],
    ]


@pytest.mark.parametrize(
    "empty",
    [
        {"tasks": []},
        {"corpora": []},
        {"n": []},
        {"criteria": []},
        {"operators": []},
        {"tasks": [], "corpora": [], "n": []},
    ],
)
@pytest.mark.usefixtures("drawn")
def test_an_empty_list_leaves_a_sensible_report(empty):
    world = World(**empty)
    world.write()
    report.main()
    assert csv("perplexity")["corpus"].nunique() == len(world.corpora)
    assert csv("accuracy")["task"].nunique() == len(world.grid["tasks"])
    assert len(csv("perplexity")) == len(world.rows) * len(world.corpora)
    assert ("| dense" in text()) == bool(world.corpora or world.grid["tasks"])
    assert ("![similarity](similarity.png)" in text()) == bool(world.grid["n"])
    assert Path("reports/similarity.png").stat().st_size > 1000
    assert Path("reports/perplexity.png").stat().st_size > 1000
    assert Path("reports/perplexity-by-n.png").stat().st_size > 1000


@pytest.mark.usefixtures("drawn")
def test_two_runs_write_the_same_bytes_and_leave_nothing_else(capsys):
    World(n=[1, 2]).write()
    report.main()
    first = {path: path.read_bytes() for path in Path("reports").iterdir()}
    printed = capsys.readouterr().out
    report.main()
    assert {path: path.read_bytes() for path in Path("reports").iterdir()} == first
    assert {path.name for path in first} == {
        *("report.md", "metrics.json", "similarity.png", "perplexity.png", "perplexity-by-n.png"),
        *("perplexity.csv", "accuracy.csv", "summary.csv", "pairs.csv"),
        *("operators.csv", "similarity.csv", "cost.csv"),
    }
    assert b"matplotlib" not in first[Path("reports/similarity.png")]
    assert capsys.readouterr().out == printed
    assert "| arithmetic mean |" in printed
    assert "mean acc" in printed
    assert "reports/report.md" in printed


# What goes wrong


def test_a_perplexity_beyond_a_double_is_said_and_never_inf_in_json():
    world = World()
    world.nll["pico-shortgpt-2-none", "wiki"][:] = 900 * 15
    world.nll["pico-streamline-2-none", "wiki"][:] = 15 * 15
    world.write()
    report.main()
    metrics = json.loads(Path("reports/metrics.json").read_text(), parse_constant=pytest.fail)["pico"]
    assert metrics["shortgpt-2"]["none"]["perplexity"]["wiki"] is None
    assert metrics["shortgpt-2"]["none"]["perplexity"]["mean"] is None
    rows = {(line["criterion"], line["operator"]): line for line in table(text(), "arithmetic mean")}
    assert rows["shortgpt", "none"]["wiki"] == "exp(900.0)"
    assert rows["shortgpt", "none"]["arithmetic mean"] == "> 1.8e308"
    assert rows["streamline", "none"]["wiki"] == f"{math.exp(15):.2e}"
    assert "`exp(x)` stands for" in text()
    assert (
        csv("perplexity").set_index(["criterion", "operator", "corpus"]).loc["shortgpt", "none", "wiki"]["nll"] == 900
    )


@pytest.mark.parametrize(
    ("column", "value"),
    [("tokens", 14), ("seqlen", 32), ("bos", "every-window"), ("source", "texts/other"), ("window", range(1, 7))],
)
def test_windows_that_differ_between_rows(column, value):
    world = World()
    world.columns["pico-shortgpt-2-none", "web"] = {column: value}
    world.write()
    expected = rf"eval_ppl/pico-dense.parquet and .*pico-shortgpt-2-none.parquet differ in column `{column}`"
    with pytest.raises(UserError, match=expected):
        report.main()


@pytest.mark.parametrize(
    ("column", "value"),
    [("version", "2.0"), ("source", "x"), ("available", 39), ("limit", None), ("num_fewshot", 5), ("answer", 1)],
)
def test_questions_that_differ_between_rows(column, value):
    world = World()
    world.columns["pico-shortgpt-2-none", "boolq"] = {column: value}
    world.write()
    expected = rf"pico-dense-boolq.parquet and .*pico-shortgpt-2-none-boolq.parquet differ in column `{column}`"
    with pytest.raises(UserError, match=expected):
        report.main()


@pytest.mark.parametrize(
    ("column", "value"),
    [("dtype", "bfloat16"), ("calibration", "web:4x16:seed1:ffffffff"), ("operator_dtype", "float32")],
)
def test_another_dtype_or_calibration(column, value):
    world = World()
    world.columns["pico-streamline-2-ghost", "piqa"] = {column: value}
    world.write()
    with pytest.raises(UserError, match=rf"pico-streamline-2-ghost-piqa.parquet differ in column `{column}`.*{value}"):
        report.main()


def test_fewer_windows_in_one_row():
    world = World()
    for values in (world.nll, world.tokens):
        values["pico-shortgpt-2-ghost", "wiki"] = values["pico-shortgpt-2-ghost", "wiki"][:5]
    world.write()
    with pytest.raises(UserError, match="6 rows and 5 rows"):
        report.main()


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_negative_log_likelihoods_must_be_finite(value):
    world = World()
    world.nll["pico-shortgpt-2-ghost", "wiki"][2] = value
    world.write()
    with pytest.raises(UserError, match=r"pico-shortgpt-2-ghost.parquet: column `nll` is not finite in 1 of 12 rows"):
        report.main()


def test_similarities_must_be_finite():
    world = World()
    world.cosine = lambda start, _end: math.inf if start == 3 else 0.9
    world.write()
    with pytest.raises(UserError, match=r"score/pico.parquet: column `cosine` is not finite"):
        report.main()


def test_a_window_without_tokens():
    world = World()
    for row in world.rows:
        world.tokens[row.key, "wiki"][3] = 0
    world.write()
    with pytest.raises(UserError, match=r"pico-dense.parquet: a window predicts no token"):
        report.main()


def test_acc_norm_of_some_questions_only():
    world = World()
    world.correct_norm["pico-dense", "piqa"] = [None, *[True] * 39]
    world.write()
    with pytest.raises(UserError, match=r"pico-dense-piqa.parquet: column `correct_norm` is null for some"):
        report.main()


@pytest.mark.parametrize(
    "file",
    [
        "score/pico",
        "select/pico-streamline-2",
        "solve/pico-streamline-2-none",
        "eval_ppl/pico-dense",
        "eval_acc/pico-shortgpt-2-ghost-boolq",
    ],
)
def test_missing_and_corrupted_files_are_named_and_nothing_is_written(file):
    World().write()
    path = Path(f"data/{file}.parquet")
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match=f"{path}: cannot be read"):
        report.main()
    path.unlink()
    with pytest.raises(UserError, match=f"{path}: not found"):
        report.main()
    assert not Path("reports").exists()


def test_an_evaluation_without_rows():
    world = World()
    world.write()
    path = Path("data/eval_ppl/pico-streamline-2-none.parquet")
    write_table(path, pd.DataFrame(columns=schemas.EVAL_PPL.names), schemas.EVAL_PPL)
    with pytest.raises(UserError, match=f"{path}: holds no window of the corpus 'wiki'"):
        report.main()
    world.write()
    path = Path("data/eval_acc/pico-dense-piqa.parquet")
    write_table(path, pd.DataFrame(columns=schemas.EVAL_ACC.names), schemas.EVAL_ACC)
    with pytest.raises(UserError, match=f"{path}: holds no question"):
        report.main()


def test_a_file_of_another_row():
    World().write()
    Path("data/eval_ppl/pico-shortgpt-2-ghost.parquet").replace("data/eval_ppl/pico-shortgpt-2-none.parquet")
    with pytest.raises(
        UserError, match=r"pico-shortgpt-2-none.parquet: column `operator` holds 'ghost', expected 'none'"
    ):
        report.main()


@pytest.mark.parametrize(
    ("layers", "message"), [([3], "1 layers in 1 rows"), ([3, 3], "1 layers"), ([3, 8], "layer 8")]
)
def test_a_selection_that_is_none(layers, message):
    world = World(layers=8)
    world.removed["pico", "streamline", 2] = layers
    world.write()
    with pytest.raises(UserError, match=rf"select/pico-streamline-2.parquet: names .*{message}|{message}"):
        report.main()
