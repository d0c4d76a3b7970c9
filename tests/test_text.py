from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import SENTENCES
from transformers import PreTrainedTokenizerFast

from stages.corpora import Cutter, Document, documents, order
from stages.project.errors import UserError
from stages.project.sections import CalibrationText, Corpus, PerplexityText
from stages.text import calibration_frame, calibration_windows, corpus_frame

RECORD = '<doc id="{0}" title="T{0}">\nT{0}\n\n{1}\n\n</doc>\n'


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    file = tmp_path / "wiki.utf8"
    file.write_text("".join(RECORD.format(i, "body " * (i + 1)) for i in range(6)))
    return file


def corpus(path: Path, **changes: Any) -> Corpus:
    return Corpus(**{"path": str(path), "format": "text", **changes})


def calibration(**changes: Any) -> CalibrationText:
    settings = {"corpus": "c", "sequences": 4, "selection_sequences": 2, "seqlen": 8, "seed": 0}
    return CalibrationText(**{**settings, **changes})


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in documents(corpus, "corpora.c")]


PROSE = [Document(3 * number, text) for number, text in enumerate(SENTENCES)]


def test_records_of_wikiextractor(wiki: Path) -> None:
    found = texts(corpus(wiki, format="wikiextractor"))
    assert found[0] == "T0\n\nbody"
    assert len(found) == 6


def test_range_is_of_the_documents_long_enough(wiki: Path) -> None:
    found = documents(corpus(wiki, format="wikiextractor", min_characters=15, documents=(1, 3)), "corpora.c")
    # Documents 2 to 5 have 18 characters and more.
    assert [(number, text.split("\n")[0]) for number, text in found] == [(3, "T3"), (4, "T4")]


def test_lines_folders_and_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text("second\nthird")
    (folder / "a.txt").write_text("first")
    assert texts(corpus(folder)) == ["first", "second\nthird"]
    assert texts(corpus(folder, format="lines")) == ["first", "second", "third"]
    pd.DataFrame({"body": ["x", "y"]}).to_parquet(tmp_path / "t.parquet")
    assert texts(corpus(tmp_path / "t.parquet", format="parquet", column="body")) == ["x", "y"]
    with pytest.raises(UserError, match="no column 'text'; its columns are body"):
        documents(corpus(tmp_path / "t.parquet", format="parquet", column="text"), "c")
    pd.DataFrame({"body": ["x", None], "label": [1, 2]}).to_parquet(tmp_path / "t.parquet")
    for column in ("body", "label"):
        with pytest.raises(UserError, match=f"column '{column}' holds .* needs text"):
            documents(corpus(tmp_path / "t.parquet", format="parquet", column=column), "c")


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("one\u2028still one\x0cand\ntwo\n", encoding="utf-8")
    assert texts(corpus(tmp_path / "c", format="lines")) == ["one\u2028still one\x0cand", "two"]


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
    windows = Cutter(tiny_tokenizer, 10, "once").windows(PROSE, "stream", None, None, "c")
    assert len(windows) == len(stream) // 10
    assert [token for window in windows for token in window.input_ids] == stream[: len(windows) * 10]
    assert [(window.document, window.offset) for window in windows] == [(None, 10 * i) for i in range(len(windows))]


def test_bos_in_every_window(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = tiny_tokenizer("\n\n".join(SENTENCES), add_special_tokens=False)["input_ids"]
    windows = Cutter(tiny_tokenizer, 10, "every-window").windows(PROSE, "stream", None, None, "c")
    assert {window.input_ids[0] for window in windows} == {tiny_tokenizer.bos_token_id}
    assert {len(window.input_ids) for window in windows} == {10}
    assert [token for window in windows for token in window.input_ids[1:]] == stream[: len(windows) * 9]


def test_one_window_of_each_document_long_enough(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = {document.number: len(tiny_tokenizer(document.text)["input_ids"]) for document in PROSE}
    seqlen = sorted(lengths.values())[2]
    cutter = Cutter(tiny_tokenizer, seqlen, "once")
    first = cutter.windows(PROSE, "documents", None, None, "c")
    assert [window.document for window in first] == [number for number in lengths if lengths[number] >= seqlen]
    assert {window.offset for window in first} == {0}
    placed = set()
    for seed in range(8):
        windows = cutter.windows(PROSE, "documents", 2, seed, "c")
        assert len({window.document for window in windows}) == 2
        for window in windows:
            text = next(document.text for document in PROSE if document.number == window.document)
            ids = tiny_tokenizer(text)["input_ids"]
            assert window.input_ids == ids[window.offset : window.offset + seqlen]
            placed.add((window.document, window.offset))
        assert windows == cutter.windows(PROSE, "documents", 2, seed, "c")
    assert len(placed) > 3
    assert any(offset for _, offset in placed)


def test_the_place_in_a_document_does_not_depend_on_the_others(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    cutter = Cutter(tiny_tokenizer, 10, "once")
    alone = cutter.windows(PROSE[1:2], "documents", None, 5, "c")
    assert set(map(str, alone)) <= set(map(str, cutter.windows(PROSE, "documents", None, 5, "c")))


def test_too_few_long_documents_are_an_error_that_names_the_remedies(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = sorted(len(tiny_tokenizer(text)["input_ids"]) for text in SENTENCES)
    message = "c: only 1 of its 5 documents have .* 2 are needed; widen the corpus' `documents`, or .*`cut: stream`"
    with pytest.raises(UserError, match=message):
        Cutter(tiny_tokenizer, lengths[-1], "once").windows(PROSE, "documents", 2, 0, "c")
    with pytest.raises(UserError, match="c: only 0 of its 5 documents"):
        Cutter(tiny_tokenizer, 1000, "once").windows(PROSE, "documents", None, None, "c")


def test_short_corpus_is_named(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="corpus c: has 193 tokens, fewer than one window of 512"):
        Cutter(tiny_tokenizer, 512, "once").windows(PROSE, "stream", None, None, "corpus c")


def test_order_of_a_seed() -> None:
    assert order(4, None) == [0, 1, 2, 3]
    assert sorted(order(100, 0)) == list(range(100)) != order(100, 0)
    assert order(100, 0) == order(100, 0) != order(100, 1)


def test_too_few_windows_name_the_key(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    cutter = Cutter(tiny_tokenizer, 64, "once")
    for key in ("sequences", "selection_sequences"):
        message = rf"text\.calibration\.{key} = 9: corpus c \(text.calibration\) has only 3 windows"
        with pytest.raises(UserError, match=message):
            calibration_windows(cutter, PROSE, "stream", calibration(seqlen=64, **{key: 9}))


@pytest.mark.parametrize("cut", ["stream", "documents"])
def test_selection_and_operator_share_the_first_sequences(tiny_tokenizer: PreTrainedTokenizerFast, cut: str) -> None:
    cutter = Cutter(tiny_tokenizer, 8, "once")
    four = calibration_windows(cutter, PROSE, cut, calibration())
    more = calibration_windows(cutter, PROSE, cut, calibration(selection_sequences=5))
    assert (len(four), len(more)) == (4, 5)
    assert more[:4] == four


def test_calibration_name_follows_the_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    cutter, names = Cutter(tiny_tokenizer, 8, "once"), set()
    for changes in ({}, {"seed": 1}, {"seed": None}, {"sequences": 3}):
        wanted = calibration(**changes)
        frame = calibration_frame(calibration_windows(cutter, PROSE, "stream", wanted), wanted)
        (name,) = frame["calibration"].unique()
        names.add(name)
        assert len(frame) == changes.get("sequences", 4)
    assert len({name[-8:] for name in names}) == 4
    assert min(names).startswith("c:3x8:seed0:")


def test_corpus_takes_at_most_so_many_windows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    cutter = Cutter(tiny_tokenizer, 8, "once")
    all_windows = [window.input_ids for window in cutter.windows(PROSE, "stream", None, None, "c")]
    for windows, seed in ((3, None), (3, 0), (None, 0), (1000, None)):
        wanted = PerplexityText(corpora=["c"], seqlen=8, windows=windows, seed=seed)
        found = corpus_frame(cutter, PROSE, "stream", wanted, "c")["input_ids"].tolist()
        assert len(found) == min(windows or 1000, len(all_windows))
        if seed is None:
            assert found == all_windows[: len(found)]
        else:
            assert found != all_windows[: len(found)]
            assert all(window in all_windows for window in found)
