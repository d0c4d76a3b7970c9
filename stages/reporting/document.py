"""``reports/report.md``: the comparison as a document, and its tables for the terminal."""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from stages.boundaries import runs
from stages.project.keys import Row
from stages.reporting import markdown, usage
from stages.reporting.results import Results
from stages.reporting.significance import perplexity
from stages.reporting.tables import (
    accuracy,
    best_accuracy,
    best_perplexity,
    mean_accuracy,
    mean_nll,
    mean_perplexity,
    questions_source,
    ratio,
    tasks_with,
)

BOLD_RULE = (
    "**Bold**: the best of a column among the rows of one model and one n (the dense row does not compete), and only "
    "where its paired difference to the runner-up (of the windows' mean NLL, of the questions' hits; averaged over "
    "corpora or tasks) exceeds the standard error of that difference."
)


def document(results: Results, pictures: list[str]) -> str:
    """The whole document; `pictures` are file names."""
    parts = ["# Pruned and recovered models", *reading(results)]
    for model in results.models:
        parts.append(f"## {model}")
        for n in _numbers(results, model):
            parts += [*([f"### {n} layers removed"] if n else []), *comparison(results, model, n)]
            parts += [*_removed_layers(results, model, n), *_diagnostics(results, model, n)]
            parts += usage.texts(results, model, n)
        parts += [*usage.costs(results, model), *settings_of(results, model)]
    if pictures:
        parts += ["## Pictures", *(f"![{name.partition('.')[0]}]({name})" for name in pictures)]
    if results.versions:
        made_with = [f"{name} {markdown.listed(sorted(found))}" for name, found in sorted(results.versions.items())]
        parts += ["## Software that made the artifacts", ", ".join(made_with)]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """The perplexity and accuracy tables alone, for the terminal."""
    parts = []
    for model in results.models:
        for n in _numbers(results, model):
            parts += [f"{model}, {n} layers removed" if n else model, *comparison(results, model, n)]
    return "\n\n".join(parts)


def comparison(results: Results, model: str, n: int) -> list[str]:
    """The perplexity and the accuracy table of one model and n, the dense row on top."""
    rows = [Row(model), *results.pruned(model, n)]
    tables = [_perplexities(results, rows)] if results.corpora else []
    return [*tables, *([_accuracies(results, rows)] if results.tasks else [])]


def _numbers(results: Results, model: str) -> list[int]:
    """The n that `model` has tables for; 0, the dense row alone, where nothing is removed."""
    return [n for n in results.numbers if results.pruned(model, n) or results.chosen(model, n)] or [0]


def reading(results: Results) -> Iterable[str]:
    """How to read the tables, one paragraph each."""
    if results.corpora:
        yield (
            "Perplexity: exp of the token-weighted mean negative log-likelihood of a corpus; lower is better. The "
            "arithmetic mean is that of the corpora's perplexities; *retained* is the dense row's arithmetic mean "
            "divided by the row's. *Parameters* are those of the evaluated model, operators included; *removed* is "
            "their share of the dense model's that is gone, net of the operators."
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


def _marked(cells: list[str], rows: list[Row], winner: Row | None) -> list[str]:
    return markdown.bold(cells, None if winner is None else rows.index(winner))


def _perplexities(results: Results, rows: list[Row]) -> str:
    pruned = rows[1:]
    columns = markdown.row_labels(rows)
    for corpus in results.corpora:
        nlls = [mean_nll(results, row, corpus).value for row in rows]
        cells = [markdown.perplexity(perplexity(nll), nll) for nll in nlls]
        columns[corpus] = _marked(cells, rows, best_perplexity(results, pruned, [corpus]))
    means = [mean_perplexity(results, row, results.corpora) for row in rows]
    cells = [markdown.perplexity(mean) for mean in means]
    columns["arithmetic mean"] = _marked(cells, rows, best_perplexity(results, pruned, results.corpora))
    columns["retained (dense mean / row mean)"] = [markdown.share(ratio(means[0], mean)) for mean in means]
    first = [results.windows[row][results.corpora[0]].iloc[0] for row in rows]
    before = int(first[0]["parameters"])
    columns["parameters"] = [f"{window['parameters']:,}" for window in first]
    columns["removed"] = [markdown.share(1 - window["parameters"] / before) for window in first]
    columns["operator parameters"] = [f"{window['operator_parameters']:,}" for window in first]
    return markdown.table(columns, text=["criterion", "operator"])


def _accuracies(results: Results, rows: list[Row]) -> str:
    pruned = rows[1:]
    columns = markdown.row_labels(rows)
    for task in results.tasks:
        cells = [markdown.percent(accuracy(results, row, task, "acc")) for row in rows]
        columns[f"{task} acc"] = _marked(cells, rows, best_accuracy(results, pruned, [task], "acc"))
    for metric in ("acc", "acc_norm"):
        tasks = tasks_with(results, metric)
        if tasks:
            cells = [markdown.percent(mean_accuracy(results, row, metric)) for row in rows]
            columns[f"mean {metric}"] = _marked(cells, rows, best_accuracy(results, pruned, tasks, metric))
    means = [mean_accuracy(results, row, "acc").value for row in rows]
    columns["retained (row mean acc / dense mean acc)"] = [markdown.share(ratio(mean, means[0])) for mean in means]
    return markdown.table(columns, text=["criterion", "operator"])


def _removed_layers(results: Results, model: str, n: int) -> Iterable[str]:
    chosen = results.chosen(model, n)
    if not chosen:
        return
    scores = results.scores[model].set_index(["start", "end"])["cosine"]
    lines = []
    for criterion, layers in chosen.items():
        cuts = runs(layers)
        cosines = [f"cos(h_{start}, h_{end}) = {scores[start, end]:.4f}" for start, end in cuts]
        options = results.criterion_options[Row(model, criterion, n)]
        lines.append(f"- {criterion}: {markdown.layers(cuts)} ({', '.join(cosines)}); options {options}")
    yield "Removed layers:"
    yield "\n".join(lines)
    for distinct in dict.fromkeys(tuple(layers) for layers in chosen.values()):
        same = [criterion for criterion, layers in chosen.items() if tuple(layers) == distinct]
        if len(same) > 1:
            yield (
                f"{markdown.listed(same)} chose identical layers: {markdown.layers(runs(list(distinct)))}. "
                f"Their rows are the same model, so between them there is nothing to compare."
            )


def _diagnostics(results: Results, model: str, n: int) -> Iterable[str]:
    solved = [(row, cut) for row in results.pruned(model, n) for cut in results.operators[row].to_dict("records")]
    if not solved:
        return
    cuts: list[dict[Any, Any]] = [cut for _, cut in solved]
    yield (
        "Operators, per boundary [start, end): relative residual ‖X_pre W - X_post‖² / ‖X_post‖² on the calibration "
        "tokens without (W = I) and with the operator, anti-symmetric share of M = W - I, condition number of the "
        "Gram matrix. Few tokens of massive activation can make up most of both norms: an operator that scales by mean "
        "ratios may then raise the residual and lower the perplexity all the same."
    )
    yield markdown.table(
        {
            **markdown.row_labels([row for row, _ in solved]),
            "boundary": [f"[{cut['start']}, {cut['end']})" for cut in cuts],
            "one operator per": [cut["boundary"] for cut in cuts],
            "options": [cut["options"] for cut in cuts],
            "residual before": [markdown.significant(cut["residual_before"]) for cut in cuts],
            "residual after": [markdown.significant(cut["residual_after"]) for cut in cuts],
            "anti-symmetric share": [markdown.significant(cut["antisymmetric_share"]) for cut in cuts],
            "condition": [
                "singular" if math.isinf(cut["condition"]) else markdown.significant(cut["condition"]) for cut in cuts
            ],
            "tokens": [f"{cut['tokens']:,}" for cut in cuts],
        },
        text=["criterion", "operator", "boundary", "one operator per", "options"],
    )


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
