"""Names of the instances of a stage: what the rows of every table and the artifacts' files are called."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import NamedTuple, Self

DENSE = "dense"
NONE = "none"


@dataclass(frozen=True)
class Row:
    """One row of the comparison: a model, the criterion and number of removed layers, and the operator."""

    model: str
    criterion: str = NONE
    n: int = 0
    operator: str = NONE

    @property
    def dense(self) -> bool:
        """Whether this is the unpruned model."""
        return self.n == 0

    @property
    def selection(self) -> str:
        """Key of the selection: ``<model>-<criterion>-<n>``."""
        return f"{self.model}-{self.criterion}-{self.n}"

    @property
    def key(self) -> str:
        """Key of the row: ``<model>-<criterion>-<n>-<operator>``, or ``<model>-dense``."""
        return f"{self.model}-{DENSE}" if self.dense else f"{self.selection}-{self.operator}"

    def columns(self) -> dict[str, str | int]:
        """The four columns that every Parquet row of this row carries."""
        return {"model": self.model, "criterion": self.criterion, "n": self.n, "operator": self.operator}


class Calibration(NamedTuple):
    """What identifies calibration sequences: the corpus, how many of how many tokens, their choice, their ids."""

    corpus: str
    sequences: int
    seqlen: int
    seed: int | None
    digest: str
    """The first 8 hex digits of the SHA-256 of the token ids."""

    @property
    def name(self) -> str:
        """``<corpus>:<sequences>x<seqlen>:seed<seed>:<digest>``, the column `calibration` of the tables."""
        seed = NONE if self.seed is None else self.seed
        return f"{self.corpus}:{self.sequences}x{self.seqlen}:seed{seed}:{self.digest}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The inverse of `name`. Raises ValueError when `name` is not of that form."""
        corpus, size, seed, digest = name.rsplit(":", 3)
        sequences, seqlen = map(int, size.split("x"))
        number = seed.removeprefix("seed")
        return cls(corpus, sequences, seqlen, None if number == NONE else int(number), digest)


def parse_key(description: str | None) -> str:
    """Read the key of a pruned row from the command line: ``--row <key>``."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--row", required=True)
    return str(parser.parse_args().row)


def parse_row(description: str | None, *extra: str) -> tuple[Row, Namespace]:
    """Read a row from the command line: ``--model``, and ``--criterion --n --operator`` unless it is the dense one.

    `extra` names further required options (strings), found in the returned namespace. Stages that serve a whole
    selection or model leave the rest of the row at its defaults.
    """
    parser = ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--criterion", default=NONE)
    parser.add_argument("--n", type=int, default=0)
    parser.add_argument("--operator", default=NONE)
    for name in extra:
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    return Row(given.model, given.criterion, given.n, given.operator), given
