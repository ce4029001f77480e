"""Tables and lines in terminals of any width: no word and no number is broken or cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from headway.report.console import print_lines, print_table
from headway.report.parts import Cell, Line, Table, cells

WIDE = Table(
    "Runs",
    ("Request rate (1/s)", "answered", "output tokens/s", "TTFT P50", "TTFT P99", "TPOT P99", "met", "run"),
    (
        cells(
            "4.123", "1,234,567", Cell("12,345.6", "good", "11,111–13,333"), "98.7", "1,764", "21.5", "99.95 %", "valid"
        ),
    ),
    note="Latencies in ms.",
)


def printed(width: int, *tables: Table, lines: tuple[Line, ...] = ()) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for table in tables:
        print_table(console, table)
    print_lines(console, lines)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_numbers_and_words_of_a_table_stay_whole(width: int) -> None:
    text = printed(width, WIDE)
    whole = " ".join(text.split())
    for row in WIDE.rows:
        for cell in row:
            assert all(part in whole for part in (*cell.text.split(), *cell.detail.split()))
    for column in WIDE.columns:
        assert all(re.search(rf"(?<!\w){re.escape(word)}", whole) for word in column.split())
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width


def test_a_table_that_fits_only_when_it_is_turned_is_turned() -> None:
    lines = printed(40, WIDE).splitlines()
    assert any(line.split() == ["TTFT", "P99", "1,764"] for line in lines)
    assert any(line.split() == ["Request", "rate", "(1/s)", "4.123"] for line in lines)


def test_a_table_that_fits_stays_a_table() -> None:
    assert len(printed(200, WIDE).splitlines()) < len(printed(40, WIDE).splitlines())


@pytest.mark.parametrize("width", [30, 60, 80])
def test_lines_wrap_at_words(width: int) -> None:
    said = "131,072 tokens are left with --prefix-repetition-num-prefixes 5 of 1,024"
    text = printed(width, lines=(Line("Fits", said), Line("Objectives", "met")))
    assert " ".join(text.split()) == f"Fits {said} Objectives met"
    assert text.splitlines()[0].startswith("Fits        1")
