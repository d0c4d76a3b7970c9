from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import SENTENCES
from transformers import PreTrainedTokenizerFast

from stages.corpora import choose_windows, documents, token_windows
from stages.project.errors import UserError
from stages.project.sections import CalibrationText, Corpus, PerplexityText, Text
from stages.text import calibration_frame, corpus_frame

RECORD = '<doc id="{0}" title="T{0}">\nT{0}\n\n{1}\n\n</doc>\n'


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    file = tmp_path / "wiki.utf8"
    file.write_text("".join(RECORD.format(i, "body " * (i + 1)) for i in range(6)))
    return file


def corpus(path: Path, **changes: Any) -> Corpus:
    return Corpus(**{"path": str(path), "format": "text", **changes})


def text(bos: str = "once", **changes: Any) -> Text:
    return Text(
        bos=bos,
        calibration=CalibrationText(**{"corpus": "c", "sequences": 4, "seqlen": 8, "seed": 0, **changes}),
        perplexity=PerplexityText(corpora=["c"], seqlen=8, windows=3),
    )


def test_records_of_wikiextractor(wiki: Path) -> None:
    found = documents(corpus(wiki, format="wikiextractor"), "corpora.c")
    assert found[0] == "T0\n\nbody"
    assert len(found) == 6


def test_range_is_of_the_documents_long_enough(wiki: Path) -> None:
    found = documents(corpus(wiki, format="wikiextractor", min_characters=15, documents=(1, 3)), "corpora.c")
    # Documents 2 to 5 have 18 characters and more.
    assert [document.split("\n")[0] for document in found] == ["T3", "T4"]


def test_lines_folders_and_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text("second\nthird")
    (folder / "a.txt").write_text("first")
    assert documents(corpus(folder), "c") == ["first", "second\nthird"]
    assert documents(corpus(folder, format="lines"), "c") == ["first", "second", "third"]
    pd.DataFrame({"body": ["x", "y"]}).to_parquet(tmp_path / "t.parquet")
    assert documents(corpus(tmp_path / "t.parquet", format="parquet", column="body"), "c") == ["x", "y"]
    with pytest.raises(UserError, match="no column 'text'; its columns are body"):
        documents(corpus(tmp_path / "t.parquet", format="parquet", column="text"), "c")
    pd.DataFrame({"body": ["x", None], "label": [1, 2]}).to_parquet(tmp_path / "t.parquet")
    for column in ("body", "label"):
        with pytest.raises(UserError, match=f"column '{column}' holds .* needs text"):
            documents(corpus(tmp_path / "t.parquet", format="parquet", column=column), "c")


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("one\u2028still one\x0cand\ntwo\n", encoding="utf-8")
    assert documents(corpus(tmp_path / "c", format="lines"), "c") == ["one\u2028still one\x0cand", "two"]


def test_missing_and_empty_corpora_are_named(tmp_path: Path, wiki: Path) -> None:
    with pytest.raises(UserError, match=r"corpora\.c\.path = .*no such file"):
        documents(corpus(tmp_path / "none"), "corpora.c")
    with pytest.raises(UserError, match=r"corpora\.c: no document in range \[6, None\].* has 6"):
        documents(corpus(wiki, format="wikiextractor", documents=(6, None)), "corpora.c")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="t.parquet: cannot be read as parquet"):
        documents(corpus(tmp_path / "t.parquet", format="parquet", column="text"), "c")


def test_windows_cut_the_joined_stream(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = tiny_tokenizer("\n\n".join(SENTENCES))["input_ids"]
    windows = token_windows(tiny_tokenizer, SENTENCES, 10, "once", "c")
    assert len(windows) == len(stream) // 10
    assert [token for window in windows for token in window] == stream[: len(windows) * 10]


def test_bos_in_every_window(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = tiny_tokenizer("\n\n".join(SENTENCES), add_special_tokens=False)["input_ids"]
    windows = token_windows(tiny_tokenizer, SENTENCES, 10, "every-window", "c")
    assert {window[0] for window in windows} == {tiny_tokenizer.bos_token_id}
    assert {len(window) for window in windows} == {10}
    assert [token for window in windows for token in window[1:]] == stream[: len(windows) * 9]


def test_short_corpus_is_named(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="corpus c: has 193 tokens, fewer than one window of 512"):
        token_windows(tiny_tokenizer, SENTENCES, 512, "once", "corpus c")


def test_choice_of_windows() -> None:
    assert choose_windows(10, 3, None, "c") == [0, 1, 2]
    chosen = choose_windows(100, 20, 0, "c")
    assert len(set(chosen)) == 20
    assert chosen == choose_windows(100, 20, 0, "c") != choose_windows(100, 20, 1, "c")
    with pytest.raises(UserError, match=r"text\.calibration\.sequences = 11: c has only 10 windows"):
        choose_windows(10, 11, 0, "c")


def test_calibration_name_follows_the_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    names = set()
    for changes in ({}, {"seed": 1}, {"seed": None}, {"sequences": 3}):
        frame = calibration_frame(tiny_tokenizer, SENTENCES, text(**changes))
        (name,) = frame["calibration"].unique()
        names.add(name)
        assert len(frame) == changes.get("sequences", 4)
    assert len({name[-8:] for name in names}) == 4
    assert calibration_frame(tiny_tokenizer, SENTENCES, text())["calibration"][0].startswith("c:4x8:seed0:")


def test_corpus_takes_the_first_windows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    frame = corpus_frame(tiny_tokenizer, SENTENCES, text(), "c")
    expected = token_windows(tiny_tokenizer, SENTENCES, 8, "once", "c")[:3]
    assert frame["input_ids"].tolist() == expected
