"""Scatter plot of quality against another quantity: a point for each model, with its name beside it.

Models of nearly equal x form a column, whose names are listed beside it in the order of the points. A sweep of several
methods, too large for names, has a line for each method and a legend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from compress.report.canvas import COLOURS, DOTS_PER_INCH, short, style

MARKERS = "osD^vP*"
LINES = ("-", "--", ":")
MARKER_RADIUS = 6 * DOTS_PER_INCH / 72
"""Radius in pixels around a point that names may not cover."""
LEAST_SWEEP = 12
"""Number of models from which a sweep has a legend of its methods instead of a name at each point."""
COLUMN_WIDTH = 0.25 * DOTS_PER_INCH
"""Distance in pixels below which neighboring points are in one column."""
LEAST_COLUMN = 3
"""Number of points from which a column has a list; the names of fewer points are placed around each."""
LIST_DISTANCE = 0.3 * DOTS_PER_INCH
"""Pixels between a column and its list, which the lines to the names cross."""
FARTHEST_STEP = 14
"""The most steps of 9 pixels between a name and its point."""
PAD = 3.0
"""Pixels between names and everything else."""
FONT_SIZE = 9.5
LEAST_LOGARITHMIC = 8.0
"""Ratio of the highest to the lowest y from which the axis is logarithmic, so that one outlier does not hide the others."""

HIGHEST = 1e15
"""Limit of y, above which a model is treated as broken."""

Key = tuple[str, bool]
"""The identity of a color and marker: the name of a series and True, or of a model and False."""
Look = tuple[str, str, str]
"""Color, marker and line style."""


@dataclass(frozen=True)
class Point:
    """One model in a scatter plot. Models of equal `group` are comparable."""

    name: str
    x: float
    y: float
    group: int = 1
    x_sd: float = 0.0
    """Standard deviation of x, drawn as a bar where it is above 0."""
    series: str | None = None
    """A series such as the method that made the model; None for no series."""

    @property
    def key(self) -> Key:
        """Points with equal keys have the same color and marker."""
        return (self.name, False) if self.series is None else (self.series, True)


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> Any:
    """Draw a panel for each group, since only models of one group are comparable."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [replace(point, y=min(point.y, HIGHEST)) for point in points]
    groups = [[point for point in points if point.group == group] for group in sorted({point.group for point in points})]
    looks = _looks(points)
    most = max(len({point.key for point in own}) if is_sweep(own) else len(own) for own in groups)
    with style():
        figure = Figure(figsize=(7.2 * len(groups), max(4.6, 1.2 + 0.2 * most)))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for axes, own in zip(panels, groups, strict=True):
            _draw(axes, own, looks)
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            _scale(axes, own)
            if len(groups) > 1:
                axes.set_title(f"tokenizer of {short(own[0].name)}")
        figure.draw_without_rendering()  # fixes the layout, so that labels can be placed in pixels
        figure.set_layout_engine("none")
        for axes, own in zip(panels, groups, strict=True):
            _place_names(axes, own, [point for point in own if point.series is None] if is_sweep(own) else own)
    return figure


def is_sweep(points: Sequence[Point]) -> bool:
    """Return whether lines and a legend suffice: many models, by methods at several x each, with no x twice for a method.

    A measured x, which has a deviation, may be repeated by chance.
    """
    by_series: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.x):
        if point.series is not None:
            by_series.setdefault(point.series, []).append(point)
    span = max(point.x for point in points) - min(point.x for point in points)
    pairs = (pair for own in by_series.values() for pair in pairwise(own))
    apart = all(left.x_sd > 0 or right.x - left.x > 0.01 * span for left, right in pairs)
    joined = sum(map(len, by_series.values()))
    enough = joined >= max(LEAST_SWEEP, 2 * len(by_series)) and len(by_series) > 1
    return enough and apart and len(points) - joined < LEAST_SWEEP


def _looks(points: Sequence[Point]) -> dict[Key, Look]:
    """Return the looks by key; the first 49 are distinct."""
    keys = dict.fromkeys(point.key for point in points)
    looks = {}
    for index, key in enumerate(keys):
        turn, place = divmod(index, len(COLOURS))
        looks[key] = (COLOURS[place], MARKERS[(place + turn) % len(MARKERS)], LINES[turn % len(LINES)])
    return looks


def _draw(axes: Any, points: Sequence[Point], looks: Mapping[Key, Look]) -> None:
    """Draw points with their bars. Points of a sweep are joined by lines, which the legend names from top to bottom."""
    for point in points:
        if point.x_sd:
            axes.errorbar([point.x], [point.y], xerr=[point.x_sd], color=looks[point.key][0], capsize=3, linewidth=1.2)
    sweep = is_sweep(points)
    by_key: dict[Key, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.x):
        by_key.setdefault(point.key, []).append(point)
    for key, own in sorted(by_key.items(), key=lambda item: -sum(point.y for point in item[1]) / len(item[1])):
        colour, marker, line = looks[key]
        name, is_series = key
        xs, ys = [point.x for point in own], [point.y for point in own]
        size = 10 if marker == "*" else 8
        (drawn,) = axes.plot(xs, ys, marker, color=colour, markersize=size, markeredgecolor="white")
        if sweep and is_series:
            drawn.set_linestyle(line)
            drawn.set_label(short(name))
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if sweep:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9.5, borderaxespad=0)


def _scale(axes: Any, points: Sequence[Point]) -> None:
    """Leave space around the points for labels, and limit the zoom: differences of a few percent must not look large."""
    across = [point.x + sign * point.x_sd for point in points for sign in (-1, 1)]
    axes.set_xlim(_limits(across))
    down = [point.y for point in points]
    if min(down) > 0 and max(down) >= LEAST_LOGARITHMIC * min(down):
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = _limits([math.log(value) for value in down], least=0.0)
        axes.set_ylim(math.exp(low), math.exp(high))
    else:
        axes.set_ylim(_limits(down))


def _limits(values: Sequence[float], least: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = max(0.22 * (high - low), 0.05 * abs(high)) or 1.0
    return (max(0.0, low - margin) if low >= 0 and least is None else low - margin), high + margin


# Names


@dataclass(frozen=True, eq=False)
class _Spot:
    """A point and the size of its name, in pixels."""

    name: str
    x: float
    y: float
    left: float
    right: float
    """Right end of the point or, if wider, of its bar; the left end is the field before."""
    width: float
    height: float


Place = tuple[float, float]
"""Position of the lower left corner of a name."""


def _place_names(axes: Any, points: Sequence[Point], named: Sequence[Point]) -> None:
    """Place names beside points and columns if all fit there, otherwise all in one list on the right."""
    from matplotlib.transforms import IdentityTransform

    inside = axes.get_window_extent(axes.figure.canvas.get_renderer())
    places = _beside(_spots(axes, named), _obstacles(_spots(axes, points)), inside)
    if places is None:
        widest = max(spot.width for spot in _spots(axes, named))
        _make_room(axes, (widest + 2 * LIST_DISTANCE) / inside.width)
        places = _listed(_spots(axes, named), inside.x1 - widest - PAD, 0.0, inside)
    for spot, place in places.items():
        axes.text(*place, spot.name, transform=IdentityTransform(), fontsize=FONT_SIZE, verticalalignment="bottom")
        _lead(axes, spot, place)


def _spots(axes: Any, points: Sequence[Point]) -> list[_Spot]:
    renderer = axes.figure.canvas.get_renderer()
    spots = []
    for point in points:
        text = axes.text(point.x, point.y, short(point.name), fontsize=FONT_SIZE)
        extent = text.get_window_extent(renderer)
        text.remove()
        (left, y), (x, _), (right, _) = axes.transData.transform(
            [(point.x + sign * point.x_sd, point.y) for sign in (-1, 0, 1)]
        )
        left, right = min(left, x - MARKER_RADIUS), max(right, x + MARKER_RADIUS)
        spots.append(_Spot(short(point.name), x, y, left, right, extent.width, extent.height))
    return spots


def _obstacles(spots: Sequence[_Spot]) -> list[Any]:
    """Return the boxes of points and bars, which no name may cover."""
    from matplotlib.transforms import Bbox

    points = [
        Bbox.from_extents(spot.x - MARKER_RADIUS, spot.y - MARKER_RADIUS, spot.x + MARKER_RADIUS, spot.y + MARKER_RADIUS)
        for spot in spots
    ]
    bars = [
        Bbox.from_extents(spot.left, spot.y - MARKER_RADIUS / 2, spot.right, spot.y + MARKER_RADIUS / 2) for spot in spots
    ]
    return points + bars


def _beside(spots: Sequence[_Spot], obstacles: Sequence[Any], inside: Any) -> dict[_Spot, Place] | None:
    """Return lists beside columns, and the names of other points around them; None where one has no space."""
    taken = list(obstacles)
    places: dict[_Spot, Place] = {}
    columns = _columns(spots)
    for column in columns:
        if len(column) >= LEAST_COLUMN:
            right = max(spot.right for spot in column) + LIST_DISTANCE
            left = min(spot.left for spot in column) - LIST_DISTANCE
            sides = [_listed(column, right, 0.0, inside), _listed(column, left, 1.0, inside)]
            free = [side for side in sides if _is_free(side, taken, inside)]
            if not free:
                return None
            places |= free[0]
            taken += [_box(*item) for item in free[0].items()]
    for spot in (spot for column in columns if len(column) < LEAST_COLUMN for spot in column):
        place = _free_place(spot, taken, inside)
        if place is None:
            return None
        places[spot] = place
        taken.append(_box(spot, place))
    return places


def _columns(spots: Sequence[_Spot]) -> list[list[_Spot]]:
    """Return the spots from left to right, split wherever the next is far."""
    columns: list[list[_Spot]] = []
    for spot in sorted(spots, key=lambda spot: spot.x):
        if columns and spot.x - columns[-1][-1].x < COLUMN_WIDTH:
            columns[-1].append(spot)
        else:
            columns.append([spot])
    return columns


def _listed(column: Sequence[_Spot], x: float, share: float, inside: Any) -> dict[_Spot, Place]:
    """Return the places of names in a list, in the order of their points; `share` of each width is left of x."""
    ordered = sorted(column, key=lambda spot: spot.y)
    height = max(spot.height for spot in ordered)
    middles = spread([spot.y for spot in ordered], height + PAD, inside.y0 + height, inside.y1 - height)
    return {spot: (x - share * spot.width, y - height / 2) for spot, y in zip(ordered, middles, strict=True)}


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return values at least `gap` apart, from `low` to `high` if they fit, with least squared distance from `wanted`."""
    blocks: list[list[float]] = []  # values that would be too close are pooled, as in isotonic regression
    for index, value in enumerate(wanted):
        blocks.append([value - index * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    last = max(low, high - (len(wanted) - 1) * gap)
    pooled = [min(max(fmean(block), low), last) for block in blocks for _ in block]
    return [value + index * gap for index, value in enumerate(pooled)]


def _free_place(spot: _Spot, taken: Sequence[Any], inside: Any) -> Place | None:
    """Return the nearest free place around a point."""
    for step in range(FARTHEST_STEP):
        distance = 10.0 + 9.0 * step
        for turn in (0, 1, 0.5, 1.5, 0.25, 0.75, 1.25, 1.75):  # half turns: right, left, above, below, corners
            across, up = math.cos(turn * math.pi), math.sin(turn * math.pi)
            x = spot.x + across * distance - spot.width * (0.5 - 0.5 * _sign(across))
            y = spot.y + up * distance - spot.height * (0.5 - 0.5 * _sign(up))
            place = (min(max(x, inside.x0 + PAD), inside.x1 - spot.width - PAD), y)
            if _is_free({spot: place}, taken, inside):
                return place
    return None


def _is_free(places: Mapping[_Spot, Place], taken: Sequence[Any], inside: Any) -> bool:
    boxes = [_box(spot, place).padded(PAD) for spot, place in places.items()]
    return all(
        inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1 for box in boxes
    ) and not any(box.count_overlaps(taken) for box in boxes)


def _box(spot: _Spot, place: Place) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_bounds(*place, spot.width, spot.height)


def _sign(value: float) -> int:
    return 0 if abs(value) < 1e-9 else 1 if value > 0 else -1


def _make_room(axes: Any, share: float) -> None:
    """Reserve the right-hand `share` of the panel for names."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xlim(low, low + (high - low) / (1 - share))
    axes.set_xticks(ticks)


def _lead(axes: Any, spot: _Spot, place: Place) -> None:
    """Draw a thin line from a name to its point, where they are not adjacent."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import IdentityTransform

    box = _box(spot, place)
    x = min(max(spot.x, box.x0 - PAD), box.x1 + PAD)
    y = min(max(spot.y, box.y0), box.y1) if box.x0 < x < box.x1 else (box.y0 + box.y1) / 2
    if math.hypot(x - spot.x, y - spot.y) > 2 * MARKER_RADIUS:
        line = Line2D((x, spot.x), (y, spot.y), transform=IdentityTransform(), color="#808080", linewidth=0.7, zorder=1)
        axes.add_line(line)
