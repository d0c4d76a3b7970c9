"""Stage `text`: token ids of the calibration sequences and of every perplexity corpus.

Reads the corpora named in ``params.yaml`` and the model's tokenizer. Writes ``data/text/<model>/``:
``calibration.parquet``, what the operators are solved from, and ``selection.parquet``, what the layers are selected
from; one ``<corpus>.parquet`` each; and ``perplexity.json``, the SHA-256 of every corpus file: `eval_ppl` depends on
that alone, so that another calibration text evaluates nothing anew.
"""

import hashlib

import numpy as np
import pandas as pd

from stages.base.checkpoint import load_tokenizer
from stages.corpora import Cutter, Document, Window, documents
from stages.project import params
from stages.project.artifacts import sha256, write_json, write_table, writing
from stages.project.errors import UserError, run
from stages.project.keys import Calibration, parse_row
from stages.project.paths import calibration_file, corpora_index, corpus_file, selection_file
from stages.project.schemas import CALIBRATION_TEXT, CORPUS_TEXT
from stages.project.sections import CalibrationText, PerplexityText


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

        def identity(name: str) -> dict[str, str]:
            corpus = settings.corpora[name]
            return {"model": row.model, "bos": text.bos, "corpus": name, "source": corpus.source, "cut": corpus.cut}

        name = text.calibration.corpus
        cutter = Cutter(tokenizer, text.calibration.seqlen, text.bos)
        chosen = calibration_windows(cutter, texts[name], settings.corpora[name].cut, text.calibration)
        for file, sequences in (
            (calibration_file(row.model), text.calibration.sequences),
            (selection_file(row.model), text.calibration.selection_sequences),
        ):
            frame = calibration_frame(chosen[:sequences], text.calibration).assign(**identity(name))
            write_table(folder / file.name, frame, CALIBRATION_TEXT)
        manifest = {}
        cutter = Cutter(tokenizer, text.perplexity.seqlen, text.bos)
        for name in text.perplexity.corpora:
            file = folder / corpus_file(row.model, name).name
            windows = corpus_frame(cutter, texts[name], settings.corpora[name].cut, text.perplexity, name)
            write_table(file, windows.assign(**identity(name)), CORPUS_TEXT)
            manifest[name] = {"sha256": sha256(file)}
        write_json(folder / corpora_index(row.model).name, {"corpora": manifest})


def calibration_windows(cutter: Cutter, texts: list[Document], cut: str, wanted: CalibrationText) -> list[Window]:
    """The calibration sequences, as many as the larger of operator and selection needs; both take the first ones.

    Raises UserError when the corpus has too few.
    """
    count = max(wanted.sequences, wanted.selection_sequences)
    where = f"corpus {wanted.corpus} (text.calibration)"
    windows = cutter.windows(texts, cut, count, wanted.seed, where)
    if len(windows) < count:
        key = "sequences" if count == wanted.sequences else "selection_sequences"
        raise UserError(f"text.calibration.{key} = {count}: {where} has only {len(windows)} windows")
    return windows


def calibration_frame(windows: list[Window], wanted: CalibrationText) -> pd.DataFrame:
    """Calibration sequences: columns sequence, document, offset, input_ids, seqlen, seed, calibration."""
    digest = hashlib.sha256(np.asarray([window.input_ids for window in windows], dtype="<i4").tobytes()).hexdigest()
    calibration = Calibration(wanted.corpus, len(windows), wanted.seqlen, wanted.seed, digest[:8])
    return _frame(windows).assign(seqlen=wanted.seqlen, seed=wanted.seed, calibration=calibration.name)


def corpus_frame(cutter: Cutter, texts: list[Document], cut: str, wanted: PerplexityText, corpus: str) -> pd.DataFrame:
    """The windows of one perplexity corpus: columns sequence, document, offset, input_ids, seqlen, seed."""
    windows = cutter.windows(texts, cut, wanted.windows, wanted.seed, f"corpus {corpus} (text.perplexity)")
    return _frame(windows).assign(seqlen=wanted.seqlen, seed=wanted.seed)


def _frame(windows: list[Window]) -> pd.DataFrame:
    frame = pd.DataFrame(windows, columns=list(Window._fields))
    return frame.assign(sequence=range(len(windows)), document=frame["document"].astype("Int64"))


if __name__ == "__main__":
    run(main)
