"""Kernels of a profile, by what they are part of."""

from __future__ import annotations

from headway.bench.profile.kernels import kernels_of
from headway.bench.profile.page import page_of
from headway.bench.profile.tables import kernel_table
from tests.bench.profile.made import result as made


def test_steps_of_a_prompt_add_up_and_those_after_it_have_a_median() -> None:
    steps = [
        {"prompt_tokens": 9, "attention_ms": 1.0, "products_ms": 3.0, "other_ms": 0.5},
        {"prompt_tokens": 4, "attention_ms": 2.0, "products_ms": 4.0},
        *({"prompt_tokens": 0, "attention_ms": at, "products_ms": 10 * at} for at in (0.1, 0.2, 9.0)),
        {"prompt_tokens": 0, "decision": "not timed"},
    ]
    assert kernels_of(steps) == {
        "prefill": {"attention_ms": 3.0, "products_ms": 7.0, "other_ms": 0.5},
        "decode_step": {"attention_ms": 0.2, "products_ms": 2.0, "other_ms": 0.0},
    }
    assert kernels_of([{"prompt_tokens": 3}]) == {}, "a server that does not time them"


def test_kernels_are_in_the_table_the_page_and_the_file_where_there_are_any() -> None:
    result = made()
    assert "kernels" not in {table.title for section in page_of(result).sections for table in section.tables}
    result.kernels = {16: {"prefill": {"attention_ms": 1.0, "products_ms": 3.0, "other_ms": 0.0}}}
    table = kernel_table(result)
    assert [cell.text for cell in table.rows[0]] == ["16", "prefill", "1", "3", "0", "4"]
    assert [cell.detail for cell in table.rows[0]][2:4] == ["25 %", "75 %"]
    assert table in [each for section in page_of(result).sections for each in section.tables]
    assert result.as_json()["kernels"]["16"]["prefill"]["products_ms"] == 3.0
