"""Names of the instances of a stage: what the rows of every table and the artifacts' files are called."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

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
