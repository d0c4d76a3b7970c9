"""Stage `eval_acc`: the model's answers to one task of lm-evaluation-harness, without solved examples.

Reads the row's model and ``data/task/<task>/``. Writes ``data/eval_acc/<key>-<task>.parquet``, one row per question.
"""

import logging
import math
import os
import sys
from functools import partial
from typing import Any

import pandas as pd

from stages.project import params
from stages.project.artifacts import read_json, write_table
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import DATA, accuracy_file, task_folder
from stages.project.schemas import EVAL_ACC
from stages.task import ORIGIN

SHOTS = 0


def main() -> None:
    """Run the stage for one row and task."""
    row, given = parse_row(__doc__, "task")
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    # Read when `datasets` is imported, which is later.
    os.environ.setdefault("HF_DATASETS_CACHE", str((DATA / ".cache/datasets").absolute()))
    task = load_task(given.task)
    # Imported only now: a wrong task is found before seconds of imports and a model in memory.
    from stages.base.checkpoint import load_tokenizer
    from stages.patched import load_row

    source = settings.models[row.model]
    model, made_with = load_row(row, settings)
    tokenizer = load_tokenizer(row.model, source.trust_remote_code)
    wanted = settings.eval_acc
    frame = answers(task, model, tokenizer, wanted.limit, wanted.batch_size).assign(
        **row.columns(),
        dtype=source.dtype,
        **made_with,
        task=given.task,
        version=str(task.VERSION),
        source=origin(task),
        limit=wanted.limit,
        available=len(task.eval_docs),
        num_fewshot=SHOTS,
        batch_size=wanted.batch_size,
    )
    write_table(accuracy_file(row, given.task), frame, EVAL_ACC)


def load_task(name: str) -> Any:
    """The task (``lm_eval.api.task.Task``) with its questions, as the stage `task` prepared it.

    Raises UserError when it is of an unsupported kind, or its questions cannot be loaded.
    """
    from datasets.exceptions import DatasetsError
    from lm_eval.tasks import TaskManager

    where = f"params.yaml: grid.tasks: {name!r}"
    folder = task_folder(name)
    official = read_json(folder / ORIGIN)["official"]
    manager = TaskManager() if official else TaskManager(include_path=folder, include_defaults=False)
    if name not in manager.all_subtasks:
        raise UserError(f"{where}: {folder} holds no definition of it; delete it and run `dvc repro`")
    config = manager.task_index[name].cfg or {}
    check_config(config, where)
    try:
        task = manager.load(name)["tasks"][name]
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        hint = f"; stages/tasks/{name}.yaml could have it read a local folder" if official else ""
        raise UserError(f"{where}: data set {config['dataset_path']} cannot be loaded: {error}{hint}") from error
    if task.multiple_target:
        raise UserError(f"{where}: its questions have several right answers each; one is supported")
    return task


def check_config(config: dict[str, Any], where: str) -> None:
    """Raise UserError unless a task's definition is multiple choice with the harness' own `acc`."""
    kind = config.get("output_type")
    if kind != "multiple_choice":
        raise UserError(f"{where}: output type {kind}; only multiple_choice is supported")
    if config.get("process_results") is not None:
        raise UserError(f"{where}: scores its answers with code of its own; only the harness' `acc` is supported")
    metrics = config.get("metric_list")
    if metrics is not None and "acc" not in [metric["metric"] for metric in metrics]:
        raise UserError(f"{where}: has no metric `acc`, only {', '.join(metric['metric'] for metric in metrics)}")


def origin(task: Any) -> str:
    """Where a task's questions come from: data set, config, split."""
    config = task.config
    known = read_json(task_folder(task.task_name) / ORIGIN)
    name = config.dataset_path if known["official"] else known["data_set"]
    return f"{name} {config.dataset_name or 'default'} {config.test_split or config.validation_split}"


def answers(task: Any, model: Any, tokenizer: Any, limit: int | None, batch_size: int) -> pd.DataFrame:
    """Ask the first `limit` questions of a task, or all; `batch_size` choices are forwarded together.

    Columns question, answer, loglikelihoods (nats, of every choice), correct, correct_norm (None without `acc_norm`).
    Raises UserError naming the question when a log-likelihood is not finite or no choice is the right one.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from stages.base.decoder import input_device

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
    wrapped.loglikelihood = partial(wrapped.loglikelihood, disable_tqdm=not sys.stderr.isatty())
    name = task.task_name
    results = evaluate(wrapped, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    return pd.DataFrame([_answer(task, sample) for sample in results["samples"][name]])


def _answer(task: Any, sample: dict[str, Any]) -> dict[str, Any]:
    where = f"task {task.task_name}, question {sample['doc_id']}"
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
    if not all(map(math.isfinite, loglikelihoods)):
        raise UserError(f"{where}: log-likelihoods {loglikelihoods} are not finite; the model is broken in this dtype")
    return {
        "question": sample["doc_id"],
        "answer": right,
        "loglikelihoods": loglikelihoods,
        "correct": bool(sample["acc"]),
        "correct_norm": bool(sample["acc_norm"]) if "acc_norm" in sample else None,
    }


if __name__ == "__main__":
    run(main)
