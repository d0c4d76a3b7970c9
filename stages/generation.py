"""What a model writes after a prompt."""

from collections.abc import Sequence

import pandas as pd
import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from stages.base.decoder import input_device


@torch.no_grad()
def continuations(model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int) -> pd.DataFrame:
    """What `model` writes after each of `prompts`, always the likeliest token, up to `tokens` or until it ends.

    Columns prompt, continuation, new_tokens.
    """
    written = []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt").to(input_device(model))
        ids = model.generate(**given, max_new_tokens=tokens, do_sample=False, num_beams=1)
        new = ids[0, given["input_ids"].shape[1] :]
        written.append((prompt, tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return pd.DataFrame(written, columns=["prompt", "continuation", "new_tokens"])
