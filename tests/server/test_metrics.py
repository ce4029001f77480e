"""What /metrics says: names, labels, buckets, and values that follow from what was asked."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from headway.engine.messages import EngineStats
from headway.policy.objectives.service_class import BUILT_IN
from headway.server.edge.connection import Connection
from headway.server.edge.exchange import Exchange
from headway.server.metrics.metrics import SECONDS, Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.server.test_faults import RawClient

StartServer = Callable[..., LiveServer]
LABELS = {"model_name": "tiny", "engine": "0"}
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "iteration_tokens_bucket",
    "iteration_sequences_bucket",
    "step_duration_seconds_bucket",
    "decode_step_duration_seconds_bucket",
    "request_tokenize_time_seconds_bucket",
    "request_detokenize_time_seconds_bucket",
]


def samples(server: LiveServer) -> dict[str, float]:
    """Sample name, with label values other than the usual two, to its value."""
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            further = [value for name, value in sample.labels.items() if name not in LABELS]
            found[" ".join([sample.name, *further])] = sample.value
            if not sample.name.startswith(("process_", "python_")):
                assert sample.labels.items() >= LABELS.items()
    return found


@pytest.mark.parametrize("prefix", ["headway:", "vllm:"])
def test_names_and_labels(start_server: StartServer, prefix: str) -> None:
    server = start_server(metrics_prefix=prefix)
    server.post("/v1/completions", prompt="x")
    found = {name.split(" ")[0] for name in samples(server)}
    total = "_total" if prefix == "vllm:" else ""
    names = [each.replace("iteration_tokens", f"iteration_tokens{total}") for each in NAMES]
    assert {prefix + name for name in names} <= found
    assert "process_resident_memory_bytes" in found
    assert not any(name.endswith("_created") for name in found)


def test_values_follow_from_requests(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    engine.step_s = 0.002
    server.post("/v1/completions", prompt=[5] * 10, max_tokens=6, ignore_eos=True)
    server.post("/v1/completions", prompt=[5] * 20, max_tokens=200, n=2)
    server.post("/v1/completions", prompt=[5], max_tokens=200, stop="time")
    eventually(lambda: not server.service._background)
    eventually(lambda: samples(server)["headway:e2e_request_latency_seconds_count"] == 4)
    found = samples(server)
    assert found["headway:request_success_total length"] == 1
    assert found["headway:request_success_total stop"] == 3
    eventually(lambda: samples(server)["headway:e2e_request_latency_seconds_count"] == 4)
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_decode_time",
        "request_tokenize_time",
        "request_detokenize_time",
    ):
        assert found[f"headway:{name}_seconds_count"] == 4
    tokens = found["headway:request_generation_tokens_sum"]
    assert tokens > 6
    # Each choice has one gap fewer than tokens.
    assert found["headway:inter_token_latency_seconds_count"] == tokens - 4
    assert found["headway:request_time_per_output_token_seconds_count"] == 4
    assert found["headway:request_prompt_tokens_sum"] == 10 + 20 + 20 + 1
    assert found["headway:iteration_tokens_count"] > 6
    assert found["headway:iteration_sequences_count"] == found["headway:iteration_tokens_count"]
    assert found["headway:stall_seconds_total decode_stall_prefill"] > 0
    assert found["headway:kv_cache_usage_perc"] == 0.25
    assert 0 < found["headway:time_to_first_token_seconds_sum"] <= found["headway:e2e_request_latency_seconds_sum"]


def test_the_time_of_choices_is_counted_by_class_and_phase(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    name = "headway:class_request_phase_seconds_total"
    assert samples(server)[f"{name} decode_stall_preempted interactive"] == 0, (
        "a counter that is there before its first value"
    )
    engine.step_s, engine.shares = 0.005, {"queue_blocks": 0.5, "decode_stall_preempted": 0.25}
    asked = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "n": 2}
    timings = server.post("/v1/completions", **asked, include_timings=True).json()["timings"]
    eventually(lambda: samples(server)["headway:request_success_total length"] == 2)
    every = {tuple(key.split(" ")): value for key, value in samples(server).items() if key.startswith(name)}
    found = {phase: value for (_, phase, service_class), value in every.items() if service_class == "interactive"}
    assert sum(found.values()) == pytest.approx(2 * timings["e2e_ns"] * 1e-9, rel=0.2)
    assert found["queue_blocks"] == pytest.approx(2 * found["decode_stall_preempted"], rel=0.01)
    assert found["receive"] > 0 and found["decode_stall_recompute"] == 0


def test_gaps_are_counted_as_a_histogram_of_prometheus_counts_them() -> None:
    """Exactly on a bound and beyond the last one, too; and a class keeps its counts when classes have new names."""
    metrics = Metrics("headway:", "tiny", engine=None)
    metrics.by_class.set_classes(BUILT_IN)
    known = BUILT_IN.default_class.name
    reference = Histogram("gaps", "", ["service_class"], buckets=SECONDS, registry=None)
    for number, gap_ns in enumerate([1, 10**6, 10**6 + 1, 5 * 10**8, 10**11, 10**12]):
        for name, label in ((known, known), (f"unknown {number}", "other")):
            metrics.by_class.gaps.add(name, gap_ns)
            reference.labels(label).observe(gap_ns * 1e-9)
        metrics.by_class.set_classes(BUILT_IN)
    expected = [(one.name[4:], one.labels, one.value) for one in next(iter(reference.collect())).samples]
    of_all, by_class = metrics.by_class.gaps.collect()
    found = [(one.name.partition("seconds")[2], one.labels, one.value) for one in by_class.samples]
    assert [(name, {k: v for k, v in labels.items() if k not in LABELS}) for name, labels, _ in found] == [
        (name, labels) for name, labels, _ in expected
    ]
    assert [value for *_, value in found] == pytest.approx([value for *_, value in expected])
    assert [one.value for one in of_all.samples] == pytest.approx(
        [2 * value for *_, value in expected[: len(found) // 2]]
    )


def test_buckets_resolve_milliseconds_to_minutes(start_server: StartServer) -> None:
    found = samples(start_server())
    bounds = sorted(
        float(name.split(" ")[1]) for name in found if name.startswith("headway:time_to_first_token_seconds_bucket")
    )
    assert bounds[0] == 0.001
    assert bounds[-2] == 100
    assert all(high / low <= 1.7 for low, high in itertools.pairwise(bounds[:-1]))


def test_steps_are_resolved_to_microseconds_and_decodes_told_from_prompts(
    start_server: StartServer, engine: FakeEngine
) -> None:
    server = start_server()
    steps = [
        EngineStats(2, 0, 0.0, step_ns=20_000, scheduled_tokens=2, scheduled_sequences=2),  # two decode
        EngineStats(2, 0, 0.0, step_ns=9_000_000, prompt_tokens=30, scheduled_tokens=31, scheduled_sequences=2),
        EngineStats(1, 0, 0.0, step_ns=8_000_000, scheduled_tokens=30, scheduled_sequences=1),  # computed again
        EngineStats(0, 0, 0.0, windows=2),
    ]
    steps[1].predicted_ns, steps[1].forward_ns = 8e6, 10_000_000
    steps[1].slack_ns, steps[1].left_out = 5e6, 3
    steps[0].moe_mixtures, steps[0].moe_expert_tokens, steps[0].moe_experts_touched = 2, 8, 6
    steps[0].moe_busiest_expert_tokens = 3
    steps[2].spec_decode_num_drafts, steps[2].spec_decode_num_draft_tokens = 2, 9
    steps[2].spec_decode_num_accepted_tokens, steps[2].accepted_at = 3, [2, 1]
    for stats in steps:
        server.service.metrics.on_step(stats)
    found = samples(server)
    assert found["headway:spec_decode_num_drafts_total"] == 2
    assert found["headway:spec_decode_num_draft_tokens_total"] == 9
    assert found["headway:spec_decode_num_accepted_tokens_total"] == 3
    assert found["headway:spec_decode_num_accepted_tokens_per_pos_total 0"] == 2
    assert found["headway:spec_decode_num_accepted_tokens_per_pos_total 1"] == 1
    assert found["headway:step_duration_seconds_count"] == found["headway:iteration_sequences_count"] == 3
    assert found["headway:iteration_sequences_sum"] == 5
    assert found["headway:decode_step_duration_seconds_count"] == 1
    assert found["headway:decode_step_duration_seconds_bucket 2e-05"] == 1
    assert found["headway:decode_step_duration_seconds_bucket 1.5e-05"] == 0
    assert found["headway:step_prompt_tokens_sum"] == 30 and found["headway:step_prompt_tokens_count"] == 1
    assert found["headway:step_slack_seconds_sum"] == 0.005
    assert found["headway:step_time_measured_to_predicted_ratio_sum"] == 1.25
    assert (found["headway:tokens_left_out_total"], found["headway:batching_windows_total"]) == (3, 2)
    assert (found["headway:moe_mixtures_total"], found["headway:moe_expert_tokens_total"]) == (2, 8)
    assert (found["headway:moe_experts_touched_total"], found["headway:moe_busiest_expert_tokens_total"]) == (6, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_times_end_when_the_bytes_are_handed_to_the_connection(
    start_server: StartServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What holds up the sending of a token counts, though the token has long been in the API process."""
    server = start_server()
    send = Exchange.send
    texts = {True: [b"time", b"[DONE]"], False: [b"time"]}[stream]

    async def held_up(cycle: Exchange, message: Any) -> None:
        if any(text in message.get("body", b"") for text in texts):
            await asyncio.sleep(0.2)
        await send(cycle, message)

    monkeypatch.setattr(Exchange, "send", held_up)
    monkeypatch.setattr(Connection, "_write_now", lambda connection, data: False)
    assert server.post("/v1/completions", prompt="x", max_tokens=200, stream=stream).status_code == 200
    eventually(lambda: samples(server)["headway:e2e_request_latency_seconds_count"] == 1)
    found = samples(server)
    ttft, e2e = (found[f"headway:{name}_seconds_sum"] for name in ("time_to_first_token", "e2e_request_latency"))
    assert e2e > 0.2
    assert ttft < 0.2 if stream else ttft == pytest.approx(e2e, abs=0.001)
    assert found["headway:time_to_first_token_seconds_count"] == 1


def test_choice_counts_as_sent_when_its_own_tokens_are(start_server: StartServer, engine: FakeEngine) -> None:
    """A token without text makes no chunk; the first one that has some is the first that is sent."""
    server = start_server()
    words = engine.tokenizer.encode("🧿")
    assert len(words) > 1
    engine.reply = lambda request, index: words if index else []
    answer = server.post("/v1/completions", prompt="x", n=2, stream=True, max_tokens=len(words) + 1)
    assert answer.text.count('"text":"🧿"') == 1
    eventually(lambda: samples(server)["headway:e2e_request_latency_seconds_count"] == 2)
    assert samples(server)["headway:time_to_first_token_seconds_count"] == 2


def test_request_of_a_client_that_left_is_an_abort(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    engine.open = False
    client = RawClient(server)
    client.ask(prompt="x", n=2)
    eventually(lambda: len(engine.running) == 2)
    client.socket.close()
    eventually(lambda: samples(server).get("headway:request_success_total abort") == 2)
    assert samples(server)["headway:e2e_request_latency_seconds_count"] == 0


def test_only_requests_that_waited_in_a_window_count_in_it(start_server: StartServer) -> None:
    server = start_server()
    for phases in ({"queue_window": 4_000_000, "queue_capacity": 1_000_000}, {"queue_capacity": 1_000_000}):
        server.service.metrics._observe_phases(phases)
    found = samples(server)
    assert found["headway:request_batching_window_seconds_sum"] == 0.004
    assert found["headway:request_batching_window_seconds_count"] == 1
    assert found["headway:request_queue_time_seconds_sum"] == pytest.approx(0.006)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_the_engine_process_is_told_apart(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    assert not any(name.startswith("headway:engine_cpu") for name in samples(server))  # there is none yet
    engine.pid = os.getpid()
    found, usage = samples(server), resource.getrusage(resource.RUSAGE_SELF)
    assert found["headway:engine_cpu_seconds_total"] == pytest.approx(usage.ru_utime + usage.ru_stime, abs=0.5)
    resident = found["process_resident_memory_bytes"]
    assert found["headway:engine_resident_memory_bytes"] == pytest.approx(resident, rel=0.05)
    assert found["headway:engine_page_faults_total minor"] == pytest.approx(usage.ru_minflt, rel=0.05)
    assert found["headway:engine_page_faults_total major"] == pytest.approx(usage.ru_majflt, abs=100)


def test_gauges_follow_the_engine(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    assert samples(server)["headway:num_requests_running"] == 0
    engine.num_waiting, engine.restarts = 7, 2
    found = samples(server)
    assert (found["headway:num_requests_waiting"], found["headway:engine_restarts"]) == (7, 2)


def test_the_cache_is_described_as_routers_look_for_it(start_server: StartServer) -> None:
    text = start_server(metrics_prefix="vllm:").client.get("/metrics").text
    labels = 'block_size="16",cache_dtype="float32",engine="0",model_name="tiny",num_gpu_blocks="64"'
    (line,) = [each for each in text.splitlines() if each.startswith("vllm:cache_config_info{")]
    assert sorted(line.partition("{")[2].removesuffix("} 1.0").split(",")) == labels.split(",")


def test_the_pool_is_told_by_class(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server()
    assert engine.ready is not None
    engine.ready.pinned_blocks = 3
    found = samples(server)  # before the first step
    assert (found["headway:kv_cache_used_bytes"], found["headway:kv_blocks_free"]) == (3_000, 61)
    stats = EngineStats(
        1,
        0,
        0.5,
        protected_blocks=7,
        watermark_blocks=2,
        blocks_of_class={"interactive": 5, "gone": 2, "older": 1, "": 4},
        evictions={"offline": {"age": 3, "lent": 1}, "gone": {"age": 2}, "": {"protected": 1}},
        queries_of_class={"interactive": 100},
        hits_of_class={"interactive": 64},
        allocated_blocks=10,
        allocated_runs=3,
        swaps={"out": 48, "swap": 1, "full": 2, "copy_ns": 3_000_000},
        swap_usage=0.5,
    )
    server.service.metrics.on_step(stats)
    engine.stats = stats
    found = samples(server)
    assert (found["headway:kv_cache_used_bytes"], found["headway:kv_blocks_free"]) == (12_000, 64 - 12)
    assert found["headway:kv_evictions_total age offline"] == 3
    assert found["headway:kv_evictions_total lent offline"] == 1
    assert found["headway:kv_evictions_total age other"] == 2
    assert found["headway:kv_evictions_total protected several"] == 1
    assert found["headway:class_prefix_cache_queries_total interactive"] == 100
    assert found["headway:class_prefix_cache_hits_total interactive"] == 64
    assert (found["headway:kv_blocks_protected"], found["headway:kv_watermark_blocks"]) == (7, 2)
    assert found["headway:preloaded_prompts_left_out"] == 0
    assert (found["headway:kv_blocks_allocated_total"], found["headway:kv_block_runs_allocated_total"]) == (10, 3)
    assert found["headway:kv_swapped_tokens_total out"] == 48 and found["headway:kv_swapped_tokens_total in"] == 0
    assert found["headway:kv_swap_decisions_total swap"] == 1 and found["headway:kv_swap_decisions_total full"] == 2
    assert found["headway:kv_swap_predicted_seconds_total copy"] == pytest.approx(0.003)
    assert found["headway:cpu_cache_usage_perc"] == 0.5
    used = {
        name: found[f"headway:class_kv_blocks_used {name}"] for name in ("interactive", "batch", "other", "several")
    }
    assert used == {"interactive": 5, "batch": 0, "other": 3, "several": 4}
