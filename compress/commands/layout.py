"""The command `compress layout`."""

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.output import progress_bar, table
from compress.options.layout import LayoutOptions
from compress.report.columns import size


def layout(given: Given) -> Figures:
    """Write MODEL with its experts in an order on disk that suits reading them one by one. Every tensor stays as it is.

    The matrices of an expert lie one behind the other and, where they fill whole pages of 4,096 bytes, begin on a page, so
    that one direct read brings the expert. Experts that tokens of a text use together lie near each other.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).
    """
    from compress.layout import layout as run

    figures: Figures = run(given.job(LayoutOptions, "layout"), progress_bar)
    given.say(
        table(
            [
                ["", "before", "after"],
                ["reads for an expert", *(str(figures[f"reads_per_expert_{when}"]) for when in ("before", "after"))],
                ["experts on pages", *(f"{figures[f'page_aligned_share_{when}']:.0%}" for when in ("before", "after"))],
                ["used together, neighbors", *(_share(figures[f"neighbors_share_{when}"]) for when in ("before", "after"))],
            ]
        )
    )
    if figures["miss_costs"]:
        given.say("cost of --miss-threshold, by the share of the experts that memory has room for:")
        given.say(_costs(figures["miss_costs"]))
    if figures["note"] is not None:
        given.say(f"note: {figures['note']}")
    given.say(
        f"{figures['artifact']}: written in {figures['seconds']:.1f} s, {size(figures['bytes'])}, "
        f"peak memory {size(figures['peak_memory_bytes'])}"
    )
    return figures


def _costs(costs: list[Figures]) -> str:
    """Return a table with a row for each threshold and a column for each share of memory."""
    shares = sorted({cost["memory_share"] for cost in costs})
    rows = [["threshold", *(f"room for {share:.0%}" for share in shares)]]
    for threshold in sorted({cost["threshold"] for cost in costs}):
        own = {cost["memory_share"]: cost for cost in costs if cost["threshold"] == threshold}
        cells = [
            f"{own[share]['reads_saved'] or 0:.0%} saved, {own[share]['perplexity_ratio'] - 1:+.2%}" for share in shares
        ]
        rows.append([f"{threshold:g}", *cells])
    return table(rows)


def _share(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.0%}"


COMMAND = command("layout", layout, LayoutOptions, *HUB)
