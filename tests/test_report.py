"""A page is one file: everything escaped, nothing fetched."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest

from onecard.report import Page

EVIL = "<script>alert(1)</script> \"'& 三国 $5 & $6"


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text; complains about tags that do not close."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def draw(axes: Any) -> None:
    axes.plot([1, 2, 3], label=EVIL)
    axes.set_xlabel("更新 $x")
    axes.legend()


@pytest.fixture(scope="module")
def page() -> Page:
    made = Page(EVIL, EVIL)
    made.heading(EVIL)
    made.paragraph(EVIL)
    made.facts({EVIL: EVIL, "number": 1234567})
    made.table([EVIL, "n"], [[EVIL, 1234567]], EVIL)
    made.sample(EVIL, EVIL)
    made.pieces([(EVIL, 1), (EVIL, 3)], EVIL)
    made.details(EVIL, EVIL)
    made.figure(draw, EVIL)
    made.figure(draw)
    return made


@pytest.fixture(scope="module")
def read(page: Page) -> Reader:
    reader = Reader()
    reader.feed(page.html())
    reader.close()
    return reader


def test_all_text_is_escaped_and_still_there(read: Reader) -> None:
    assert "script" not in read.tags
    assert read.open == []
    # title twice, lead, heading, paragraph, facts 2, table 3, sample 2, pieces 3, details 2, caption, two legends
    assert read.text.count("<script>alert(1)</script>") == 20
    assert ("aria-label", EVIL) in read.attributes


def test_nothing_is_fetched(read: Reader, page: Page) -> None:
    for name, value in read.attributes:
        if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
            assert value.startswith("#"), (name, value)
    assert not {"link", "img", "iframe", "object", "embed"} & set(read.tags)
    assert "@import" not in page.html()
    # url(#...) inside the figures is a place in the same page.
    assert page.html().count("url(") == page.html().count("url(#")


def test_numbers_are_grouped_and_aligned(page: Page) -> None:
    assert '<td class="number">1,234,567</td>' in page.html()


def test_labels_of_figures_stay_text(page: Page) -> None:
    assert "更新 $x</text>" in page.html()


def test_a_page_is_saved_as_utf8(page: Page, tmp_path: Path) -> None:
    page.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page.html()
    assert page.html().startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')
