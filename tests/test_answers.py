"""A killed evaluation goes on where it was, and shares no answers with another."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages import answers
from stages.answers import answers_folder, resumable
from stages.project.errors import UserError


@dataclass(frozen=True)
class Request:
    """What is used of ``lm_eval.api.instance.Instance``."""

    task_name: str
    doc_id: int
    args: tuple[str, str]


def requests(questions: int, choices: int = 3) -> list[Request]:
    """Questions whose lengths go up and down."""
    lengths = [(7 * number) % questions for number in range(questions)]
    return [
        Request("t", number, ("x" * lengths[number], f" choice {choice} of {number}"))
        for number in range(questions)
        for choice in range(choices)
    ]


def value(texts: tuple[str, str]) -> float:
    """A log-likelihood that the texts determine, with digits to the last bit."""
    return -len(texts[0]) - 1 / (3 + sum(map(ord, texts[1])))


class Model:
    """What is used of the harness' model: asks the longest first, in batches; stops in a call, or in an answer."""

    def __init__(self, calls: int | None = None, answers: int | None = None, value: Callable[..., float] = value):
        self._calls, self._answers, self._value = calls, answers, value
        self.asked: list[list[tuple[str, str]]] = []

    def set_cache_hook(self, hook: Any) -> None:
        self._hook = hook

    def _model_call(self, batch: list[tuple[str, str]]) -> list[float]:
        if len(self.asked) == self._calls:
            raise KeyboardInterrupt
        self.asked.append(batch)
        return [self._value(texts) for texts in batch]

    def loglikelihood(self, requests: list[Request]) -> None:
        texts = sorted((request.args for request in requests), key=lambda pair: (-len(pair[0]), pair))
        for start in range(0, len(texts), 4):
            batch = texts[start : start + 4]
            for number, found in enumerate(self._model_call(batch)):
                if len(self.asked) == self._calls and number == self._answers:
                    raise KeyboardInterrupt
                self._hook.add_partial("loglikelihood", batch[number], (found, number % 2 == 0))


def ask(model: Model, asked: list[Request], folder: Path, batch_size: int = 4) -> list[tuple[float, bool]]:
    return resumable(model, model.loglikelihood, asked, batch_size, folder)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("inside", [None, 2])
@pytest.mark.parametrize("calls", [1, 2, 7, 30])
def test_a_killed_evaluation_asks_the_batches_that_were_left(calls: int, inside: int | None) -> None:
    """Killed before a batch, or while its answers come: what was finished is not asked again, nothing else differs."""
    asked, folder = requests(40), answers_folder({"model": "m"})
    whole, killed, resumed = Model(), Model(calls, inside), Model()
    expected = ask(whole, asked, answers_folder({"model": "another"}))
    assert [found for found, _ in expected] == [value(request.args) for request in asked]
    assert len(whole.asked) == 30
    if (calls, inside) == (30, None):
        ask(killed, asked, folder)
    else:
        with pytest.raises(KeyboardInterrupt):
            ask(killed, asked, folder)
    assert ask(resumed, asked, folder) == expected
    finished = calls if inside is None else calls - 1
    assert killed.asked[:finished] + resumed.asked == whole.asked


def test_equal_requests_of_two_questions_are_both_answered() -> None:
    asked = [Request("a", 0, ("x", "y")), Request("b", 0, ("x", "y")), Request("b", 1, ("x", "z"))]
    found = ask(Model(), asked, answers_folder({}))
    assert [value for value, _ in found] == [value(request.args) for request in asked]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_an_answer_that_is_not_finite_names_the_question(bad: float) -> None:
    def broken(texts: tuple[str, str]) -> float:
        return bad if texts == asked[4].args else value(texts)

    asked = requests(5)
    with pytest.raises(UserError, match=f"task t, question 1: a choice's log-likelihood is {bad}"):
        ask(Model(value=broken), asked, answers_folder({}))


@pytest.mark.parametrize("changes", [{"model": "n"}, {"adapter": {"w": "1"}}, {"dtype": "bfloat16"}])
def test_another_model_shares_nothing(changes: dict[str, Any]) -> None:
    identity = {"model": "m", "adapter": {"w": "0"}, "dtype": "float32"}
    first, second = Model(), Model()
    ask(first, requests(5), answers_folder(identity))
    ask(second, requests(5), answers_folder({**identity, **changes}))
    assert first.asked == second.asked


def test_other_prompts_batches_and_code_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"model": "m"}
    ask(Model(), requests(5), answers_folder(identity))
    for asked, batch_size in ((requests(6), 4), (requests(5), 5)):
        again = Model()
        ask(again, asked, answers_folder(identity), batch_size)
        assert sum(map(len, again.asked)) == len(asked)
    folders = {answers_folder(identity)}
    monkeypatch.setattr(answers, "versions", lambda: {"torch": "0"})
    folders.add(answers_folder(identity))
    code = Path("code")
    code.mkdir()
    (code / "a.py").write_text("one")
    monkeypatch.setattr(answers, "CODE", code)
    folders.add(answers_folder(identity))
    (code / "a.py").write_text("two")
    folders.add(answers_folder(identity))
    assert len(folders) == 4
