"""Tables and banners on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from headway.report.parts import Banner, Cell, Line, Table

_BETWEEN = 3  # characters between two columns
STYLES = {"": "", "good": "green", "bad": "bold red", "warn": "yellow", "quiet": "dim"}


def print_lines(console: Console, lines: Sequence[Line]) -> None:
    """A short answer: labels in a column, beside what is said."""
    indent = max((len(line.label) for line in lines), default=0) + 2
    for line in lines:
        said = textwrap.wrap(
            line.text, max(20, console.width - indent), break_long_words=False, break_on_hyphens=False
        ) or [""]
        first, *rest = said
        console.print(Text.assemble((line.label.ljust(indent), STYLES[line.tone]), first), soft_wrap=True)
        for each in rest:
            console.print(Text(" " * indent + each), soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """The table as fitted() has it."""
    console.print(fitted(table, console.width))


def fitted(table: Table, width: int) -> RenderableType:
    """The table; where it is too wide for the terminal, its rows as columns, or else a short list for each row.

    No word and number is ever cut.
    """
    for shown in (table, _turned(table)):
        widths = _widths(shown, width)
        if widths is not None:
            return _drawn(shown, widths)
    lines = [Text(table.title, style="bold")]
    for row in table.rows:
        heading = f"{table.columns[0]}: {row[0].text}" if table.columns[0] else row[0].text
        lines.append(Text(heading, style=STYLES[row[0].tone] or "bold"))
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            detail = f"  ({cell.detail})" if cell.detail else ""
            lines.append(Text.assemble(f"  {column}: " if column else "  ", (cell.text, STYLES[cell.tone]), detail))
    return Group(*lines, *([Text(table.note, style="dim")] if table.note else []))


def _turned(table: Table) -> Table:
    """The same with rows as columns; where the first cells of rows and columns are the headings."""
    corner = table.columns[0] if table.columns else ""
    headings = (corner, *(row[0].text for row in table.rows))
    rows = tuple(
        (Cell(heading), *(row[place] for row in table.rows)) for place, heading in enumerate(table.columns[1:], start=1)
    )
    return Table(table.title, headings, rows, note=table.note)


def _widths(table: Table, most: int) -> list[int] | None:
    """The widths of columns, at least that of their longest words; None if the terminal is too narrow for that."""
    columns = [
        [heading, *(text for row in table.rows for text in (row[place].text, row[place].detail))]
        for place, heading in enumerate(table.columns)
    ]
    least = [max((cell_len(word) for text in texts for word in text.split()), default=0) for texts in columns]
    wanted = [max(cell_len(text) for text in texts) for texts in columns]
    spare = most - sum(least) - _BETWEEN * len(columns)
    if spare < 0:
        return None
    widths = list(least)
    for place in sorted(range(len(columns)), key=lambda place: wanted[place] - least[place]):
        more = min(wanted[place] - least[place], spare)
        widths[place] += more
        spare -= more
    return widths


def _drawn(table: Table, widths: Sequence[int]) -> RichTable:
    drawn = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        caption=Text(table.note, style="dim") if table.note else None,
        caption_justify="left",
        show_header=any(table.columns),
    )
    for place, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
        left = place in table.left or place == 0
        drawn.add_column(Text(column), justify="left" if left else "right", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(_cell(cell) for cell in row))
    return drawn


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style=STYLES[cell.tone])
    if cell.detail:
        text.append(f"\n{cell.detail}", style="dim")
    return text


def print_banner(console: Console, banner: Banner) -> None:
    """Print a banner: in a heavy box if it is bad, as a line or two otherwise."""
    style = STYLES[banner.tone]
    if banner.tone == "bad":
        body = Text("\n".join(banner.lines))
        console.print(Panel(body, title=Text(banner.title), title_align="left", border_style=style, box=box.HEAVY))
        return
    console.print(Text.assemble((f"{banner.title}: ", f"bold {style}"), " ".join(banner.lines)))
