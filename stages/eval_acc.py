"""Stage `eval_acc`: the model's answers to one task of lm-evaluation-harness, without solved examples.

Reads the row's model and ``data/task/<task>/``. Writes ``data/eval_acc/<key>-<task>.parquet``, one row per question.
Killed and started again, it goes on where it was.
"""

import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from stages.answers import answers_folder, resumable
from stages.harness import prepared
from stages.project import params
from stages.project.artifacts import read_json, sha256, write_table
from stages.project.errors import UserError, run
from stages.project.keys import Row, parse_row
from stages.project.paths import accuracy_file, model_folder, patch_folder
from stages.project.schemas import EVAL_ACC

SHOTS = 0


def main() -> None:
    """Run the stage for one row and task."""
    row, given = parse_row(__doc__, "task")
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    tasks, origin = prepared(given.task)
    # Imported only now: a wrong task is found before seconds of imports and a model in memory.
    from stages.base.checkpoint import SOURCE, load_tokenizer
    from stages.recovered.patched import load_row

    source = settings.models[row.model]
    model, made_with = load_row(row, settings)
    tokenizer = load_tokenizer(row.model, source.trust_remote_code)
    wanted = settings.eval_acc
    identity = {
        "task": given.task,
        "model": read_json(model_folder(row.model) / SOURCE),
        "adapter": adapter_hashes(row),
        "dtype": source.dtype,
        "bos_token": tokenizer.bos_token,
    }
    folder = answers_folder(identity)
    frame = answers(tasks, model, tokenizer, wanted.limit, wanted.batch_size, folder).assign(
        **row.columns(),
        dtype=source.dtype,
        **made_with,
        task=given.task,
        version=origin["version"],
        limit=wanted.limit,
        available=sum(len(task.eval_docs) for task in tasks.values()),
        num_fewshot=SHOTS,
        batch_size=wanted.batch_size,
    )
    write_table(accuracy_file(row, given.task), frame.assign(source=frame["member"].map(sources(origin))), EVAL_ACC)
    shutil.rmtree(folder)


def adapter_hashes(row: Row) -> dict[str, str]:
    """SHA-256 of the files of a row's adapter, by name; empty for the dense row."""
    files = [] if row.dense else sorted(patch_folder(row).iterdir())
    return {file.name: sha256(file) for file in files}


def sources(origin: dict[str, Any]) -> dict[str, str]:
    """Where the questions of each member come from: data set, config, split."""
    found = origin["members"].items()
    return {name: f"{m['data_set']} {m['config'] or 'default'} {m['split']}" for name, m in found}


def answers(
    tasks: dict[str, Any], model: Any, tokenizer: Any, limit: int | None, batch_size: int, folder: Path
) -> pd.DataFrame:
    """Ask the first `limit` questions of each task, or all; `batch_size` choices are forwarded together.

    Columns member, question, answer, loglikelihoods (nats, of every choice), correct, correct_norm (None without
    `acc_norm`). Answers already in `folder` are not asked again. Raises UserError naming the question when a
    log-likelihood is not finite, or no choice is the right one.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from stages.base.decoder import input_device

    for task in tasks.values():
        task.set_config("num_fewshot", SHOTS)
    # HFLM warns that it takes the model as it is, which is what we want.
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # In half precision, the sum of a choice's log-probabilities would be rounded to steps that decide questions.
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
    logger.setLevel(level)
    # It takes the device of the first parameter, which a device map may keep on disk.
    wrapped._device = input_device(model)
    ask = partial(wrapped.loglikelihood, disable_tqdm=not sys.stderr.isatty())
    wrapped.loglikelihood = partial(resumable, wrapped, ask, batch_size=batch_size, folder=folder)
    samples = evaluate(wrapped, {"tasks": tasks}, limit=limit, bootstrap_iters=0)["samples"]
    return pd.DataFrame([_answer(task, name, sample) for name, task in tasks.items() for sample in samples[name]])


def _answer(task: Any, name: str, sample: dict[str, Any]) -> dict[str, Any]:
    where = f"task {name}, question {sample['doc_id']}"
    choices = task.doc_to_choice(sample["doc"])
    right = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
    if isinstance(right, str):
        right = choices.index(right) if right in choices else None
    if right is None or not 0 <= right < len(choices):
        raise UserError(
            f"{where}: the right answer is {sample['target']!r}, which is none of its {len(choices)} choices"
        )
    # Behind the choices' own come those without the question, of a task that also has acc_mutual_info.
    loglikelihoods = [float(value) for value, _ in sample["filtered_resps"][: len(choices)]]
    return {
        "member": name,
        "question": sample["doc_id"],
        "answer": right,
        "loglikelihoods": loglikelihoods,
        "correct": bool(sample["acc"]),
        "correct_norm": bool(sample["acc_norm"]) if "acc_norm" in sample else None,
    }


if __name__ == "__main__":
    run(main)
