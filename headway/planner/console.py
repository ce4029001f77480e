"""A plan on a terminal: the short answer; then, where asked for, tables and what it rests on, or the formulas."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from headway.planner.answer import answer, headline
from headway.planner.formula import DOCUMENTS
from headway.planner.formulas import formulas
from headway.planner.plan import Plan
from headway.planner.tables import tables
from headway.report.console import print_lines, print_table
from headway.report.parts import Line

RANGES = "Four in five measurements lie within the brackets."
NEXT = "--verbose shows all tables and assumptions. `headway plan levers` with the same options ranks changes."
# Columns that the widest table takes.
WIDE = 80


def print_brief(plan: Plan, console: Console) -> None:
    """Print the answer, how to read it, and what to do next."""
    ranges = () if plan.tpot is None else (Line("Ranges", RANGES),)
    print_answer(plan, console, *ranges, Line("Next", NEXT))


def print_plan(plan: Plan, console: Console) -> None:
    """Print all that a plan says."""
    print_answer(plan, console)
    for table in tables(plan, narrow=console.width < WIDE):
        console.print()
        print_table(console, table)
    console.print()
    console.print(Text("Assumptions", style="bold"))
    listed = RichTable.grid(padding=(0, 1))
    for each in plan.assumptions:
        listed.add_row(Text("•"), Text(each))
    console.print(listed)


def print_answer(plan: Plan, console: Console, *more: Line) -> None:
    """Print the headline, and a line for each question."""
    console.print(Text(headline(plan), style="bold"))
    print_lines(console, (*answer(plan), *more))


def print_explained(plan: Plan, console: Console) -> None:
    """Print the answer, and every formula in the order of the calculation."""
    print_answer(plan, console)
    for formula in formulas(plan):
        console.print()
        console.print(Text.assemble((formula.name, "bold"), f"  [{formula.source}]"))
        for line in filter(None, formula.lines):
            console.print(Padding(Text(line), (0, 0, 0, 4)))
    console.print()
    console.print(Text("; ".join(f"document {number}: {title}" for number, title in DOCUMENTS.items()), style="dim"))
