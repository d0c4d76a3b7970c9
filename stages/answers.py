"""Answers of a model that outlive a killed evaluation.

Each batch of answers is kept as a file before the next one is forwarded. The folder is named by everything that the
answers depend on, so that no two models, settings or versions of the code share one. (The harness' own request cache
does not know which model answered, and pickles.)
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


class Kept:
    """The answers to `requests` (``lm_eval.api.instance.Instance``) that a folder holds, one file a batch."""

    def __init__(self, requests: Sequence[Any], folder: Path):
        self._requests, self._folder = requests, folder
        self._numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            self._numbers[request.args].append(number)
        self._batch: list[tuple[int, float, bool]] = []
        self._batches = len(list(folder.glob("*.json")))
        self.answers: dict[int, Answer] = {}
        for batch in range(self._batches):
            for number, value, greedy in read_json(folder / f"{batch}.json")["answers"]:
                self.answers[number] = (value, greedy)

    def add_partial(self, _kind: str, texts: tuple[str, str], answer: Answer) -> None:
        """Take an answer of the batch at hand; the harness calls this for every one.

        Raises UserError naming the question when the log-likelihood is not finite.
        """
        for number in self._numbers[texts]:
            request, value = self._requests[number], float(answer[0])
            if not math.isfinite(value):
                raise UserError(
                    f"task {request.task_name}, question {request.doc_id}: a choice's log-likelihood is {value}; the "
                    f"model is broken in this dtype"
                )
            self._batch.append((number, value, bool(answer[1])))

    def write(self) -> None:
        """Keep the batch at hand, if there is one: all of it or nothing."""
        if self._batch:
            write_json(self._folder / f"{self._batches}.json", {"answers": self._batch})
            self.answers |= {number: (value, greedy) for number, value, greedy in self._batch}
            self._batch, self._batches = [], self._batches + 1


def resumable(
    model: Any, ask: Callable[[list[Any]], Any], requests: Sequence[Any], batch_size: int, folder: Path
) -> list[Answer]:
    """The answers of ``ask``, the `loglikelihood` of `model` (``lm_eval.models.huggingface.HFLM``), to `requests`.

    Only requests without an answer in `folder` are asked. The harness orders requests by length and cuts the order into
    batches of `batch_size`; those kept are a beginning of it, so that the others are the same as in one go: resuming
    changes no bit. Raises UserError naming the question when a log-likelihood is not finite.
    """
    texts = json.dumps([batch_size, *(list(request.args) for request in requests)])
    kept = Kept(requests, folder / hashlib.sha256(texts.encode()).hexdigest())
    forward = model._model_call  # Where a batch begins; the harness tells of its answers alone.

    def keep_and_forward(*inputs: Any, **named: Any) -> Any:
        kept.write()
        return forward(*inputs, **named)

    model.set_cache_hook(kept)
    model._model_call = keep_and_forward
    left = [request for number, request in enumerate(requests) if number not in kept.answers]
    if left:
        ask(left)
        kept.write()
    return [kept.answers[number] for number in range(len(requests))]
