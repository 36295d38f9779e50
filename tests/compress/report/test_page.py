"""The page is well-formed, complete and self-contained, and every name in it is escaped."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compress.report.columns import columns, text_table, to_csv
from compress.report.page import page
from compress.report.pictures import Picture

VOID = {"meta", "img"}
PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452") + (720).to_bytes(4, "big") + (360).to_bytes(4, "big")
NASTY = "<script>alert('&')</script>\" onload=\"x"


class Parsed(HTMLParser):
    """Records elements in order. It fails on a tag that is closed out of order or left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open) and "small" not in self.open:
            self.cells[-1] += data.strip()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def row(label: str, **changes: Any) -> dict[str, Any]:
    values = {"model": f"models/{label}", "label": label, "method": "reap", "experts_per_layer": [4, 2], "bytes": 2_000_000}
    values |= {"parameters": 1_500_000, "active_parameters": 900_000, "perplexity": 12.5, "perplexity_group": 1}
    return values | {"skip_threshold": 0.0, "experts_skipped_share": 0.0, "tasks": None} | changes


@pytest.fixture
def html(tmp_path: Path) -> str:
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [row("one", experts_per_layer=[8, 8]), row(NASTY, bytes=1_000_000, perplexity=25.0)]
    picture = Picture(tmp_path / "a.png", f"Of {NASTY}", "about")
    return page(rows, title=NASTY, notes=[NASTY], settings={"data": NASTY}, pictures=[picture])


def test_it_parses_and_shows_every_row(html: str) -> None:
    parsed = Parsed(html)
    assert parsed.cells == [
        *("model", "perplexity", "weights", "parameters", "active", "experts"),
        *("one", "12.50", "2.0 MB", "1.50 M", "0.90 M", "8"),
        *(NASTY, "25.00", "1.0 MB", "1.50 M", "0.90 M", "2 to 4"),
    ]
    assert "<small>2.00×</small>" in html and "<small>0.50×</small>" in html
    assert [cell.get("data-value") for cell in parsed.all("td")[:2]] == ["12.5", "2000000"]


def test_names_are_text(html: str) -> None:
    assert len(Parsed(html).all("script")) == 1
    assert html.count("<script>") == 1 and "onload" not in {name for _, own in Parsed(html).elements for name in own}


def test_it_needs_nothing_from_outside(html: str) -> None:
    parsed = Parsed(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert not parsed.all("link") and not parsed.all("iframe") and all("src" not in own for own in parsed.all("script"))
    (image,) = parsed.all("img")
    assert (image["src"] or "").startswith("data:image/png;base64,") and image["alt"] == f"Of {NASTY}"
    assert (image["width"], image["height"]) == ("480", "240"), "144 dots per inch, 96 CSS pixels"


def test_it_suits_phones_and_the_dark(html: str) -> None:
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Parsed(html).all("meta")
    assert "prefers-color-scheme: dark" in html and "overflow-x: auto" in html and "max-width: 100%" in html


@pytest.mark.parametrize(("count", "is_open"), [(2, True), (25, False)])
def test_pictures_of_each_model_are_together_and_the_many_of_a_sweep_folded(
    count: int, is_open: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [row(f"model {index}") for index in range(count)]
    own = [Picture(tmp_path / "a.png", "Similarity", "about these", f"{NASTY} {index}") for index in range(count)]
    pictures = [Picture(tmp_path / "a.png", "Sizes", "about"), *own]
    html = page(rows, title="a", notes=[], settings={}, pictures=pictures)
    parsed = Parsed(html)
    (details,) = parsed.all("details")
    assert ("open" in details) == is_open and html.count("about these") == 1
    assert [image["alt"] for image in parsed.all("img")] == ["Sizes", *(f"Similarity: {each.model}" for each in own)]
    assert len(parsed.all("section")) == count + 1 and html.count("<h3>") == count


def test_columns_without_figures_are_left_out() -> None:
    titles = [column.title for column in columns([row("a", perplexity=None), row("b", perplexity=None)])]
    assert titles == ["model", "weights", "parameters", "active", "experts"]
    titles = [column.title for column in columns([row("a", skip_threshold=1.0, experts_skipped_share=0.25)])]
    assert titles[-1] == "skipped"


def test_perplexities_of_different_tokens_are_marked() -> None:
    rows = [row("a"), row("b", perplexity_group=2), row("c", perplexity=None, perplexity_group=None)]
    assert [line[1] for line in text_table(rows)] == ["perplexity", "12.50 [1]", "12.50 [2]", "–"]
    assert not columns(rows)[1].relative, "no ratios between them"


def test_dense_models_tasks_and_csv() -> None:
    tasks = {"arc": {"acc": 0.5, "acc_stderr": 0.01}}
    rows = [row("a", tasks=tasks), row("b", experts_per_layer=[], tasks={"arc": {"acc": 0.25}}, model='b,"c"')]
    assert [line[2] for line in text_table(rows)] == ["arc", "0.5000", "0.2500"]
    assert [line[-1] for line in text_table(rows)] == ["experts", "2 to 4", "dense"]
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["tasks.arc.acc"] for line in read] == ["0.5", "0.25"] and read[1]["tasks.arc.acc_stderr"] == ""
    assert [line["experts_per_layer"] for line in read] == ["4 2", ""] and read[1]["model"] == 'b,"c"'
