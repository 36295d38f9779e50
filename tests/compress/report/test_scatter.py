"""Points and their names: no name overlaps another name or a point, and each name clearly belongs to its point."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from packages_for_tests import needs_matplotlib
from test_plots import LONG, check_nothing_is_cut_off, drawn, texts

from compress.report import canvas
from compress.report.scatter import Point, is_sweep, scatter, spread

METHODS = [f"method-{letter}" for letter in "abcdefgh"]
FULL = Point("full", 26.1, 9.4)


def column(count: int, name: str = "model {}", spacing: float = 0.3) -> list[Point]:
    """Return models of one size, each of its own method."""
    return [Point(name.format(index), 14.2, 11 + spacing * index, series=f"method {index}") for index in range(count)]


def cloud(count: int) -> list[Point]:
    chosen = random.Random(0)
    return [Point(f"model {index} {LONG}", chosen.uniform(1, 2), chosen.uniform(9, 12), x_sd=0.01) for index in range(count)]


def sweep(methods: int) -> list[Point]:
    own = [(method, share) for method in METHODS[:methods] for share in (0.25, 0.5, 0.75)]
    made = [
        Point(f"{method}-{share}", 26 - 20 * share, 9.4 + share * int(method[-1], 36), series=method)
        for method, share in own
    ]
    return [FULL, *made]


def named(figure: Any, points: list[Point]) -> dict[str, Any]:
    """Return the box of each point's name, in pixels."""
    renderer, names = drawn(figure), {canvas.short(point.name) for point in points}
    return {text.get_text(): text.get_window_extent(renderer) for text in texts(figure) if text.get_text() in names}


@needs_matplotlib
@pytest.mark.parametrize(
    "points",
    [
        [FULL],
        [FULL, *column(2)],
        [FULL, *column(10)],
        [FULL, *column(10, spacing=0.0)],
        [FULL, *column(10, "{} " + LONG)],
        [FULL, *column(24, spacing=0.001)],
        sweep(4)[:11],
        cloud(3),
        cloud(11),
        cloud(25),
        [Point(f"model number {index}", 10 + index / 1000, 5 + index / 5000, x_sd=0.001) for index in range(9)]
        + [Point(LONG, 20, 5), Point("first again", 10, 5)],
        [FULL, Point("far too long " * 3, 26.2, 9.4), Point("broken", 26.1, 1e300)],
    ],
    ids=lambda points: f"{len(points)} {points[-1].name[:9]}",
)
def test_no_name_lies_on_another_or_on_a_point(points: list[Point]) -> None:
    figure = scatter(points, "size", "perplexity")
    check_nothing_is_cut_off(figure)
    boxes = list(named(figure, points).values())
    assert len(boxes) == len(points)
    assert not [(a, b) for index, a in enumerate(boxes) for b in boxes[:index] if a.overlaps(b)]
    inside = figure.axes[0].get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    places = figure.axes[0].transData.transform([(point.x, min(point.y, 1e15)) for point in points])
    assert not [place for place in places for box in boxes if box.contains(*place)]


@needs_matplotlib
def test_a_column_is_listed_beside_it_in_its_order() -> None:
    points = column(10, spacing=0.001)
    boxes = named(scatter([FULL, *points], "size", "perplexity"), points)
    heights = [boxes[point.name].y0 for point in points]
    assert heights == sorted(heights) and len({round(box.x0) for box in boxes.values()}) == 1


@needs_matplotlib
def test_a_large_sweep_has_a_line_for_each_method_and_a_legend() -> None:
    points = sweep(8)
    figure = scatter(points, "size", "perplexity")
    check_nothing_is_cut_off(figure)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines if line.get_label() in METHODS}
    assert {name: list(line.get_xdata()) for name, line in lines.items()} == {name: [11, 16, 21] for name in METHODS}
    assert [text.get_text() for text in axes.get_legend().texts] == METHODS[::-1], "from the top down"
    assert list(named(figure, points)) == ["full"]
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() not in ("", "None", "|")}
    assert len(looks) == 9, "no two methods look alike"


def test_what_a_legend_cannot_tell_apart_keeps_its_names() -> None:
    assert is_sweep(sweep(4)) and not is_sweep(sweep(3)), "ten names have room"
    assert not is_sweep([FULL, *column(24)]), "each method once"
    speeds = [replace(point, x=100.0, x_sd=3.0) for point in sweep(4)]
    assert is_sweep(speeds) and not is_sweep([replace(point, x_sd=0.0) for point in speeds]), "speeds may be the same"
    assert not is_sweep([*sweep(8), Point("again", 11.0, 9.9, series=METHODS[0])]), "two of a method at one size"
    assert not is_sweep(cloud(25)), "no methods"
    assert not is_sweep([FULL, *(Point(str(x), x, 9.0, series="one") for x in range(20))]), "one method"


@needs_matplotlib
def test_models_that_cannot_be_compared_have_panels_of_their_own() -> None:
    points = [Point("a", 1, 5), Point("b", 2, 6), Point("c", 1, 50, group=2)]
    panels = scatter(points, "size", "perplexity").axes
    assert [panel.get_title() for panel in panels] == ["tokenizer of a", "tokenizer of c"]
    assert [{text.get_text() for text in panel.texts} for panel in panels] == [{"a", "b"}, {"c"}]


@needs_matplotlib
@pytest.mark.parametrize(("highest", "scale"), [(20.0, "linear"), (2000.0, "log")])
def test_a_broken_model_does_not_hide_the_others(highest: float, scale: str) -> None:
    axes = scatter([FULL, Point("b", 14, highest)], "size", "perplexity").axes[0]
    assert axes.get_yscale() == scale and axes.get_ylim()[0] < 9.4 and highest < axes.get_ylim()[1]


def test_spread_by_hand() -> None:
    assert spread([0.0, 10.0], 2.0, 0.0, 20.0) == [0.0, 10.0], "far apart already"
    assert spread([5.0, 5.0, 5.0], 2.0, 0.0, 20.0) == [3.0, 5.0, 7.0], "around where they want to be"
    assert spread([5.0, 6.0, 12.0], 2.0, 0.0, 20.0) == [4.5, 6.5, 12.0]
    assert spread([0.0, 0.0, 19.0, 19.0], 2.0, 0.0, 20.0) == [0.0, 2.0, 18.0, 20.0], "kept inside"
