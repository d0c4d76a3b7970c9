"""Stage `text`: token ids of the calibration sequences and of every perplexity corpus.

Reads the corpora named in ``params.yaml`` and the model's tokenizer. Writes ``data/text/<model>/``:
``calibration.parquet``, one ``<corpus>.parquet`` each, and ``perplexity.json``, the SHA-256 of every corpus file:
`eval_ppl` depends on that alone, so that another calibration text evaluates nothing anew.
"""

import hashlib
from typing import Any

import numpy as np
import pandas as pd

from stages.base.checkpoint import load_tokenizer
from stages.corpora import choose_windows, documents, token_windows
from stages.project import params
from stages.project.artifacts import sha256, write_json, write_table, writing
from stages.project.errors import run
from stages.project.keys import parse_row
from stages.project.paths import calibration_file, corpora_index, corpus_file
from stages.project.schemas import CALIBRATION_TEXT, CORPUS_TEXT


def main() -> None:
    """Run the stage for one model."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    text = settings.text
    names = dict.fromkeys([text.calibration.corpus, *text.perplexity.corpora])
    texts = {name: documents(settings.corpora[name], f"params.yaml: corpora.{name}") for name in names}
    tokenizer = load_tokenizer(row.model, settings.models[row.model].trust_remote_code)
    with writing(calibration_file(row.model).parent) as folder:
        folder.mkdir()

        def identity(corpus: str) -> dict[str, str]:
            source = settings.corpora[corpus].source
            return {"model": row.model, "bos": text.bos, "corpus": corpus, "source": source}

        name = text.calibration.corpus
        calibration = calibration_frame(tokenizer, texts[name], text).assign(**identity(name))
        write_table(folder / calibration_file(row.model).name, calibration, CALIBRATION_TEXT)
        manifest = {}
        for name in text.perplexity.corpora:
            file = folder / corpus_file(row.model, name).name
            windows = corpus_frame(tokenizer, texts[name], text, name).assign(**identity(name))
            write_table(file, windows, CORPUS_TEXT)
            manifest[name] = {"sha256": sha256(file)}
        write_json(folder / corpora_index(row.model).name, {"corpora": manifest})


def calibration_frame(tokenizer: Any, texts: list[str], text: params.Text) -> pd.DataFrame:
    """The calibration sequences: columns sequence, input_ids, seqlen, seed, calibration."""
    wanted = text.calibration
    where = f"corpus {wanted.corpus} (text.calibration)"
    windows = token_windows(tokenizer, texts, wanted.seqlen, text.bos, where)
    chosen = [windows[index] for index in choose_windows(len(windows), wanted.sequences, wanted.seed, where)]
    digest = hashlib.sha256(np.asarray(chosen, dtype="<i4").tobytes()).hexdigest()
    seed = "none" if wanted.seed is None else wanted.seed
    name = f"{wanted.corpus}:{wanted.sequences}x{wanted.seqlen}:seed{seed}:{digest[:8]}"
    return _frame(chosen).assign(seqlen=wanted.seqlen, seed=wanted.seed, calibration=name)


def corpus_frame(tokenizer: Any, texts: list[str], text: params.Text, corpus: str) -> pd.DataFrame:
    """The windows of one perplexity corpus: columns sequence, input_ids, seqlen."""
    seqlen = text.perplexity.seqlen
    windows = token_windows(tokenizer, texts, seqlen, text.bos, f"corpus {corpus} (text.perplexity)")
    return _frame(windows[: text.perplexity.windows]).assign(seqlen=seqlen)


def _frame(windows: list[list[int]]) -> pd.DataFrame:
    return pd.DataFrame({"sequence": range(len(windows)), "input_ids": windows})


if __name__ == "__main__":
    run(main)
