"""What the models of some rows write and what they cost, each beside the dense one and the one without operators."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from stages.project.keys import Row
from stages.project.schemas import ROW
from stages.reporting import markdown
from stages.reporting.results import Results

MEBIBYTE = 2**20
ROW_COLUMNS = tuple(column.name for column in ROW)


def texts(results: Results, model: str, n: int) -> Iterable[str]:
    """What the models of one table's rows wrote, a table per prompt; nothing without prompts."""
    rows = [row for row in results.texts if row.model == model and row.n in (0, n)]
    if not results.prompts or not rows:
        return
    yield (
        "What the models write after a prompt, always the likeliest token. It shows that a model works; how well, the "
        "tables above say. ⏎ stands for a line break."
    )
    for number, prompt in enumerate(results.prompts):
        yield f"**{_line(prompt)}** ..."
        written = [results.texts[row]["continuation"].iloc[number] for row in rows]
        columns = {**markdown.row_labels(rows), "continuation": [_line(text) or "(nothing)" for text in written]}
        yield markdown.table(columns, text=list(columns))


def costs(results: Results, model: str) -> Iterable[str]:
    """The costs of a model's rows, as paragraphs and tables; nothing if there are none."""
    table = cost_table(results)
    table = table[table["model"] == model]
    if table.empty:
        return
    yield "### Cost"
    yield (
        "Medians over turns, first to third quartile in brackets; the compared models took turns in one process. "
        "*Prefill* fills the cache from the prompts, in one pass; *against no operator*: the median over turns of its "
        "time over that of the pruned model without operators. *Decode* is all new tokens of all sequences over the "
        "time of their passes. *Peak* is the weights and the most that all other tensors took at one time."
    )
    for key, rows in table.groupby("row", sort=False):
        first = rows.iloc[0]
        yield (
            f"{_cut(next(row for row in results.costs if row.key == key))}, {first['dtype']}, on {first['device']} "
            f"({first['threads']} threads of the host): batches of {first['batch_size']}, prompts of "
            f"{first['prompt_tokens']:,} tokens, {first['new_tokens']:,} new ones, {first['repeats']} turns."
        )
        records = rows.to_dict("records")
        yield markdown.table(
            {
                **markdown.row_labels([Row(*identity) for identity in rows[list(ROW_COLUMNS)].to_numpy()]),
                "parameters": [f"{record['parameters']:,}" for record in records],
                "operators'": [f"{record['operator_parameters']:,}" for record in records],
                "weights, MiB": [f"{record['weight_bytes'] / MEBIBYTE:,.1f}" for record in records],
                "peak, MiB": [f"{record['peak_bytes'] / MEBIBYTE:,.1f}" for record in records],
                "prefill, ms": [_spread(record, "prefill_seconds", 1000) for record in records],
                "against no operator": [f"{record['prefill_ratio']:.3f}" for record in records],
                "prefill, GFLOP": [f"{record['prefill_flops'] / 1e9:,.2f}" for record in records],
                "operators', GFLOP": [f"{record['operator_flops'] / 1e9:,.3f}" for record in records],
                "decode, tokens/s": [_spread(record, "decode_tokens_per_second", 1) for record in records],
            },
            text=["criterion", "operator"],
        )


def cost_table(results: Results) -> pd.DataFrame:
    """One row per measured model: medians and quartiles over turns.

    `row` is the key of the row that was measured with those it is compared with, `prefill_ratio` the median over turns
    of the prefill time over that of the model without operators in the same turn.
    """
    records: list[dict[str, Any]] = []
    for row, frame in results.costs.items():
        bare = frame[(frame["n"] == row.n) & (frame["operator"] == "none")].set_index("repeat")["prefill_seconds"]
        for identity, turns in frame.groupby(list(ROW_COLUMNS), sort=False):
            record = {"row": row.key, **dict(zip(ROW_COLUMNS, identity, strict=True))}
            speed = turns["batch_size"] * turns["new_tokens"] / turns["decode_seconds"]
            measured = {"prefill_seconds": turns["prefill_seconds"], "decode_tokens_per_second": speed}
            for name, values in measured.items():
                record |= {
                    name: values.median(),
                    f"{name}_q1": values.quantile(0.25),
                    f"{name}_q3": values.quantile(0.75),
                }
            record["prefill_ratio"] = (turns.set_index("repeat")["prefill_seconds"] / bare).median()
            record |= {"repeats": len(turns), **{name: turns[name].iloc[0] for name in COPIED}}
            records.append(record)
    return pd.DataFrame(records, columns=COST_COLUMNS)


COPIED = (
    *("parameters", "operator_parameters", "weight_bytes", "peak_bytes", "prefill_flops", "operator_flops"),
    *("batch_size", "prompt_tokens", "new_tokens", "dtype", "device", "threads"),
)
COST_COLUMNS = [
    *("row", *ROW_COLUMNS, "prefill_seconds", "prefill_seconds_q1", "prefill_seconds_q3"),
    *("prefill_ratio", "decode_tokens_per_second", "decode_tokens_per_second_q1", "decode_tokens_per_second_q3"),
    *("repeats", *COPIED),
]


def _cut(row: Row) -> str:
    return f"{row.criterion}, {row.n} layers removed, {row.operator}"


def _line(text: str) -> str:
    return " ".join(text.replace("\n", " ⏎ ").split())


def _spread(record: dict[Any, Any], name: str, scale: float) -> str:
    middle, low, high = (scale * record[name + suffix] for suffix in ("", "_q1", "_q3"))
    return f"{middle:,.1f} [{low:,.1f}, {high:,.1f}]"
