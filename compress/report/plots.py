"""Plots of compression results by matplotlib, the optional extra `plots`.

Each function takes plain figures and returns a matplotlib Figure; `canvas.save` writes it. Layers are decoder layer indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.report.canvas import (
    COLOURS,
    DASH,
    Names,
    Page,
    between,
    cell_numbers,
    colour_bar,
    few_ticks,
    heat,
    page_width,
    short,
    style,
    whole_ticks,
)

LAYERS_IN_A_LINE = 32
"""Layers per row of panels; further layers start a new row, so that numbers stay legible."""


@dataclass(frozen=True)
class ExpertShares:
    """A share for each of a model's experts."""

    name: str
    shares: Mapping[int, Sequence[float]]
    """By layer, each expert's share: of the tokens routed in the layer, or of its own hidden units."""
    numbers: Mapping[int, Sequence[int]]
    """By layer, each expert's number in the source model."""


@dataclass(frozen=True)
class SearchScores:
    """Scores learned by DiEP: α by layer and expert, β by layer, and the experts that stayed."""

    alpha: Mapping[int, Sequence[float]]
    beta: Mapping[int, float]
    kept: Mapping[int, Sequence[int]]


# Heat maps


def experts_per_layer(counts: Mapping[str, Mapping[int, int]]) -> Any:
    """Draw the number of experts in each layer of each model, by name; a dash means a model without experts in a layer."""
    import numpy as np
    from matplotlib.figure import Figure

    layers = sorted({layer for own in counts.values() for layer in own})
    lines = [layers[start : start + LAYERS_IN_A_LINE] for start in range(0, len(layers), LAYERS_IN_A_LINE)]
    highest = max(count for own in counts.values() for count in own.values())
    names = Names(counts)
    across = max(3.0, 0.4 * len(lines[0]))
    down = 0.42 * len(counts)
    with style():
        title = "Experts per layer"
        page = Page(page_width(names.inches + across + 1.1, title, names.inches), len(lines), down, title=0.15, below=0.62)
        figure = Figure(figsize=page.size)
        for index, line in enumerate(lines):
            axes = page.axes(figure, index, names.inches, across)
            grid = np.array([[own.get(layer, np.nan) for layer in line] for own in counts.values()], dtype=float)
            picture = heat(axes, grid, 0, highest)
            cell_numbers(axes, grid, picture, lambda value: DASH if math.isnan(value) else f"{value:.0f}")
            axes.set_yticks(range(len(counts)), names.shown)
            axes.set_xticks(range(len(line)), [str(layer) for layer in line])
            axes.set_xlabel("layer")
        page.title(figure, title, names.inches)
        colour_bar(figure, page, picture, names.inches + across, "experts")
    return figure


def expert_usage(usages: Sequence[ExpertShares]) -> Any:
    """Draw each expert's share of the tokens routed in its layer, a panel for each model."""
    highest = max(share for usage in usages for shares in usage.shares.values() for share in shares)
    return _shares(usages, highest, "Routed tokens, % of a layer (grey: no such expert)", "share of tokens")


def kept_units(models: Sequence[ExpertShares]) -> Any:
    """Draw the share of each expert's hidden units that stayed, a panel for each model."""
    return _shares(models, 1.0, "Hidden units that stayed, % of an expert (grey: none)", "share of units")


def _shares(usages: Sequence[ExpertShares], highest: float, title: str, measure: str) -> Any:
    """Draw a panel for each model: a row per layer, a column per source expert, gray where an expert is missing."""
    import numpy as np
    from matplotlib.figure import Figure

    layers = sorted({layer for usage in usages for layer in usage.shares})
    experts = 1 + max(number for usage in usages for numbers in usage.numbers.values() for number in numbers)
    cell_across, cell_down = between(6.0 / experts, 0.05, 0.42), between(11.0 / len(layers), 0.16, 0.3)
    across, down = max(2.4, cell_across * experts), max(0.6, cell_down * len(layers))
    in_a_line = max(1, min(len(usages), int(13.0 // (across + 0.75))))
    with style():
        lines = math.ceil(len(usages) / in_a_line)
        page = Page(page_width(0.75 + in_a_line * (across + 0.75) + 0.6, title, 0.75), lines, down, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        for index, usage in enumerate(usages):
            line, place = divmod(index, in_a_line)
            axes = page.axes(figure, line, 0.75 + place * (across + 0.75), across)
            grid = np.full((len(layers), experts), np.nan)
            for row, layer in enumerate(layers):
                grid[row, list(usage.numbers.get(layer, ()))] = usage.shares.get(layer, ())
            picture = heat(axes, grid, 0, highest)
            if cell_across >= 0.34 and cell_down >= 0.2:
                cell_numbers(axes, grid, picture, lambda value: "" if math.isnan(value) else f"{100 * value:.0f}", 8)
            axes.set_title(short(usage.name, max(12, int(across / 0.095))))
            whole_ticks(axes.set_xticks, range(experts), across)
            whole_ticks(axes.set_yticks, layers, down)
            axes.set_xlabel("expert")
            axes.set_ylabel("layer")
        page.title(figure, title, 0.75)
        colour_bar(figure, page, picture, 0.75 + in_a_line * (across + 0.75) - 0.75, measure, percent=True)
    return figure


@dataclass(frozen=True)
class _Similarity:
    """A CKA matrix, with the text above, left of and below it."""

    matrix: Any
    title: str = ""
    down: str = ""
    across: str = ""


def expert_similarity(name: str, matrices: Mapping[int, Any]) -> Any:
    """Draw RBF CKA between the outputs of a layer's experts [N, N], a panel per layer (DiEP's figures 1 and 6).

    The diagonal is gray, because its ones would take most of the color range.
    """
    import numpy as np

    panels = []
    for layer, matrix in sorted(matrices.items()):
        grid = np.array(matrix, dtype=float)
        np.fill_diagonal(grid, np.nan)
        panels.append(_Similarity(grid, title=f"layer {layer}"))
    return _similarities(f"Similarity of experts (RBF CKA), {short(name)}", panels)


def layer_similarity(name: str, matrices: Mapping[tuple[int, int], Any]) -> Any:
    """Draw RBF CKA between experts of two layers [N, M], a panel for each pair of layers (DiEP's figures 1 and 7)."""
    panels = [
        _Similarity(matrix, down=f"layer {layer}", across=f"layer {other}")
        for (layer, other), matrix in sorted(matrices.items())
    ]
    return _similarities(f"Similarity of neighboring layers' experts (RBF CKA), {short(name)}", panels)


def _similarities(title: str, panels: Sequence[_Similarity]) -> Any:
    """Draw square panels that share their color scale."""
    import numpy as np
    from matplotlib.figure import Figure

    side, gap, most = (1.15, 0.3, 8) if len(panels) > 8 else (1.7, 0.4, 4)
    left, below, above = 0.35, 0.3, 0.4
    if panels[0].across:
        left, gap, below, above = left + 0.2, gap + 0.25, below + 0.2, 0.2
    lines = math.ceil(len(panels) / most)
    in_a_line = math.ceil(len(panels) / lines)
    values = np.concatenate([np.ravel(panel.matrix) for panel in panels])
    found = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([0.0, 1.0])
    low = math.floor(20 * found.min()) / 20
    high = max(math.ceil(20 * found.max()) / 20, low + 0.05)
    with style():
        width = page_width(left + in_a_line * (side + gap) + 0.7, title, left)
        page = Page(width, lines, side, title=above, below=below)
        figure = Figure(figsize=page.size)
        for index, panel in enumerate(panels):
            line, place = divmod(index, in_a_line)
            axes = page.axes(figure, line, left + place * (side + gap), side)
            picture = heat(axes, panel.matrix, low, high, gaps=False)
            for count, set_ticks in zip(np.shape(panel.matrix), (axes.set_yticks, axes.set_xticks), strict=True):
                ends = sorted({0, count - 1})
                set_ticks(ends, [str(end) for end in ends], fontsize=8)
            if place and panel.title:
                axes.set_yticklabels([])
            axes.set_title(panel.title, fontsize=9, pad=3)
            axes.set_xlabel(panel.across, fontsize=9, labelpad=0)
            axes.set_ylabel(panel.down, fontsize=9, labelpad=0)
        page.title(figure, title, left)
        colour_bar(figure, page, picture, left + in_a_line * (side + gap) - gap, "CKA")
    return figure


def usage_histogram(
    name: str,
    shares: Mapping[int, Sequence[float]],
    alike: Mapping[int, float],
    chosen: Mapping[int, Sequence[int]],
    layers: Mapping[int, str] | None = None,
) -> Any:
    """Draw the share of routed tokens of each expert, by layer (Cruz Salinas et al., fig. 4).

    Selected experts have another color. alike: effective number of experts by layer. layers: their names; None for their
    numbers. A dashed line shows the share under uniform usage.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    experts = max(len(own) for own in shares.values())
    across, gap, left = between(0.2 * experts, 1.5, 3.2), 0.25, 0.65
    in_a_line = min(max(1, int(12.0 // (across + gap))), len(shares))
    highest = max(share for own in shares.values() for share in own)
    with style():
        title = f"Share of routed tokens of each expert, {short(name)}"
        width = page_width(left + in_a_line * (across + gap) + 0.1, title, left)
        page = Page(width, math.ceil(len(shares) / in_a_line), 1.1, title=0.36, below=0.45)
        figure = Figure(figsize=page.size)
        for index, (layer, own) in enumerate(sorted(shares.items())):
            line, place = divmod(index, in_a_line)
            axes = page.axes(figure, line, left + place * (across + gap), across)
            colours = [COLOURS[1] if expert in chosen.get(layer, ()) else COLOURS[0] for expert in range(len(own))]
            axes.bar(range(len(own)), own, color=colours, width=0.8)
            axes.axhline(1.0 / len(own), color="#606060", linewidth=0.8, linestyle="--")
            named = f"layer {layer}" if layers is None else layers[layer]
            axes.set_title(f"{named}, like {alike[layer]:.1f} of {len(own)}", fontsize=9, pad=3)
            axes.set_xlim(-0.6, experts - 0.4)
            axes.set_ylim(0.0, 1.05 * highest)
            whole_ticks(axes.set_xticks, range(len(own)), across)
            axes.yaxis.set_major_locator(few_ticks())
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.tick_params(labelsize=8, labelleft=place == 0)
        page.title(figure, title, left)
    return figure


def by_layer(title: str, panels: Mapping[str, Mapping[int, float]]) -> Any:
    """Draw a bar for each layer, in a panel for each quantity."""
    from matplotlib.figure import Figure

    layers = max(len(own) for own in panels.values())
    across, gap, left = between(0.3 * layers, 2.4, 6.0), 0.8, 0.75
    with style():
        page = Page(page_width(left + len(panels) * (across + gap), title, left), 1, 2.2, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        for place, (name, own) in enumerate(panels.items()):
            axes = page.axes(figure, 0, left + place * (across + gap), across)
            axes.bar(list(own), list(own.values()), color=COLOURS[place % len(COLOURS)], width=0.8)
            axes.set_title(name)
            axes.set_xlabel("layer")
            whole_ticks(axes.set_xticks, list(own), across)
        page.title(figure, title, left)
    return figure


def by_number(title: str, x_label: str, panels: Mapping[str, Mapping[int, float]]) -> Any:
    """Draw values over whole numbers as points joined by a line, in a panel for each quantity."""
    from matplotlib.figure import Figure

    across, gap, left = 3.2, 0.8, 0.75
    with style():
        page = Page(page_width(left + len(panels) * (across + gap), title, left), 1, 2.2, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        for place, (name, own) in enumerate(panels.items()):
            axes = page.axes(figure, 0, left + place * (across + gap), across)
            numbers = sorted(own)
            axes.plot(numbers, [own[number] for number in numbers], marker="o", color=COLOURS[place % len(COLOURS)])
            axes.set_title(name)
            axes.set_xlabel(x_label)
            axes.set_xticks(numbers)
            axes.grid(color="#e6e6e6", linewidth=0.8)
        page.title(figure, title, left)
    return figure


def training(name: str, terms: Mapping[str, Sequence[float]], validations: Sequence[tuple[int, float]], measure: str) -> Any:
    """Draw each loss term by step, smoothed over the pale line of single steps, and the validations beside them.

    measure: name of the validation metric, where lower is better.
    """
    import numpy as np
    from matplotlib.figure import Figure

    across, gap, left = 3.6, 0.8, 0.65
    with style():
        title = f"Training of {short(name)}"
        panels = 2 if validations else 1
        page = Page(page_width(left + panels * (across + gap), title, left), 1, 2.4, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        axes = page.axes(figure, 0, left, across)
        for place, (term, values) in enumerate(terms.items()):
            window = max(1, len(values) // 25)
            smooth = np.convolve(values, np.ones(window) / window, mode="valid")
            axes.plot(range(1, len(values) + 1), values, color=f"C{place}", alpha=0.25, linewidth=0.8)
            axes.plot(np.arange(len(smooth)) + (window + 1) / 2, smooth, color=f"C{place}", label=term)
        axes.set_title("loss")
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0.0)
        axes.legend(frameon=False, fontsize=8)
        if validations:
            axes = page.axes(figure, 0, left + across + gap, across)
            steps, values = zip(*validations, strict=True)
            best = min(range(len(values)), key=values.__getitem__)
            axes.plot(steps, values, marker="o", markersize=3)
            axes.plot(steps[best], values[best], marker="o", color=COLOURS[1], label=f"kept: {values[best]:.2f}")
            axes.set_title(f"{measure} on text set aside")
            axes.set_xlabel("step")
            axes.legend(frameon=False, fontsize=8)
        page.title(figure, title, left)
    return figure


def token_accuracy(name: str, curves: Mapping[str, Sequence[tuple[int, float]]], mixture: float) -> Any:
    """Draw token accuracy by step, a curve for each part of a training (Cruz Salinas et al., fig. 3).

    Each part begins where the part before ends. A dashed line shows the mixture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    across, left = 4.4, 0.75
    with style():
        title = f"Token accuracy on pairs set aside, {short(name)}"
        page = Page(page_width(left + across + 0.2, title, left), 1, 2.6, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        axes = page.axes(figure, 0, left, across)
        first = 0
        for place, (part, pairs) in enumerate(curves.items()):
            steps, values = [first + step for step, _ in pairs], [value for _, value in pairs]
            axes.plot(steps, values, marker="o", markersize=3, color=COLOURS[place], label=part)
            first = steps[-1]
        axes.axhline(mixture, color="#606060", linewidth=0.8, linestyle="--", label="mixture")
        axes.set_xlabel("step")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(frameon=False, fontsize=8)
        page.title(figure, title, left)
    return figure


def frontier(
    name: str, predicted: Sequence[tuple[float, float]], measured: Sequence[tuple[float, float]], target: float | None
) -> Any:
    """Draw divergences in nats per token by size in bytes: the predicted curve, the measured choices, and the target.

    Points with a divergence of 0 are left out: the axis is logarithmic.
    """
    from matplotlib.figure import Figure

    across, left = 4.4, 1.0
    with style():
        title = f"Divergence by size, {short(name)}"
        page = Page(page_width(left + across + 0.2, title, left), 1, 2.6, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        axes = page.axes(figure, 0, left, across)
        curve = sorted((size / 1e6, value) for size, value in predicted if value > 0.0)
        points = [(size / 1e6, value) for size, value in measured if value > 0.0]
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, color=COLOURS[0], label="predicted")
        if points:
            axes.plot(*zip(*points, strict=True), "D", markersize=5, color=COLOURS[1], label="measured")
        if target is not None:
            axes.axvline(target / 1e6, color="#606060", linewidth=0.8, linestyle="--", label="target")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("weights in MB")
        axes.set_ylabel("KL, nats per token")
        axes.legend(frameon=False, fontsize=8)
        page.title(figure, title, left)
    return figure


def search_scores(name: str, scores: SearchScores) -> Any:
    """Draw α of each expert, with removed ones crossed out, and β of each layer beside it (DiEP's figure 4)."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    layers = sorted(scores.alpha)
    experts = max(len(own) for own in scores.alpha.values())
    grid = np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        grid[row, : len(scores.alpha[layer])] = scores.alpha[layer]
    bound = float(np.nanmax(np.abs(grid))) or 1.0
    across = between(0.4 * experts, 2.6, 7.0)
    down = between(0.3 * len(layers), 1.2, 12.0)
    with style():
        title = f"DiEP scores, {short(name)}"
        page = Page(page_width(0.75 + across + 1.35 + 2.6 + 0.35, title, 0.75), 1, down, title=0.36, below=0.62)
        figure = Figure(figsize=page.size)
        axes = page.axes(figure, 0, 0.75, across)
        picture = heat(axes, grid, -bound, bound, colours="PuOr_r")
        gone = [
            (expert, row)
            for row, layer in enumerate(layers)
            for expert in range(len(scores.alpha[layer]))
            if expert not in scores.kept.get(layer, ())
        ]
        if gone:
            side = between(36 * min(across / experts, down / len(layers)), 2, 6)
            # the outline keeps a black cross visible in the darkest cells
            halo = withStroke(linewidth=2.5, foreground="white")
            axes.scatter(*zip(*gone, strict=True), marker="x", s=side**2, c="black", linewidths=1, path_effects=[halo])
        axes.set_title("α of each expert; × removed")
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        whole_ticks(axes.set_xticks, range(experts), across)
        whole_ticks(axes.set_yticks, layers, down)
        colour_bar(figure, page, picture, 0.75 + across, "α")
        bars = page.axes(figure, 0, 0.75 + across + 1.35, 2.6)
        changes = [scores.beta[layer] - 1.0 for layer in layers]
        bars.barh(range(len(layers)), changes, left=1.0, color=COLOURS[0], height=0.7)
        bars.axvline(1.0, color="black", linewidth=0.8)
        low, high = min([0.0, *changes]), max([0.0, *changes])
        margin = max(0.08 * (high - low), 0.002)
        bars.set_xlim(1.0 + low - margin, 1.0 + high + margin)
        bars.xaxis.set_major_locator(few_ticks())
        bars.ticklabel_format(axis="x", useOffset=False)
        bars.set_ylim(len(layers) - 0.5, -0.5)
        whole_ticks(bars.set_yticks, layers, down)
        bars.set_title("β of each layer, from 1")
        bars.set_xlabel("β")
        bars.grid(axis="x", color="#e6e6e6")
        bars.set_axisbelow(True)
        page.title(figure, title, 0.75)
    return figure
