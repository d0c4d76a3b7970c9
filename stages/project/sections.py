"""The sections of ``params.yaml``: keys, types, and what a section alone must hold to."""

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.project.keys import Row

COMMIT = re.compile(r"[0-9a-f]{40}")
CONVERTED = "refs/convert/parquet"
"""Where the Hub keeps its Parquet conversion of a data set that is a loading script."""


class Section(BaseModel):
    """A mapping in params.yaml: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Grid(Section):
    """The lists whose product is the rows of the tables."""

    models: list[str] = Field(min_length=1)
    criteria: list[str]
    n: list[int] = Field(description="numbers of removed layers")
    operators: list[str]
    tasks: list[str]


class Model(Section):
    """Where a model comes from: exactly one of `gguf` (a file), `path` (a checkpoint folder) and `id` (the Hub)."""

    gguf: str | None = None
    path: str | None = None
    id: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("gguf", "path", "id") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of gguf, path, id must be given, found {given or 'none'}")
        if (self.revision is not None) != (self.id is not None):
            raise ValueError("`revision` (a commit of 40 hex digits) goes with `id`, and only with it")
        if self.revision is not None and not COMMIT.fullmatch(self.revision):
            raise ValueError(f"revision {self.revision!r} is not a commit of 40 hex digits; a branch or tag can move")
        return self


class Corpus(Section):
    """A text: plain files (`path` and `format`), or a `column` of a data set (`split` of a `path` or an `id`).

    Plain files are one, or a folder's in name order. `format` says how a file splits into documents: `text`, not at
    all; `lines`, one a line; `wikiextractor`, one a ``<doc>`` element; `parquet`, one a row of `column`. A data set is
    the Hub's (`id` and `revision`) or a folder laid out like one of the Hub's (`path`); a document is a row.

    `documents` then takes a range of those that have at least `min_characters` characters. `cut` says what becomes
    windows: the `stream` of all documents joined, or each of the `documents` that is long enough for one.
    """

    path: str | None = Field(default=None, min_length=1)
    id: str | None = None
    revision: str | None = None
    config: str | None = None
    data_dir: str | None = Field(default=None, description="folder in the data set, where it has no such config")
    split: str | None = None
    format: Literal["text", "lines", "wikiextractor", "parquet"] | None = None
    column: str | None = Field(default=None, description="text column of a Parquet file or data set")
    min_characters: int = Field(default=0, ge=0)
    documents: tuple[int, int | None] = (0, None)
    cut: Literal["stream", "documents"] = "stream"

    @model_validator(mode="before")
    @classmethod
    def _range(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("documents"), list):
            return {**data, "documents": tuple(data["documents"])}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first, end = self.documents
        if first < 0 or (end is not None and end <= first):
            raise ValueError(f"documents {list(self.documents)} must be [first, end) with 0 <= first < end")
        if (self.path is None) == (self.id is None):
            raise ValueError("exactly one of `path` and `id` must be given")
        if (self.format is None) == (self.split is None):
            raise ValueError("needs either `format` (plain files) or `split` (a data set)")
        if self.split is None and (self.id or self.config or self.data_dir):
            raise ValueError("`id`, `config` and `data_dir` go with `split` (a data set), and only with it")
        if self.config and self.data_dir:
            raise ValueError("`config` and `data_dir` are two ways to say one thing; give one")
        if (self.revision is None) != (self.id is None):
            raise ValueError("`revision` goes with `id`, and only with it")
        if self.revision is not None and self.revision != CONVERTED and not COMMIT.fullmatch(self.revision):
            raise ValueError(f"revision {self.revision!r} is neither a commit of 40 hex digits nor {CONVERTED}")
        if (self.column is not None) != (self.format == "parquet" or self.split is not None):
            raise ValueError("`column` goes with format parquet or a `split`, and only with them")
        return self

    @property
    def source(self) -> str:
        """The text's origin in one string, for the tables: data set, config, split, revision, or path; and the part."""
        first, end = self.documents
        words = [self.id or self.path, self.config or self.data_dir, self.split]
        if self.revision:
            words.append(f"@{self.revision[:8] if COMMIT.fullmatch(self.revision) else self.revision}")
        if (first, end) != (0, None):
            long = f" of {self.min_characters} characters" if self.min_characters else ""
            words.append(f"documents [{first}:{'' if end is None else end}]{long}")
        return " ".join(word for word in words if word)


class CalibrationText(Section):
    """The calibration sequences: windows of one corpus. The operator's and the selection's share the first ones."""

    corpus: str
    sequences: int = Field(ge=1, description="sequences that the operator is solved from")
    selection_sequences: int = Field(ge=1, description="sequences that the layers are selected from")
    seqlen: int = Field(ge=2)
    seed: int | None = Field(description="seed of the choice of windows; null takes the first ones in order")


class PerplexityText(Section):
    """The perplexity corpora: non-overlapping windows of each."""

    corpora: list[str]
    seqlen: int = Field(ge=2)
    windows: int | None = Field(ge=1, description="at most so many windows of each corpus; null takes all")
    seed: int | None = Field(description="seed of the choice of windows; null takes the first ones in order")


class Text(Section):
    """Everything that becomes token ids."""

    bos: Literal["once", "every-window"]
    calibration: CalibrationText
    perplexity: PerplexityText


class Collect(Section):
    """What the statistics are kept for: each removed run, or each removed layer as well."""

    boundary: Literal["run", "layer"]
    mlp: bool = Field(description="whether sums inside the layer before each removed run are kept too")


OperatorDtype = Literal["model", "float32"]


class Patch(Section):
    """The recovered model: whether its operators are kept and applied in the model's dtype or in float32."""

    operator_dtype: OperatorDtype


class Task(Section):
    """A task that is not lm-evaluation-harness' own: its task file."""

    file: str


class EvalAcc(Section):
    """Settings of lm-evaluation-harness."""

    limit: int | None = Field(ge=1, description="the first so many questions of each task; null asks all")
    batch_size: int = Field(ge=1)


class Generate(Section):
    """Texts for the report: what every row's model writes."""

    prompts: list[str]
    new_tokens: int = Field(ge=1, description="most tokens after each prompt")


class Cost(Section):
    """What the model of each row costs, beside the dense one and the one without operators."""

    rows: list[str] = Field(description="keys of pruned rows, such as smollm2-streamline-7-ghost")
    batch_size: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    repeats: int = Field(ge=1)


class Params(Section):
    """All of params.yaml."""

    grid: Grid
    assets: list[str]
    models: dict[str, Model]
    corpora: dict[str, Corpus]
    text: Text
    tasks: dict[str, Task] = Field(description="task files; a task of the grid not named here is the harness' own")
    select: dict[str, dict[str, Any]]
    collect: Collect
    solve: dict[str, dict[str, Any]]
    patch: Patch
    eval_acc: EvalAcc
    generate: Generate
    cost: Cost

    def rows(self) -> list[Row]:
        """The rows of the tables in the order of params.yaml: per model the dense one, then n, criterion, operator."""
        rows = []
        for model in self.grid.models:
            rows.append(Row(model))
            for n in self.grid.n:
                for criterion in self.grid.criteria:
                    rows += [Row(model, criterion, n, operator) for operator in self.grid.operators]
        return rows

    def row(self, key: str) -> Row:
        """The declared row of a key. Raises KeyError when there is none."""
        return {row.key: row for row in self.rows()}[key]
