"""Pictures can be drawn for all sizes of models, nothing is cut off, and no label overlaps another."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from packages_for_tests import needs_matplotlib

from compress.report import canvas, plots
from compress.report.scatter import Point, scatter
from engine.errors import OptionError


def drawn(figure: Any) -> Any:
    """Return the renderer, after a full draw by the canvas that savefig uses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawing = FigureCanvasAgg(figure)
    with canvas.style():
        drawing.draw()
    return drawing.get_renderer()


def texts(figure: Any) -> list[Any]:
    import matplotlib.text

    return [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]


def check_nothing_is_cut_off(figure: Any) -> None:
    """Check that everything that is drawn ends inside the page, in inches."""
    box, (width, height) = figure.get_tightbbox(drawn(figure)), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"{box} of {width} × {height}"


def usage(name: str, layers: int, experts: int, kept: int) -> plots.ExpertShares:
    numbers = {layer: sorted((layer + 3 * i) % experts for i in range(kept)) for layer in range(layers)}
    shares = {layer: [(i + 1) / (kept * (kept + 1) / 2) for i in range(kept)] for layer in range(layers)}
    return plots.ExpertShares(name, shares, numbers)


LONG = "an-organisation/a-model-with-a-very-long-name-8x7B-instruct-v0.1"


@needs_matplotlib
@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (6, 8), pytest.param(48, 128, marks=pytest.mark.slow)])
def test_every_picture_fits_its_page(layers: int, experts: int) -> None:
    counts = {LONG: dict.fromkeys(range(layers), experts), "b": {layer: 1 + layer % 2 for layer in range(1, layers)}}
    check_nothing_is_cut_off(plots.experts_per_layer(counts))
    check_nothing_is_cut_off(
        plots.expert_usage([usage(LONG, layers, experts, experts), usage("b", layers, experts, experts // 2)])
    )
    check_nothing_is_cut_off(plots.expert_usage([usage("alone", layers, experts, experts)]))
    shares = {layer: [(i + 1) / (experts * (experts + 1) / 2) for i in range(experts)] for layer in range(layers)}
    alike = dict.fromkeys(range(layers), 0.9 * experts)
    check_nothing_is_cut_off(plots.usage_histogram(LONG, shares, alike, {layer: [experts - 1] for layer in shares}))
    named = plots.usage_histogram(LONG, shares, alike, {}, {layer: f"decoder layer {layer}" for layer in shares})
    check_nothing_is_cut_off(named)
    assert named.axes[0].get_title().startswith("decoder layer 0, like ")
    check_nothing_is_cut_off(plots.token_accuracy(LONG, {"distill": [(0, 0.1), (9, 0.5)], "finetune": [(0, 0.5)]}, 0.7))
    matrix = [[1.0 if i == j else 0.3 for j in range(experts)] for i in range(experts)]
    check_nothing_is_cut_off(plots.expert_similarity(LONG, dict.fromkeys(range(layers), matrix)))
    pairs = {(layer, layer - 1): matrix[: experts - layer % 2] for layer in range(1, layers + 1)}
    check_nothing_is_cut_off(plots.layer_similarity(LONG, pairs))
    alpha = {layer: [expert / experts - 0.5 for expert in range(experts)] for layer in range(layers)}
    beta = {layer: 1 + layer / 100 for layer in range(layers)}
    check_nothing_is_cut_off(
        plots.search_scores(LONG, plots.SearchScores(alpha, beta, {layer: [0] for layer in range(layers)}))
    )


@needs_matplotlib
def test_token_accuracy_goes_on_where_the_part_before_ended() -> None:
    (axes,) = plots.token_accuracy("a", {"distill": [(0, 0.1), (9, 0.5)], "finetune": [(0, 0.5), (4, 0.6)]}, 0.7).axes
    distill, finetune, mixture = axes.get_lines()
    assert list(distill.get_xdata()) == [0, 9] and list(finetune.get_xdata()) == [9, 13]
    assert list(finetune.get_ydata()) == [0.5, 0.6] and set(mixture.get_ydata()) == {0.7}


@needs_matplotlib
def test_cells_carry_the_counts() -> None:
    figure = plots.experts_per_layer({"a": {0: 8, 2: 6}, "b": {0: 3}})
    assert [text.get_text() for text in figure.axes[0].texts] == ["8", "6", "3", "–"]


@needs_matplotlib
def test_removed_experts_are_grey_and_crossed_out() -> None:
    grid = plots.expert_usage([plots.ExpertShares("a", {4: [0.25, 0.75]}, {4: [0, 3]})]).axes[0].images[0].get_array()
    assert grid.mask.tolist() == [[False, True, True, False]] and grid[0, 3] == 0.75
    scores = plots.SearchScores({0: [0.1, -0.2, 0.3]}, {0: 0.5}, {0: [0, 2]})
    axes = plots.search_scores("a", scores).axes
    assert axes[0].collections[0].get_offsets().tolist() == [[1.0, 0.0]]
    assert [bar.get_x() + bar.get_width() for panel in axes for bar in panel.patches] == [0.5]


@needs_matplotlib
@pytest.mark.parametrize("name", ["a$b$_{x}", r"\frac{", "模型", "two\nlines", "🙂"])
def test_names_are_never_formulas(name: str, tmp_path: Path) -> None:
    canvas.save(scatter([Point(name, 1, 2)], "size", "perplexity"), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG") and min(struct.unpack(">II", data[16:24])) > 400
    canvas.save(plots.experts_per_layer({name: {0: 1}}), tmp_path / "b.png")


@needs_matplotlib
def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        canvas.save(scatter([Point("m", 1, 2), Point("n", 1, 2)], "x", "y"), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_long_names_lose_their_middle() -> None:
    assert canvas.short("abc") == "abc"
    assert canvas.short("abcdefghij", 5) == "ab…ij"
    assert len(canvas.short(LONG)) == canvas.MAX_NAME


def test_without_matplotlib_plots_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "available", lambda: False)
    with pytest.raises(OptionError, match=r"pip install moe-compress\[plots\]"):
        canvas.require()
