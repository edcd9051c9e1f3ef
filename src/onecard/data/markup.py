"""What a person would read of marked-up files: web pages, e-books, Word documents, PDF.

In: the lines of a page, or an open file. Out: text with its paragraphs as lines. Scripts, styles, menus and forms are
left out; which of the rest is boilerplate is not known here.
"""

from __future__ import annotations

import codecs
import html.parser
import posixpath
import re
import urllib.parse
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from onecard.data.encoding import DAMAGED, OpenBytes
from onecard.data.rows import Item, Rejection, Row
from onecard.errors import MissingExtra


def _tags_named(names: str) -> frozenset[str]:
    return frozenset(names.split())


_VOID = _tags_named("area base br col embed hr img input link meta param source track wbr")
_UNSEEN = _tags_named(
    "script style noscript template svg math iframe object canvas audio video head nav form select button textarea"
)
_PARAGRAPHS = _tags_named("p h1 h2 h3 h4 h5 h6 blockquote pre table ul ol dl figure section article main header hr")
_LINES = _tags_named("div li tr dt dd br option address footer aside caption figcaption details summary title")
_CELLS = _tags_named("td th")
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_STATED = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,30})""", re.IGNORECASE)
_HEAD_BYTES = 4096
# Servers write these of whatever they have.
_SAID_OF_ANYTHING = ("latin-1", "iso8859-1", "cp1252", "ascii", "utf-8", "utf-16", "utf-16-le", "utf-16-be")
# While a page is gathered: ends of blocks, and spaces that stay as they are.
_PARAGRAPH, _LINE, _BREAK = "\x01\x02\x03"
_BREAKS = re.compile("[ \t\n]*[\x01-\x03][ \t\n\x01-\x03]*")
_EXACT = str.maketrans(" \t", "\x04\x05")
_AS_IT_WAS = str.maketrans("\x04\x05", " \t")
_CONTROLS = re.compile("[\0-\x08]")
_SPACES = re.compile(r"[ \t\r\n\f\v]+")
_LONGEST_MEMBER_BYTES = 64 << 20


class _Page(html.parser.HTMLParser):
    """Gathers the visible text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._unseen: list[str] = []
        self._exact = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._unseen:
            if tag not in _VOID:
                self._unseen.append(tag)
            return
        values = dict(attrs)
        hidden = "hidden" in values or values.get("aria-hidden") == "true" or _HIDDEN.search(values.get("style") or "")
        if (tag in _UNSEEN or hidden) and tag not in _VOID and tag not in ("html", "body"):
            self._unseen.append(tag)
            return
        self._break(tag, opens=True)
        self._exact += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._unseen:
            # Tags inside that were never closed end with the one around them.
            if tag in self._unseen:
                del self._unseen[len(self._unseen) - 1 - self._unseen[::-1].index(tag) :]
            return
        self._exact -= tag == "pre" and self._exact > 0
        self._break(tag, opens=False)

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self._parts.append(data.translate(_EXACT) if self._exact else _SPACES.sub(" ", data))

    def _break(self, tag: str, *, opens: bool) -> None:
        if tag in _PARAGRAPHS:
            self._parts.append(_PARAGRAPH)
        elif tag == "br":
            self._parts.append(_BREAK)
        elif tag in _LINES:
            self._parts.append(_LINE)
        elif tag in _CELLS and opens:
            self._parts.append("\t")

    def text(self) -> str:
        """What was gathered, without the spaces that only the markup had."""
        text = _BREAKS.sub(_line_ends, "".join(self._parts))
        return text.strip(" \t\n").translate(_AS_IT_WAS).strip("\n")


def _line_ends(found: re.Match[str]) -> str:
    return "\n\n" if _PARAGRAPH in found[0] or found[0].count(_BREAK) > 1 else "\n"


def html_text(pieces: Iterable[str]) -> str:
    """The visible text of a page: a line for each block, a blank line between paragraphs, tabs between cells."""
    page = _Page()
    for piece in pieces:
        page.feed(_CONTROLS.sub("", piece.replace(DAMAGED, "\ufffd")))
    page.close()
    return page.text()


def stated_encoding(open_bytes: OpenBytes) -> str:
    """The encoding that a page says it is in, or auto where it says none that Python knows or that is often wrong."""
    with open_bytes() as stream:
        found = _STATED.search(stream.read(_HEAD_BYTES))
    if found is None:
        return "auto"
    try:
        name = codecs.lookup(found[1].decode("ascii")).name
    except LookupError:
        return "auto"
    return "auto" if name in _SAID_OF_ANYTHING else name


# --- books --------------------------------------------------------------------------------------------------------


def read_book(file: str, kind: str, open_bytes: OpenBytes) -> Iterator[Item]:
    """The text of an e-book chapter by chapter (`line` is the chapter's number), else of the whole document.

    MissingExtra without the package that reads .docx or .pdf.
    """
    with open_bytes() as stream:
        match kind:
            case ".epub":
                yield from _read_epub(file, stream)
            case ".docx":
                yield from _read_docx(file, stream)
            case _:
                yield from _read_pdf(file, stream)


def _read_epub(file: str, stream: BinaryIO) -> Iterator[Item]:
    with zipfile.ZipFile(stream) as archive:
        names = archive.namelist()
        if "META-INF/encryption.xml" in names and "META-INF/rights.xml" in names:
            yield Rejection("encrypted_file", file, 0, "")
            return
        for number, name in enumerate(_chapters(archive, names), 1):
            if archive.getinfo(name).file_size > _LONGEST_MEMBER_BYTES:
                yield Rejection("row_too_long", file, number, "")
                continue
            text = html_text([archive.read(name).decode("utf-8-sig", "replace")])
            if text:
                yield Row({"text": text}, file, number)


class _Tags(html.parser.HTMLParser):
    """The attributes of every tag with one of the names wanted, in order."""

    def __init__(self, *wanted: str) -> None:
        super().__init__()
        self._wanted = wanted
        self.found: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = tag.rpartition(":")[2]
        if name in self._wanted:
            self.found.append((name, {key: value or "" for key, value in attrs}))


def _tags(archive: zipfile.ZipFile, name: str, *wanted: str) -> list[tuple[str, dict[str, str]]]:
    """Of an XML file. No XML parser: entities of a hostile file have nothing to expand in."""
    parser = _Tags(*wanted)
    parser.feed(archive.read(name)[:_LONGEST_MEMBER_BYTES].decode("utf-8-sig", "replace"))
    parser.close()
    return parser.found


def _chapters(archive: zipfile.ZipFile, names: list[str]) -> list[str]:
    """The members in the order of reading; in the order of their names where the book does not say."""
    pages = sorted(name for name in names if name.lower().endswith((".xhtml", ".html", ".htm")))
    if "META-INF/container.xml" not in names:
        return pages
    roots = [values.get("full-path", "") for _, values in _tags(archive, "META-INF/container.xml", "rootfile")]
    root = next((name for name in roots if name in names), None)
    if root is None:
        return pages
    tags = _tags(archive, root, "item", "itemref")
    places = {values.get("id", ""): values.get("href", "") for tag, values in tags if tag == "item"}
    order = [places.get(values.get("idref", ""), "") for tag, values in tags if tag == "itemref"]
    found = [posixpath.normpath(posixpath.join(posixpath.dirname(root), urllib.parse.unquote(href))) for href in order]
    return [name for name in found if name in names] or pages


def _read_docx(file: str, stream: BinaryIO) -> Iterator[Item]:
    try:
        import docx
    except ModuleNotFoundError:
        raise MissingExtra("python-docx", f"Reading {file}", install="'onecard[documents]'") from None
    try:
        document = docx.Document(stream)
    except (KeyError, ValueError, SyntaxError) as fault:  # what it raises for a zip that is no document
        yield Rejection("damaged_file", file, 0, str(fault))
        return
    lines: list[str] = []
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            lines += ["\t".join(_cells(row)) for row in block.rows]
        else:
            lines.append(block.text)
    text = "\n".join(lines).strip("\n")
    yield Row({"text": text}, file, 1) if text else Rejection("empty_file", file, 0, "")


def _cells(row: Any) -> list[str]:
    """The texts of a row of a table; one that spans several columns stands once."""
    seen: list[Any] = []
    for cell in row.cells:
        if not any(cell._tc is other._tc for other in seen):
            seen.append(cell)
    return [cell.text.replace("\n", " ") for cell in seen]


def _read_pdf(file: str, stream: BinaryIO) -> Iterator[Item]:
    try:
        import pypdf
        import pypdf.errors
    except ModuleNotFoundError:
        raise MissingExtra("pypdf", f"Reading {file}", install="'onecard[documents]'") from None
    import logging

    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        reader = pypdf.PdfReader(stream)
        if reader.is_encrypted and not reader.decrypt(""):
            yield Rejection("encrypted_file", file, 0, "")
            return
        pages = [page.extract_text() for page in reader.pages]
    except (
        pypdf.errors.PyPdfError,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as fault:
        yield Rejection("damaged_file", file, 0, str(fault))
        return
    text = "\n\n".join(page.strip("\n") for page in pages).strip("\n")
    # Without text it is pictures of pages: reading those is another trade.
    yield Row({"text": text}, file, 1) if text else Rejection("no_text_in_file", file, 0, "")
