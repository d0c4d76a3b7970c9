"""The paired differences of the pruned rows, their tests, and the bold cells that rest on them."""

import dataclasses
import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from world import World, bold_cells, csv, table, text

from stages import report
from stages.project import artifacts
from stages.project.keys import Row
from stages.reporting import pictures
from stages.reporting.pairs import Pair, best, compare
from stages.reporting.results import Results
from stages.reporting.significance import Estimate

SIDES = ["criterion_a", "operator_a", "criterion_b", "operator_b"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "versions", lambda: {})
    monkeypatch.setattr(pictures, "save", lambda _draw, path: path.write_bytes(b""))


# The table of pairs


def test_pairs_csv_recomputed():
    world = World()
    world.write()
    report.main()
    found = csv("pairs")
    assert list(found) == ["model", "n", *SIDES, "measure", "on", "difference", "stderr", "p"]
    rows = [("streamline", "none"), ("streamline", "ghost"), ("shortgpt", "none"), ("shortgpt", "ghost")]
    columns = [
        *(("perplexity", on) for on in ("wiki", "web", "mean")),
        *(("acc", on) for on in ("piqa", "boolq", "mean")),
        *(("acc_norm", on) for on in ("piqa", "mean")),
    ]
    expected = [(*a, *b, *column) for column in columns for a, b in combinations(rows, 2)]
    assert list(found[[*SIDES, "measure", "on"]].itertuples(index=False, name=None)) == expected
    assert set(found["model"]) == {"pico"}
    assert set(found["n"]) == {2}
    found = found.set_index([*SIDES, "measure", "on"])

    keys = ("pico-streamline-2-none", "pico-shortgpt-2-ghost")
    sides = ("streamline", "none", "shortgpt", "ghost")
    gaps = [(world.nll[keys[0], corpus] - world.nll[keys[1], corpus]) / 15 for corpus in ("wiki", "web")]
    for on, gap in zip(("wiki", "web"), gaps, strict=True):
        line = found.loc[(*sides, "perplexity", on)]
        assert line["difference"] == pytest.approx(gap.mean())
        assert line["stderr"] == pytest.approx(gap.std(ddof=1) / math.sqrt(6))
        # All six windows agree, so no resample can turn the sign.
        assert (gap > 0).all()
        assert line["p"] == 2**-5
    line = found.loc[(*sides, "perplexity", "mean")]
    assert line["difference"] == pytest.approx(np.mean(gaps))
    assert line["stderr"] == pytest.approx(math.hypot(*(gap.std(ddof=1) / math.sqrt(6) for gap in gaps)) / 2)

    keys = ("pico-streamline-2-none", "pico-shortgpt-2-none")
    sides = ("streamline", "none", "shortgpt", "none")
    hits = {task: [world.correct[key, task] for key in keys] for task in ("piqa", "boolq")}
    wins = {task: int((a & ~b).sum()) for task, (a, b) in hits.items()}
    losses = {task: int((b & ~a).sum()) for task, (a, b) in hits.items()}
    assert min(sum(wins.values()), sum(losses.values())) > 0

    def two_sided(wins, losses):
        n = wins + losses
        return min(1, 2 * sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n)

    for task in hits:
        line = found.loc[(*sides, "acc", task)]
        assert line["difference"] == pytest.approx((wins[task] - losses[task]) / 40)
        assert line["p"] == pytest.approx(two_sided(wins[task], losses[task]))
    line = found.loc[(*sides, "acc", "mean")]
    assert line["difference"] == pytest.approx(sum(wins[task] - losses[task] for task in hits) / 80)
    assert line["p"] == pytest.approx(two_sided(sum(wins.values()), sum(losses.values())))
    assert "pairs.csv" in text()


def test_one_window_is_no_test():
    World(windows=1, tasks=[]).write()
    report.main()
    assert csv("pairs")[["stderr", "p"]].isna().all(axis=None)
    assert bold_cells(text()) == []


def test_a_single_pruned_row_is_in_no_pair():
    World(criteria=["streamline"], operators=["ghost"]).write()
    report.main()
    assert csv("pairs").empty
    assert "pairs.csv" not in text()
    assert bold_cells(text()) == []


def test_the_mean_of_tasks_is_no_lead_where_all_questions_together_say_otherwise():
    rows = [Row("pico", "streamline", 7, operator) for operator in ("ghost", "none")]
    results = Results([Row("pico"), *rows], [], ["copa", "hellaswag"], [7])
    # One is right 8 times of 10 where the other is 1 time, and 60 of 400 times fewer.
    right = [(np.arange(10) < 8, np.arange(400) < 200), (np.arange(10) < 1, np.arange(400) < 260)]
    for row, hits in zip(rows, right, strict=True):
        frames = [pd.DataFrame({"correct": of_task, "correct_norm": of_task}) for of_task in hits]
        results.questions[row] = dict(zip(results.tasks, frames, strict=True))
    compared = compare(results, "pico", 7)["acc", "mean"]
    (pair,) = compared.values()
    assert pair.difference.value == pytest.approx((0.7 - 0.15) / 2)
    assert pair.difference.value > 2 * pair.difference.error
    assert pair.p == 1
    assert best(dict(zip(rows, (0.65, 0.375), strict=True)), compared, lambda row: row, lowest=False) == []


def test_many_rows_of_one_n_and_what_a_pair_is_whatever_the_others():
    random = np.random.default_rng(0)
    rows = [Row("pico", f"c{number}", 7, operator) for number in range(21) for operator in ("w", "x", "y", "z")]
    results = Results([Row("pico"), *rows], ["wiki", "web", "speech"], ["piqa"], [7])
    for row in rows:
        results.windows[row] = {
            corpus: pd.DataFrame({"tokens": 511, "nll": random.normal(2000, 100, 14)}) for corpus in results.corpora
        }
        right = random.random((2, 240)) < 0.6
        results.questions[row] = {"piqa": pd.DataFrame({"correct": right[0], "correct_norm": right[1]})}
    compared = compare(results, "pico", 7)
    assert [len(column) for column in compared.values()] == [84 * 83 // 2] * 8
    alone = compare(dataclasses.replace(results, rows=[rows[3], rows[80]]), "pico", 7)
    for column, of_two in alone.items():
        assert of_two == {(rows[3], rows[80]): compared[column][rows[3], rows[80]]}


# Which rows are bold


def pair_of(lead, error, p):
    return Pair(Estimate(lead, error), p)


def winners(values, pair, lowest, identity=lambda row: row):
    return best(values, dict.fromkeys(combinations(values, 2), pair), identity, lowest=lowest)


def test_best_when_its_lead_exceeds_the_error_and_chance_is_unlikely():
    values = {"a": 1.0, "b": 3.0}
    assert winners(values, pair_of(-1.0, 0.99, 0.049), True) == ["a"]
    assert winners(values, pair_of(-1.0, 0.99, 0.05), True) == []
    assert winners(values, pair_of(-1.0, 1.0, 0.001), True) == []
    assert winners(values, pair_of(-1.0, None, None), True) == []
    assert winners(values, pair_of(1.0, 0.99, 0.001), True) == []
    # b stands second: its lead is the negative of a - b.
    assert winners(values, pair_of(-1.0, 0.99, 0.049), False) == ["b"]
    assert winners(values, pair_of(1.0, 0.99, 0.049), False) == []


def test_best_must_lead_every_other_row():
    values = {"b": 2.0, "a": 1.0, "c": 3.0}
    leads = {("b", "a"): 1.0, ("b", "c"): -1.0, ("a", "c"): -2.0}
    compared = {rows: pair_of(lead, 0.1, 0.01) for rows, lead in leads.items()}
    assert best(values, compared, lambda row: row, lowest=True) == ["a"]
    for rival in (("b", "a"), ("a", "c")):
        unclear = compared | {rival: pair_of(leads[rival], 0.1, 0.2)}
        assert best(values, unclear, lambda row: row, lowest=True) == []
    irrelevant = compared | {("b", "c"): pair_of(-1, 0.1, 0.2)}
    assert best(values, irrelevant, lambda row: row, lowest=True) == ["a"]


def test_no_best_without_a_rival_or_on_a_tie():
    assert winners({"a": 1.0}, None, True) == []
    assert winners({}, None, True) == []
    assert winners({"a": 1.0, "b": 1.0}, pair_of(0.0, 0.0, 1.0), True) == []
    assert winners({"a": 1.0, "b": 1.0}, pair_of(0.0, 0.0, 1.0), True, identity=len) == []


def test_rows_that_are_the_same_model_are_bold_together():
    world = World(tasks=["boolq"], operators=["none", "ghost"])
    world.removed["pico", "shortgpt", 2] = world.removed["pico", "streamline", 2]
    for number, operator in enumerate(("none", "ghost")):
        for criterion in ("streamline", "shortgpt"):
            key = f"pico-{criterion}-2-{operator}"
            flat(world, {key: 4 - number})
            world.correct[key, "boolq"] = np.arange(40) < 10 + 10 * number
    world.write()
    report.main()
    for column in ("arithmetic mean", "wiki", "boolq acc", "mean acc"):
        marked = [(line["criterion"], line["operator"]) for line in table(text(), column) if "**" in line[column]]
        assert marked == [("streamline", "ghost"), ("shortgpt (= streamline)", "ghost")]
    same = csv("pairs").query("operator_a == operator_b")
    assert set(same["operator_a"]) == {"none", "ghost"}
    assert (same["p"] == 1).all()
    assert (same["difference"] == 0).all()
    # Where the layers differ, equal results are a tie.
    world.removed["pico", "shortgpt", 2] = [1, 5]
    world.write()
    report.main()
    assert bold_cells(text()) == []


def flat(world, levels, noise=0.0):
    """Mean NLLs of the pruned rows of a world: the level of each key, the same difficulty, and independent noise."""
    for number, (key, level) in enumerate(levels.items()):
        for corpus in world.corpora:
            hard = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 0.25])
            alternating = noise * np.array([1, -1, 1, -1, 1, -1]) * (-1) ** number
            world.nll[key, corpus] = (level + hard + alternating) * 15
    return world


def pair(ghost, none):
    return {"pico-streamline-2-none": none, "pico-streamline-2-ghost": ghost}


def test_bold_when_the_paired_difference_is_clear_though_windows_vary_much():
    world = flat(World(criteria=["streamline"], tasks=[]), pair(3.70, 3.75), noise=0.01)
    world.write()
    report.main()
    perplexities = table(text(), "arithmetic mean")
    bold = {
        line["operator"]: [line[c].startswith("**") for c in ("wiki", "web", "arithmetic mean")]
        for line in perplexities
    }
    assert bold == {"-": [False] * 3, "none": [False] * 3, "ghost": [True] * 3}


def test_not_bold_when_the_paired_difference_is_within_its_error():
    # SE of the difference: deviations of +-0.1 over 6 windows, std (ddof 1) 0.1095 / sqrt 6 = 0.0447. At 0.049 the lead
    # is beyond it, but chance too likely: a resample's D* is 0.1 (k - 3) / 3 - 0.049 with k ~ Binomial(6, 1/2), so
    # P(D* > 0) = P(k >= 5) = 7/64; at 0.080 it is P(k = 6) = 1/64, and p = 0.03.
    for difference, expected in ((0.040, False), (0.049, False), (0.080, True)):
        world = flat(
            World(criteria=["streamline"], tasks=[], corpora=["wiki"]), pair(3.7, 3.7 + difference), noise=0.05
        )
        world.write()
        report.main()
        assert bool(bold_cells(text())) is expected


def test_windows_weigh_by_their_tokens():
    # ghost is better by 0.05 in five windows of 15 tokens, worse by 0.4 in one of a single token
    world = flat(World(criteria=["streamline"], tasks=[], corpora=["wiki"]), pair(3.70, 3.75))
    world.nll["pico-streamline-2-ghost", "wiki"][5] += 0.45 * 15
    for row in world.rows:
        world.tokens[row.key, "wiki"][5] = 1
        world.nll[row.key, "wiki"][5] /= 15
    world.write()
    report.main()
    assert [line["operator"] for line in table(text(), "arithmetic mean") if "**" in line["wiki"]] == ["ghost"]


def test_not_bold_with_one_window():
    world = World(tasks=[], windows=1)
    world.write()
    report.main()
    assert bold_cells(text()) == []
    assert csv("perplexity")["nll_stderr"].isna().all()


def test_accuracy_bold_by_paired_questions():
    # 40 questions of which both get 20 right; the better one gets `more` others right.
    # Paired: the share d = more / 40 has the error sqrt(d (1 - d) / 39), and p = 2 / 2^more. Unpaired errors would be
    # 0.08 each.
    for more, expected in ((1, False), (2, False), (5, False), (6, True)):
        world = World(criteria=["streamline"], corpora=[], tasks=["boolq"])
        for row in world.rows:
            right = 20 + more * (row.operator == "ghost")
            world.correct[row.key, "boolq"] = np.arange(40) < right
        world.write()
        report.main()
        p = csv("pairs").set_index(["measure", "on"])["p"]
        assert p["acc", "boolq"] == p["acc", "mean"] == 2 / 2**more
        assert bool(bold_cells(text())) is expected


def test_bold_belongs_to_the_rows_of_one_model_and_n():
    world = World(models=["pico", "nano"], criteria=["streamline"], n=[1, 2], tasks=[], corpora=["wiki"])
    for row in world.rows:
        flat(world, {row.key: {"none": 4.0, "ghost": 3.5}[row.operator] + row.n + 2 * (row.model == "nano")})
    flat(world, {"pico-dense": 1.0, "nano-dense": 1.0})
    world.write()
    report.main()
    assert len([line for line in text().splitlines() if "**" in line and "ghost" in line]) == 4
    assert not [line for line in text().splitlines() if "**" in line and line.startswith("| dense")]
