"""A box is ticked by what was measured, and by nothing else."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from headway.advisor.checklist import BOXES, as_object, checked, print_checklist
from headway.advisor.evidence import Evidence, increase
from tests.advisor.evidences import healthy, metrics, record, replace_cached, stage

TUNED = {
    "counted": increase(
        "",
        metrics(
            spec_decode_num_draft_tokens_total=400.0,
            spec_decode_num_accepted_tokens_total=240.0,
            prefix_cache_hits_total=2100.0,
            prefix_cache_queries_total=4600.0,
            num_preemptions_total=0.0,
            kv_evictions_total=3.0,
            class_objectives_total=84.0,
            step_time_to_roofline_ratio_sum=300.0,
            step_time_to_roofline_ratio_count=100.0,
        )
        + 'headway:class_requests_running{service_class="interactive"} 0\n'
        + 'headway:class_requests_running{service_class="batch"} 0\n',
    ),
    "metrics": frozenset({"time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_bucket"}),
    "gauges": {"kv_cache_usage": 0.2},
    "limits": {"x-ratelimit-limit-requests": "60"},
    "traced_steps": 20,
}


def ticked(evidence: Evidence) -> set[int]:
    return {box.number for box, verdict in checked(evidence) if verdict.ticked}


def test_a_tuned_server_has_all_boxes_but_the_one_that_no_endpoint_tells() -> None:
    assert ticked(healthy(**TUNED)) == set(range(1, 11)) - {7}


def test_a_server_of_which_nothing_is_known_has_none() -> None:
    assert ticked(Evidence("unknown", {})) == set()


@pytest.mark.parametrize(
    ("box", "changes"),
    [
        (1, {"crowd": stage(record(0, 10.0, 4, schedule=0.1))}),
        (2, {"first": stage(*(record(n, 600.0, 4, prefill_compute=590.0) for n in range(3)))}),
        (3, {"crowd": stage(*(record(n, 40.0, 32, 9.0, schedule=90.0) for n in range(16)))}),
        (4, {"prompts": stage(*(record(n, 5000.0, 2) for n in range(6)))}),
        (5, {"again": stage(*replace_cached([record(n, 60.0, 4, schedule=0.1) for n in range(3)], 0))}),
        (6, {"gauges": {}}),
        (9, {"limits": {}}),
        (10, {"metrics": frozenset({"time_to_first_token_seconds_bucket"})}),
        (10, {"traced_steps": 0}),
    ],
)
def test_a_box_is_not_ticked_where_its_measurement_says_otherwise(box: int, changes: dict[str, Any]) -> None:
    assert ticked(healthy(**TUNED | changes)) == set(range(1, 11)) - {7, box}


def test_drafts_that_are_seldom_accepted_are_not_tuned() -> None:
    few = increase("", metrics(spec_decode_num_draft_tokens_total=400.0, spec_decode_num_accepted_tokens_total=20.0))
    assert 8 not in ticked(healthy(counted=few)) and 8 not in ticked(healthy())


def test_every_box_has_its_figure_and_what_to_do() -> None:
    console = Console(file=io.StringIO(), width=100)
    evidence = replace(healthy(), metrics=frozenset())
    print_checklist("http://x:1", evidence, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    told = as_object("http://x:1", evidence)
    assert [box["number"] for box in told["boxes"]] == list(range(1, 11)) == [box.number for box in BOXES]
    assert all(box["figure"] and (box["ticked"] or box["next"]) for box in told["boxes"])
    assert said.count("[x]") == sum(box["ticked"] for box in told["boxes"])
    assert said.count("Next: ") == said.count("[ ]") and "no /metrics" in said
