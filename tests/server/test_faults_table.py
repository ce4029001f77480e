"""tests/server/faults.md has the cases of docs/faults.md, and names tests of each that are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE / "faults.md"
CASES = HERE.parent.parent / "docs" / "faults.md"


def rows(table: Path) -> list[list[str]]:
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ") and not line.startswith("| case")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


def test_each_case_names_tests_that_exist() -> None:
    tested = rows(TESTS)
    assert len(tested) > 30
    assert [row[0] for row in tested] == [row[0] for row in rows(CASES)]
    for case, cell in tested:
        named = re.findall(r"`([\w./]+\.py)?::(test_\w+)`", cell)
        assert named, case
        file = ""
        for path, test in named:
            file = path or file
            assert re.search(rf"^(async )?def {test}\(", (HERE / file).read_text(), re.MULTILINE), f"{file}::{test}"
