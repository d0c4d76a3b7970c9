"""Corpora: the documents of a text, the token stream they form, and the sequences it is cut into."""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.project.errors import UserError
from stages.project.params import Corpus

DOCUMENT = re.compile(r"<doc [^>]*>\n(.*?)</doc>", re.DOTALL)
JOINT = "\n\n"
"""Documents are joined by a blank line."""


def documents(corpus: Corpus, where: str) -> list[str]:
    """The corpus' documents in order, of at least `min_characters`, in its range.

    Raises UserError when the path is missing or cannot be read, or when the range holds no document.
    """
    path = Path(corpus.path)
    if not path.exists():
        raise UserError(f"{where}.path = {corpus.path}: no such file or folder")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    found: list[str] = []
    for file in files:
        try:
            found += _documents(file, corpus)
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise UserError(f"{file}: cannot be read as {corpus.format}: {str(error).splitlines()[0]}") from error
    long_enough = [text for text in found if len(text) >= corpus.min_characters]
    first, end = corpus.documents
    chosen = long_enough[first:end]
    if not chosen:
        raise UserError(
            f"{where}: no document in range {list(corpus.documents)}; {corpus.path} has {len(long_enough)} of at least "
            f"{corpus.min_characters} characters"
        )
    return chosen


def _documents(file: Path, corpus: Corpus) -> list[str]:
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


def token_windows(tokenizer: Any, texts: list[str], seqlen: int, bos: str, where: str) -> list[list[int]]:
    """Non-overlapping windows of `seqlen` token ids of the joined documents; an incomplete last one is left out.

    With `bos` = ``once`` the tokenizer's own special tokens stand once in the stream; with ``every-window`` each window
    is the BOS token and `seqlen` - 1 tokens of text. Raises UserError for ``every-window`` when the tokenizer has no
    BOS token, and when the corpus is shorter than one window.
    """
    every = bos == "every-window"
    if every and tokenizer.bos_token_id is None:
        raise UserError("params.yaml: text.bos = every-window, but the tokenizer has no BOS token; use once")
    stream = tokenizer(JOINT.join(texts), add_special_tokens=not every, verbose=False)["input_ids"]
    head = [tokenizer.bos_token_id] if every else []
    body = seqlen - len(head)
    windows = [head + stream[start : start + body] for start in range(0, len(stream) - body + 1, body)]
    if not windows:
        raise UserError(f"{where}: has {len(stream)} tokens, fewer than one window of {seqlen}")
    return windows


def choose_windows(count: int, wanted: int, seed: int | None, where: str) -> list[int]:
    """Indices of `wanted` of `count` windows: the first ones, or with a seed a random choice, in random order.

    Raises UserError when there are too few.
    """
    if wanted > count:
        raise UserError(f"text.calibration.sequences = {wanted}: {where} has only {count} windows")
    if seed is None:
        return list(range(wanted))
    # random.sample's choice for a seed is stable over Python versions and platforms.
    return random.Random(seed).sample(range(count), wanted)
