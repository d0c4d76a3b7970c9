"""A small fabricated run: params.yaml and the artifacts of its rows; and reading what the report made of them."""

import math
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from stages.project import schemas
from stages.project.artifacts import write_table
from stages.project.keys import Row

LEVEL = {"none": 4.4, "diag": 4.2, "rotate": 4.25, "ghost": 3.7}
RIGHT = {"none": 0.5, "diag": 0.52, "rotate": 0.52, "ghost": 0.6}
CALIBRATION = "wiki:4x16:seed0:0123abcd"


class World:
    """A params.yaml and the artifacts of its rows. Change the dictionaries, then `write`."""

    def __init__(
        self,
        models=("pico",),
        criteria=("streamline", "shortgpt"),
        n=(2,),
        operators=("none", "ghost"),
        tasks=("piqa", "boolq"),
        corpora=("wiki", "web"),
        layers=8,
        windows=6,
        questions=40,
        prompts=(),
        costs=(),
    ):
        self.grid = {"models": models, "criteria": criteria, "n": n, "operators": operators, "tasks": tasks}
        self.grid = {axis: list(values) for axis, values in self.grid.items()}
        self.corpora, self.layers = list(corpora), layers
        self.prompts, self.costs = list(prompts), list(costs)
        self.rows = [Row(model) for model in models]
        self.rows += [Row(m, c, k, o) for m in models for k in n for c in criteria for o in operators]
        self.nll, self.tokens, self.correct, self.correct_norm, self.columns = {}, {}, {}, {}, {}
        self.operator_dtype = "model"
        self.removed = {(m, c, k): self.layers_of(c, k) for m in models for c in criteria for k in n}
        for row in self.rows:
            random = np.random.default_rng(zlib.crc32(row.key.encode()))
            level, right = (3.2, 0.65) if row.dense else (LEVEL[row.operator], RIGHT[row.operator])
            for corpus in corpora:
                shared = np.random.default_rng(len(corpus)).normal(0, 0.4, windows)
                tokens = np.full(windows, 15)
                self.tokens[row.key, corpus] = tokens
                self.nll[row.key, corpus] = (level + shared + random.normal(0, 0.02, windows)) * tokens
            for task in tasks:
                hard = np.random.default_rng(len(task)).random(questions)
                self.correct[row.key, task] = hard + random.normal(0, 0.05, questions) < right
                self.correct_norm[row.key, task] = None if task == "boolq" else hard < right + 0.03

    def layers_of(self, criterion, n):
        start = self.layers // 2 - 1
        if criterion == "streamline":
            return list(range(start, start + n))
        return [*range(start, start + n - 1), start + n + 1]

    def write(self):
        model = {"path": "somewhere", "dtype": "float32"}
        content = {
            "grid": self.grid,
            "assets": [],
            "models": dict.fromkeys(self.grid["models"], model),
            "corpora": {name: {"path": f"texts/{name}", "format": "text"} for name in {*self.corpora, "wiki"}},
            "text": {
                "bos": "once",
                "calibration": {"corpus": "wiki", "sequences": 4, "selection_sequences": 4, "seqlen": 16, "seed": 0},
                "perplexity": {"corpora": self.corpora, "seqlen": 16, "windows": 6, "seed": None},
            },
            "tasks": {},
            "select": {name: {"protect_first": 1, "protect_last": 1} for name in ("streamline", "shortgpt")},
            "collect": {"boundary": "run", "mlp": False},
            "solve": {name: {"ridge": 1e-6} if name == "ghost" else {} for name in self.grid["operators"]},
            "patch": {"operator_dtype": "model"},
            "eval_acc": {"limit": 40, "batch_size": 4},
            "generate": {"prompts": self.prompts, "new_tokens": 4},
            "cost": {"rows": self.costs, "batch_size": 1, "prompt_tokens": 8, "new_tokens": 4, "repeats": 3},
        }
        Path("params.yaml").write_text(yaml.safe_dump(content))
        for name in self.grid["models"]:
            self.write_score(name)
        for (name, criterion, n), layers in self.removed.items():
            made = {"model": name, "criterion": criterion, "n": n, "dtype": "float32", "calibration": CALIBRATION}
            selection = pd.DataFrame(
                {**made, "layer": layers, "layers": self.layers, "criterion_options": '{"protect_last": 1}'}
            )
            write_table(Path(f"data/select/{name}-{criterion}-{n}.parquet"), selection, schemas.SELECT)
        for row in self.rows:
            self.write_row(row)

    def cosine(self, start, end):
        return 1 - 0.02 * (end - start) - 0.01 * abs((start + end) / 2 - self.layers / 2)

    def write_score(self, model):
        pairs = [(i, j) for i in range(self.layers + 1) for j in range(i + 1, self.layers + 1)]
        scores = pd.DataFrame(pairs, columns=["start", "end"]).assign(
            model=model,
            dtype="float32",
            calibration=CALIBRATION,
            seqlen=16,
            corpus="wiki",
            source="texts/wiki[0:5]",
            bos="once",
            cut="stream",
            seed=0,
            sequences=4,
            angular=0.1,
            angular_last=0.12,
            tokens=64,
        )
        scores["cosine"] = [self.cosine(*pair) for pair in pairs]
        write_table(Path(f"data/score/{model}.parquet"), scores[schemas.SCORE.names], schemas.SCORE)

    def write_row(self, row):
        made = {**row.columns(), "dtype": "float32"}
        how = {"calibration": CALIBRATION, "boundary": "run", "options": "{}"}
        made |= dict.fromkeys(how) if row.dense else how
        if not row.dense:
            write_table(Path(f"data/solve/{row.key}.parquet"), self.solved(row, made), schemas.SOLVE)
        made["operator_dtype"] = None if row.operator == "none" else self.operator_dtype
        parts = [self.windows(row, corpus, made) for corpus in self.corpora]
        empty = [pd.DataFrame(columns=schemas.EVAL_PPL.names)]
        frame = pd.concat(parts or empty)
        write_table(Path(f"data/eval_ppl/{row.key}.parquet"), frame, schemas.EVAL_PPL)
        texts = {"prompt": self.prompts, "continuation": [f"{row.key}\n {p}" for p in self.prompts], "new_tokens": 4}
        identity = {**row.columns(), "dtype": "float32"}
        write_table(Path(f"data/generate/{row.key}.parquet"), pd.DataFrame({**identity, **texts}), schemas.GENERATE)
        if row.key in self.costs:
            write_table(Path(f"data/cost/{row.key}.parquet"), self.costing(row), schemas.COST)
        for task in self.grid["tasks"]:
            write_table(
                Path(f"data/eval_acc/{row.key}-{task}.parquet"), self.questions(row, task, made), schemas.EVAL_ACC
            )

    def windows(self, row, corpus, made):
        nll = self.nll[row.key, corpus]
        parameters = {"parameters": 1000 if row.dense else 800 + 50 * (row.operator != "none")}
        return pd.DataFrame(
            {
                **made,
                "corpus": corpus,
                "source": f"texts/{corpus}",
                "bos": "once",
                "cut": "stream",
                "seqlen": 16,
                "seed": None,
                "window": range(len(nll)),
                "tokens": self.tokens[row.key, corpus],
                "nll": nll,
                **parameters,
                "operator_parameters": 0 if row.operator == "none" else 50,
                **self.columns.get((row.key, corpus), {}),
            }
        )

    def questions(self, row, task, made):
        correct = self.correct[row.key, task]
        return pd.DataFrame(
            {
                **made,
                "task": task,
                "member": task,
                "version": "1.0",
                "source": f"sets/{task}",
                "limit": 40,
                "available": 1838,
                "num_fewshot": 0,
                "batch_size": 4,
                "question": range(len(correct)),
                "answer": 0,
                "loglikelihoods": [[-1.0, -2.0]] * len(correct),
                "correct": correct,
                "correct_norm": self.correct_norm[row.key, task],
                **self.columns.get((row.key, task), {}),
            }
        )

    def solved(self, row, made):
        if row.operator == "none":
            return pd.DataFrame(columns=schemas.SOLVE.names)
        diagnostics = {"residual_before": 0.00885, "residual_after": 0.00306, "antisymmetric_share": 0.616}
        diagnostics |= {"token_residual_before": 0.31, "token_residual_after": 0.125}
        cut = {"start": 3, "end": 5, "tokens": 64, "condition": math.inf, "chosen": "{}"}
        return pd.DataFrame([{**made, **cut, **diagnostics, **self.columns.get((row.key, "solve"), {})}])

    def costing(self, row):
        """Three turns; the third is slow for all. The dense model takes 2 s, the pruned 1 s, the recovered 1.01 s."""
        sizes = {"parameters": 10, "operator_parameters": 0, "weight_bytes": 2**20, "peak_bytes": 3 * 2**20}
        flops = {"prefill_flops": 2 * 10**9, "operator_flops": 0}
        setting = {"dtype": "float32", "device": "cpu", "threads": 2, "batch_size": 2, "prompt_tokens": 8}
        compared = ((Row(row.model), 2.0), (Row(row.model, row.criterion, row.n), 1.0), (row, 1.01))
        records = []
        for repeat, slow in enumerate((1.0, 1.0, 5.0)):
            for of, seconds in compared:
                times = {"repeat": repeat, "prefill_seconds": slow * seconds, "decode_seconds": slow * 0.5}
                records.append({**of.columns(), **sizes, **flops, **setting, "new_tokens": 4, **times})
        return pd.DataFrame(records)


def csv(name):
    return pd.read_csv(f"reports/{name}.csv", keep_default_na=False, na_values=[""])


def text():
    return Path("reports/report.md").read_text(encoding="utf-8")


def bold_cells(document):
    return [cell for line in document.splitlines() if line.startswith("|") for cell in cells_of(line) if "**" in cell]


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def table(document, header):
    """The lines of the first table that has a column `header`, as a list of dictionaries."""
    lines = document.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("|") and header in cells_of(line.strip()))
    names = cells_of(lines[at])
    body = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        body.append(dict(zip(names, cells_of(line), strict=True)))
    return body
