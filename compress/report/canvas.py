"""The parts of a plot by matplotlib, the optional extra `plots`: style, page, heat map, color bar, ticks.

Color maps are viridis for amounts and PuOr around zero, which are legible to color-blind readers; gray means missing.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import OptionError

DOTS_PER_INCH = 144
MAX_NAME = 36
"""Length in characters above which names are shortened in their middle."""
MISSING = "#d4d4d4"
DASH = "–"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Palette of Okabe and Ito."""


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Raise OptionError where matplotlib is not installed."""
    if not available():
        raise OptionError("plots need matplotlib; install it with `pip install moe-compress[plots]`, or leave out --output")


@contextmanager
def style() -> Iterator[None]:
    """Set the style: names are text without formulas, and missing glyphs are drawn as boxes without a warning."""
    from matplotlib import rc_context

    settings: Any = {
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": DOTS_PER_INCH,
    }
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save(figure: Any, path: Path) -> None:
    """Write a PNG that has identical bytes for identical figures."""
    with style():
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None}, facecolor="white")


def short(name: str, length: int = MAX_NAME) -> str:
    """Return the name on one line, shortened in its middle where it is too long."""
    name = " ".join(name.split())
    keep = length - 1
    return name if len(name) <= length else f"{name[: keep - keep // 2]}…{name[len(name) - keep // 2 :]}"


class Page:
    """Rows of panels of equal height, in inches. An automatic layout would take seconds with up to 64 panels."""

    def __init__(self, width: float, lines: int, height: float, *, title: float, below: float) -> None:
        """Create the page. `title`: space above each row of panels; `below`: space under it for tick and axis labels."""
        self.lines, self.height, self.above, self.below = lines, height, title, below
        self.size = (width, 0.4 + lines * (title + height + below))

    def axes(self, figure: Any, line: int, left: float, width: float) -> Any:
        """Return a panel of `width` inches in a row, `left` inches from the page's edge."""
        top = 0.4 + line * (self.above + self.height + self.below) + self.above
        across, down = self.size
        return figure.add_axes((left / across, 1 - (top + self.height) / down, width / across, self.height / down))

    def title(self, figure: Any, text: str, left: float) -> None:
        """Draw the heading of the whole figure."""
        figure.text(left / self.size[0], 1 - 0.18 / self.size[1], text, va="top", fontsize=12, fontweight="bold")


class Names:
    """Names of the models beside a heat map, and the space that the longest one takes."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.shown = [short(name) for name in names]
        # Wide characters take more space than Latin letters.
        self.inches = 0.25 + 0.083 * max(sum(1 if ord(sign) < 0x1100 else 2 for sign in name) for name in self.shown)


def page_width(wanted: float, title: str, left: float) -> float:
    """Return the width of a page in inches, at least that of its title."""
    return max(wanted, left + 0.2 + 0.11 * sum(1 if ord(sign) < 0x1100 else 2 for sign in title))


def between(value: float, low: float, high: float) -> float:
    """Return the value, but at least `low` and at most `high`."""
    return min(max(value, low), high)


def heat(axes: Any, grid: Any, low: float, high: float, *, colours: str = "viridis", gaps: bool = True) -> Any:
    """Draw cells of the grid's values, with thin white gaps where few cells leave room for them."""
    import matplotlib
    import numpy as np

    palette = matplotlib.colormaps[colours].with_extremes(bad=MISSING)
    grid = np.ma.masked_invalid(np.asarray(grid, dtype=float))
    picture = axes.imshow(grid, cmap=palette, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    if gaps and max(grid.shape) <= 64:
        axes.set_xticks(np.arange(grid.shape[1] + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(grid.shape[0] + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    return picture


def cell_numbers(axes: Any, grid: Any, picture: Any, text: Any, font_size: float = 9) -> None:
    """Write a number in each cell, black or white, whichever is legible on the cell's color."""
    for (row, column), value in _cells(grid):
        red, green, blue, _ = picture.cmap(picture.norm(value)) if not math.isnan(value) else (0.83, 0.83, 0.83, 1)
        colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(column, row, text(value), ha="center", va="center", color=colour, fontsize=font_size)


def _cells(grid: Any) -> Iterator[tuple[tuple[int, int], float]]:
    for row, values in enumerate(grid.tolist()):
        for column, value in enumerate(values):
            yield (row, column), float(value)


def whole_ticks(set_ticks: Any, labels: Sequence[int], inches: float) -> None:
    """Set as many of the labels as have space, evenly spaced."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if len(labels) / step * 0.22 <= inches or step == 256)
    places = range(0, len(labels), step)
    set_ticks(list(places), [str(labels[place]) for place in places])


def colour_bar(figure: Any, page: Page, picture: Any, left: float, label: str, percent: bool = False) -> None:
    """Draw the color bar beside the first row of panels."""
    bar = figure.colorbar(picture, cax=page.axes(figure, 0, left + 0.15, 0.14))
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    if percent:
        from matplotlib.ticker import PercentFormatter

        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        bar.locator = few_ticks()
        bar.update_ticks()


def few_ticks() -> Any:
    """Return a locator of at most four round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4, steps=[1, 2, 5, 10])
