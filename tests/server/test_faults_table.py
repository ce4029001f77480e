"""docs/faults.md names a test in each row, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "docs" / "faults.md"


def test_each_row_names_tests_that_exist() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| case")]
    assert len(rows) > 30
    for row in rows:
        cell = row.split(" | ")[-1]
        named = re.findall(r"`([\w./]+\.py)?::(test_\w+)`", cell)
        assert named, row
        file = ""
        for path, test in named:
            file = path or file
            assert re.search(rf"^(async )?def {test}\(", (HERE / file).read_text(), re.MULTILINE), f"{file}::{test}"
