"""A killed evaluation goes on where it was, and shares no answers with another."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages import answers
from stages.answers import answers_folder, batches, resumable


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


class Model:
    """Answers with a number that every request determines; stops after some calls."""

    def __init__(self, calls: int | None = None):
        self.left = calls
        self.asked: list[list[Request]] = []

    def __call__(self, asked: list[Request]) -> list[tuple[float, bool]]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = None if self.left is None else self.left - 1
        self.asked.append(asked)
        return [(-len(request.args[0]) - request.doc_id / 7, request.doc_id % 2 == 0) for request in asked]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_batches_hold_whole_questions_longest_first() -> None:
    asked = requests(50)
    found = batches(asked, 16)
    assert sorted(index for batch in found for index in batch) == list(range(150))
    assert {len(batch) for batch in found[:-1]} == {15}
    flat = [len(asked[index].args[0]) for batch in found for index in batch]
    assert flat == sorted(flat, reverse=True)
    of = [{asked[index].doc_id for index in batch} for batch in found]
    assert sum(map(len, of)) == 50, "a question is in two batches"
    assert {len(batch) for batch in batches(asked, 2)} == {3}


def test_the_same_number_in_two_tasks_is_two_questions() -> None:
    asked = [Request("a", 0, ("x", "y")), Request("b", 0, ("x", "y"))]
    assert batches(asked, 1) == [[0], [1]]


@pytest.mark.parametrize("calls", range(5))
def test_a_killed_evaluation_asks_the_same_batches_that_were_left(calls: int) -> None:
    asked, folder = requests(40), answers_folder({"model": "m"})
    whole = Model()
    expected = resumable(whole, asked, 6, answers_folder({"model": "another"}))
    assert expected == Model()(asked)
    assert len(whole.asked) == 20
    killed, resumed = Model(calls), Model()
    with pytest.raises(KeyboardInterrupt):
        resumable(killed, asked, 6, folder)
    assert resumable(resumed, asked, 6, folder) == expected
    assert killed.asked + resumed.asked == whole.asked


def test_answers_are_kept_to_the_last_bit() -> None:
    asked, folder = requests(3), answers_folder({})
    values = {request: (-1 / (3 + index), True) for index, request in enumerate(asked)}
    assert resumable(lambda batch: [values[request] for request in batch], asked, 8, folder) == [*values.values()]
    assert resumable(lambda _: pytest.fail("asked again"), asked, 8, folder) == [*values.values()]


@pytest.mark.parametrize("changes", [{"model": "n"}, {"adapter": {"w": "1"}}, {"dtype": "bfloat16"}])
def test_another_model_shares_nothing(changes: dict[str, Any]) -> None:
    identity = {"model": "m", "adapter": {"w": "0"}, "dtype": "float32"}
    first, second = Model(), Model()
    resumable(first, requests(5), 4, answers_folder(identity))
    resumable(second, requests(5), 4, answers_folder({**identity, **changes}))
    assert first.asked == second.asked


def test_other_prompts_batches_and_code_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"model": "m"}
    resumable(Model(), requests(5), 4, answers_folder(identity))
    for asked, batch_size in ((requests(6), 4), (requests(5), 5)):
        again = Model()
        resumable(again, asked, batch_size, answers_folder(identity))
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


def test_a_half_written_batch_is_asked_again() -> None:
    asked, folder = requests(5), answers_folder({})
    expected = resumable(Model(), asked, 16, folder)
    (file,) = folder.rglob("0.json")
    assert len(json.loads(file.read_text())["answers"]) == 15
    file.rename(file.with_suffix(".partial"))
    again = Model()
    assert resumable(again, asked, 16, folder) == expected
    assert len(again.asked) == 1
