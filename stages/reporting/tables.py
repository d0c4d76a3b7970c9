"""The tables of the report as data frames and plain values: pure functions of :mod:`stages.reporting.results`."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from stages.project.keys import DENSE, Row
from stages.project.schemas import SOLVE
from stages.reporting.measures import (
    accuracy,
    gap_recovered,
    mean_accuracy,
    mean_nll,
    mean_perplexity,
    ratio,
    tasks_with,
)
from stages.reporting.pairs import Comparison
from stages.reporting.results import Results
from stages.reporting.significance import perplexity


def perplexity_table(results: Results) -> pd.DataFrame:
    """One row per row and corpus.

    `nll` is in nats per token, `nll_stderr` its standard error over windows (empty with one window), `perplexity` its
    exp (`inf` beyond a double), `retained` the dense row's perplexity over this one's, `gap_recovered` the share of the
    gap in log-perplexity between the dense row and the one without operator, `parameters` those of the evaluated model
    with its operators.
    """
    records: list[dict[str, Any]] = []
    for row in results.rows if results.corpora else []:
        for corpus in results.corpora:
            frame = results.windows[row][corpus]
            nll = mean_nll(results, row, corpus)
            dense = mean_nll(results, Row(row.model), corpus)
            records.append(
                {
                    **row.columns(),
                    "corpus": corpus,
                    "perplexity": perplexity(nll.value),
                    "nll": nll.value,
                    "nll_stderr": nll.error,
                    "retained": perplexity(dense.value - nll.value),
                    "gap_recovered": gap_recovered(results, row, [corpus]),
                    "windows": len(frame),
                    "tokens": frame["tokens"].sum(),
                    **{name: frame[name].iloc[0] for name in WINDOW_SETTINGS},
                    **{name: frame[name].iloc[0] for name in ("parameters", "operator_parameters")},
                }
            )
    return pd.DataFrame(records, columns=PERPLEXITY_COLUMNS).astype({"seed": "Int64"})


WINDOW_SETTINGS = ("seqlen", "bos", "cut", "seed", "source", "dtype", "calibration")
PERPLEXITY_COLUMNS = [
    *("model", "criterion", "n", "operator", "corpus", "perplexity", "nll", "nll_stderr", "retained", "gap_recovered"),
    *("windows", "tokens", *WINDOW_SETTINGS, "parameters", "operator_parameters"),
]


def accuracy_table(results: Results) -> pd.DataFrame:
    """One row per row and task; `acc` and `acc_norm` in [0, 1], with their standard errors.

    `acc_norm` is empty where the task has none, an error with one question, `limit` where all questions were asked.
    """
    records: list[dict[str, Any]] = []
    for row in results.rows:
        for task in results.tasks:
            frame = results.questions[row][task]
            record: dict[str, Any] = {**row.columns(), "task": task, "questions": len(frame)}
            for metric in ("acc", "acc_norm"):
                if task in tasks_with(results, metric):
                    estimate = accuracy(results, row, task, metric)
                    record |= {metric: estimate.value, f"{metric}_stderr": estimate.error}
            copied = {name: frame[name].iloc[0] for name in QUESTION_SETTINGS}
            records.append({**record, **copied, "source": questions_source(frame)})
    table = pd.DataFrame(records, columns=ACCURACY_COLUMNS)
    return table.astype({"limit": "Int64"})


def questions_source(frame: pd.DataFrame) -> str:
    """Where a task's questions come from; of a group, the first member's and how many more there are."""
    first, *others = frame["source"].unique()
    return f"{first} and {len(others)} more" if others else str(first)


QUESTION_SETTINGS = (*("available", "limit", "version", "source", "num_fewshot", "batch_size", "dtype", "calibration"),)
ACCURACY_COLUMNS = [
    *("model", "criterion", "n", "operator", "task", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "questions"),
    *QUESTION_SETTINGS,
]


def summary_table(results: Results) -> pd.DataFrame:
    """One row per row: the averages over corpora and over tasks, what they retain of the dense row's, parameters.

    `perplexity` is the arithmetic mean over corpora, `acc` and `acc_norm` the means over the tasks that have them, in
    [0, 1]. `perplexity_retained` is dense over row, `acc_retained` row over dense; `gap_recovered` is of the mean over
    corpora; `stock_architecture` says that no operator is needed at inference. Empty where nothing was evaluated.
    """
    records: list[dict[str, Any]] = []
    for row in results.rows:
        record: dict[str, Any] = {**row.columns()}
        if results.corpora:
            mean, dense = (mean_perplexity(results, of, results.corpora) for of in (row, Row(row.model)))
            window, whole = (results.windows[of][results.corpora[0]].iloc[0] for of in (row, Row(row.model)))
            record |= {"perplexity": mean, "perplexity_retained": ratio(dense, mean)}
            record["gap_recovered"] = gap_recovered(results, row, results.corpora)
            record |= {"parameters": window["parameters"], "dense_parameters": whole["parameters"]}
            record["operator_parameters"] = window["operator_parameters"]
            record["stock_architecture"] = bool(window["operator_parameters"] == 0)
        for metric in ("acc", "acc_norm"):
            if tasks_with(results, metric):
                estimate = mean_accuracy(results, row, metric)
                record |= {metric: estimate.value, f"{metric}_stderr": estimate.error}
        if results.tasks:
            record["acc_retained"] = ratio(record["acc"], mean_accuracy(results, Row(row.model), "acc").value)
        records.append(record)
    table = pd.DataFrame(records, columns=SUMMARY_COLUMNS)
    numbers = dict.fromkeys(("parameters", "dense_parameters", "operator_parameters"), "Int64")
    return table.astype({**numbers, "stock_architecture": "boolean", "gap_recovered": "float64"})


SUMMARY_COLUMNS = [
    *("model", "criterion", "n", "operator", "perplexity", "perplexity_retained", "gap_recovered", "acc", "acc_stderr"),
    *("acc_retained", "acc_norm", "acc_norm_stderr", "dense_parameters", "parameters", "operator_parameters"),
    "stock_architecture",
]


def pair_table(comparisons: Mapping[tuple[str, int], Comparison]) -> pd.DataFrame:
    """One row per pair of pruned rows a, b of one model and n, and column that they are compared in.

    `measure` is `perplexity`, `acc` or `acc_norm`, `on` a corpus, a task or `mean`. `difference` is a - b: of the mean
    negative log-likelihood, nats per token, or of the share of right answers; `stderr` is empty
    with one window or question, `p` with one window.
    """
    records = [
        (model, n, a.criterion, a.operator, b.criterion, b.operator, measure, on, *pair.values())
        for (model, n), comparison in comparisons.items()
        for (measure, on), pairs in comparison.items()
        for (a, b), pair in pairs.items()
    ]
    return pd.DataFrame(records, columns=PAIR_COLUMNS)


PAIR_COLUMNS = [
    *("model", "n", "criterion_a", "operator_a", "criterion_b", "operator_b"),
    *("measure", "on", "difference", "stderr", "p"),
]


def operator_table(results: Results) -> pd.DataFrame:
    """The diagnostics of every operator: the rows of the SOLVE artifacts, in the order of the tables."""
    records = [record for frame in results.operators.values() for record in frame.to_dict("records")]
    return pd.DataFrame(records, columns=SOLVE.names)


def similarity_table(results: Results) -> pd.DataFrame:
    """For every model and n, every block start s with cos(h_s, h_{s+n}).

    `removed_by` names the criteria whose removed layers are exactly s..s+n-1, joined by ` and `; empty if none.
    """
    columns = ["model", "n", "start", "end", "cosine", "removed_by"]
    parts = [pd.DataFrame(columns=columns)] if not results.numbers else []
    for model, scores in results.scores.items():
        for n in results.numbers:
            blocks = scores[scores["end"] - scores["start"] == n].sort_values("start").assign(n=n)
            chosen = results.chosen(model, n)
            blocks["removed_by"] = [
                " and ".join(name for name, layers in chosen.items() if layers == list(range(start, start + n)))
                for start in blocks["start"]
            ]
            parts.append(blocks[columns])
    return pd.concat(parts, ignore_index=True)


def metrics(results: Results) -> dict[str, Any]:
    """Nested plain values: model, then ``<criterion>-<n>`` and operator (or ``dense``), then perplexity and acc.

    A perplexity that a double can't hold is None (JSON has no infinity); reports/perplexity.csv has its logarithm.
    """
    nested: dict[str, Any] = {}
    for row in results.rows:
        values: dict[str, dict[str, float | None]] = {}
        if results.corpora:
            perplexities = {name: perplexity(mean_nll(results, row, name).value) for name in results.corpora}
            perplexities["mean"] = mean_perplexity(results, row, results.corpora)
            values["perplexity"] = {name: x if math.isfinite(x) else None for name, x in perplexities.items()}
        if results.tasks:
            values["acc"] = {task: accuracy(results, row, task, "acc").value for task in results.tasks}
            values["acc"]["mean"] = mean_accuracy(results, row, "acc").value
        of_model = nested.setdefault(row.model, {})
        if row.dense:
            of_model[DENSE] = values
        else:
            of_model.setdefault(f"{row.criterion}-{row.n}", {})[row.operator] = values
    return nested
