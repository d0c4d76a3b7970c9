"""Boundaries: the maximal runs of removed layers, and the segments that one operator each bridges."""

from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """The layers start..end-1, between the residual states h_start and h_end."""

    start: int
    end: int

    @property
    def name(self) -> str:
        """``<start>-<end>``, as in the names of tensors."""
        return f"{self.start}-{self.end}"

    @classmethod
    def parse(cls, name: str) -> "Segment":
        """The inverse of `name`. Raises ValueError when `name` is not of that form."""
        start, end = name.split("-")
        return cls(int(start), int(end))


def runs(removed: Iterable[int]) -> list[Segment]:
    """The maximal runs [start, end) of consecutive removed layers, in order."""
    found: list[Segment] = []
    for layer in sorted(set(removed)):
        if found and found[-1].end == layer:
            found[-1] = Segment(found[-1].start, layer + 1)
        else:
            found.append(Segment(layer, layer + 1))
    return found


def pieces(run: Segment, boundary: str) -> list[Segment]:
    """What one operator each bridges inside a run: the run itself (`run`), or each of its layers (`layer`)."""
    if boundary == "run":
        return [run]
    return [Segment(layer, layer + 1) for layer in range(run.start, run.end)]
