"""A comparison as one self-contained HTML page: embedded images, no network, light and dark, phones and wide screens."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from compress.report.canvas import DOTS_PER_INCH
from compress.report.columns import Column, Row, columns
from compress.report.pictures import Picture

if TYPE_CHECKING:
    from jinja2 import Template

LEAST_SCALE = 0.8
"""Smallest display size of a picture, relative to its own size."""
MOST_OPEN = 3
"""The most pictures of one kind that are open at once."""


@dataclass(frozen=True)
class Cell:
    """One figure of the table: its text, its sort key, and its ratio to the first model's."""

    text: str
    sort_key: str
    ratio: str


def page(
    rows: Sequence[Row], *, title: str, notes: Sequence[str], settings: Mapping[str, Any], pictures: Sequence[Picture]
) -> str:
    """Return the HTML text. Every name, note and setting is escaped; `pictures` are read from disk and embedded."""
    shown = columns(rows)
    return _template().render(
        title=title,
        columns=shown,
        rows=[(row, [_cell(column, row, rows[0]) for column in shown]) for row in rows],
        notes=notes,
        settings=settings,
        groups=[
            _Group(title, [_Shown.of(each) for each in own]) for title, own in groupby(pictures, lambda each: each.title)
        ],
    )


@dataclass(frozen=True)
class _Shown:
    """A picture as embedded in the page; sizes are in CSS pixels."""

    picture: Picture
    uri: str
    width: int
    height: int

    @classmethod
    def of(cls, picture: Picture) -> Self:
        """Read a picture from disk."""
        return cls(picture, _data_uri(picture.path), *_display_size(picture.path))

    @property
    def least_width(self) -> int:
        """Least width at which its text is legible; smaller screens scroll the picture."""
        return round(LEAST_SCALE * self.width)


@dataclass(frozen=True)
class _Group:
    """Pictures of one title: one for all models, or one for each model."""

    title: str
    pictures: Sequence[_Shown]

    @property
    def about(self) -> str:
        """Text that describes the group's pictures."""
        return self.pictures[0].picture.about

    @property
    def is_open(self) -> bool:
        """Whether all pictures are shown at once; the many pictures of a sweep are collapsed."""
        return len(self.pictures) <= MOST_OPEN


def _cell(column: Column, row: Row, first: Row) -> Cell:
    value, reference = column.value(row), column.value(first)
    ratio = ""
    if column.relative and row is not first and isinstance(value, int | float) and isinstance(reference, int | float):
        ratio = f"{value / reference:.2f}×" if reference else ""
    return Cell(column.text(row), "" if value is None else str(value), ratio)


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _display_size(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG in CSS pixels (96 per inch), so that high resolutions are sharp and not large."""
    with path.open("rb") as file:
        width, height = struct.unpack(">II", file.read(24)[16:])
    return round(width * 96 / DOTS_PER_INCH), round(height * 96 / DOTS_PER_INCH)


_SOURCE = """\
{% macro embedded(shown) %}
<div class="scroll picture" tabindex="0" role="region" aria-label="{{ shown.picture.name }}">
<img src="{{ shown.uri }}" alt="{{ shown.picture.name }}" width="{{ shown.width }}" height="{{ shown.height }}"
  style="min-width: {{ shown.least_width }}px">
</div>
{%- endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --paper: #ffffff; --ink: #1c1e21; --soft: #5c636b; --line: #d9dde2; --band: #f3f5f7; --accent: #0059a8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e8eaed; --soft: #a3abb4; --line: #343a41; --band: #1d2227; --accent: #7db8ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1600px; margin: 0 auto; padding: 16px clamp(12px, 2vw, 24px) 48px; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 0.4em 0 0.6em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2em 0 0.4em; overflow-wrap: anywhere; }
p { max-width: 75ch; margin: 0.4em 0; color: var(--soft); }
.note { border-left: 4px solid var(--accent); padding: 4px 12px; color: var(--ink); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px; text-align: right; vertical-align: top; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--band); padding: 0; }
th:first-child, tbody th { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th:first-child { background: var(--band); }
tbody th { font-weight: 600; white-space: normal; overflow-wrap: anywhere; }
tbody th { min-width: min(34vw, 11rem); max-width: min(40vw, 420px); }
button { all: unset; display: block; width: 100%; box-sizing: border-box; padding: 8px; }
button { cursor: pointer; font-weight: 600; }
button:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
button::after { content: "\\2195"; opacity: 0.35; padding-left: 4px; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
small { display: block; color: var(--soft); font-size: 0.85em; font-weight: 400; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2em 0 0.4em; overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 0 32px; align-items: flex-start; }
details { margin: 2em 0 0; }
summary { cursor: pointer; color: var(--soft); }
summary h2 { display: inline; color: var(--ink); }
section { max-width: 100%; min-width: min(100%, 22rem); }
.picture { background: #ffffff; }
img { display: block; max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: minmax(8em, max-content) minmax(0, 1fr); gap: 4px 16px; font-size: 0.9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% for note in notes %}
<p class="note">{{ note }}</p>
{% endfor %}
<div class="scroll" tabindex="0" role="region" aria-label="Figures of every model">
<table>
<thead>
<tr>
{% for column in columns %}
<th scope="col"><button type="button" title="{{ column.about }}">{{ column.title }}</button></th>
{% endfor %}
</tr>
</thead>
<tbody>
{% for row, cells in rows %}
<tr>
{% for cell in cells %}
{% if loop.first %}
<th scope="row" data-value="{{ cell.sort_key }}">{{ cell.text }}
{%- if row.model != row.label %}<small>{{ row.model }}</small>{% endif %}
{%- if row.method %}<small>{{ row.method }}</small>{% endif %}</th>
{% else %}
<td data-value="{{ cell.sort_key }}">{{ cell.text }}{% if cell.ratio %}<small>{{ cell.ratio }}</small>{% endif %}</td>
{% endif %}
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
<p>{{ rows | length }} models; small figures with × are ratios to the first. A heading sorts the table.</p>
<div class="pictures">
{% for group in groups if group.pictures | length == 1 %}
<section style="width: {{ group.pictures[0].width + 2 }}px">
<h2>{{ group.pictures[0].picture.name }}</h2>
<p>{{ group.about }}</p>
{{ embedded(group.pictures[0]) }}
</section>
{% endfor %}
</div>
{% for group in groups if group.pictures | length > 1 %}
<details{% if group.is_open %} open{% endif %}>
<summary><h2>{{ group.title }}</h2> <span>of {{ group.pictures | length }} models</span></summary>
<p>{{ group.about }}</p>
<div class="pictures">
{% for shown in group.pictures %}
<section style="width: {{ shown.width + 2 }}px">
<h3>{{ shown.picture.model }}</h3>
{{ embedded(shown) }}
</section>
{% endfor %}
</div>
</details>
{% endfor %}
<h2>What the columns say</h2>
<dl>
{% for column in columns %}
<dt>{{ column.title }}</dt><dd>{{ column.about }}</dd>
{% endfor %}
</dl>
<h2>How it was measured</h2>
<dl>
{% for name, value in settings.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
</main>
<script>
"use strict";
document.querySelectorAll("thead th").forEach((head, column) => {
  head.firstElementChild.addEventListener("click", () => {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const body = document.querySelector("tbody");
    const key = (row) => row.children[column].dataset.value;
    const compare = (a, b) => {
      if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
      return sign * (column === 0 ? key(a).localeCompare(key(b)) : Number(key(a)) - Number(key(b)));
    };
    document.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    body.append(...Array.from(body.children).sort(compare));
  });
});
</script>
</body>
</html>
"""


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # imported here: only runs that write a page need it

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_SOURCE)
