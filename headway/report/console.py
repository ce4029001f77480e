"""Tables and banners on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from headway.report.parts import Banner, Cell, Table

STYLES = {"": "", "good": "green", "bad": "bold red", "warn": "yellow", "quiet": "dim"}


def print_table(console: Console, table: Table) -> None:
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
    for place, column in enumerate(table.columns):
        left = place in table.left or place == 0
        drawn.add_column(Text(column), justify="left" if left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_cell(cell) for cell in row))
    console.print(drawn)


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style=STYLES[cell.tone])
    if cell.detail:
        text.append(f"\n{cell.detail}", style="dim")
    return text


def print_banner(console: Console, banner: Banner) -> None:
    """Loud when it is bad: a heavy box. A line or two otherwise."""
    style = STYLES[banner.tone]
    if banner.tone == "bad":
        body = Text("\n".join(banner.lines))
        console.print(Panel(body, title=Text(banner.title), title_align="left", border_style=style, box=box.HEAVY))
        return
    console.print(Text.assemble((f"{banner.title}: ", f"bold {style}"), " ".join(banner.lines)))
