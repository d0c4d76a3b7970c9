from pathlib import Path
from typing import Any

import datasets
import pytest
from hub import write_data_set

from stages.corpora import Document, documents
from stages.project.errors import UserError
from stages.project.sections import CONVERTED, Corpus

COMMIT = "b08601e04326c79dfdd32d625aee71d232d685c3"
ROWS = {
    "test": [{"text": text, "url": f"u{number}"} for number, text in enumerate(["one", "", "three", "four!"])],
    "train": [{"text": "other", "url": "u"}],
}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mirror"
    write_data_set(folder, "team/texts", ROWS, "first")
    write_data_set(folder, "team/texts", {"test": [{"text": "of another config", "url": "u"}]}, "second")
    monkeypatch.setenv("GHOSTED_MIRROR", str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


def corpus(**changes: Any) -> Corpus:
    settings = {"id": "team/texts", "revision": COMMIT, "config": "first", "split": "test", "column": "text"}
    return Corpus(**{name: value for name, value in {**settings, **changes}.items() if value is not None})


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("end", [None, 4, 100])
def test_a_corpus_of_the_mirror(end: int | None) -> None:
    found = documents(corpus(documents=(0, end)), "corpora.c")
    assert found == [Document(0, "one"), Document(1, ""), Document(2, "three"), Document(3, "four!")]
    assert documents(corpus(config="second"), "corpora.c") == [Document(0, "of another config")]
    assert documents(corpus(config=None, data_dir="second"), "corpora.c") == [Document(0, "of another config")]


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("end", [None, 2])
def test_numbers_are_those_of_the_data_set(end: int | None) -> None:
    assert documents(corpus(min_characters=4, documents=(1, end)), "corpora.c") == [Document(3, "four!")]


def test_a_folder_laid_out_like_a_data_set(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GHOSTED_MIRROR")
    local = corpus(id=None, revision=None, path=str(mirror / "team/texts"))
    assert [document.text for document in documents(local, "corpora.c")] == ["one", "", "three", "four!"]
    assert local.source == f"{mirror}/team/texts first test"


def test_a_data_set_that_is_a_file(mirror: Path) -> None:
    file = mirror / "team/texts/first/test.parquet"
    with pytest.raises(UserError, match="corpora.c.path = .*test.parquet: with `split`, must be a data set's folder"):
        documents(corpus(id=None, revision=None, path=str(file)), "corpora.c")


def test_what_the_mirror_lacks_is_named(mirror: Path) -> None:
    place = rf"its folder in the mirror \(GHOSTED_MIRROR\), {mirror}/team/none, is not there"
    with pytest.raises(UserError, match=f"corpora.c.id: data set team/none, config first: {place}"):
        documents(corpus(id="team/none"), "corpora.c")
    for changes in ({"config": "third"}, {"split": "dev"}):
        where = rf"corpora.c: data set team/texts, config .*, from folder {mirror}/team/texts: .*(third|dev)"
        with pytest.raises(UserError, match=where):
            documents(corpus(**changes), "corpora.c")
    with pytest.raises(UserError, match=r"corpora.c.column = 'body': not there, needs text; the columns are text, url"):
        documents(corpus(column="body"), "corpora.c")
    write_data_set(mirror, "team/numbers", {"test": [{"text": 1}]}, "first")
    with pytest.raises(UserError, match="corpora.c.column = 'text': int in row 0, needs text"):
        documents(corpus(id="team/numbers"), "corpora.c")


def test_a_mirror_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GHOSTED_MIRROR", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=rf"{tmp_path}/gone/team/texts, is not there, and neither is {tmp_path}/gone"):
        documents(corpus(), "corpora.c")


@pytest.mark.parametrize("end", [None, 2])
def test_without_a_mirror_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch, end: int | None) -> None:
    asked = []

    def refuse(*arguments: Any, **options: Any) -> None:
        asked.append((arguments, options))
        raise ConnectionError("no Hub\nand more")

    monkeypatch.delenv("GHOSTED_MIRROR", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    message = r"corpora.c: data set team/texts, config first, from the Hub: no Hub; without .* in GHOSTED_MIRROR$"
    with pytest.raises(UserError, match=message):
        documents(corpus(documents=(0, end)), "corpora.c")
    options = {"name": "first", "data_dir": None, "split": "test", "revision": COMMIT, "streaming": end is not None}
    assert asked == [(("team/texts",), options)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": None}, "`revision` goes with `id`"),
        ({"revision": "main"}, "neither a commit of 40 hex digits nor refs/convert/parquet"),
        ({"id": None, "revision": None, "path": ""}, "at least 1 character"),
        ({"path": "p"}, "exactly one of `path` and `id`"),
        ({"id": None, "revision": None}, "exactly one of `path` and `id`"),
        ({"format": "text"}, "either `format` .* or `split`"),
        ({"split": None}, "either `format` .* or `split`"),
        ({"split": None, "format": "text"}, "go with `split`"),
        ({"data_dir": "d"}, "two ways to say one thing"),
        ({"column": None}, "`column` goes with"),
        ({"documents": (2, 2)}, "must be"),
    ],
)
def test_a_corpus_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corpus(**changes)


def test_the_source_names_data_set_config_split_and_part() -> None:
    assert corpus().source == "team/texts first test @b08601e0"
    part = corpus(config=None, data_dir="d", revision=CONVERTED, min_characters=9, documents=(5, None))
    assert part.source == "team/texts d test @refs/convert/parquet documents [5:] of 9 characters"
