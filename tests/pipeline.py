"""A small project in a folder of its own, for tests of the whole pipeline: DVC and single stages run in it."""

import ast
import contextlib
import copy
import hashlib
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.project.keys import Row

ROOT = Path(__file__).parents[1]
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
CHECKPOINT = Path("checkpoint")
LOCAL = Path("data/local")
PATIENCE = 600
"""Seconds after which a test that waits for another process gives up."""

PARAMS: dict[str, Any] = {
    "grid": {
        "models": ["tiny"],
        "criteria": ["streamline"],
        "n": [2],
        "operators": ["ghost"],
        "tasks": ["quiz"],
    },
    "assets": [],
    "models": {"tiny": {"path": str(CHECKPOINT), "dtype": "float32"}},
    "corpora": {name: {"path": str(LOCAL / f"{name}.txt"), "format": "text"} for name in ("notes", "wiki", "web")},
    "text": {
        "bos": "once",
        "calibration": {"corpus": "notes", "sequences": 8, "selection_sequences": 6, "seqlen": 32, "seed": 0},
        "perplexity": {"corpora": ["wiki", "web"], "seqlen": 32, "windows": 5, "seed": None},
    },
    "tasks": {name: {"file": f"stages/tasks/{name}.yaml"} for name in ("quiz", "riddles")},
    "select": {
        "streamline": {"protect_first": 1, "protect_last": 1},
        "shortgpt": {"protect_first": 0, "protect_last": 1},
    },
    "collect": {"boundary": "run", "mlp": True},
    "solve": {"none": {}, "diag": {}, "ghost": {"ridge": 1e-6}},
    "patch": {"operator_dtype": "model"},
    "eval_acc": {"limit": 6, "batch_size": 4},
    "generate": {"prompts": ["The river"], "new_tokens": 4},
    "cost": {"rows": [], "batch_size": 2, "prompt_tokens": 8, "new_tokens": 3, "repeats": 2},
}

TASKS = {"quiz": ("acc", "acc_norm"), "riddles": ("acc",)}
"""The tasks and the metrics of each."""

# On the path of a run, this halts the named stage when its first artifact is written and not yet renamed, until the
# gate opens: what a kill at the worst moment meets.
GATE = """
import os, pathlib, sys, time

stage = os.environ["GATED_STAGE"]
if "stages." + stage in sys.orig_argv:
    gate = pathlib.Path(os.environ["GATE"])
    replace = pathlib.Path.replace

    def halt(path, target):
        if ".partial" in path.parts and pathlib.Path(target).parts[:2] == ("data", stage):
            (gate / "reached.new").write_text(str(os.getpid()))
            os.rename(gate / "reached.new", gate / "reached")
            for _ in range(6000):
                if (gate / "open").exists():
                    break
                time.sleep(0.1)
        return replace(path, target)

    pathlib.Path.replace = halt
"""


@dataclass(frozen=True)
class Repro:
    """What one `dvc repro` did: its exit code, the stages it ran, those restored from the run cache, its output."""

    code: int
    ran: list[str]
    restored: list[str]
    output: str


class Project:
    """A project folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def copy(self, folder: Path) -> "Project":
        """The project, with its cache and artifacts, in another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder)

    def set(self, **changes: Any) -> None:
        """Write params.yaml with `changes`; a key's dots are written as two underscores."""
        params = copy.deepcopy(PARAMS)
        for key, value in changes.items():
            *sections, last = key.split("__")
            section = params
            for name in sections:
                section = section[name]
            section[last] = value
        text = yaml.safe_dump(params, sort_keys=False)
        (self.folder / "params.yaml").write_text(text, encoding="utf-8")

    def environment(self, **changes: str) -> dict[str, str]:
        """Nothing of the user's settings, and no network: whatever asks for it fails at once."""
        private = ("DVC_", "GHOSTED_", "GIT_", "HF_", "PIP_", "PYTHON")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(private)}
        aside = self.folder.parent / "aside"
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "DVC_GLOBAL_CONFIG_DIR": str(aside),
            "DVC_SYSTEM_CONFIG_DIR": str(aside),
            "DVC_SITE_CACHE_DIR": str(aside),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "HF_HOME": str(aside),
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
            "OMP_NUM_THREADS": "1",
            **changes,
        }

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder; stdout and stderr together."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def repro(self, **environment: str) -> Repro:
        """Run `dvc repro`."""
        done = self.run("dvc", "repro", **environment)
        return read_repro(done.returncode, done.stdout)

    @contextlib.contextmanager
    def gated(self, stage: str, gate: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """A `dvc repro` in a process group of its own, whose `stage` halts before it renames an artifact.

        Yields the DVC process and the stage's process id as soon as it does; in the end both are gone. The output goes
        to ``output`` in the new folder `gate`; a file ``open`` there opens it.
        """
        gate.mkdir()
        (gate / "sitecustomize.py").write_text(GATE, encoding="utf-8")
        with (gate / "output").open("wb") as output:
            process = subprocess.Popen(
                ["dvc", "repro"],
                cwd=self.folder,
                env=self.environment(PYTHONPATH=str(gate), GATE=str(gate), GATED_STAGE=stage),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            reached = gate / "reached"
            wait_until(lambda: reached.exists() or process.poll() is not None)
            if not reached.exists():
                raise AssertionError(f"dvc repro ended before {stage} wrote anything:\n{(gate / 'output').read_text()}")
            yield process, int(reached.read_text())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stage(self, name: str, *arguments: str) -> None:
        """Run a stage's module as ``python -m stages.<name>`` does, but in this process, which has its imports.

        What the stage ends with, such as SystemExit, is raised.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [name, *arguments])
            runpy.run_path(str(ROOT / "stages" / f"{name}.py"), run_name="__main__")

    def digests(self, *folders: str) -> dict[str, str]:
        """SHA-256 of every file below `folders`, by its path in the project."""
        files = [file for name in folders for file in sorted((self.folder / name).rglob("*")) if file.is_file()]
        return {
            file.relative_to(self.folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        }

    def partial(self) -> list[str]:
        """What lies in the folder of unfinished artifacts."""
        return sorted(file.name for file in (self.folder / "data/.partial").glob("*"))


def read_repro(code: int, output: str) -> Repro:
    """Read what `dvc repro` printed."""
    ran = re.findall(r"^Running stage '(.+?)':$", output, re.MULTILINE)
    restored = re.findall(r"^Stage '(.+?)' is cached - skipping run", output, re.MULTILINE)
    return Repro(code, ran, restored, output)


def new_project(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Project:
    """This project's files in a new git repository, with a checkpoint, corpora and tasks of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    # What DVC and the report wrote here is not part of a new project. A listed file may have been deleted.
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and name != "dvc.lock" and not name.startswith("reports/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    project = Project(folder)
    write_inputs(project, model, tokenizer)
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", "--all"],
        ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message", "Start"],
    ):
        done = project.run(*command)
        assert done.returncode == 0, done.stdout
    return project


def write_inputs(project: Project, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write what a run starts from: params.yaml, a checkpoint, corpora, tasks and their questions."""
    write_checkpoint(project.folder / CHECKPOINT, model, tokenizer)
    local = project.folder / LOCAL
    local.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(PARAMS["corpora"]):
        (local / f"{name}.txt").write_text(prose(seed, sentences=60), encoding="utf-8")
    tasks = project.folder / "stages/tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    for seed, (name, metrics) in enumerate(TASKS.items()):
        write_questions(local / name, seed)
        definition = {
            "task": name,
            "dataset_path": (LOCAL / name).as_posix(),
            "output_type": "multiple_choice",
            "test_split": "test",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "answer",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
            "metadata": {"version": 3.0},
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
    project.set()


def write_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary checkpoint."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prose(seed: int, sentences: int) -> str:
    """Sentences of words in random order, the same ones for a seed."""
    words = ["river", "hill", "sea", "harbour", "layer", "model", "stream", "a", "of", "near", "in", "reads", "old"]
    draw = random.Random(seed)
    return " ".join(" ".join(draw.choices(words, k=9)).capitalize() + "." for _ in range(sentences))


def write_questions(folder: Path, seed: int) -> None:
    """Write a data set of eight multiple-choice questions, as a folder that reads like one of the Hub's."""
    draw = random.Random(100 + seed)
    rows = [
        {
            "question": prose(1000 * seed + number, sentences=1),
            "choices": [prose(draw.randrange(10**6), sentences=1)[:12] for _ in range(3)],
            "answer": draw.randrange(3),
        }
        for number in range(8)
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "test.parquet")
    header = {"configs": [{"config_name": "default", "data_files": [{"split": "test", "path": "test.parquet"}]}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(header)}---\n", encoding="utf-8")


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail when it does not in a long while."""
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def imported_modules(file: Path, root: Path) -> set[str]:
    """Files of the package `stages` that importing `file` imports, itself among them, as paths relative to `root`.

    Imports inside functions count. With a module come the ``__init__.py`` of its packages. What is imported by a name
    that only a run knows does not show.
    """
    found: set[Path] = set()
    todo = [file]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += _direct(module, root)
    return {module.relative_to(root).as_posix() for module in found}


def _direct(file: Path, root: Path) -> list[Path]:
    package = file.relative_to(root).parent.parts
    names: list[str] = [".".join(package)]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from stages import params` names a module, `from stages.project.params import load` what is in one.
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    modules = []
    for name in names:
        parts = name.split(".")
        if parts[0] == "stages":
            modules += [root.joinpath(*parts[: count + 1], "__init__.py") for count in range(len(parts))]
            modules.append(root.joinpath(*parts).with_suffix(".py"))
    return [module for module in modules if module.is_file()]


def outputs_of(stage: str) -> list[str]:
    """The paths under `outs`, `plots` and `metrics`."""
    listed = [*STAGES[stage].get("outs", []), *STAGES[stage].get("plots", []), *STAGES[stage].get("metrics", [])]
    return [next(iter(out)) if isinstance(out, dict) else out for out in listed]


def arguments(row: Row) -> list[str]:
    """The command line of a stage for one row."""
    return [text for name, value in row.columns().items() for text in (f"--{name}", str(value))]


def table(project: Project, path: Path) -> pd.DataFrame:
    return pq.read_table(project.folder / path).to_pandas()


def csv(project: Project, name: str) -> pd.DataFrame:
    return pd.read_csv(project.folder / f"reports/{name}.csv", keep_default_na=False, na_values=[""])
