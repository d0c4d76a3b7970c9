"""Numbers, ranges and tables as Markdown that reads as well in a terminal."""

import math
from collections.abc import Collection, Mapping, Sequence

from stages.project.keys import Row
from stages.reporting.significance import Estimate

NOTHING = "-"


def perplexity(value: float, nll: float | None = None) -> str:
    """Two decimals, scientific from 1e5 on; one too large for a double as ``exp(<nll>)``, or as that it is infinite."""
    if math.isinf(value):
        return "> 1.8e308" if nll is None else f"exp({nll:.1f})"
    return f"{value:.2e}" if value >= 1e5 else f"{value:.2f}"


def percent(estimate: Estimate) -> str:
    """A share in percent with its standard error, two decimals each; ``n/a`` for an error that does not exist."""
    error = "n/a" if estimate.error is None else f"{100 * estimate.error:.2f}"
    return f"{100 * estimate.value:.2f} ± {error}"


def share(value: float | None) -> str:
    """A share in percent with one decimal."""
    return NOTHING if value is None else f"{100 * value:.1f}%"


def significant(value: float | None) -> str:
    """Three significant digits; a dash for null and NaN."""
    return NOTHING if value is None or math.isnan(value) else f"{value:#.3g}"


def layers(removed_runs: Sequence[tuple[int, int]]) -> str:
    """Runs [start, end) of layers, both ends named: ``12-15, 17, 25-26``."""
    return ", ".join(f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end in removed_runs)


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def row_labels(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns `criterion` and `operator` of a table of rows."""
    return {
        "criterion": ["dense" if row.dense else row.criterion for row in rows],
        "operator": [NOTHING if row.dense else row.operator for row in rows],
    }


def yes_no(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def bold(cells: Sequence[str], at: Collection[int]) -> list[str]:
    """The cells with those at the indices `at` in bold."""
    return [f"**{cell}**" if index in at else cell for index, cell in enumerate(cells)]


def table(columns: Mapping[str, Sequence[str]], text: Sequence[str] = ()) -> str:
    """An aligned table from the cells of each column, by header; columns named in `text` are flush left."""
    lines: list[list[str]] = []
    for header, cells in columns.items():
        escaped = [cell.replace("|", "\\|") for cell in (header, *cells)]
        width = max(3, *map(len, escaped))
        left = header in text
        padded = [cell.ljust(width) if left else cell.rjust(width) for cell in escaped]
        rule = "-" * width if left else "-" * (width - 1) + ":"
        lines.append([padded[0], rule, *padded[1:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*lines, strict=True))
