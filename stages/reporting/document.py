"""``reports/report.md``: the comparison as a document, and its tables for the terminal."""

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from stages.project.keys import Row
from stages.reporting import cuts, markdown, usage
from stages.reporting.measures import (
    accuracy,
    gap_recovered,
    mean_accuracy,
    mean_nll,
    mean_perplexity,
    ratio,
    tasks_with,
)
from stages.reporting.pairs import LEVEL, MEAN, Comparison, best, compare
from stages.reporting.results import Results
from stages.reporting.significance import RESAMPLES, Estimate, perplexity
from stages.reporting.tables import questions_source

BOLD_RULE = (
    "**Bold**: the best of a column among the rows of one model and one n (the dense row does not compete), and only "
    "where its paired difference to every other row (of the windows' mean NLL, of the questions' hits; averaged over "
    f"corpora or tasks) exceeds the standard error of that difference and has p < {LEVEL}, two-sided: by a bootstrap "
    f"of {RESAMPLES:,} resamples of the windows, or by McNemar's exact test of the questions that only one of the two "
    "rows got right. Rows that are the same model, with the same layers removed and the same operator, do not compete: "
    "they are bold together. The p are those of single pairs, not corrected for their number."
)


def document(results: Results, comparisons: Mapping[tuple[str, int], Comparison], pictures: list[str]) -> str:
    """The whole document; `comparisons` are those of every model and n, `pictures` file names."""
    parts = ["# Pruned and recovered models", *reading(results)]
    for model in results.models:
        parts.append(f"## {model}")
        for n in _numbers(results, model):
            parts += [f"### {n} layers removed"] if n else []
            parts += _tables(results, model, n, comparisons.get((model, n), {}))
            parts += [*cuts.removed_layers(results, model, n), *cuts.diagnostics(results, model, n)]
            parts += usage.texts(results, model, n)
        parts += [*usage.costs(results, model), *settings_of(results, model)]
    if any(comparisons.values()):
        parts += [
            "## Tests",
            "[pairs.csv](pairs.csv) has what lies behind the bold cells: in every column the paired difference of "
            "every two pruned rows of one model and n, its standard error and its p.",
        ]
    if pictures:
        parts += ["## Pictures", *(f"![{name.partition('.')[0]}]({name})" for name in pictures)]
    if results.versions:
        made_with = [f"{name} {markdown.listed(sorted(found))}" for name, found in sorted(results.versions.items())]
        parts += ["## Software that made the artifacts", ", ".join(made_with)]
    return "\n\n".join(parts) + "\n"


def summary(results: Results, comparisons: Mapping[tuple[str, int], Comparison]) -> str:
    """The perplexity and accuracy tables alone, for the terminal."""
    parts = []
    for model in results.models:
        for n in _numbers(results, model):
            parts += [f"{model}, {n} layers removed" if n else model]
            parts += _tables(results, model, n, comparisons.get((model, n), {}))
    return "\n\n".join(parts)


def comparison(results: Results, model: str, n: int) -> list[str]:
    """The perplexity and the accuracy table of one model and n, the dense row on top."""
    return _tables(results, model, n, compare(results, model, n))


def _tables(results: Results, model: str, n: int, compared: Comparison) -> list[str]:
    rows = [Row(model), *results.pruned(model, n)]
    tables = [_perplexities(results, rows, compared)] if results.corpora else []
    return [*tables, *([_accuracies(results, rows, compared)] if results.tasks else [])]


def _numbers(results: Results, model: str) -> list[int]:
    """The n that `model` has tables for; 0, the dense row alone, where nothing is removed."""
    return [n for n in results.numbers if results.pruned(model, n) or results.chosen(model, n)] or [0]


def reading(results: Results) -> Iterable[str]:
    """How to read the tables, one paragraph each."""
    if results.corpora:
        yield (
            "Perplexity: exp of the token-weighted mean negative log-likelihood of a corpus; lower is better. The "
            "arithmetic mean is that of the corpora's perplexities; *retained* is the dense row's arithmetic mean "
            "divided by the row's. *Gap recovered* is the share of what the cut adds to the mean NLL (that of the row "
            "without operator minus the dense row's, averaged over the corpora) which the operator takes away again. "
            "*Parameters* are those of the evaluated model, operators included; *removed* is their share of the dense "
            "model's that is gone, net of the operators; *extra* are the operators' alone, each a multiplication and "
            "an addition per token. *Stock architecture*: the model needs no operator when it runs."
        )
    if results.tasks:
        normed = markdown.listed(results.normed)
        which = f"; mean acc_norm is over {normed}, the tasks that have it" if results.normed != results.tasks else ""
        yield (
            "Accuracy in percent ± its standard error; higher is better. The means weigh every task equally"
            f"{which if normed else ''}; *retained* is the row's mean acc divided by the dense row's."
        )
    if not results.corpora and not results.tasks:
        yield "Nothing was evaluated: params.yaml names neither perplexity corpora nor tasks."
        return
    yield BOLD_RULE
    nlls = [mean_nll(results, row, corpus).value for row in results.windows for corpus in results.corpora]
    if any(math.isinf(perplexity(nll)) for nll in nlls):
        yield "`exp(x)` stands for a perplexity beyond 1.8e308, the largest double: x is the mean NLL in nats."


def _marked(
    results: Results, cells: list[str], values: dict[Row, float], compared: Comparison, column: tuple[str, str]
) -> list[str]:
    """The cells of the rows in `values`, those of the best pruned rows in bold; perplexity is best where lowest."""
    pruned = {row: value for row, value in values.items() if not row.dense}
    winners = best(pruned, compared.get(column, {}), results.recipe, lowest=column[0] == "perplexity")
    return markdown.bold(cells, [at for at, row in enumerate(values) if row in winners])


def _labels(results: Results, rows: list[Row]) -> dict[str, list[str]]:
    """The columns that name the rows; a criterion that removed the layers of one above says so."""
    columns = markdown.row_labels(rows)
    alike = [row.criterion if row.dense else results.first_alike(row) for row in rows]
    pairs = zip(rows, columns["criterion"], alike, strict=True)
    return {
        **columns,
        "criterion": [name if row.dense or name == first else f"{name} (= {first})" for row, name, first in pairs],
    }


def _perplexities(results: Results, rows: list[Row], compared: Comparison) -> str:
    columns = _labels(results, rows)
    for corpus in results.corpora:
        nlls = [mean_nll(results, row, corpus).value for row in rows]
        cells = [markdown.perplexity(perplexity(nll), nll) for nll in nlls]
        values = dict(zip(rows, map(perplexity, nlls), strict=True))
        columns[corpus] = _marked(results, cells, values, compared, ("perplexity", corpus))
    means = {row: mean_perplexity(results, row, results.corpora) for row in rows}
    cells = [markdown.perplexity(mean) for mean in means.values()]
    columns["arithmetic mean"] = _marked(results, cells, means, compared, ("perplexity", MEAN))
    dense = means[rows[0]]
    columns["retained (dense mean / row mean)"] = [markdown.share(ratio(dense, mean)) for mean in means.values()]
    gaps = [gap_recovered(results, row, results.corpora) for row in rows]
    columns["gap recovered"] = [markdown.share(gap) for gap in gaps]
    first = [results.windows[row][results.corpora[0]].iloc[0] for row in rows]
    before = int(first[0]["parameters"])
    columns["parameters"] = [f"{window['parameters']:,}" for window in first]
    columns["removed"] = [markdown.share(1 - window["parameters"] / before) for window in first]
    columns["extra parameters"] = [f"{window['operator_parameters']:,}" for window in first]
    columns["stock architecture"] = [markdown.yes_no(window["operator_parameters"] == 0) for window in first]
    return markdown.table(columns, text=["criterion", "operator", "stock architecture"])


def _accuracies(results: Results, rows: list[Row], compared: Comparison) -> str:
    columns = _labels(results, rows)
    for task in results.tasks:
        columns[f"{task} acc"] = _accuracy_column(
            results, {row: accuracy(results, row, task, "acc") for row in rows}, compared, ("acc", task)
        )
    for metric in ("acc", "acc_norm"):
        if tasks_with(results, metric):
            columns[f"mean {metric}"] = _accuracy_column(
                results, {row: mean_accuracy(results, row, metric) for row in rows}, compared, (metric, MEAN)
            )
    means = [mean_accuracy(results, row, "acc").value for row in rows]
    columns["retained (row mean acc / dense mean acc)"] = [markdown.share(ratio(mean, means[0])) for mean in means]
    return markdown.table(columns, text=["criterion", "operator"])


def _accuracy_column(
    results: Results, estimates: dict[Row, Estimate], compared: Comparison, column: tuple[str, str]
) -> list[str]:
    cells = [markdown.percent(estimate) for estimate in estimates.values()]
    values = {row: estimate.value for row, estimate in estimates.items()}
    return _marked(results, cells, values, compared, column)


def settings_of(results: Results, model: str) -> Iterable[str]:
    """The settings that a model was calibrated and evaluated with."""
    if model in results.scores or results.corpora or results.tasks:
        yield f"### Settings of {model}"
    dense = Row(model)
    if model in results.scores:
        score = results.scores[model].iloc[0]
        seed = "the first ones in order" if pd.isna(score["seed"]) else f"chosen with seed {score['seed']:.0f}"
        yield (
            f"Calibration text: {score['corpus']} ({score['source']}), windows of {score['seqlen']:,} tokens cut from "
            f"its {score['cut']}, {seed}, BOS {score['bos']}, {score['dtype']}. Layers selected from "
            f"{score['sequences']:,} sequences, {score['tokens']:,} tokens: `{score['calibration']}`."
        )
        solved = [frame.iloc[0] for row, frame in results.operators.items() if row.model == model and len(frame)]
        for first in solved[:1]:
            yield f"Operators solved from {first['tokens']:,} tokens: `{first['calibration']}`."
    yield from _operator_dtype(results, model)
    if results.corpora:
        yield _perplexity_settings(results.windows[dense])
    if results.tasks:
        yield _accuracy_settings(results.questions[dense])
        yield from _limits(results, model)


def _operator_dtype(results: Results, model: str) -> Iterable[str]:
    """Say in which dtype the operators are kept and applied, where there are any; the rows of a model share it."""
    rows = [row for row in results.rows if row.model == model]
    frames = [
        frame for of in (results.windows, results.questions) for row in rows for frame in of.get(row, {}).values()
    ]
    applied = next((frame.iloc[0] for frame in frames if frame["operator_dtype"].notna().any()), None)
    if applied is not None:
        dtype = applied["dtype"]
        in_model = f"the model's dtype, {dtype}"
        in_float32 = f"float32, the states upcast for them and rounded back to the model's dtype, {dtype}"
        yield f"Operators are kept and applied in {in_model if applied['operator_dtype'] == 'model' else in_float32}."


def _perplexity_settings(windows: dict[str, pd.DataFrame]) -> str:
    first = [frame.iloc[0] for frame in windows.values()]
    return markdown.table(
        {
            "corpus": list(windows),
            "source": [row["source"] for row in first],
            "windows": [f"{len(frame):,}" for frame in windows.values()],
            "predicted tokens": [f"{frame['tokens'].sum():,}" for frame in windows.values()],
            "seqlen": [f"{row['seqlen']:,}" for row in first],
            "BOS": [row["bos"] for row in first],
            "cut from": [row["cut"] for row in first],
            "chosen by seed": ["-" if pd.isna(row["seed"]) else f"{row['seed']:.0f}" for row in first],
            "dtype": [row["dtype"] for row in first],
        },
        text=["corpus", "source", "BOS", "cut from", "dtype"],
    )


def _accuracy_settings(questions: dict[str, pd.DataFrame]) -> str:
    first = [frame.iloc[0] for frame in questions.values()]
    return markdown.table(
        {
            "task": list(questions),
            "source": [questions_source(frame) for frame in questions.values()],
            "version": [row["version"] for row in first],
            "asked": [f"{len(frame):,}" for frame in questions.values()],
            "of": [f"{row['available']:,}" for row in first],
            "shots": [str(row["num_fewshot"]) for row in first],
            "batch size": [str(row["batch_size"]) for row in first],
            "dtype": [row["dtype"] for row in first],
        },
        text=["task", "source", "dtype"],
    )


def _limits(results: Results, model: str) -> Iterable[str]:
    """Say which tasks were not asked in full, and how large the standard errors are."""
    rows = [row for row in results.rows if row.model == model]
    asked = {task: len(frame) for task, frame in results.questions[Row(model)].items()}
    cut = [task for task, frame in results.questions[Row(model)].items() if asked[task] < frame["available"].iloc[0]]
    errors = [accuracy(results, row, task, "acc").error for row in rows for task in cut]
    known = [error for error in errors if error is not None]
    if cut:
        limited = ", ".join(f"{asked[task]:,} of {task}" for task in cut)
        scale = f"standard errors reach {100 * max(known):.2f} points" if known else "there are no standard errors"
        yield f"Only the first questions were asked (eval_acc.limit), not all: {limited}; {scale}."
