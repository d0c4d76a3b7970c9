"""The stage `task`: official tasks from a mirror, groups, task files, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.tasks
import pytest
import yaml
from datasets import ClassLabel, Value
from hub import write_data_set

from stages import assets, harness, task
from stages.harness import ORIGIN, QUESTIONS, prepared
from stages.project import params
from stages.project.errors import UserError
from stages.project.paths import ASSETS, task_folder

SOURCE = Path(__file__).parents[1]
OFFICIAL = Path(lm_eval.tasks.__file__).parent
OURS = sorted((SOURCE / "stages/tasks").glob("*.yaml"))
DATASETS = SOURCE.parent / "shared/datasets"
NINE = ("arc_easy", "arc_challenge", "hellaswag", "winogrande", "boolq", "openbookqa", "rte", "copa", "race")

ARC = [
    {
        "id": f"q{number}",
        "question": f"Which of {number}?",
        "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    for number in range(4)
]
COPA = [
    {
        "premise": "The man turned on the tap.",
        "choice1": "The toilet filled.",
        "choice2": "Water flowed.",
        "question": "effect",
        "idx": number,
        "label": 1,
    }
    for number in range(3)
]
COPA_FEATURES = {
    **{name: Value("string") for name in ("premise", "choice1", "choice2", "question")},
    "idx": Value("int32"),
    "label": ClassLabel(names=["choice1", "choice2"]),
}
LOCAL = Path("data/local")
EXAM = [{"question": f"Q{number}", **dict(zip("ABCD", "wxyz", strict=True)), "answer": "C"} for number in range(2)]
TASK_MANAGER = lm_eval.tasks.TaskManager
EXAMS = ("Biology", "IslamicStudies", "Physics", "Science", "Social")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder without tasks, and a mirror of some data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    settings = yaml.safe_load((SOURCE / "profiles/embedded.yaml").read_text(encoding="utf-8"))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({**settings, "tasks": {}}), encoding="utf-8")
    (tmp_path / LOCAL).mkdir(parents=True)
    mirror = tmp_path / "mirror"
    write_data_set(mirror, "allenai/ai2_arc", {"test": ARC, "validation": ARC[:1]}, "ARC-Easy")
    write_data_set(mirror, "aps/super_glue", {"validation": COPA}, "copa", COPA_FEATURES)
    for number, name in enumerate(EXAMS):
        write_data_set(mirror, "Hennara/aexams", {"test": EXAM * (number + 1), "dev": EXAM[:1]}, name)
    monkeypatch.setenv("GHOSTED_MIRROR", str(mirror))
    return tmp_path


@pytest.fixture(autouse=True)
def _few_official(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness with some of its tasks: indexing all of them takes eight seconds."""

    class Few(lm_eval.tasks.TaskManager):  # type: ignore[misc]
        def __init__(self, include_path: Any = None, include_defaults: bool = True):
            names = ("piqa", "super_glue/copa", "arc", "gsm8k", "truthfulqa", "aexams", "glue/mrpc", "leaderboard")
            few = [OFFICIAL / name for name in names]
            super().__init__(include_path=few if include_defaults else include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Few)


@pytest.fixture(scope="module")
def official() -> Any:
    """The index of all tasks of the harness."""
    return TASK_MANAGER()


def prepare(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Run the stage for one task."""
    monkeypatch.setattr(sys, "argv", ["task", "--task", name])
    task.main()


def own(project: Path, name: str, file: str, **settings: Any) -> None:
    """Name a task file in params.yaml."""
    content = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))
    content["tasks"][name] = {"file": file, **settings}
    (project / "params.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


@pytest.mark.usefixtures("project")
def test_an_official_task_is_prepared_from_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "arc_easy")
    origin = json.loads((task_folder("arc_easy") / ORIGIN).read_text(encoding="utf-8"))
    member = {"data_set": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test", "version": "1.0"}
    assert origin == {"official": "arc", "version": "1.0", "members": {"arc_easy": member}}
    # Nothing but the evaluated split is kept, and nothing else is needed.
    written = [file.name for file in (task_folder("arc_easy") / QUESTIONS).rglob("*.parquet")]
    assert written == ["test.parquet"]
    monkeypatch.setenv("GHOSTED_MIRROR", "gone")
    tasks, _ = prepared("arc_easy")
    found = tasks["arc_easy"]
    assert list(found.eval_docs) == ARC
    assert found.doc_to_text(ARC[2]) == "Question: Which of 2?\nAnswer:"
    assert (found.doc_to_target(ARC[2]), found.doc_to_choice(ARC[2])) == (1, ["a", "b", "c"])
    assert sorted(metric["metric"] for metric in found.config.metric_list) == ["acc", "acc_norm"]


@pytest.mark.usefixtures("project")
def test_functions_of_a_definition_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "copa")
    found = prepared("copa")[0]["copa"]
    assert found.eval_docs.features == datasets.Features(COPA_FEATURES)
    assert found.doc_to_text(COPA[0]) == "The man turned on the tap therefore"
    assert found.doc_to_choice(COPA[0]) == [" the toilet filled.", " water flowed."]


@pytest.mark.usefixtures("project")
def test_a_group_holds_the_questions_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "aexams")
    tasks, origin = prepared("aexams")
    assert [len(tasks[f"aexams_{name}"].eval_docs) for name in EXAMS] == [2, 4, 6, 8, 10]
    assert (origin["official"], origin["version"]) == ("aexams", "1.0")
    assert origin["members"]["aexams_Social"]["config"] == "Social"


@pytest.mark.usefixtures("project")
def test_preparing_twice_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        prepare(monkeypatch, "aexams")
        files = sorted(file for file in task_folder("aexams").rglob("*") if file.is_file())
        found.append({file: file.read_bytes() for file in files})
    assert found[0] == found[1]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("piqqa", r"is neither in params.yaml: tasks \(empty\) nor a task of lm-evaluation-harness; near: piqa"),
        ("zzz", "near: none"),
        ("ai2_arc", "is a tag, a mere list of tasks; name those you want: arc_challenge, arc_easy"),
        ("piqa", r"data set baber/piqa, config default: its folder in the mirror .*/mirror/baber/piqa, is not there"),
        ("arc_challenge", r"data set allenai/ai2_arc, config ARC-Challenge, from folder .*ARC-Challenge.* not found"),
    ],
)
def test_what_cannot_be_had_is_named(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"params.yaml: grid.tasks: '{name}'.*{message}"):
        prepare(monkeypatch, name)
    assert not task_folder(name).exists()


@pytest.mark.usefixtures("project")
def test_without_a_mirror_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(path: str, name: str) -> None:
        asked.append((path, name))
        raise ConnectionError("no Hub")

    monkeypatch.delenv("GHOSTED_MIRROR")
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    message = (
        "'arc_easy': data set allenai/ai2_arc, config ARC-Easy, from the Hub: no Hub; without .* in GHOSTED_MIRROR"
    )
    with pytest.raises(UserError, match=message):
        prepare(monkeypatch, "arc_easy")
    assert asked == [("allenai/ai2_arc", "ARC-Easy")]


@pytest.mark.parametrize(
    ("name", "data_set", "rows", "message"),
    [
        ("gsm8k", "openai/gsm8k", [{"question": "q", "answer": "a #### 1"}], "has output type generate_until"),
        (
            "truthfulqa_mc2",
            "truthfulqa/truthful_qa",
            [{"question": "q", "mc2_targets": {"choices": ["a", "b"], "labels": [1, 0]}}],
            "scores its answers with code of its own",
        ),
    ],
)
def test_a_kind_that_is_not_supported(
    project: Path, name: str, data_set: str, rows: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"gsm8k": "main", "truthfulqa_mc2": "multiple_choice"}[name]
    split = {"gsm8k": "test", "truthfulqa_mc2": "validation"}[name]
    write_data_set(project / "mirror", data_set, {split: rows, "train": rows}, config)
    with pytest.raises(UserError, match=f"'{name}': {name} {message}"):
        prepare(monkeypatch, name)


DEFINITION = {
    "task": "pets",
    "dataset_path": "local/pets",
    "output_type": "multiple_choice",
    "training_split": "train",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": 1,
    "doc_to_choice": ["cat", "dog"],
    "metadata": {"version": 7},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric_list": [{"metric": "f1", "aggregation": "f1", "higher_is_better": True}]}, "has no metric `acc`"),
        ({"doc_to_target": [0, 1]}, "have several right answers each"),
        (
            {"test_split": "dev"},
            "cannot be built: .*data set local/pets, config default, from folder local/pets, with the splits test",
        ),
        ({"dataset_kwargs": {"data_dir": "x"}}, "is loaded with {'data_dir': 'x'}; only name and config"),
        ({"dataset_path": "/local/pets"}, "dataset_path /local/pets must be a Hub id, or a folder in"),
        ({"dataset_path": "local/../pets"}, "must be a Hub id, or a folder in"),
        ({"task": "dogs"}, "must define `task: pets`"),
    ],
)
def test_a_task_file_that_is_not_supported(
    project: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data_set(project, "local/pets", {"test": [{"question": "Which?"}]})
    (project / LOCAL / "pets.yaml").write_text(yaml.safe_dump({**DEFINITION, **changes}), encoding="utf-8")
    own(project, "pets", "data/local/pets.yaml")
    with pytest.raises(UserError, match=f"params.yaml: tasks.pets: .*{message}"):
        prepare(monkeypatch, "pets")


def test_a_task_file_with_what_it_needs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data_set(project, "local/pets", {"test": [{"question": "Which?"}]})
    home = project / LOCAL / "definitions"
    home.mkdir()
    (home / "common_yaml").write_text(yaml.safe_dump({**DEFINITION, "doc_to_text": "no"}), encoding="utf-8")
    (home / "words.py").write_text("def ask(doc):\n    return doc['question'] + ' Say:'\n", encoding="utf-8")
    (home / "pets.yaml").write_text("include: common_yaml\ntask: pets\ndoc_to_text: !function words.ask\n")
    (home / "other.yaml").write_text("task: other\n")
    own(project, "pets", "data/local/definitions/pets.yaml")
    prepare(monkeypatch, "pets")
    copied = {file.name for file in (task_folder("pets") / harness.DEFINITION).iterdir()}
    assert copied == {"pets.yaml", "common_yaml", "words.py"}
    for folder in (home, project / "local"):
        folder.rename(project / f"moved-{folder.name}")
    tasks, origin = prepared("pets")
    assert tasks["pets"].doc_to_text({"question": "Which?"}) == "Which? Say:"
    assert (origin["official"], origin["version"]) == (None, "7")


def test_a_task_file_that_dvc_would_not_watch(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "pets.yaml").write_text("task: pets\n", encoding="utf-8")
    own(project, "pets", "pets.yaml")
    with pytest.raises(UserError, match="tasks.pets.file = pets.yaml: must lie below stages/tasks or data/local"):
        prepare(monkeypatch, "pets")


def test_a_data_set_that_only_a_function_reads(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pets", "names"):
        write_data_set(project, f"local/{name}", {"test": [{"question": f"Which {name}?"}]})
    code = "import datasets\ndef ask(doc):\n    return datasets.load_dataset('local/names')['test'][0]['question']\n"
    (project / LOCAL / "words.py").write_text(code, encoding="utf-8")
    content = yaml.safe_dump({name: value for name, value in DEFINITION.items() if name != "doc_to_text"})
    (project / LOCAL / "pets.yaml").write_text(f"{content}doc_to_text: !function words.ask\n", encoding="utf-8")
    own(project, "pets", "data/local/pets.yaml")
    prepare(monkeypatch, "pets")
    assert (task_folder("pets") / QUESTIONS / "local/names/default/test.parquet").exists()
    assert prepared("pets")[1]["members"]["pets"]["data_set"] == "local/pets"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("include: ../pets.yaml", "which is not in data/local/definitions"),
        ("include: none", "none cannot be read"),
        ("include: a", "cannot be built"),
    ],
)
def test_includes_of_a_task_file_that_lead_astray(
    project: Path, content: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / LOCAL / "definitions").mkdir()
    for name, text in (("a", f"{content}\ntask: pets\n"), ("b", "task: pets\n")):
        (project / LOCAL / "definitions" / name).write_text(text, encoding="utf-8")
    (project / LOCAL / "definitions/pets.yaml").write_text("include: [a, b]\ntask: pets\n", encoding="utf-8")
    (project / LOCAL / "pets.yaml").write_text("task: pets\n", encoding="utf-8")
    own(project, "pets", "data/local/definitions/pets.yaml")
    with pytest.raises(UserError, match=message):
        prepare(monkeypatch, "pets")


@pytest.mark.parametrize(
    ("content", "message"), [("task: [", "cannot be read"), ("- a", "must hold a mapping"), (None, "no such file")]
)
def test_a_broken_task_file_is_named(
    project: Path, content: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (project / LOCAL / "pets.yaml").write_text(content, encoding="utf-8")
    own(project, "pets", "data/local/pets.yaml")
    with pytest.raises(UserError, match=f"params.yaml: tasks.pets.*pets.yaml.*{message}"):
        prepare(monkeypatch, "pets")


@pytest.mark.usefixtures("project")
def test_damaged_questions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "copa")
    (task_folder("copa") / QUESTIONS / "aps/super_glue/copa/validation.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"'copa': data set aps/super_glue, config copa, from folder .*data/task/copa"):
        prepared("copa")


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_our_task_file_asks_the_official_question(file: Path) -> None:
    ours = yaml.safe_load(file.read_text(encoding="utf-8"))
    (found,) = [path for path in OFFICIAL.rglob(file.name) if path.parent.name == file.stem]
    official = yaml.safe_load(found.read_text(encoding="utf-8"))
    assert file.stem == ours["task"]
    assert ours.pop("dataset_path") == f"{ASSETS / 'tasks'}/{official.pop('dataset_path')}"
    splits = [config.pop("test_split") or config.pop("validation_split") for config in (ours, official)]
    assert splits[0] == splits[1]
    assert ours["training_split"] is None
    other = {"training_split", "validation_split"}
    assert {k: v for k, v in ours.items() if k not in other} == {k: v for k, v in official.items() if k not in other}


def test_our_task_files_read_what_assets_writes() -> None:
    for file in OURS:
        ours = yaml.safe_load(file.read_text(encoding="utf-8"))
        asset = assets.ALL_ASSETS[file.stem]
        assert Path(ours["dataset_path"]) == ASSETS / "tasks" / asset.hub_id
        assert ours["dataset_name"] in (None, asset.config)
        assert (ours["test_split"] or ours["validation_split"]) == asset.split


def test_the_default_names_the_task_files_that_are_there() -> None:
    settings = params.load(SOURCE / "profiles/embedded.yaml")
    assert {name: entry.file for name, entry in settings.tasks.items()} == {
        file.stem: file.relative_to(SOURCE).as_posix() for file in OURS
    }


@pytest.mark.slow
@pytest.mark.skipif(not DATASETS.exists(), reason=f"needs the data sets in {DATASETS.relative_to(SOURCE.parent)}")
@pytest.mark.parametrize("name", NINE)
def test_the_nine_tasks_of_the_paper(
    name: str, project: Path, official: lm_eval.tasks.TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question's prompt, choices and answer are those of the harness itself, run where the data sets lie."""
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path=None, include_defaults=True: (
            official if include_defaults else TASK_MANAGER(include_path=include_path, include_defaults=False)
        ),
    )
    monkeypatch.setenv("GHOSTED_MIRROR", str(DATASETS))
    prepare(monkeypatch, name)
    monkeypatch.setenv("GHOSTED_MIRROR", "gone")
    found = prepared(name)[0][name]
    entry = official.task_index[name]
    config = official._factory._load_full_config(entry, {"training_split": None})
    expected = {**config}
    for key in ("tag", "group", "task_list"):
        expected.pop(key, None)
    monkeypatch.chdir(DATASETS)
    theirs = lm_eval.api.task.ConfigurableTask(config=expected)
    monkeypatch.chdir(project)
    assert str(found.VERSION) == str(theirs.VERSION)
    assert [*found.aggregation()] == [*theirs.aggregation()]
    assert len(found.eval_docs) == len(theirs.eval_docs) > 99
    for one, other in zip(found.eval_docs, theirs.eval_docs, strict=True):
        assert one == other
        for ask in ("doc_to_text", "doc_to_choice", "doc_to_target"):
            assert getattr(found, ask)(one) == getattr(theirs, ask)(other)
