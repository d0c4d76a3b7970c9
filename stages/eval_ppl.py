"""Stage `eval_ppl`: what a row's model makes of text: the likelihood of every window, and what it writes itself.

Reads ``data/text/<model>/perplexity.json`` and the corpora it lists, the model, and unless the row is the dense one
its adapter. Writes ``data/eval_ppl/<key>.parquet``, the negative log-likelihood of every window of every perplexity
corpus, and ``data/generate/<key>.parquet``, what the model writes after a few prompts.
"""

import pandas as pd
from transformers import PreTrainedModel

from stages.base.checkpoint import load_tokenizer
from stages.base.device import batch_tokens
from stages.generation import continuations
from stages.likelihood import window_nll
from stages.project import params
from stages.project.artifacts import read_json, read_table, require, sha256, write_table
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import corpora_index, corpus_file, perplexity_file, text_file
from stages.project.schemas import CORPUS_TEXT, EVAL_PPL, GENERATE
from stages.recovered.patched import load_row
from stages.weights import operator_parameters, parameters


def main() -> None:
    """Run the stage for one row."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    source, wanted = settings.models[row.model], settings.generate
    corpora = read_corpora(row.model)
    likelihoods, texts = pd.DataFrame(columns=EVAL_PPL.names), pd.DataFrame(columns=GENERATE.names)
    if corpora or wanted.prompts:
        model, made_with = load_row(row, settings)
        identity = {**row.columns(), "dtype": source.dtype}
    if corpora:
        sizes = {"parameters": parameters(model), "operator_parameters": operator_parameters(model)}
        likelihoods = corpora_nll(model, corpora).assign(**identity, **made_with, **sizes)
    if wanted.prompts:
        tokenizer = load_tokenizer(row.model, source.trust_remote_code)
        texts = continuations(model, tokenizer, wanted.prompts, wanted.new_tokens).assign(**identity)
    write_table(perplexity_file(row), likelihoods, EVAL_PPL)
    write_table(text_file(row), texts, GENERATE)


def corpora_nll(model: PreTrainedModel, corpora: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Every window's negative log-likelihood, nats, and number of predicted tokens, beside what identifies it."""
    frames = []
    for corpus, text in corpora.items():
        nll = window_nll(model, text["input_ids"].tolist(), batch_tokens(), f"corpus {corpus}")
        frame = text[["corpus", "source", "bos", "cut", "seqlen", "seed"]].assign(
            window=text["sequence"], tokens=text["input_ids"].map(len) - 1, nll=nll
        )
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def read_corpora(model: str) -> dict[str, pd.DataFrame]:
    """The windows of every corpus in the index, columns of ``stages.project.schemas.CORPUS_TEXT``.

    Raises UserError when a corpus' file is not the one that the index lists.
    """
    found = {}
    for corpus, known in read_json(corpora_index(model))["corpora"].items():
        file = corpus_file(model, corpus)
        require(file)
        if sha256(file) != known["sha256"]:
            raise UserError(f"{file}: is not the file listed in {corpora_index(model)}; run `dvc checkout`")
        found[corpus] = read_table(file, CORPUS_TEXT)
    return found


if __name__ == "__main__":
    run(main)
