"""Which rows of a cross of parameters are quick: tests/conftest.py."""

from __future__ import annotations

import itertools

from tests.conftest import covering_rows

ROWS = [[f"{column}{value}" for column, value in enumerate(row)] for row in itertools.product(*map(range, (5, 3, 2)))]


def pairs(rows: list[list[str]]) -> set[tuple[str, str]]:
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


def test_each_value_is_there_and_values_take_turns() -> None:
    found = [ROWS[number] for number in sorted(covering_rows(ROWS, 1))]
    assert [first for first, *_ in found] == [f"0{value}" for value in range(5)]
    assert [second for _, second, _ in found] == ["10", "11", "12", "10", "11"]
    assert {third for *_, third in found} == {"20", "21"}


def test_each_pair_is_there_in_few_rows() -> None:
    found = [ROWS[number] for number in covering_rows(ROWS, 2)]
    assert pairs(found) == pairs(ROWS) and len(found) < 20


def test_a_row_may_have_fewer_columns() -> None:
    assert covering_rows([["a"], ["b"], ["a"]], 2) == {0, 1}
    assert covering_rows([], 2) == set()
