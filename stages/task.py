"""Stage `task`: the questions of one task, or group of tasks, of lm-evaluation-harness.

A task is the harness' own, its definition unchanged, or the file that ``params.yaml: tasks`` names. Its data sets come
from the Hub, from the mirror (:mod:`stages.hub`), or, for a file, from a local folder. Writes ``data/task/<task>/``:
the evaluated questions, laid out so that the same definition finds them there, and ``origin.json``. `eval_acc` depends
on that alone: one more task touches no other, and no later stage needs the Hub.
"""

import difflib
import os
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from stages import hub
from stages.harness import (
    DEFINITION,
    ORIGIN,
    QUESTIONS,
    LoadedDataSet,
    build,
    check_supported,
    data_sets_from,
    evaluated_split,
    harness_folder,
)
from stages.project import params
from stages.project.artifacts import write_json, writing
from stages.project.errors import UserError, run
from stages.project.paths import task_folder

WATCHED = (Path("stages/tasks"), Path("data/local"))
"""Folders among the stage's dependencies in dvc.yaml."""


def main() -> None:
    """Run the stage for one task."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True)
    name = parser.parse_args().task
    settings = params.load()
    with writing(task_folder(name)) as folder:
        folder.mkdir()
        if name in settings.tasks:
            where = f"params.yaml: tasks.{name}"
            copy_definition(Path(settings.tasks[name].file), name, folder / DEFINITION, where)
            write_questions(name, folder / DEFINITION, None, folder, where)
        else:
            where = f"params.yaml: grid.tasks: {name!r}"
            definitions = find_official(name, sorted(settings.tasks), where)
            write_questions(name, harness_folder() / definitions, definitions, folder, where)


def copy_definition(file: Path, name: str, folder: Path, where: str) -> None:
    """Copy a task file, and the files beside it that it includes or takes functions from.

    Raises UserError when the file is missing, cannot be read, or defines another task.
    """
    if not file.is_file():
        raise UserError(f"{where}.file = {file}: no such file")
    if not any(file.resolve().is_relative_to(watched.resolve()) for watched in WATCHED):
        raise UserError(f"{where}.file = {file}: must lie below {' or '.join(map(str, WATCHED))}, which DVC watches")
    definition, _ = read_definition(file, where)
    if definition.get("task") != name:
        raise UserError(f"{where}: {file} must define `task: {name}`")
    home = file.resolve().parent
    needed, copied = [file.resolve()], set[Path]()
    while needed:
        current = needed.pop()
        # A function may be of an installed package, which is no file here.
        if current in copied or (current.suffix == ".py" and not current.exists()):
            continue
        copied.add(current)
        if not current.is_relative_to(home):
            raise UserError(f"{where}: needs {current}, which is not in {file.parent}")
        target = folder / current.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        if current.suffix != ".py":
            needed += read_definition(current, where)[1]
        shutil.copyfile(current, target)


def read_definition(file: Path, where: str) -> tuple[dict[str, Any], list[Path]]:
    """The content of a task file, and the files that it includes or takes functions from, wherever they are.

    Raises UserError when it cannot be read or is no mapping.
    """
    functions: list[Path] = []

    class Loader(yaml.SafeLoader):
        pass

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        name = str(loader.construct_scalar(node))
        functions.append((file.parent / f"{name.rpartition('.')[0].replace('.', '/')}.py").resolve())
        return name

    Loader.add_constructor("!function", function)
    try:
        # The loader is a safe one: it makes no objects.
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{where}: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {file} must hold a mapping, found {type(content).__name__}")
    included = content.get("include", [])
    names = [included] if isinstance(included, str) else included
    return content, [*functions, *((file.parent / name).resolve() for name in names)]


def find_official(name: str, own: list[str], where: str) -> str:
    """The folder of the harness that defines a task or group with all its members, relative to all of its tasks'.

    Raises UserError when the harness has no task or group of this name.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name in manager.all_tags:
        members = ", ".join(sorted(manager.task_index[name].tags))
        raise UserError(f"{where} is a tag, a mere list of tasks; name those you want: {members}")
    if name not in manager.all_tasks:
        near = ", ".join(difflib.get_close_matches(name, {*own, *manager.all_tasks}, n=5))
        raise UserError(
            f"{where} is neither in params.yaml: tasks ({', '.join(own) or 'empty'}) nor a task of "
            f"lm-evaluation-harness; near: {near or 'none'}"
        )
    files = [manager.task_index[member].yaml_path for member in members_of(manager, name)]
    folder = os.path.commonpath([file.parent for file in files if file is not None])
    return Path(folder).relative_to(harness_folder()).as_posix()


def members_of(manager: Any, name: str) -> Iterator[str]:
    """Every name in the harness' index that a task or group is built from: itself, its groups, tags, and tasks."""
    entry = manager.task_index.get(name)
    if entry is None:
        return
    if name in manager.all_tags:
        yield from sorted(entry.tags)
    elif entry.yaml_path is not None:
        yield name
    members = (entry.cfg or {}).get("task")
    for member in members if isinstance(members, list) else []:
        inner = member if isinstance(member, str) else member.get("group", member.get("task"))
        yield from members_of(manager, inner)


def local_or_hub(data_set: str, config: str | None, where: str) -> str:
    """Where a data set that a task file names is: a folder of that path, or in the mirror, or on the Hub."""
    return data_set if Path(data_set).is_dir() else hub.place(data_set, config, where)


def write_questions(name: str, definitions: Path, official: str | None, folder: Path, where: str) -> None:
    """Load the data sets of the task or group `name`, defined in `definitions`, and write the questions into `folder`.

    `official` is the definitions' folder in the harness, or None. Raises UserError when the task is of a kind that is
    not supported, or a data set cannot be loaded.
    """
    place = partial(local_or_hub if official is None else hub.place, where=where)
    with data_sets_from(place, where) as data_sets:
        tasks, version = build(name, definitions, where)
    check_supported(tasks, where)
    members = {}
    for member, task in tasks.items():
        key = (task.DATASET_PATH, task.DATASET_NAME)
        if key not in data_sets:
            raise UserError(f"{where}: {member} does not load its data set by name and config; that is not supported")
        split = evaluated_split(task)
        data_sets[key].evaluated.add(split)
        members[member] = {"data_set": key[0], "config": key[1], "split": split, "version": str(task.VERSION)}
    for (data_set, config), loaded in data_sets.items():
        write_data_set(folder / QUESTIONS, data_set, config, loaded)
    write_json(folder / ORIGIN, {"official": official, "version": version, "members": members})


def write_data_set(folder: Path, data_set: str, config: str | None, loaded: LoadedDataSet) -> None:
    """Write the evaluated splits of a data set below `folder`, as the Hub would hold them."""
    home = folder / data_set
    configs = home / (config or "default")
    configs.mkdir(parents=True)
    files = []
    # One of which nothing is evaluated is read by a function of the definition.
    for split in sorted(loaded.evaluated or set(map(str, loaded.splits))):
        loaded.splits[split].to_parquet(configs / f"{split}.parquet")
        files.append({"split": split, "path": f"{configs.name}/{split}.parquet"})
    readme = home / "README.md"
    known = yaml.safe_load(readme.read_text(encoding="utf-8").strip("-\n"))["configs"] if readme.exists() else []
    known.append({"config_name": configs.name, "data_files": files})
    readme.write_text(f"---\n{yaml.safe_dump({'configs': known}, sort_keys=False)}---\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
