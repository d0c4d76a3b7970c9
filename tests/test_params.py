import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.project import params
from stages.project.errors import UserError
from stages.project.sections import Params

PROFILES = Path(__file__).parent.parent / "profiles"
NINE = ["arc_easy", "arc_challenge", "hellaswag", "winogrande", "boolq", "openbookqa", "rte", "copa", "race"]
DEFAULT = yaml.safe_load((PROFILES / "embedded.yaml").read_text())
NUMBER = "a finite number, at least 0"
NUMBERS = ("ghost__ridge", "symmetric__ridge", "ghost-affine__ridge", "ghost-lowrank__ridge", "ghost-refit__ridge")
NUMBERS += ("ghost-refit__fraction", "refit__fraction", "replaceme__fraction")
COUNTS = ("residual__blocks", "residual__candidates", "perplexity__sequences", "taylor__sequences")


def load(tmp_path: Path, **changes: Any) -> Params:
    """Load the default params.yaml with changes, keys such as ``grid__n`` for grid.n."""
    content = yaml.safe_load(yaml.safe_dump(DEFAULT))
    for key, value in changes.items():
        *path, last = key.split("__")
        section = content
        for part in path:
            section = section[part]
        section[last] = value
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(content))
    return params.load(file)


def test_default_has_nine_rows_dense_first(tmp_path: Path) -> None:
    keys = [row.key for row in load(tmp_path).rows()]
    assert len(keys) == 9
    assert keys[0] == "smollm2-dense"
    assert keys[1:5] == [f"smollm2-streamline-7-{operator}" for operator in ("none", "diag", "rotate", "ghost")]


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_calibration_and_evaluation_documents_of_a_profile_are_disjoint(profile: Path) -> None:
    settings = params.load(profile)
    calibration = settings.corpora[settings.text.calibration.corpus]
    for name in settings.text.perplexity.corpora:
        corpus = settings.corpora[name]
        if [corpus.path, corpus.id, corpus.split] == [calibration.path, calibration.id, calibration.split]:
            assert corpus.min_characters == calibration.min_characters
            assert calibration.documents[1] is not None
            assert corpus.documents[0] >= calibration.documents[1]


def test_the_paper_s_grid() -> None:
    settings = params.load(PROFILES / "paper.yaml")
    assert len(settings.rows()) == 3 * (1 + 2 * 2 * 4)
    assert settings.grid.tasks == NINE
    assert settings.tasks == {}
    assert {model.dtype for model in settings.models.values()} == {"bfloat16"}
    assert (settings.text.calibration.selection_sequences, settings.text.calibration.sequences) == (128, 32)
    assert {settings.text.calibration.seqlen, settings.text.perplexity.seqlen} == {2048}
    assert settings.eval_acc.limit is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid__n": [0]}, "grid.n: 0 layers cannot be removed"),
        ({"grid__n": [-2]}, "grid.n: -2 layers cannot be removed"),
        ({"grid__n": [2.5]}, "grid.n.0 = 2.5"),
        ({"grid__n": [7, 7]}, "grid.n: 7 is listed twice"),
        ({"grid__models": ["smolm2"]}, r"grid.models: 'smolm2' is unknown \(did you mean 'smollm2'"),
        ({"grid__models": []}, "grid.models"),
        ({"grid__criteria": ["streamlin"]}, r"grid.criteria: 'streamlin' is unknown \(did you mean 'streamline'"),
        ({"grid__operators": ["gost"]}, r"grid.operators: 'gost' is unknown \(did you mean 'ghost'"),
        ({"solve": {"none": {}, "diag": {}, "rotate": {}}}, "solve.ghost: missing"),
        ({"solve__ghost": {"rigde": 1.0}}, r"solve.ghost: 'rigde' is unknown \(did you mean 'ridge'"),
        ({"solve__diag": {"ridge": 1.0}}, "solve.diag: 'ridge' is unknown; available: none"),
        ({"select__streamline": {"protect_first": 1}}, "select.streamline.protect_last: missing"),
        ({"solve__ghost": {}}, "solve.ghost.ridge: missing; it must be a finite number, at least 0"),
        ({"solve__ghost__ridge": "small"}, "solve.ghost.ridge = 'small': must be a finite number, at least 0"),
        ({"solve__ghost__ridge": True}, "solve.ghost.ridge = True: must be a finite number, at least 0"),
        (
            {"select__shortgpt__protect_first": 0.5},
            "select.shortgpt.protect_first = 0.5: must be a whole number, at least 0",
        ),
        ({"text__perplexity__corpora": ["wiki", "wiki"]}, "text.perplexity.corpora: 'wiki' is listed twice"),
        ({"grid__models": ["llama-3.1"]}, "grid.models: 'llama-3.1' cannot name a file"),
        ({"select__streamline__protect_last": -1}, "select.streamline.protect_last = -1"),
        ({"text__calibration__corpus": "wikki"}, "text.calibration.corpus: 'wikki' is unknown"),
        ({"text__perplexity__corpora": ["wikki"]}, "text.perplexity.corpora: 'wikki' is unknown"),
        ({"text__calibration__sequences": 0}, "text.calibration.sequences = 0"),
        ({"text__calibration__sequences": "many"}, "text.calibration.sequences = 'many'"),
        ({"text__bos": "twice"}, "text.bos = 'twice'.*'once' or 'every-window'"),
        ({"text__seqlenn": 5}, "text.seqlenn: unknown key; text knows bos, calibration, perplexity"),
        ({"evalacc": {}}, r"evalacc: unknown key \(did you mean 'eval_acc'\?\)"),
        ({"patch__operator_dtype": "float64"}, "patch.operator_dtype = 'float64'.*'model' or 'float32'"),
        ({"patch": {}}, "patch.operator_dtype: missing"),
        ({"models__smollm2__dtype": "float8"}, "models.smollm2.dtype = 'float8'"),
        ({"models__smollm2__path": "x"}, "models.smollm2 .*exactly one of gguf, path, id"),
        ({"models__smollm2": {"id": "a/b", "revision": "main"}}, "revision 'main' is not a commit"),
        (
            {"models__smollm2": {"dtyp": "float32", "path": "x"}},
            r"models.smollm2.dtyp: unknown key \(did you mean 'dtype'",
        ),
        ({"corpora__wiki__documents": [5, 2]}, r"corpora.wiki .*documents \[5, 2\]"),
        ({"corpora__wiki__format": "xml"}, "corpora.wiki.format = 'xml'"),
        ({"grid__tasks": ["a/b"]}, "grid.tasks: 'a/b' cannot name a file"),
        *(
            ({"select__explicit__layers": value}, f"select.explicit.layers = {shown}: must be a list of whole numbers")
            for value, shown in (
                (12, "12"),
                ("12", "'12'"),
                (["12"], r".'12'."),
                ([1, 2.0], r".1, 2.0."),
                ([1, True], r".1, True."),
                ([[1]], r"..1.."),
                ({1: 2}, r".1: 2."),
                (None, "None"),
            )
        ),
        *(
            ({"solve__ghost-ridge__fraction": value}, f"ghost-ridge.fraction = {shown}: must be {NUMBER}, or 'auto'")
            for value, shown in (
                *((True, "True"), ([0.1], r".0.1."), (None, "None"), ({}, "{}")),
                *(("best", "'best'"), (-1, "-1"), (float("inf"), "inf"), (float("nan"), "nan")),
            )
        ),
        ({"solve__ghost-ridge": {}}, f"ghost-ridge.fraction: missing; it must be {NUMBER}, or 'auto'"),
        *(
            ({"solve__ghost-lowrank__rank": value}, f"ghost-lowrank.rank = {value}: must be a whole number, at least 1")
            for value in (2.5, 0, -1, True)
        ),
        *(({f"solve__{name}": value}, f"must be {NUMBER}") for name in NUMBERS for value in (-1, float("nan"), "auto")),
        *(
            ({f"select__{name}": 0}, f"{name.replace('__', '.')} = 0: must be a whole number, at least 1")
            for name in COUNTS
        ),
        ({"select__angular__tokens": "first"}, "select.angular.tokens = 'first': must be 'last' or 'all'"),
        ({"select__perplexity__method": ["once"]}, r"select.perplexity.method = .'once'.: must be 'greedy' or 'once'"),
        ({"collect__mlp": 1}, "collect.mlp = 1"),
        ({"collect": {"boundary": "run"}}, "collect.mlp: missing"),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)params.yaml: .*{message}"):
        load(tmp_path, **changes)


def test_missing_section_is_named(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in DEFAULT.items() if key != "text"}))
    with pytest.raises(UserError, match="text: missing"):
        params.load(file)


@pytest.mark.parametrize(("text", "message"), [("a: [", "not valid YAML"), ("- a", "must hold a mapping")])
def test_not_a_mapping(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        params.load(tmp_path / "params.yaml")


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    text = (PROFILES / "embedded.yaml").read_text().replace("1.0e-6", "1e-6")
    (tmp_path / "params.yaml").write_text(text)
    assert params.load(tmp_path / "params.yaml").solve["ghost"]["ridge"] == 1e-6


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        params.load(tmp_path / "params.yaml")


def test_profiles_are_valid() -> None:
    for profile in PROFILES.glob("*.yaml"):
        params.load(profile)


@pytest.mark.parametrize("value", ["auto", 0, 1, 0.5, 1e-9], ids=str)
def test_a_number_or_a_word(tmp_path: Path, value: Any) -> None:
    found = load(tmp_path, **{"solve__ghost-ridge__fraction": value}).solve["ghost-ridge"]["fraction"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [[], [3], [3, 1, 2], [-1]], ids=str)
def test_a_list_of_numbers(tmp_path: Path, value: list[int]) -> None:
    assert load(tmp_path, select__explicit__layers=value).select["explicit"]["layers"] == value


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of criteria and operators that files may be added to."""
    for package in ("criteria", "operators"):
        shutil.copytree(params.ROOT / package, tmp_path / "own" / package)
    monkeypatch.setattr(params, "ROOT", tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize(
    "text",
    [
        *("", "CHOOSE = 1\n", "def select(scores, n, allowed): ...\n", "choose = search = print\n"),
        "class Own:\n    def choose(self, scores, n, allowed): ...\n",
        "def solve(sums): ...\n",
    ],
)
def test_a_criterion_that_defines_neither_function(text: str, own: Path, tmp_path: Path) -> None:
    (own / "criteria/mine.py").write_text(text)
    section = {**DEFAULT["select"], "mine": {"protect_first": 0, "protect_last": 0}}
    with pytest.raises(UserError, match=r"stages/criteria/mine.py: defines no function `choose` or `search`"):
        load(tmp_path, select=section)
    # A file that params.yaml does not name is nobody's mistake.
    assert "mine" not in load(tmp_path).select


def test_a_criterion_that_defines_both_functions(own: Path, tmp_path: Path) -> None:
    (own / "criteria/mine.py").write_text("def choose(scores, n, allowed): ...\ndef search(model, *, x: int): ...\n")
    section = {**DEFAULT["select"], "mine": {"protect_first": 0, "protect_last": 0}}
    with pytest.raises(UserError, match=r"criteria/mine.py: defines 2 functions `choose` or `search`; it needs one"):
        load(tmp_path, select=section)


def test_an_operator_without_its_function(own: Path, tmp_path: Path) -> None:
    (own / "operators/mine.py").write_text("def choose(scores, n, allowed): ...\ndef search(model): ...\n")
    with pytest.raises(UserError, match=r"stages/operators/mine.py: defines no function `solve`"):
        load(tmp_path, solve={**DEFAULT["solve"], "mine": {}})


OWN = {
    "choose": "def choose(scores, n, allowed, *, weight: float, layers: list[int], kind: float | str = 'auto'): ...\n",
    "search": "def search(model, text, n, allowed, *, weight: float, layers: list[int], kind: float | str = 1): ...\n",
}


@pytest.mark.parametrize("function", OWN)
def test_options_of_a_criterion_of_one_s_own(function: str, own: Path, tmp_path: Path) -> None:
    (own / "criteria/mine.py").write_text(OWN[function])
    given = {"protect_first": 0, "protect_last": 0, "weight": 1, "layers": [2]}

    def loaded(**changes: Any) -> dict[str, Any]:
        wanted = {name: value for name, value in {**given, **changes}.items() if value != "left out"}
        return load(tmp_path, select={**DEFAULT["select"], "mine": wanted}).select["mine"]

    assert loaded() == given
    assert loaded(kind="auto")["kind"] == "auto"
    for changes, message in (
        ({"weight": "left out"}, "select.mine.weight: missing; it must be a number"),
        ({"protect_last": "left out"}, "select.mine.protect_last: missing; it must be a whole number"),
        ({"layers": 2}, "select.mine.layers = 2: must be a list of whole numbers"),
        ({"kind": [1]}, "select.mine.kind = .1.: must be a number, or a string"),
        ({"wieght": 1.0}, r"select.mine: 'wieght' is unknown \(did you mean 'weight'"),
    ):
        with pytest.raises(UserError, match=message):
            loaded(**changes)
