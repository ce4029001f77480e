"""Each pitfall is found from its signal, with what it costs; a server without faults has none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.advisor.evidence import Evidence, increase
from headway.advisor.machine import MachineLook
from headway.advisor.pitfalls import Finding, Gain, findings
from headway.advisor.playbook import BY_KEY, LEVERS
from headway.changes import typed
from tests.advisor.evidences import healthy, metrics, record, replace_cached, stage

RECORDED = Path(__file__).parent / "recorded"
LOOK = healthy().machine
assert LOOK is not None


def first(evidence: Evidence) -> Finding:
    found = findings(evidence)
    assert found, "nothing was found"
    return found[0]


@pytest.mark.parametrize("kind", ["headway", "vllm", "sglang", "llamacpp", "unknown"])
def test_a_healthy_server_has_no_fault(kind: str) -> None:
    assert findings(healthy(kind)) == []


def one_by_one(ledger: bool) -> Any:
    """A crowd of which one request runs at a time, each for 100 ms."""
    waits = [100.0 * number for number in range(16)]
    told = [{"queue_capacity": wait} if ledger else {} for wait in waits]
    return stage(*(record(n, 12.0 + wait, 10, 9.0, **told[n]) for n, wait in enumerate(waits)))


WORSE_STREAM = record(0, 20.0, 40, 6.0)
WORSE_STREAM.chunk_ns = WORSE_STREAM.chunk_ns[:20] + type(WORSE_STREAM.chunk_ns)(
    "q", [each + 400_000_000 for each in WORSE_STREAM.chunk_ns[20:]]
)
STOOD = stage(WORSE_STREAM, num_preemptions_total=0.0)
BLOCKED = stage(*(record(n, 300.0, 20, 9.0, queue_blocks=250.0) for n in range(16)), num_preemptions_total=4.0)
MISSED = stage(*replace_cached([record(n, 60.0, 4, prefill_compute=50.0) for n in range(3)], 0))
STEPS = stage(
    *(record(n, 200.0, 4, prefill_compute=190.0) for n in range(3)),
    step_prompt_tokens_count=144.0,
    step_prompt_tokens_sum=2304.0,
)


@pytest.mark.parametrize(
    ("key", "changes", "figure"),
    [
        ("queue", {"crowd": one_by_one(True)}, "TTFT of a crowd"),
        ("kv", {"crowd": BLOCKED}, "a request"),
        ("prefix", {"again": MISSED}, "TTFT of a repeated prompt"),
        ("chunk-large", {"beside": STOOD}, "the longest gap"),
        ("chunk-small", {"first": STEPS}, "TTFT of a long prompt"),
        (
            "window",
            {"alone": stage(*(record(n, 160.0, 32, queue_window=150.0) for n in range(5)))},
            "TTFT at a low rate",
        ),
        (
            "tokenizer",
            {"first": stage(*(record(n, 60.0, 4, tokenize=30.0) for n in range(3)))},
            "TTFT of a long prompt",
        ),
        (
            "host",
            {"crowd": stage(*(record(n, 40.0, 32, 9.0, schedule=90.0, transport=90.0) for n in range(16)))},
            "a request of a crowd",
        ),
        (
            "drafts",
            {
                "counted": increase(
                    "",
                    metrics(
                        spec_decode_num_draft_tokens_total=400.0,
                        spec_decode_num_accepted_tokens_total=20.0,
                    ),
                )
            },
            "TPOT",
        ),
        ("threads", {"machine": replace(LOOK, cores=8, workers=2, cores_used=1.9)}, "TPOT"),
        ("threads", {"machine": replace(LOOK, cores=2, workers=8)}, "TPOT"),
        ("parallel", {"machine": replace(LOOK, commands=("vllm serve m --tensor-parallel-size 8",))}, "TPOT"),
        ("contended", {"machine": replace(LOOK, waited=0.5)}, "TPOT"),
        ("steal", {"machine": replace(LOOK, steal=0.2)}, "TPOT"),
        ("swap", {"machine": replace(LOOK, swapped_bytes=2**27, swapping=500.0)}, "TPOT"),
        ("huge-pages", {"machine": replace(LOOK, huge_pages="never", resident_bytes=2**33)}, "TPOT"),
        ("frequency", {"machine": replace(LOOK, frequency=0.5, governor="powersave")}, "TPOT"),
    ],
)
def test_a_fault_is_named_first_with_what_it_costs(key: str, changes: dict[str, Any], figure: str) -> None:
    found = first(healthy(**changes))
    assert found.lever.key == key and found.gain is not None and found.gain.figure == figure and found.evidence
    low, high = found.gain.bar
    assert 1.0 <= low <= found.gain.times <= high and 0 < found.confidence < 1


def test_without_a_ledger_a_queue_is_seen_by_the_order_of_answers() -> None:
    found = first(healthy("llamacpp", crowd=one_by_one(False)))
    assert found.lever.key == "queue" and "at most 1 ran together" in found.evidence[0]
    assert typed(found.changes) == "--parallel 32"


def test_a_crowd_that_waits_for_blocks_is_no_queue() -> None:
    evidence = healthy(crowd=BLOCKED, beside=STOOD)
    assert [each.lever.key for each in findings(evidence)] == ["kv"]


def test_the_longest_gap_says_how_many_tokens_a_step_had() -> None:
    """400 ms, where 768 tokens take 60 ms, are 5,000 tokens: steps of 512 would take a tenth."""
    gain = first(healthy(beside=STOOD)).gain
    assert gain is not None and gain.now_ms == pytest.approx(406) and gain.times == pytest.approx(10, rel=0.1)


def test_a_gap_without_a_large_step_is_not_the_prompts_doing() -> None:
    """Buckets count how many steps had at most so many tokens."""
    steps = {768: 3.0, 1024: 6.0, 8192: 6.0}
    text = "".join(f'headway:step_prompt_tokens_bucket{{le="{bound}"}} {count}\n' for bound, count in steps.items())
    counted = increase("", text)
    assert findings(healthy(beside=replace(STOOD, counted=counted))) == []
    larger = increase("", text.replace("6.0", "5.0", 1))
    found = first(healthy(beside=replace(STOOD, counted=larger)))
    assert found.lever.key == "chunk-large" and "up to 8,192 tokens" in found.evidence[-1]


def test_busy_threads_on_half_of_the_cores_are_no_fault_while_the_server_idles() -> None:
    assert findings(healthy(machine=replace(LOOK, cores=8, workers=2, cores_used=0.3))) == []


def recorded(name: str) -> Evidence:
    """A server whose metrics are all that is known."""
    text = (RECORDED / f"{name}.txt").read_text()
    usual = {"vllm": {"kv_cache_usage": 0.987, "waiting": 31.0}, "llamacpp": {"waiting": 15.0}}
    return Evidence(name, {"name": name}, lifetime=increase("", text), gauges=usual[name])


def test_metrics_of_vllm_alone_tell_of_pressure_drafts_and_prefixes() -> None:
    found = {each.lever.key: each for each in findings(recorded("vllm"))}
    assert found.keys() == {"kv", "drafts", "prefix"}
    assert "741 preemptions since its start" in found["kv"].evidence
    assert any("32,768 tokens" in each for each in found["kv"].evidence)
    assert "9% were accepted" in found["drafts"].evidence[0] and "0.1%" in found["prefix"].evidence[0]
    assert typed(found["kv"].changes) == "--gpu-memory-utilization 0.95"
    gains = {key: each.gain for key, each in found.items()}
    assert gains["kv"] is not None and gains["kv"].now_ms == pytest.approx(9120.0 / 1800.0 * 1e3)
    assert gains["drafts"] is None  # these metrics have no time of a token


def test_metrics_of_llama_cpp_alone_tell_of_nothing_else() -> None:
    assert findings(recorded("llamacpp")) == []


def test_a_gain_has_a_bar_around_its_prediction() -> None:
    gain = Gain.of("TTFT", 100.0, 50.0, 0.2)
    assert (gain.then_ms, gain.low_ms, gain.high_ms) == (50.0, 40.0, 60.0)
    assert gain.times == 2.0 and gain.bar == pytest.approx((1.667, 2.5), abs=1e-3)
    assert Gain.of("TTFT", 100.0, 99.0).then_ms == 10.0  # more than nine tenths are never promised


def test_findings_are_ranked_by_expected_gain() -> None:
    found = findings(healthy(machine=replace(LOOK, steal=0.06), crowd=one_by_one(True)))
    weights = [each.confidence * math.log(each.gain.times) for each in found if each.gain is not None]
    assert [each.lever.key for each in found] == ["queue", "steal"] and weights == sorted(weights, reverse=True)


# --- the playbook ----------------------------------------------------------------------------------------


def test_the_playbook_covers_both_documents() -> None:
    parts = {part for lever in LEVERS for part in lever.parts}
    wanted = {f"{what} {n}" for what, most in (("step", 12), ("pitfall", 6), ("box", 10)) for n in range(1, most + 1)}
    of_the_tail = {"quantization", "kernels", "batching", "kv cache", "scheduling", "hardware and network"}
    assert parts == wanted | {f"lever {name}" for name in of_the_tail}
    assert len(BY_KEY) == len(LEVERS)


VALUES = {"sequences": 32, "pool_tokens": 9, "chunk": 512, "cores": 2}


@pytest.mark.parametrize("key", BY_KEY)
def test_every_lever_says_what_to_do_and_how_to_verify_it(key: str) -> None:
    lever = BY_KEY[key]
    for kind in ("headway", "vllm", "sglang", "llamacpp"):
        changes = lever.changes(kind, VALUES)  # those of Headway are parsed as its flags
        assert changes or lever.advised(kind), kind
        assert typed(changes) == lever.remedy.get(kind, "").format_map(VALUES)
    assert lever.verify and lever.signal


def test_a_look_at_a_machine_has_no_figure_that_was_not_read() -> None:
    assert findings(healthy(machine=MachineLook(1.0, cores=1))) == []
