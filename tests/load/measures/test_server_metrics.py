"""Scrapes of the servers that the bench knows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from headway.engine.messages import EngineStats
from headway.load.measures.server_metrics import parse_metrics, read_gauges, server_metrics
from headway.server.metrics.metrics import Metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="org/m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="org/m"}} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="org/m"}} 7.0
vllm:num_requests_waiting{{engine="1",model_name="org/m"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="org/m"}} 0.5
vllm:kv_cache_usage_perc{{engine="1",model_name="org/m"}} 0.3
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="org/m"}} {tokens}
# HELP vllm:prefix_cache_queries_total Prefix cache queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="org/m"}} {queries}
# HELP vllm:prefix_cache_hits_total Prefix cache hits.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="org/m"}} {hits}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="org/m"}} {stopped}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="org/m"}} 4.0
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3",model_name="org/m"}} 1.0
vllm:request_queue_time_seconds_bucket{{engine="0",le="+Inf",model_name="org/m"}} {queued}
vllm:request_queue_time_seconds_count{{engine="0",model_name="org/m"}} {queued}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="org/m"}} {queue_s}
"""
BEFORE = VLLM.format(tokens=100, queries=1000, hits=100, stopped=5, queued=10, queue_s=2.0)
AFTER = VLLM.format(tokens=350, queries=3000, hits=1600, stopped=15, queued=30, queue_s=3.0)


def test_the_change_between_two_scrapes() -> None:
    metrics = server_metrics(BEFORE, AFTER)
    assert metrics["prefix"] == "vllm"
    assert metrics["generation_tokens"] == 250
    assert metrics["prefix_cache"] == {"queries": 2000, "hits": 1500, "hit_rate": 0.75}
    assert metrics["requests_finished"] == {"length": 0, "stop": 10}
    assert metrics["queue"] == {"count": 20, "sum_s": 1.0, "mean_ms": 50.0}
    assert "prefill" not in metrics and "preemptions" not in metrics and "resets" not in metrics
    json.dumps(metrics, allow_nan=False)


def test_any_prefix_is_understood() -> None:
    for prefix in ("headway:", "other:", "sglang_"):
        before, after = (text.replace("vllm:", prefix) for text in (BEFORE, AFTER))
        metrics = server_metrics(before, after)
        assert metrics["prefix"] == prefix[:-1]
        assert metrics["generation_tokens"] == 250
        assert read_gauges(after)["waiting"] == 7


def test_nothing_happened() -> None:
    metrics = server_metrics(BEFORE, BEFORE)
    assert metrics["queue"] == {"count": 0, "sum_s": 0.0, "mean_ms": None}
    assert metrics["prefix_cache"]["hit_rate"] is None


def test_a_server_started_anew_counts_from_nothing_and_is_named() -> None:
    restarted = VLLM.format(tokens=40, queries=3000, hits=1600, stopped=2, queued=30, queue_s=3.0)
    metrics = server_metrics(BEFORE, restarted)
    assert metrics["generation_tokens"] == 40
    assert metrics["requests_finished"]["stop"] == 2
    assert metrics["resets"] == ["generation_tokens_total", "request_success_total"]


def test_a_series_that_appeared_in_the_run_counts_from_nothing() -> None:
    assert server_metrics("process_cpu_seconds_total 3.0\n", AFTER)["generation_tokens"] == 350


def test_without_both_scrapes_there_is_no_change() -> None:
    assert server_metrics("", AFTER) == server_metrics(BEFORE, "\n") == {}


def test_gauges_over_engines() -> None:
    assert read_gauges(AFTER) == {"running": 5, "waiting": 7, "kv_cache_usage": pytest.approx(0.4)}


def test_gauges_are_found_in_the_lines_as_the_parser_reads_them() -> None:
    series = parse_metrics(AFTER).series
    gauges = read_gauges(AFTER)
    assert gauges["running"] == sum(series["num_requests_running"].values())
    assert gauges["waiting"] == sum(series["num_requests_waiting"].values())


def test_gauges_over_time() -> None:
    scrapes = [(0.5, {"running": 1.0, "kv_cache_usage": 0.2}), (1.5, {"running": 4.0}), (2.5, {"running": 1.0})]
    metrics = server_metrics(BEFORE, AFTER, scrapes)
    assert metrics["gauges"] == {
        "running": {"mean": 2.0, "peak": 4.0},
        "kv_cache_usage": {"mean": 0.2, "peak": 0.2},
    }
    assert metrics["gauges_over_time"] == {
        "t_s": [0.5, 1.5, 2.5],
        "running": [1.0, 4.0, 1.0],
        "kv_cache_usage": [0.2, None, None],
    }


def test_headways_own() -> None:
    engine = SimpleNamespace(stats=None, ready=None, num_waiting=2, restarts=0, hangs=0, pid=None)
    metrics = Metrics("headway:", "tiny", engine)
    before = metrics.exposition().decode()
    stats = EngineStats(
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        prompt_tokens=64,
        generation_tokens=5,
        prefix_cache_queries=80,
        prefix_cache_hits=16,
        preemptions=1,
        scheduled_tokens=69,
        step_ns=20_000_000,
        stall_ns={"decode_stall_prefill": 3_000_000_000},
    )
    engine.stats = stats
    metrics.on_step(stats)
    after = metrics.exposition().decode()
    told = server_metrics(before, after)
    assert told["prefix"] == "headway"
    assert (told["prompt_tokens"], told["generation_tokens"], told["preemptions"]) == (64, 5, 1)
    assert told["prefix_cache"]["hit_rate"] == 0.2
    assert told["stall_seconds"] == {"decode_stall_prefill": 3.0}
    assert told["step"]["mean_ms"] == pytest.approx(20)
    assert read_gauges(after) == {"running": 3, "waiting": 2, "kv_cache_usage": 0.25}


SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="m",tp_rank="0"}} 6.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{model_name="m",tp_rank="0"}} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{{model_name="m",tp_rank="0"}} 0.28
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {prompt}
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{{cache_source="device",model_name="m"}} {cached}
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{{model_name="m"}} {retracted}
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_count{{model_name="m"}} {count}
sglang:queue_time_seconds_sum{{model_name="m"}} {seconds}
"""


def test_sglang() -> None:
    before = SGLANG.format(prompt=100, cached=0, retracted=0, count=1, seconds=0.5)
    after = SGLANG.format(prompt=500, cached=100, retracted=3, count=5, seconds=0.7)
    metrics = server_metrics(before, after)
    assert metrics["prefix_cache"] == {"queries": 400, "hits": 100, "hit_rate": 0.25}
    assert metrics["preemptions"] == 3
    assert metrics["queue"]["mean_ms"] == pytest.approx(50)
    assert read_gauges(after) == {"running": 6, "waiting": 1, "kv_cache_usage": 0.28}


LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
# HELP llamacpp:prompt_seconds_total Prompt process time
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 1.5
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {predicted}
# HELP llamacpp:predicted_tokens_seconds Average generation throughput in tokens/s.
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds nan
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 4
"""


def test_llama_cpp() -> None:
    before, after = LLAMA_CPP.format(prompt=10, predicted=20), LLAMA_CPP.format(prompt=110, predicted=70)
    metrics = server_metrics(before, after)
    assert (metrics["prompt_tokens"], metrics["generation_tokens"], metrics["prompt_seconds"]) == (100, 50, 0)
    assert read_gauges(after) == {"running": 2, "waiting": 4}
    quoted = server_metrics(json.dumps(before), json.dumps(after))
    assert quoted == metrics and read_gauges(json.dumps(after)) == read_gauges(after)


def test_a_gauge_that_is_no_number_is_left_out() -> None:
    assert read_gauges("vllm:num_requests_running NaN\nvllm:num_requests_waiting what\n") == {}


def test_text_that_is_not_prometheus_is_said_in_one_line() -> None:
    error = server_metrics("<html>\n<p>Not here</p>", AFTER)["error"]
    assert error.startswith("/metrics is not Prometheus text") and "\n" not in error


def test_metrics_of_a_server_that_is_not_known() -> None:
    text = "# TYPE my_server_requests_total counter\nmy_server_requests_total 5.0\n"
    assert server_metrics(text, text) == {}
