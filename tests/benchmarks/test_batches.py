"""What the comparison with and without a batch sends, and how it counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks import batches
from headway.load.workload.mix import load_mix


def test_the_interactive_load_is_a_mix_with_the_objectives_that_it_is_judged_by(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(batches.MIX.format(rate=4))
    [each] = load_mix(file).classes
    assert {each.name: each.objectives} == batches.OBJECTIVES
    assert each.extra_body == {"service_class": "interactive"}


def test_rates_are_those_of_the_stretch_alone() -> None:
    watch = batches.Watch("", None)
    watch._rows = [(10.0, 0, 1.0), (11.0, 100, 1.5), (13.0, 400, 3.5)]
    assert watch.rates(11.0, 13.0) == (150.0, 1.0)
    assert watch.rates(10.5, 12.0) == (200 / 1.5, 1.25 / 1.5)


def test_texts_have_the_length_that_was_asked_for() -> None:
    assert len(batches.text_of(8192, 1)) == 8192
    assert batches.text_of(100, 1) != batches.text_of(100, 2)


def test_what_is_left_is_the_time_without_a_step() -> None:
    of = {"goodput": 4.0, "met": 1.0, "interactive": 200.0, "offline": 0.0, "busy": 0.4}
    beside = {**of, "offline": 900.0, "busy": 0.95}
    way = {"tokens": 5, "kept": [9.0, 1.0], "not kept": [9.0, 9.5], "crowd": [{"quiet_p50_ms": 2.0}]}
    shown = batches.table(
        {"batch": {"stretches": {"without": [of], "with": [beside]}, "batch_alone": [1500.0]}, "way_in": way}
    )
    assert "| with a batch | 4.00 | 100.0% | 200 | 900 | 95% |" in shown
    assert "A batch alone: 1500 tokens/s; of what is left: 100%" in shown
