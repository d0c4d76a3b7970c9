"""Stage `task`: the definition and the questions of one task, so that `eval_acc` depends on its own task alone.

Reads ``stages/tasks/<task>.yaml``, a task file of lm-evaluation-harness that asks the official question of a local
data set, and that data set. Writes ``data/task/<task>/``: the file and a copy of the questions that it reads. A task
without a file here is the harness' own, whose definition and data set are not ours to copy: the folder then only says
so.
"""

import difflib
import shutil
from argparse import ArgumentParser
from pathlib import Path

import yaml

from stages.project import params
from stages.project.artifacts import write_json, writing
from stages.project.errors import UserError, run
from stages.project.paths import task_folder

OURS = Path(__file__).with_name("tasks")
ORIGIN = "origin.json"
"""In ``data/task/<task>``: whether the definition is the harness' own, else the data set's id."""
QUESTIONS = "questions"


def main() -> None:
    """Run the stage for one task."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True)
    name = parser.parse_args().task
    params.load()
    file = OURS / f"{name}.yaml"
    if file.exists():
        write_own(file, task_folder(name))
    else:
        check_official(name)
        with writing(task_folder(name)) as folder:
            folder.mkdir()
            write_json(folder / ORIGIN, {"official": True})


def write_own(file: Path, target: Path) -> None:
    """Write a task file of ours, reading the copy of its questions beside it.

    Raises UserError when it is not a task file, or when its data set is not there.
    """
    where = f"params.yaml: grid.tasks: {file.stem!r}"
    try:
        definition = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {file.name} is not valid YAML: {error}") from error
    if not isinstance(definition, dict) or definition.get("task") != file.stem or "dataset_path" not in definition:
        raise UserError(f"{where}: stages/tasks/{file.name} must define `task: {file.stem}` and a `dataset_path`")
    source = Path(definition["dataset_path"])
    if not source.is_dir():
        raise UserError(f"{where}: its questions, {source}, are not there; name the data set under `assets`")
    with writing(target) as folder:
        folder.mkdir()
        shutil.copytree(source, folder / QUESTIONS)
        changed = {**definition, "dataset_path": str(target / QUESTIONS)}
        (folder / file.name).write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
        write_json(folder / ORIGIN, {"official": False, "data_set": "/".join(source.parts[-2:])})


def check_official(name: str) -> None:
    """Raise UserError unless lm-evaluation-harness has a task of this name."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    ours = sorted(file.stem for file in OURS.glob("*.yaml"))
    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, {*ours, *manager.all_tasks}, n=5)
        raise UserError(
            f"params.yaml: grid.tasks: {name!r} is neither in stages/tasks ({', '.join(ours)}) nor a task of "
            f"lm-evaluation-harness; near: {', '.join(near) or 'none'}"
        )
    if name not in manager.all_subtasks:
        raise UserError(f"params.yaml: grid.tasks: {name!r} is a group of tasks; name the tasks themselves")


if __name__ == "__main__":
    run(main)
