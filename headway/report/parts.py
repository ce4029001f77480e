"""The parts of reports, for the terminal and the page alike: tables, pictures, sections, banners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["", "good", "bad", "warn", "quiet"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its text, what it says of itself, and a second, quieter text (an interval)."""

    text: str
    tone: Tone = ""
    detail: str = ""


NOTHING = Cell("–", "quiet")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings."""

    title: str
    # Headings; the first column is set to the left, the others to the right unless `left` names them.
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]  # as many cells as columns each
    left: frozenset[int] = frozenset({0})  # numbers of further columns with text
    note: str = ""  # a line below the table

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {self.title!r} has {len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a short answer: what it is about, and what is said."""

    label: str
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with its file's name (letters, digits, hyphens) and the sentence that says what to read from it."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Banner:
    """A message that must not be missed."""

    title: str
    lines: tuple[str, ...]
    tone: Tone = "bad"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, in this order."""

    title: str
    paragraphs: tuple[str, ...] = ()  # plain text
    banners: tuple[Banner, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()  # a list of definitions: (term, meaning)
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    anchor: str = ""  # letters, digits and hyphens: makes it a link's target, and lists it at the top of the page
    folded: bool = False  # hidden until asked for (and shown in print)


@dataclass(frozen=True, slots=True)
class Page:
    """A report: a heading with its verdict, key figures (number, what it is), and sections."""

    title: str
    subtitle: str = ""
    verdict: tuple[Banner, ...] = ()
    key_figures: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = field(default=())
    footer: str = ""


def cells(*texts: str | Cell) -> tuple[Cell, ...]:
    """A row of plain texts and cells."""
    return tuple(each if isinstance(each, Cell) else Cell(each) for each in texts)
