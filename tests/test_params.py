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
        ({"solve__ghost": {}}, "solve.ghost.ridge: missing; needs a value of type float"),
        ({"solve__ghost__ridge": "small"}, "solve.ghost.ridge = 'small': must be of type float"),
        ({"solve__ghost__ridge": True}, "solve.ghost.ridge = True: must be of type float"),
        ({"select__shortgpt__protect_first": 0.5}, "select.shortgpt.protect_first = 0.5: must be of type int"),
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
