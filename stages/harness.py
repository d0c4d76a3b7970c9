"""Tasks of lm-evaluation-harness: which are supported, and how the stage `task` leaves them for `eval_acc`.

Nothing here imports the harness before it is needed: it takes seconds.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stages import hub
from stages.project.artifacts import read_json
from stages.project.errors import UserError
from stages.project.paths import task_folder

ORIGIN = "origin.json"
"""In ``data/task/<task>``: `official`, the definitions' folder in the harness or null; `version`; `members`, by the
name of the task or of each of a group's: data_set, config, split, version."""
DEFINITION = "definition"
"""In ``data/task/<task>``: the task file and what it needs, unless the definition is the harness' own."""
QUESTIONS = "questions"
"""In ``data/task/<task>``: the data sets, as ``<hub id>/<config>/<split>.parquet``."""


def harness_folder() -> Path:
    """The folder of the harness' own task definitions."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def prepared(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A task or group as the stage `task` left it: its tasks (``lm_eval.api.task.Task``) by name, and its origin.

    Raises UserError when the harness cannot build it.
    """
    folder = task_folder(name).absolute()
    origin = read_json(folder / ORIGIN)
    official = origin["official"]
    definitions = folder / DEFINITION if official is None else harness_folder() / official
    where = f"params.yaml: grid.tasks: {name!r}"
    with data_sets_from(lambda data_set, _config: str(folder / QUESTIONS / data_set), where):
        tasks, _ = build(name, definitions, where)
    return tasks, origin


class LoadedDataSet:
    """A data set as ``datasets.load_dataset`` gave it, and which of its splits are evaluated."""

    def __init__(self, splits: Any):
        self.splits = splits
        self.evaluated: set[str] = set()


DataSets = dict[tuple[str, str | None], LoadedDataSet]
"""By id and config."""


@contextmanager
def data_sets_from(place: Callable[[str, str | None], str], where: str) -> Iterator[DataSets]:
    """Inside the context, the harness loads data sets from ``place(id, config)``, and they are recorded.

    That is a folder, or the id for the Hub. A split that is not there is empty: a definition names the training split
    too, which nobody reads without solved examples. Every way in which a definition may load a data set leads through
    this one function of the library, so that definitions stay as they are. Raises UserError when one cannot be loaded.
    """
    import datasets

    class Splits(datasets.DatasetDict):  # type: ignore[misc]  # has no types
        def __missing__(self, split: str) -> datasets.Dataset:
            return next(iter(self.values())).select([])

    recorded: DataSets = {}
    places: list[str] = []
    from_library = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        given = {key: value for key, value in options.items() if value is not None}
        if given:
            raise UserError(f"{where}: data set {path} is loaded with {given}; only name and config are supported")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise UserError(
                f"{where}: dataset_path {path} must be a Hub id, or a folder in the project's, relative to it"
            )
        found_at = place(path, name)
        try:
            with patch.object(datasets, "load_dataset", from_library):
                splits = Splits(hub.load(found_at, name=name))
                there = ", ".join(splits)
        except Exception as error:
            # The library and those below it raise many types.
            raise hub.unloadable(where, path, name, found_at, error) from error
        looked = f"folder {found_at}" if Path(found_at).is_dir() else "the Hub"
        places.append(f"data set {path}, config {name or 'default'}, from {looked}, with the splits {there}")
        recorded[path, name] = LoadedDataSet(splits)
        return splits

    with patch.object(datasets, "load_dataset", load):
        try:
            yield recorded
        except UserError as error:
            raise UserError(f"{error} ({'; '.join(places)})" if places else str(error)) from error


def build(name: str, definitions: Path, where: str) -> tuple[dict[str, Any], str]:
    """The tasks of the task or group `name` by name, and its version, from the definitions in a folder.

    Raises UserError when the harness cannot build it, or when it is a group that does not average over questions.
    """
    from lm_eval.tasks import TaskManager

    # It tells of defaults that a definition leaves to it.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=definitions, include_defaults=False)
    try:
        loaded = manager.load(name)
    except UserError:
        raise
    except Exception as error:
        # A definition may run code of its own and read any data set: every type of error is possible.
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UserError(f"{where}: cannot be built: {type(error).__name__}: {reason}") from error
    groups = loaded.get("groups", {})
    if name not in groups:
        return loaded["tasks"], str(loaded["tasks"][name].VERSION)
    means = [metric for metric in groups[name].aggregate_metric_list or [] if metric.metric == "acc"]
    if not any(metric.aggregation == "mean" and metric.weight_by_size for metric in means):
        members = ", ".join(loaded["tasks"])
        raise UserError(f"{where} is a group without a mean of `acc` over questions; name its tasks: {members}")
    return loaded["tasks"], str((groups[name].metadata or {}).get("version", "none"))


def check_supported(tasks: dict[str, Any], where: str) -> None:
    """Raise UserError unless every task is multiple choice with one right answer and the harness' own `acc`."""
    for name, task in tasks.items():
        kind, config = task.OUTPUT_TYPE, task.config
        if kind != "multiple_choice":
            raise UserError(f"{where}: {name} has output type {kind}; only multiple_choice is supported")
        if config.process_results is not None:
            raise UserError(f"{where}: {name} scores its answers with code of its own, only `acc` is supported")
        metrics = [metric["metric"] for metric in config.metric_list or [{"metric": "acc"}]]
        if "acc" not in metrics:
            raise UserError(f"{where}: {name} has no metric `acc`, only {', '.join(map(str, metrics))}")
        if task.multiple_target:
            raise UserError(f"{where}: the questions of {name} have several right answers each; one is supported")


def evaluated_split(task: Any) -> str:
    """The split that the harness evaluates: the test split, or if there is none the validation split."""
    return str(task.config.test_split or task.config.validation_split)
