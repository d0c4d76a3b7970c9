"""What dvc.yaml says: the code, files and command line of every stage."""

import re
from pathlib import Path

import pytest
from pipeline import (
    ROOT,
    STAGES,
    imported_modules,
    outputs_of,
)

from stages.project import paths
from stages.project.keys import Row

ITEM = re.compile(r"\$\{item\.(\w+)\}")
DYNAMIC = {"select": ("criteria", "criterion"), "solve": ("operators", "operator")}
"""Stages that import a module named in params.yaml: the package that it is in, the matrix axis that names it."""
SELECTION = Row("tiny", "streamline", 2)
GHOST = Row("tiny", "streamline", 2, "ghost")
REPORTED = ("score", "select", "solve", "eval_ppl", "eval_acc", "generate", "cost")
"""Folders of `data` that the report depends on as a whole."""


def module_of(stage: str) -> str:
    """The module that a stage runs."""
    return re.match(r"python -m stages\.(\w+)", STAGES[stage]["cmd"])[1]


def code_of(module: str, root: Path = ROOT) -> set[str]:
    """What must be among the deps of a stage that runs `module`: every file of the package that it imports.

    A criterion or an operator is a dependency of its own instances alone; what any of them imports besides, of all.
    """
    found = imported_modules(root / "stages" / f"{module}.py", root)
    if module in DYNAMIC:
        package, axis = DYNAMIC[module]
        for file in sorted((root / "stages" / package).glob("*.py")):
            found |= imported_modules(file, root) - {file.relative_to(root).as_posix()}
        found |= {f"stages/{package}/__init__.py", f"stages/{package}/${{item.{axis}}}.py"}
    found |= {"assets": {"stages/assets.txt"}, "task": {"stages/tasks"}}.get(module, set())
    return found


def files_of(dependency: str) -> list[str]:
    """The modules of a package that is one dependency; anything else as it is."""
    folder = ROOT / dependency
    package = (folder / "__init__.py").is_file()
    return [file.relative_to(ROOT).as_posix() for file in sorted(folder.glob("*.py"))] if package else [dependency]


def dependency_faults(declared: list[str], needed: set[str]) -> list[str]:
    """What is wrong with the code among a stage's deps."""
    code = [file for dep in declared if dep.startswith("stages/") for file in files_of(dep)]
    return [
        *(f"lacks {name}, which it imports" for name in sorted(needed - set(code))),
        *(f"has {name}, which it does not import" for name in sorted(set(code) - needed)),
        *(f"has {name} twice" for name in sorted({name for name in code if code.count(name) > 1})),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_stage_depends_on_the_code_it_imports_and_on_no_other(stage):
    faults = dependency_faults(STAGES[stage]["deps"], code_of(module_of(stage)))
    assert not faults, f"dvc.yaml: {stage}.deps " + "; ".join(faults)


def test_imports_are_found_wherever_they_stand(tmp_path):
    files = {
        "__init__.py": "",
        "a.py": "import os\nimport stages.b\ndef f():\n    from stages import c\n",
        "b.py": "from stages.package.inner import x, y\n",
        "c.py": "from . import d\nfrom .package import e\n",
        "d.py": "",
        "unused.py": "import stages.a\n",
        "package/__init__.py": "from stages import f\n",
        "package/inner.py": "if True:\n    import stages.package.deep as deep\n",
        "package/deep.py": "",
        "package/e.py": "",
        "f.py": "import json\n",
    }
    for name, text in files.items():
        file = tmp_path / "stages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    found = imported_modules(tmp_path / "stages/a.py", tmp_path)
    assert found == {f"stages/{name}" for name in files if name != "unused.py"}


def test_faults_of_a_wrong_list_are_named():
    faults = dependency_faults(["data/x", "stages/a.py", "stages/c.py", "stages/c.py"], {"stages/a.py", "stages/b.py"})
    assert faults == [
        "lacks stages/b.py, which it imports",
        "has stages/c.py, which it does not import",
        "has stages/c.py twice",
    ]


def declared_outputs(row: Row, task: str) -> dict[str, list[Path]]:
    """What stages/project/paths.py says that each stage writes."""
    dense = Row(row.model)
    return {
        "grid": [paths.GRID],
        "assets": [paths.ASSETS],
        "model": [paths.model_folder(row.model)],
        "text": [paths.calibration_file(row.model).parent],
        "task": [paths.task_folder(task)],
        "score": [paths.score_file(row.model)],
        "select": [paths.select_file(row)],
        "collect": [paths.collect_file(row)],
        "solve": [paths.solve_file(row), paths.diagnostics_file(row)],
        "patch": [paths.patch_folder(row)],
        "eval_ppl_dense": [paths.perplexity_file(dense), paths.text_file(dense)],
        "eval_ppl": [paths.perplexity_file(row), paths.text_file(row)],
        "eval_acc_dense": [paths.accuracy_file(dense, task)],
        "eval_acc": [paths.accuracy_file(row, task)],
        "cost": [paths.cost_file(row)],
    }


ITEMS = {"model": "m-1", "criterion": "crit", "n": "7", "operator": "op", "task": "t-2", "row": "m-1-crit-7-op"}


def filled(text: str) -> str:
    """A text of dvc.yaml for one instance of its stage."""
    return ITEM.sub(lambda match: ITEMS[match[1]], text)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "report"])
def test_stage_writes_where_paths_says(stage):
    expected = declared_outputs(Row("m-1", "crit", 7, "op"), "t-2")[stage]
    assert [filled(out) for out in outputs_of(stage)] == [path.as_posix() for path in expected]


@pytest.mark.parametrize("stage", STAGES)
def test_instance_is_named_on_the_command_line(stage):
    # An axis that is not on the command line, or an argument that is no axis, would compute one instance several times.
    axes = STAGES[stage].get("matrix", {})
    assert STAGES[stage]["cmd"] == " ".join(
        [f"python -m stages.{module_of(stage)}", *(f"--{axis} ${{item.{axis}}}" for axis in axes)]
    )


@pytest.mark.parametrize("stage", STAGES)
def test_every_artifact_that_a_stage_reads_is_written_by_another(stage):
    written = [Path(filled(out)) for other in STAGES for out in outputs_of(other) if other != stage]
    # A corpus of the user's own has no stage that writes it.
    read = [Path(filled(dep)) for dep in STAGES[stage]["deps"] if dep.startswith("data/") and dep != "data/local"]
    orphans = [
        str(dep) for dep in read if not any(dep == out or out in dep.parents or dep in out.parents for out in written)
    ]
    assert not orphans, f"dvc.yaml: {stage} reads {orphans}, which no stage writes"
