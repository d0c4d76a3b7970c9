"""Answers of a model that outlive a killed evaluation.

Requests are asked in batches, each kept as a file when it is answered. The folder is named by everything
that the answers depend on, so that no two models, settings or versions of the code share one. (The harness' own request
cache does not know which model answered, and pickles.)
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.project.artifacts import read_json, sha256, versions, write_json
from stages.project.errors import UserError
from stages.project.paths import DATA

ANSWERS = DATA / ".cache/answers"
CODE = Path(__file__).parent
Answer = tuple[float, bool]
"""Log-likelihood of a choice, nats, and whether greedy decoding would give it."""


def answers_folder(identity: dict[str, Any]) -> Path:
    """The folder for answers that depend on `identity` (JSON), on the code of all stages, and on the libraries."""
    code = {file.relative_to(CODE).as_posix(): sha256(file) for file in CODE.rglob("*.py")}
    text = json.dumps({"code": code, "versions": versions(), **identity}, sort_keys=True)
    return ANSWERS / hashlib.sha256(text.encode()).hexdigest()


def resumable(
    ask: Callable[[list[Any]], list[Answer]], requests: Sequence[Any], batch_size: int, folder: Path
) -> list[Answer]:
    """The answers of ``ask`` to `requests` (``lm_eval.api.instance.Instance``), in their order.

    Only batches without a file in `folder` are asked. They are the same whether an earlier one was answered now or
    before: resuming changes no bit. Raises
    UserError naming the question when a log-likelihood is not finite.
    """
    texts = json.dumps([batch_size, *(list(map(str, request.args)) for request in requests)])
    folder = folder / hashlib.sha256(texts.encode()).hexdigest()
    answers: list[Answer | None] = [None] * len(requests)
    for number, batch in enumerate(tqdm(batches(requests, batch_size), desc="batches", leave=False)):
        file = folder / f"{number}.json"
        if not file.exists():
            asked = [requests[index] for index in batch]
            found = ask(asked)
            require_finite(asked, found)
            write_json(file, {"answers": [[float(value), bool(greedy)] for value, greedy in found]})
        for index, (value, greedy) in zip(batch, read_json(file)["answers"], strict=True):
            answers[index] = (value, greedy)
    assert None not in answers
    return [answer for answer in answers if answer is not None]


def require_finite(requests: Sequence[Any], answers: Sequence[Answer]) -> None:
    """Raise UserError naming the question when a log-likelihood is NaN or infinite."""
    for request, (value, _) in zip(requests, answers, strict=True):
        if not math.isfinite(value):
            raise UserError(
                f"task {request.task_name}, question {request.doc_id}: a choice's log-likelihood is {value}; the model "
                f"is broken in this dtype"
            )


def batches(requests: Sequence[Any], size: int) -> list[list[int]]:
    """Indices of `requests` in batches of at most `size`, the longest first.

    Questions stay whole, as the harness forwards a context once for all choices of one token; one with more choices
    than `size` is a batch of its own, which the harness splits.
    """
    questions = [
        [index for index, _ in question]
        for _, question in groupby(enumerate(requests), lambda item: (item[1].task_name, item[1].doc_id))
    ]
    questions.sort(key=lambda question: -max(sum(map(len, requests[index].args)) for index in question))
    found: list[list[int]] = []
    for question in questions:
        if found and len(found[-1]) + len(question) <= size:
            found[-1] += question
        else:
            found.append(list(question))
    return found
