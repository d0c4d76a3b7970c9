"""Corpora: the documents of a text, and the windows of token ids that they are cut into."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stages import hub
from stages.project.errors import UserError
from stages.project.sections import Corpus

DOCUMENT = re.compile(r"<doc [^>]*>\n(.*?)</doc>", re.DOTALL)
JOINT = "\n\n"
"""Documents are joined by a blank line."""


class Document(NamedTuple):
    """A document and its number in its source, from 0."""

    number: int
    text: str


class Window(NamedTuple):
    """Token ids, the number of the document they are from (None in a stream of many), and the tokens before them."""

    input_ids: list[int]
    document: int | None
    offset: int


def documents(corpus: Corpus, where: str) -> list[Document]:
    """The corpus' documents in order, of at least `min_characters`, in its range; nothing beyond the range is read.

    Raises UserError when the source is missing or cannot be read, or when the range holds no document.
    """
    first, end = corpus.documents
    chosen: list[Document] = []
    long_enough = 0
    for number, text in enumerate(_texts(corpus, where)):
        if len(text) < corpus.min_characters:
            continue
        if long_enough >= first:
            chosen.append(Document(number, text))
        long_enough += 1
        if long_enough == end:
            break
    if not chosen:
        raise UserError(
            f"{where}: no document in range {list(corpus.documents)}; {corpus.source} has {long_enough} of at least "
            f"{corpus.min_characters} characters"
        )
    return chosen


def _texts(corpus: Corpus, where: str) -> Iterator[str]:
    if corpus.id is not None:
        found_at = hub.place(corpus.id, corpus.config or corpus.data_dir, f"{where}.id")
    else:
        found_at = str(corpus.path)
        if not Path(found_at).exists():
            raise UserError(f"{where}.path = {corpus.path}: no such file or folder")
        if corpus.split is not None and not Path(found_at).is_dir():
            raise UserError(f"{where}.path = {corpus.path}: with `split`, must be a data set's folder")
    if corpus.split is None:
        yield from _plain_texts(Path(found_at), corpus)
        return
    options = {"name": corpus.config, "data_dir": corpus.data_dir}
    if found_at == corpus.id:
        options["revision"] = corpus.revision
    # A data set that is read in part may be far too large to be had as a whole.
    stream = corpus.documents[1] is not None
    assert corpus.column is not None
    name = corpus.id or found_at
    yield from hub.column_texts(name, found_at, corpus.column, where, stream=stream, split=corpus.split, **options)


def _plain_texts(path: Path, corpus: Corpus) -> Iterator[str]:
    for file in sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]:
        try:
            yield from _of_file(file, corpus)
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise UserError(f"{file}: cannot be read as {corpus.format}: {str(error).splitlines()[0]}") from error


def _of_file(file: Path, corpus: Corpus) -> list[str]:
    if corpus.format == "parquet":
        schema = pq.read_schema(file)
        if corpus.column not in schema.names:
            raise UserError(f"{file}: has no column {corpus.column!r}; its columns are {', '.join(schema.names)}")
        texts = pq.read_table(file, columns=[corpus.column])[corpus.column]
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)) or texts.null_count:
            raise UserError(
                f"{file}: column {corpus.column!r} holds {texts.type}s, {texts.null_count} nulls; needs text"
            )
        return list(texts.to_pylist())
    text = file.read_text(encoding="utf-8")
    if corpus.format == "wikiextractor":
        return [match.strip() for match in DOCUMENT.findall(text)]
    return text.removesuffix("\n").split("\n") if corpus.format == "lines" else [text]


class Cutter:
    """Cuts documents into windows of `seqlen` token ids.

    With `bos` = ``once`` the tokenizer's own special tokens stand once, at the start of what is cut; with
    ``every-window`` each window is the BOS token and `seqlen` - 1 tokens of text. Raises UserError for ``every-window``
    when the tokenizer has no BOS token.
    """

    def __init__(self, tokenizer: Any, seqlen: int, bos: str):
        self._tokenizer = tokenizer
        self._own_tokens = bos == "once"
        if not self._own_tokens and tokenizer.bos_token_id is None:
            raise UserError("params.yaml: text.bos = every-window, but the tokenizer has no BOS token; use once")
        self._head = [] if self._own_tokens else [tokenizer.bos_token_id]
        self.seqlen = seqlen
        self._body = seqlen - len(self._head)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=self._own_tokens, verbose=False)["input_ids"]
        return ids

    def windows(
        self, texts: list[Document], cut: str, wanted: int | None, seed: int | None, where: str
    ) -> list[Window]:
        """Windows of a corpus, in an order that `seed` chooses; without one, in their own.

        With `cut` = ``stream``, the documents are joined and cut without overlap, the rest left out; at most `wanted`
        windows are taken. With ``documents``, each document long enough gives one, from a place that `seed` chooses
        (without one, its beginning), until there are `wanted`. Raises UserError when the stream is shorter than one
        window, or too few documents are long enough.
        """
        return (self._documents if cut == "documents" else self._stream)(texts, wanted, seed, where)

    def _stream(self, texts: list[Document], wanted: int | None, seed: int | None, where: str) -> list[Window]:
        tokens = self._tokens(JOINT.join(document.text for document in texts))
        starts = range(0, len(tokens) - self._body + 1, self._body)
        if not starts:
            raise UserError(f"{where}: has {len(tokens)} tokens, fewer than one window of {self.seqlen}")
        return [self._window(tokens, starts[index], None) for index in order(len(starts), seed)[:wanted]]

    def _documents(self, texts: list[Document], wanted: int | None, seed: int | None, where: str) -> list[Window]:
        found: list[Window] = []
        for index in order(len(texts), seed):
            if len(found) == wanted:
                break
            number, text = texts[index]
            tokens = self._tokens(text)
            places = len(tokens) - self._body + 1
            if places > 0:
                start = 0 if seed is None else random.Random(f"{seed} {number}").randrange(places)
                found.append(self._window(tokens, start, number))
        if len(found) < (wanted or 1):
            raise UserError(
                f"{where}: only {len(found)} of its {len(texts)} documents have {self.seqlen} tokens, "
                f"{wanted or 1} are needed; widen the corpus' `documents`, or join them with `cut: stream`"
            )
        return found

    def _window(self, tokens: list[int], start: int, document: int | None) -> Window:
        return Window(self._head + tokens[start : start + self._body], document, start)


def order(count: int, seed: int | None) -> list[int]:
    """The numbers below `count`, ascending, or in an order that `seed` chooses.

    A choice is a beginning of it, so that the smaller of two choices is part of the larger.
    """
    # random.sample's order for a seed is stable over Python versions and platforms.
    return list(range(count)) if seed is None else random.Random(seed).sample(range(count), count)
