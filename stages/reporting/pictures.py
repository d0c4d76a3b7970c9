"""The report's pictures as matplotlib figures, and their bytes, which depend on the data alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatter, MaxNLocator

# Okabe and Ito's colours, told apart by readers with any common colour blindness, and two darker ones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#7A5230")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")
GREY = "#777777"


@dataclass(frozen=True)
class SimilarityPanel:
    """One model and n: the cosine of every block start, and the layers that each criterion removed."""

    title: str
    n: int
    layers: int
    starts: pd.DataFrame
    chosen: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class PerplexityPanel:
    """One model and n: the mean perplexity of the dense model, and by criterion and operator."""

    title: str
    dense: float
    means: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class NumberPanel:
    """One model and criterion: the mean perplexity of the dense model, and by operator and number of removed layers."""

    title: str
    dense: float
    means: Mapping[str, Mapping[int, float]]


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw with matplotlib's own settings, not the user's, and write a PNG that names no version or date."""
    with mpl.rc_context():
        mpl.rcdefaults()
        figure = draw()
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches


def similarity(rows: Sequence[Sequence[SimilarityPanel]]) -> Figure:
    """A panel per model (down) and n (across): above the similarity of each block start, below the removed layers."""
    panels = [panel for row in rows for panel in row]
    if not panels:
        return _empty("no layers are removed")
    strip = 0.3 * max(1, *(len(panel.chosen) for panel in panels))
    across = max(len(row) for row in rows)
    figure = Figure(figsize=(max(7.0, 5.5 * across), (3.6 + strip) * len(rows)), layout=_layout())
    grid = figure.subfigures(len(rows), across, squeeze=False)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            above, below = grid[i, j].subplots(2, 1, sharex=True, height_ratios=[2.8, strip])
            _cosines(above, panel)
            _removed(below, panel)
    return figure


def _cosines(axes: Axes, panel: SimilarityPanel) -> None:
    starts = panel.starts
    axes.plot(starts["start"], starts["cosine"], color=GREY, linewidth=1, marker=".", markersize=5)
    removed = starts[starts["removed_by"] != ""]
    for (_, block), colour in zip(removed.iterrows(), _colours(panel, removed), strict=True):
        label = f"removed by {block['removed_by']}: s = {block['start']}, cosine {block['cosine']:.4f}"
        axes.plot(block["start"], block["cosine"], "o", color=colour, markersize=9, label=label)
    _heading(axes, panel.title, columns=1)
    axes.set_ylabel(f"mean cos(h$_s$, h$_{{s+{panel.n}}}$)")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)


def _style(index: int) -> tuple[str, str]:
    """Colour and marker of one of several series: pairs repeat long after colours do."""
    return COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]


def _heading(axes: Axes, title: str, columns: int) -> None:
    """Title and legend side by side above the axes, where they cover no point."""
    axes.set_title(title, fontsize=10, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.99), ncols=columns, fontsize=8, frameon=False)


def _colours(panel: SimilarityPanel, removed: pd.DataFrame) -> list[str]:
    """The colour of the first criterion that removed each block."""
    names = list(panel.chosen)
    return [COLOURS[names.index(by.partition(" and ")[0]) % len(COLOURS)] for by in removed["removed_by"]]


def _removed(axes: Axes, panel: SimilarityPanel) -> None:
    for index, layers in enumerate(panel.chosen.values()):
        blocks = [(layer - 0.42, 0.84) for layer in range(panel.layers)]
        axes.broken_barh(blocks, (index - 0.36, 0.72), facecolor="#E8E8E8")
        removed = [(layer - 0.42, 0.84) for layer in layers]
        axes.broken_barh(removed, (index - 0.36, 0.72), facecolor=COLOURS[index % len(COLOURS)])
    axes.set_yticks(range(len(panel.chosen)), list(panel.chosen), fontsize=9)
    axes.set_ylim(max(len(panel.chosen), 1) - 0.5, -0.5)
    axes.set_xlim(-0.7, panel.layers - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("above: block start s; below: layer (coloured: removed)")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def perplexities(rows: Sequence[Sequence[PerplexityPanel]]) -> Figure:
    """A panel per model (down) and n (across): mean perplexity by operator and criterion, the dense model as a line.

    A perplexity that a double can't hold has no place on the axis: it is written at the right edge.
    """
    panels = [panel for row in rows for panel in row]
    if not panels:
        return _empty("no perplexities of pruned rows")
    operators = max(len(means) for panel in panels for means in panel.means.values())
    across = max(len(row) for row in rows)
    figure = Figure(figsize=(max(7.0, 5.5 * across), (1.6 + 0.45 * operators) * len(rows)), layout=_layout())
    grid = figure.subplots(len(rows), across, squeeze=False)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            _perplexity(grid[i, j], panel)
    return figure


def _perplexity(axes: Axes, panel: PerplexityPanel) -> None:
    axes.set_xscale("log")
    if math.isfinite(panel.dense):
        axes.axvline(panel.dense, color="black", linestyle="--", linewidth=1, label="dense")
    operators = list(next(iter(panel.means.values())))
    for index, (criterion, means) in enumerate(panel.means.items()):
        colour, marker = _style(index)
        # Criteria beside one another, lest equal perplexities hide each other.
        offset = 0.5 * ((index + 0.5) / len(panel.means) - 0.5)
        heights = [height + offset for height in range(len(means))]
        shown = [mean if math.isfinite(mean) else math.nan for mean in means.values()]
        axes.plot(shown, heights, marker, color=colour, label=criterion, markersize=7)
        for mean, height in zip(means.values(), heights, strict=True):
            if math.isinf(mean):
                right = axes.get_yaxis_transform()
                axes.text(0.99, height, "> 1.8e308", color=colour, fontsize=8, ha="right", va="center", transform=right)
    axes.set_yticks(range(len(operators)), operators)
    axes.set_ylim(len(operators) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter())
    axes.set_xlabel("mean perplexity of the corpora (log scale; lower is better)", fontsize=9)
    axes.grid(axis="x", alpha=0.3, which="both")
    _heading(axes, panel.title, columns=4)


def perplexities_by_number(rows: Sequence[Sequence[NumberPanel]]) -> Figure:
    """A panel per model (down) and criterion (across): mean perplexity against the number of removed layers.

    A line per operator, the dense model as a dashed one. A perplexity that a double can't hold is written at the top.
    """
    panels = [panel for row in rows for panel in row]
    if not panels:
        return _empty("no perplexities of more than one number of removed layers")
    across = max(len(row) for row in rows)
    figure = Figure(figsize=(max(7.0, 5.0 * across), 4.0 * len(rows)), layout=_layout())
    grid = figure.subplots(len(rows), across, squeeze=False)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            _perplexity_by_number(grid[i, j], panel)
    return figure


def _perplexity_by_number(axes: Axes, panel: NumberPanel) -> None:
    axes.set_yscale("log")
    for index, (operator, means) in enumerate(panel.means.items()):
        shown = [mean if math.isfinite(mean) else math.nan for mean in means.values()]
        colour, marker = _style(index)
        axes.plot(list(means), shown, marker=marker, color=colour, label=operator, markersize=5)
    top = axes.get_xaxis_transform()
    for n in {n for means in panel.means.values() for n, mean in means.items() if math.isinf(mean)}:
        axes.text(n, 0.99, "> 1.8e308", color=GREY, fontsize=8, ha="center", va="top", transform=top)
    if math.isfinite(panel.dense):
        axes.axhline(panel.dense, color="black", linestyle="--", linewidth=1, label="dense")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.set_xlabel("number of removed layers", fontsize=9)
    axes.set_ylabel("mean perplexity of the corpora\n(log scale; lower is better)", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.legend(fontsize=8)


def _empty(message: str) -> Figure:
    figure = Figure(figsize=(7, 1.5))
    figure.text(0.5, 0.5, message, ha="center", va="center")
    return figure
