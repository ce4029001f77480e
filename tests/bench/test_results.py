"""Results on disk: what is written, and what comes back."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from array import array
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.bench.results import default_file_name, load_json, to_json, write_csv, write_json
from headway.load.errors import BenchError
from headway.load.measures.summary import summarise_all
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult
from headway.policy.step.ledger import Phase
from tests.bench.records import MS, at, failed, request, run

DATE = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def a_run() -> RunResult:
    """A run with something of everything: classes, ledgers, failures, chunks of several tokens, an unsent request."""
    generator = np.random.default_rng(5)
    records = []
    for index in range(60):
        first, due = generator.uniform(20, 300), index * 100.0
        chunks = due + first + np.cumsum(generator.uniform(1, 30, generator.integers(1, 20)))
        record = request(
            index,
            chunks.tolist(),
            due=due,
            sent=due + 0.3,
            end=float(chunks[-1]) + 1,
            tokens=len(chunks) + index % 3,
            class_name="chat" if index % 2 else "batch",
            cached_tokens=index % 4 or None,
            text=f"an “answer”, {index}\n" if index % 5 else None,
        )
        if index % 7 == 0:
            record.tokens_per_chunk_known = True
            record.chunk_tokens = array("i", [2] * len(chunks))
        if index % 2:
            phases = {"receive": MS, "queue_capacity": index * MS, "decode_compute": 5 * MS}
            record.timings = {"e2e_ns": sum(phases.values()), "ttft_ns": 2 * MS, "phases_ns": phases, "preemptions": 0}
        records.append(record)
    never = failed(62, FailureKind.ABANDONED)
    never.scheduled_ns = never.sent_ns = never.connected_ns = never.headers_ns = never.end_ns = 0
    records += [failed(60, due=6000), failed(61, FailureKind.CUT, due=6100), never]
    return run(
        records,
        probes=[request(0, [40.0, 50.0], due=10), failed(1, due=700)],
        client=ClientHealth([0.1, 7.25], [0, 4096], [0.25], 0.5, 0.02, ["it ran late"]),
        interrupted=True,
        server={"name": "headway", "max_model_len": 512, "metrics": {"preemptions": 3.0}},
        energy_joules=12.5,
    )


def saved(result: RunResult, path: Path, **options: Any) -> dict[str, Any]:
    write_json(path, to_json(result, summarise_all(result), date=DATE, **options))
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in the file"))


@pytest.mark.parametrize("detailed", [True, False])
def test_a_run_comes_back_as_it_was(tmp_path: Path, detailed: bool) -> None:
    result = a_run()
    saved(result, tmp_path / "a.json", save_detailed=detailed)
    assert load_json(tmp_path / "a.json") == result


@pytest.mark.parametrize("records", [[], [failed(0)], [request(0, [5])]])
def test_runs_of_nearly_nothing_come_back_too(tmp_path: Path, records: list[RequestRecord]) -> None:
    result = run(records)
    result.settings["goodput"] = {"ttft": 1.0}
    values = saved(result, tmp_path / "a.json", save_detailed=True)
    assert load_json(tmp_path / "a.json") == result
    assert values["completed"] == sum(record.ok for record in records)


def test_every_field_of_a_record_is_saved(tmp_path: Path) -> None:
    """A field that is added to RequestRecord and forgotten here would be lost."""
    values: dict[str, Any] = {
        "chunk_ns": array("q", [at(20), at(30)]),
        "chunk_tokens": array("i", [1, 3]),
        "failure": Failure(FailureKind.CUT, "cut", 200),
        "timings": {"e2e_ns": 5},
        "calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    kinds: dict[str, Any] = {"int": at(7), "int | None": 9, "str": "x", "str | None": "y", "bool": True}
    record = RequestRecord(
        **{f.name: values.get(f.name, kinds.get(str(f.type))) for f in dataclasses.fields(RequestRecord)}
    )
    saved(run([record]), tmp_path / "a.json")
    assert load_json(tmp_path / "a.json").records == [record]


VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "latencies", "queue_times"),
    *(f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")),
}
DETAILED = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}


def test_the_keys_are_those_of_vllm_bench_serve(tmp_path: Path) -> None:
    assert set(saved(a_run(), tmp_path / "a.json", percentiles=[99])) == VLLM_KEYS | {"headway"}
    assert set(saved(a_run(), tmp_path / "b.json", percentiles=[99], save_detailed=True)) == (
        VLLM_KEYS | DETAILED | {"headway"}
    )
    many = saved(a_run(), tmp_path / "c.json", percentiles=[50, 99.9])
    assert "p50_ttft_ms" in many and "p99.9_itl_ms" in many


def test_the_keys_hold_what_vllm_bench_serve_would_compute(tmp_path: Path) -> None:
    records = [
        request(0, [100, 110, 130], due=0, sent=5, prompt=30),
        request(1, [900, 1900], due=0, sent=800, tokens=5, prompt=40),
        request(2, [2950], due=2500, tokens=1, prompt=50),
        request(3, [3000], due=2900, tokens=4, prompt=60),
        failed(4),
    ]
    result = run(records)
    result.settings["goodput"] = {"ttft": 150.0, "tpot": 20.0}
    values = saved(result, tmp_path / "a.json", percentiles=[90], save_detailed=True)
    assert (values["date"], values["model_id"], values["num_prompts"]) == ("20260304-050607", "org/tiny", 5)
    assert (values["completed"], values["failed"], values["duration"]) == (4, 1, 10.0)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (180, 13)
    assert (values["request_throughput"], values["output_throughput"]) == (0.4, 1.3)
    assert values["total_token_throughput"] == pytest.approx(19.3)
    assert values["request_goodput"] == pytest.approx(0.2)  # from the send: 0 and 3, not 1 (TPOT) nor 2 (TTFT)
    ttfts, tpots = [95, 100, 450, 100], [15, 250, 0]
    assert values["mean_ttft_ms"] == pytest.approx(np.mean(ttfts))
    assert values["median_ttft_ms"] == pytest.approx(np.median(ttfts))
    assert values["std_ttft_ms"] == pytest.approx(np.std(ttfts))
    assert values["p90_ttft_ms"] == pytest.approx(np.percentile(ttfts, 90))
    assert values["mean_tpot_ms"] == pytest.approx(np.mean(tpots))
    assert values["mean_itl_ms"] == pytest.approx(np.mean([10, 20, 1000]))
    assert values["mean_e2el_ms"] == pytest.approx(np.mean([125, 1100, 450, 100]))
    # Chunks by the second since the first send at 5 ms, and requests that touch a second.
    assert (values["max_output_tokens_per_s"], values["max_concurrent_requests"]) == (4, 2)
    assert values["input_lens"] == [30, 40, 50, 60, 10]
    assert values["output_lens"] == [3, 5, 1, 4, 0]
    assert values["ttfts"] == pytest.approx([0.095, 0.1, 0.45, 0.1, 0])
    assert values["itls"][0] == pytest.approx([0.01, 0.02]) and values["itls"][4] == []
    assert values["queue_times"] == pytest.approx([0.005, 0.8, 0, 0, 0])
    assert values["errors"] == ["", "", "", "", "a server_error failure"]


def test_ours_says_what_is_refused_and_both_views(tmp_path: Path) -> None:
    result = a_run()
    ours = saved(result, tmp_path / "a.json")["headway"]
    whole = ours["summaries"][0]
    by_p = {each["p"]: each for each in whole["from_schedule"]["ttft_ms"]["percentiles"]}
    assert by_p[99]["value"] is None and by_p[99]["needs"] > 60
    assert by_p[50]["low"] < by_p[50]["value"] < by_p[50]["high"]
    assert whole["from_send"]["ttft_ms"]["mean"] == pytest.approx(whole["from_schedule"]["ttft_ms"]["mean"] - 0.3)
    assert [each["name"] for each in ours["summaries"]][-3:] == [
        "class batch",
        "class chat",
        "probe stream",
    ]
    assert ours["failures"]["server_error"] == {"count": 1, "example": "a server_error failure"}
    assert ours["failures"]["abandoned"]["count"] == 1
    assert ours["client"]["bound"] is True and ours["client"]["reasons"] == ["it ran late"]
    slowest = max((r for r in result.records if r.ok and r.timings), key=lambda r: r.end_ns - r.scheduled_ns)
    assert ours["composition_ms"]["e2el"]["slowest_1_percent"]["queue_capacity"] == slowest.index
    assert ours["settings"] == result.settings and ours["interrupted"] is True
    assert (ours["format"], ours["energy_joules"]) == (1, 12.5)
    assert ours["server"]["metrics"] == {"preemptions": 3.0}


def test_what_json_has_no_word_for_loses_no_run(tmp_path: Path) -> None:
    settings = {
        "rate": math.inf,
        "none": math.nan,
        "path": Path("/a/b"),
        "count": np.int64(3),
        "share": np.float32(0.5),
    }
    result = run([request(0, [5], text="half \ud83d a smile")], settings=settings)
    values = saved(result, tmp_path / "a.json", save_detailed=True)
    assert values["headway"]["settings"] == {"rate": None, "none": None, "path": "/a/b", "count": 3, "share": 0.5}
    assert values["generated_texts"] == ["half ? a smile"]


def test_a_plain_result_of_vllm_bench_serve_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    result = a_run()
    for record in result.records:
        record.chunk_tokens = array("i", [1] * len(record.chunk_ns))
    values = saved(result, tmp_path / "a.json", save_detailed=True)
    (tmp_path / "b.json").write_text(json.dumps({key: value for key, value in values.items() if key != "headway"}))
    read = load_json(tmp_path / "b.json")
    assert (read.settings["model"], read.settings["request_rate"], len(read.records)) == ("org/tiny", 4.0, 63)
    assert read.duration_s == pytest.approx(result.duration_s)
    for ours, theirs in zip(result.records[:60], read.records, strict=False):
        assert theirs.output_tokens == ours.output_tokens and theirs.text == ours.text
        assert np.allclose(np.subtract(theirs.chunk_ns, ours.chunk_ns), 0, atol=2000)
        assert abs(theirs.scheduled_ns - ours.scheduled_ns) < 2000
    again = to_json(read, summarise_all(read))
    assert again["p99_tpot_ms"] == pytest.approx(values["p99_tpot_ms"], rel=1e-4)
    assert again["failed"] == 3


def test_failures_of_vllm_bench_serve_get_a_kind(tmp_path: Path) -> None:
    errors = [
        "Too Many Requests",
        "Traceback (most recent call last):\n  File x\naiohttp.ClientConnectorError: Cannot connect to host",
        "Never received a valid chunk to calculate TTFT.This response will be marked as failed!",
        "Internal Server Error",
    ]
    values = saved(run([failed(i) for i in range(4)]), tmp_path / "a.json", save_detailed=True)
    del values["headway"]
    (tmp_path / "b.json").write_text(json.dumps(values | {"errors": errors}))
    failures = [record.failure for record in load_json(tmp_path / "b.json").records]
    assert [str(failure.kind) for failure in failures if failure] == [
        "rate_limited",
        "connect",
        "no_tokens",
        "server_error",
    ]
    assert all(failure and "\n" not in failure.message for failure in failures)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ("[1, 2]", "holds a list"),
        ("{}", "start_times"),
        ('{"request_throughput": 3.0}', "--save-detailed"),
        ('{"headway": {"format": 2, "version": "9.9"}}', "format 2, written by Headway 9.9"),
        ('{"headway": {"format": 1}}', "missing required field `settings`"),
        ('{"headway": 3}', "is not a result"),
        ('{"start_times": 3, "duration": 1}', "is not a result"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(BenchError) as error:
        load_json(path)
    assert str(path) in str(error.value) and named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["index", "chunk_ns", "failure", "sent_ns"])
@pytest.mark.parametrize("damage", [lambda column: column[:-1], lambda column: 5, lambda column: ["x"] * len(column)])
def test_a_damaged_result_is_said_to_be_one(tmp_path: Path, name: str, damage: Any) -> None:
    values = saved(a_run(), tmp_path / "a.json")
    values["headway"]["requests"][name] = damage(values["headway"]["requests"][name])
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(BenchError, match="is not a result"):
        load_json(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["sent_ns", "end_ns", "chunk_ns", "output_tokens"])
@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_a_result_with_numbers_beyond_reason_is_said_to_be_damaged(tmp_path: Path, name: str, value: int) -> None:
    values = saved(a_run(), tmp_path / "a.json")
    column = values["headway"]["requests"][name]
    column[-1] = [value] if name == "chunk_ns" else value
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(BenchError, match="is not a result"):
        load_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("input_lens", ["x"]), ("output_lens", [-1]), ("ttfts", [-1.0]), ("itls", [[1e18]]), ("start_times", [1e18])],
)
def test_a_damaged_result_of_vllm_bench_serve_is_said_to_be_one(tmp_path: Path, name: str, value: list[Any]) -> None:
    whole = {"start_times": [1.0], "ttfts": [0.1], "itls": [[0.1]], "input_lens": [3], "output_lens": [2]}
    whole |= {"errors": [""], "duration": 2.0}
    for content, is_whole in ((whole, True), (whole | {name: value}, False)):
        (tmp_path / "a.json").write_text(json.dumps(content))
        if is_whole:
            assert load_json(tmp_path / "a.json").records[0].tokens == 2
            continue
        with pytest.raises(BenchError, match="is not a result"):
            load_json(tmp_path / "a.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .*gone.json: No such file"):
        load_json(tmp_path / "gone.json")


def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "result.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 2}
    assert os.listdir(path.parent) == ["result.json"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"x": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchError, match=r"cannot write .*result.json: No space left on device"):
        write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match=r"cannot write .*file/a.json"):
        write_json(tmp_path / "file" / "a.json", {})


def test_the_file_is_named_as_vllm_bench_serve_names_it() -> None:
    result = run([], settings={"backend": "openai-chat", "model": "org/Some Model", "request_rate": 4.0})
    assert default_file_name(result, DATE) == "openai-chat-4.0qps-Some_Model-20260304-050607.json"
    result = run([], settings={"model": "/models/tiny/", "request_rate": None, "max_concurrency": 8, "label": "a/b"})
    assert default_file_name(result, DATE) == "a_b-infqps-concurrency8-tiny-20260304-050607.json"


def test_the_name_of_the_file_is_one_that_a_file_can_have(tmp_path: Path) -> None:
    result = run([], settings={"label": "\u00fc" * 300, "model": "\U0001f40c" * 300, "request_rate": 123456.7})
    write_json(tmp_path / default_file_name(result), {})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_row_for_each_request(tmp_path: Path) -> None:
    result = a_run()
    result.settings["goodput"] = {"e2el": 400.0}
    write_csv(tmp_path / "r.csv", result)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [int(row["index"]) for row in rows] == list(range(63))
    record, row = result.records[9], rows[9]
    assert row["class"] == "chat"
    assert float(row["scheduled_s"]) == pytest.approx(0.9)
    assert float(row["start_lag_ms"]) == pytest.approx(0.3)
    assert float(row["ttft_ms"]) == pytest.approx((record.first_token_ns - record.sent_ns) / MS)
    assert float(row["ttft_from_schedule_ms"]) == pytest.approx(float(row["ttft_ms"]) + 0.3, abs=1e-5)
    assert float(row["e2el_ms"]) == pytest.approx((record.last_token_ns - record.sent_ns) / MS)
    assert float(row["itl_max_ms"]) == pytest.approx(max(np.diff(record.chunk_ns)) / MS)
    assert (row["output_tokens"], row["finish_reason"], row["failure"]) == (str(record.output_tokens), "length", "")
    assert float(row["phase_queue_capacity_ms"]) == 9 and float(row["phase_sampling_ms"]) == 0
    assert rows[8]["phase_queue_capacity_ms"] == ""  # gave no ledger
    assert {f"phase_{phase}_ms" for phase in Phase} <= set(row)
    met = [float(row["e2el_from_schedule_ms"]) <= 400 for row in rows[:60]]
    assert [row["met_objectives"] == "1" for row in rows[:60]] == met
    assert (rows[60]["failure"], rows[60]["status"], rows[60]["message"]) == (
        "server_error",
        "500",
        "a server_error failure",
    )
    assert (rows[60]["met_objectives"], rows[60]["missed"]) == ("0", "failed")
    assert rows[62]["sent_s"] == rows[62]["met_objectives"] == ""


def test_without_objectives_nobody_met_or_missed(tmp_path: Path) -> None:
    write_csv(tmp_path / "r.csv", run([request(0, [5, 6])]))
    (row,) = csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))
    assert row["met_objectives"] == row["missed"] == ""
