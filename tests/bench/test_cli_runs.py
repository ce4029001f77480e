"""`headway bench` from end to end: one run, its files, its exit code, and the ways in which requests fail."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.bench.report import figures_time
from headway.bench.results import load_json
from headway.load.record import FailureKind
from tests.bench.command_line import CommandLine, Ran, wait_until
from tests.bench.script import Script, script
from tests.bench.scripted_server import ScriptedServer

SHORT = ("--random-input-len", 8, "--random-output-len", 4)
VLLM_KEYS = {
    "date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms",
    "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms",
}  # fmt: skip


def test_a_run(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    report = tmp_path / "pages" / "run.html"
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--request-rate", 100, "--num-prompts", 50, "--num-warmups", 2,
        "--goodput", "ttft:5000", "tpot:5000", "--csv", "--report", report, "--label", "tea time",
        "--metadata", "gpu=none", "--metadata", "note=a=b", "--price-per-hour", 3.6, "--metric-percentiles", "50,99",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    result = ran.result()
    assert set(result) >= VLLM_KEYS | {"headway"}
    assert (result["completed"], result["failed"], result["num_prompts"]) == (50, 0, 50)
    assert result["model_id"] == "scripted" and result["request_rate"] == 100 and result["label"] == "tea time"
    assert result["gpu"] == "none" and result["note"] == "a=b"
    assert "p50_ttft_ms" in result and "p95_ttft_ms" not in result and "ttfts" not in result
    assert result["mean_ttft_ms"] >= 10 and result["mean_tpot_ms"] >= 1.9 and result["total_output_tokens"] == 200
    settings = result["headway"]["settings"]
    assert settings["num_warmups"] == 2 and settings["goodput"] == {"ttft": 5000, "tpot": 5000}
    assert result["headway"]["server"]["name"] == "vLLM" and result["headway"]["server"]["max_model_len"] == 4096
    # Warm-ups were sent, and are in no number; the few others are those that looked at the server.
    of_four = [entry for entry in scripted.logs()["requests"].values() if entry["body"]["max_tokens"] == 4]
    assert len(of_four) == 52
    (path,) = ran.files(".json")
    assert path.name.startswith("tea_time-100.0qps-scripted-")
    loaded = load_json(path)
    assert len(loaded.records) == 50 and all(record.ok for record in loaded.records)
    (table,) = ran.files(".csv")
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == 50
    assert "<svg" in report.read_text() and "tea time" in report.read_text()
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["run.html"]
    assert "Valid: 50 of 50 requests answered" in ran.out and "Objectives" in ran.out
    for word in (
        "TTFT, schedule",
        "TTFT, send",
        "TPOT",
        "E2EL",
        "The client itself",
        "cost per 1M output",
        str(path),
        str(report),
    ):
        assert word in ran.out, ran.out


def test_nothing_is_written_where_nothing_is_wanted(
    headway: CommandLine, scripted: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 3, "--no-save-result", results=False
    )  # fmt: skip
    assert ran.code == 0 and "3 of 3 requests" in ran.out and "Result:" not in ran.out
    assert not list(tmp_path.iterdir())


def test_a_named_file_and_details(headway: CommandLine, scripted: ScriptedServer) -> None:
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 3, "--result-filename", "mine.json",
        "--save-detailed",
    )  # fmt: skip
    assert [path.name for path in ran.files("")] == ["mine.json"]
    result = ran.result()
    assert len(result["ttfts"]) == len(result["itls"]) == 3
    assert result["generated_texts"] == ["tok tok tok tok "] * 3


def test_client_bound_is_not_valid(
    headway: CommandLine, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.bench.client.watch.reasons", lambda *_: ["the client slept"])
    ran = headway("bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 3)
    assert ran.code == 1 and "CLIENT-BOUND" in ran.out and "The client slept" in ran.out
    assert ran.result()["headway"]["client"]["bound"] is True


def test_nobody_there(headway: CommandLine) -> None:
    error = headway("bench", "--base-url", "http://127.0.0.1:1").error()
    assert "no server at http://127.0.0.1:1" in error and "--ready-check-timeout-sec" in error
    assert "no server at http://127.0.0.1:1" in headway("bench", "--host", "127.0.0.1", "--port", 1).error()


def test_host_and_port(headway: CommandLine, scripted: ScriptedServer) -> None:
    ran = headway("bench", "--host", "localhost", "--port", scripted.port, *SHORT, "--num-prompts", 2)
    assert ran.code == 0 and ran.settings()["base_url"] == f"http://localhost:{scripted.port}"


def test_no_tls_there(headway: CommandLine, scripted: ScriptedServer) -> None:
    error = headway("bench", "--base-url", scripted.url.replace("http:", "https:")).error()
    assert "TLS" in error and "http://" in error and "--insecure" in error


def test_wrong_key_and_right_key(headway: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(api_key="open-sesame") as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--num-prompts", 2]
        assert "does not accept the API key" in headway(*arguments).error()
        assert "--api-key" in headway(*arguments, "--api-key", "shut").error()
        ran = headway(*arguments, "--api-key", "open-sesame")
        assert ran.code == 0
        for name in ("HEADWAY_API_KEY", "OPENAI_API_KEY"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "open-sesame")
                assert headway(*arguments).code == 0
    # A key is nobody else's business.
    assert "open-sesame" not in ran.files(".json")[0].read_text() + ran.out + ran.err


def test_another_model(headway: CommandLine) -> None:
    with ScriptedServer(model=["first", "second"]) as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--num-prompts", 2]
        error = headway(*arguments, "--model", "secund").error()
        assert "'secund'" in error and "second, first" in error
        assert headway(*arguments, "--model", "second").result()["model_id"] == "second"
        assert headway(*arguments).result()["model_id"] == "first"


FAILING = [
    (Script(fail="status", status=429), FailureKind.RATE_LIMITED, "429"),
    (Script(fail="status", status=500, message="out of tea"), FailureKind.SERVER_ERROR, "out of tea"),
    (Script(fail="status", status=401), FailureKind.AUTH, "401"),
    (Script(fail="cut", fail_at=2), FailureKind.CUT, "in the middle"),
    (Script(fail="malformed_sse", fail_at=2), FailureKind.MALFORMED, "not server-sent events"),
    (Script(fail="error_event", fail_at=1, message="no more"), FailureKind.STREAM_ERROR, "no more"),
    (Script(chunks=0), FailureKind.NO_TOKENS, ""),
    (Script(fail="hang", fail_at=1), FailureKind.TIMEOUT, "s"),
]


def requests_of(folder: Path, scripts: list[Script]) -> Path:
    """A dataset whose prompts tell the scripted server what to do."""
    path = folder / "scripts.jsonl"
    rows = [json.dumps({"prompt": script(**fields_of(each)), "output_tokens": 4}) for each in scripts]
    path.write_text("\n".join(rows) + "\n")
    return path


def fields_of(each: Script) -> dict[str, Any]:
    return {name: getattr(each, name) for name in each.__struct_fields__}


def run_scripts(headway: CommandLine, server: ScriptedServer, tmp_path: Path, scripts: list[Script], *more: Any) -> Ran:
    path = requests_of(tmp_path, scripts)
    return headway(
        "bench", "--base-url", server.url, "--dataset-name", "custom", "--dataset-path", path, "--num-prompts",
        len(scripts), "--disable-shuffle", "--num-warmups", 0, "--max-concurrency", 64, *more,
    )  # fmt: skip


def test_each_failure_is_counted_by_its_kind(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    scripts = [*(each for each, _, _ in FAILING for _ in range(2)), *[Script(chunks=4)] * 4]
    ran = run_scripts(headway, scripted, tmp_path, scripts, "--request-timeout", 1)
    assert ran.code == 1, ran.err
    result = ran.result()
    assert (result["completed"], result["failed"]) == (4, 16)
    counted = result["headway"]["failures"]
    assert {kind: each["count"] for kind, each in counted.items()} == {kind.value: 2 for _, kind, _ in FAILING}
    for _, kind, said in FAILING:
        assert said in counted[kind.value]["example"]
        assert kind.value in ran.out
    assert "16 REQUESTS FAILED (80 %)" in ran.out and "Not valid: 4 of 20" in ran.out
    (path,) = ran.files(".json")
    records = load_json(path).records
    assert sum(record.ok for record in records) == 4
    # Their tokens all came at once, and that can be drawn.
    figures_time.itl_over_time(records, load_json(path).began_ns, None)


def test_nothing_was_answered(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    ran = run_scripts(headway, scripted, tmp_path, [Script(fail="cut")] * 3, "--report", report, "--csv")
    assert ran.code == 1 and "NO ANSWER" in ran.out and "NO ANSWER" in report.read_text()
    assert ran.result()["completed"] == 0 and len(ran.files(".csv")) == 1


@pytest.mark.parametrize(
    ("failed", "flags", "code"),
    [
        (40, (), 1),
        (40, ("--max-failed-share", 0.2), 0),
        (2, (), 0),
        (2, ("--max-failed-share", 0.001), 1),
        (1, ("--max-failed-share", 0), 1),
        (0, ("--max-failed-share", 0), 0),
    ],
)
def test_how_many_may_fail(
    headway: CommandLine, scripted: ScriptedServer, tmp_path: Path, failed: int, flags: tuple[Any, ...], code: int
) -> None:
    scripts = [Script(chunks=2, fail="cut", fail_at=1)] * failed + [Script(chunks=2)] * (400 - failed)
    ran = run_scripts(headway, scripted, tmp_path, scripts, *flags)
    assert ran.code == code, ran.out
    assert ran.result()["failed"] == failed
    assert ("Valid: " in ran.out) == (code == 0)
    assert ("the run is not valid" in ran.out) == (code == 1)


def test_all_warm_ups_fail(headway: CommandLine) -> None:
    """The server answers the two tokens of the probe, and nothing longer."""
    with ScriptedServer(script=script(ttft_s=0.3, gap_s=0.01)) as server:
        ran = headway("bench", "--base-url", server.url, *SHORT, "--num-prompts", 2, "--request-timeout", 0.15)
    assert ran.code == 2 and "all 3 warm-up requests failed" in ran.err.splitlines()[-1]


def test_a_frozen_server_is_seen_from_the_schedule(headway: CommandLine, tmp_path: Path) -> None:
    """One place, so that the latency from the send hides what the one from the schedule shows."""
    with ScriptedServer(script=script(ttft_s=0.001, gap_s=0.0005)) as server:

        def freeze() -> None:
            wait_until(lambda: len(server.logs()["requests"]) >= 40)
            server.freeze(0.0, 1.0)

        freezing = threading.Thread(target=freeze)
        freezing.start()
        ran = headway(
            "bench", "--base-url", server.url, *SHORT, "--request-rate", 60, "--max-concurrency", 1, "--arrival",
            "constant", "--num-prompts", 180, "--num-warmups", 0,
        )  # fmt: skip
        freezing.join()
        ((began, ended),) = server.logs()["freezes"]
    result = ran.result()
    whole = result["headway"]["summaries"][0]
    waits = result["headway"]["settings"]
    assert ran.code == 0 and whole["from_schedule"]["ttft_ms"]["maximum"] > 900
    assert waits["waited_for_place"] >= 40 and waits["longest_wait_ms"] > 800
    p90 = {since: value_at(whole[since]["ttft_ms"], 90) for since in ("from_schedule", "from_send")}
    assert p90["from_schedule"] > 3 * p90["from_send"] and ended - began > 0.9e9
    assert "Requests waited before they were sent" in ran.out and "leave this wait out" in ran.out


def value_at(measured: dict[str, Any], p: float) -> float:
    (found,) = (each["value"] for each in measured["percentiles"] if each["p"] == p)
    return float(found)


def test_a_request_sent_again_and_one_that_never_ends_are_shown(
    headway: CommandLine, scripted: ScriptedServer, tmp_path: Path
) -> None:
    """One user: the second request loses the connection that was kept open, the third hangs in mid-stream."""
    path, report = tmp_path / "scripts.jsonl", tmp_path / "run.html"
    scripts = [script(), script(fail="close_if_reused"), script(fail="hang", fail_at=2)]
    path.write_text("".join(json.dumps({"prompt": each, "output_tokens": 4}) + "\n" for each in scripts))
    ran = headway(
        "bench", "--base-url", scripted.url, "--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle",
        "--max-concurrency", 1, "--num-prompts", 3, "--num-warmups", 0, "--drain-timeout", 0.3, "--csv",
        "--goodput", "ttft:5000", "--report", report,
    )  # fmt: skip
    assert ran.code == 1
    ours = ran.result()["headway"]
    assert ours["requests"]["resent"] == [0, 1, 0] and ours["summaries"][0]["resent"] == 1
    assert ours["failures"]["drain_limit"]["count"] == 1
    assert (ours["summaries"][0]["attainment"]["met"], ours["summaries"][0]["attainment"]["total"]) == (2, 3)
    assert ours["summaries"][0]["attainment"]["missed_by"] == {"ttft": 0, "failed": 1}
    (table,) = ran.files(".csv")
    with table.open() as file:
        assert [row["resent"] for row in csv.DictReader(file)] == ["0", "1", "0"]
    for text in (ran.out, report.read_text()):
        assert "requests sent again" in text and "1 request sent again, because the server" in text
        assert "drain_limit" in text and "drain limit: nothing was left to send" in text


def test_flags_of_a_file(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'base-url = "{scripted.url}"\nnum_prompts = 6\nnum-warmups = 0\nrandom-input-len = 4\noutput-len = 3\n'
        'request-rate = inf\ngoodput = ["ttft:9000", "e2el:9000"]\nmetadata = ["gpu=none"]\nsave-detailed = true\n'
    )
    ran = headway("bench", "--config", file, "--num-prompts", 4)
    assert ran.code == 0, ran.err
    settings = ran.settings()
    assert (settings["num_prompts"], settings["num_warmups"], settings["arrivals"]) == (4, 0, "all at once")
    assert settings["goodput"] == {"ttft": 9000.0, "e2el": 9000.0} and settings["metadata"] == {"gpu": "none"}
    assert ran.result()["output_lens"] == [3] * 4
    # What a file says without need is refused as it is on the command line.
    file.write_text("slo-attainment = 0.9\n")
    assert "--slo-attainment works only with --goodput" in headway("bench", "--config", file).error()
