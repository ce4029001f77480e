"""The comparison of servers: what is sent, how rounds are compared, and that nobody runs beside the one measured."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import clients, rounds, served, servers
from benchmarks.clients import Load
from tests.benchmarks.peers import RESULT, program

TINY = servers.Settings("tiny", threads=1, context=64, streams=2, start_seconds=60)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (servers, served):
        monkeypatch.setattr(module, "CHECKPOINTS", tmp_path / "checkpoints")


def test_flags_are_those_of_vllm() -> None:
    lengths = "--random-input-len 128 --random-output-len 64"
    closed = Load("", 128, 64, prompts=16, streams=4, warmups=4).flags()
    assert " ".join(closed) == (
        f"--dataset-name random --ignore-eos --num-prompts 16 {lengths} --num-warmups 4 --max-concurrency 4"
    )
    opened = Load("", 128, 64, prompts=48, rate=0.75).flags()
    assert " ".join(opened) == (
        f"--dataset-name random --ignore-eos --num-prompts 48 {lengths} --num-warmups 0 --request-rate 0.75"
    )


def test_loads_are_closed_loops_and_then_one_open_loop() -> None:
    one, four, poisson = served.loads(served.parse(["--streams", "1", "4", "--rate", "0.5", "--rate-prompts", "9"]))
    assert (one.label, one.prompts, one.streams, one.rate) == ("1 stream", 8, 1, None)
    assert (four.label, four.prompts, four.streams, four.warmups) == ("4 streams", 16, 4, 4)
    assert (poisson.label, poisson.prompts, poisson.streams, poisson.rate) == ("Poisson, 0.5 requests/s", 9, None, 0.5)
    assert len(served.loads(served.parse(["--rate", "0"]))) == 3
    varied = served.loads(served.parse(["--range-ratio", "0.5"]))
    assert all(load.flags()[-4:-2] == ["--random-range-ratio", "0.5"] for load in varied)


def test_ratios_compare_medians_and_neighbouring_rounds() -> None:
    compared = rounds.compare([10.0, 40.0, 30.0], [5.0, 40.0, 10.0])
    assert compared == rounds.Compared(10, 5, 40, ratio=3, ratio_low=1, ratio_high=3, ratio_middle=2)


def test_a_value_of_0_has_no_ratio() -> None:
    assert rounds.compare([1.0, 2.0], [0.0, 4.0]) == rounds.Compared(2.0, 0.0, 4.0, None, None, None, None)
    assert rounds.compare([0.0, 0.0], [1.0, 1.0]).ratio == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.01234, "0.012"),
        (0.951, "0.951"),
        (1.5, "1.50"),
        (43.21, "43.2"),
        (4700.4, "4700"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert rounds.number(value) == text


def test_table_has_each_server_and_its_ratio() -> None:
    measured = rounds.Rounds()
    for tokens, other in ((100.0, 50.0), (120.0, 40.0), (110.0, 44.0)):
        others = dict.fromkeys(served.MEASURES, 8.0) | {"output_throughput": other, "failed": 1.0, "client_bound": 0.0}
        measured.add("4 streams", "headway", others | {"output_throughput": tokens, "failed": 0.0})
        measured.add("4 streams", "vllm", others)
        measured.add("4 streams", "headway, offline", {"output_throughput": 125.0})
    lines = served.tables(measured, "headway", ["vllm"]).splitlines()
    assert lines[0] == "| 4 streams | headway | vllm | headway / vllm |"
    assert lines[2] == "| output tokens/s | 110 (100 .. 120) | 44.0 (40.0 .. 50.0) | 2.50 (2.00 .. 3.00) |"
    assert lines[3] == "| TTFT median, ms | 8.00 | 8.00 | 1.00 |"
    assert lines[-4] == "| requests failed, all rounds | 0 | 3 | |"
    assert lines[-2:] == [
        "| the same work offline, tokens/s | 125 | | |",
        "| share of it served | 0.880 (0.800 .. 0.960) | | |",
    ]
    assert {line.count("|") for line in lines} == {5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm"], "'vllm' is not NAME=PROGRAM"),
        (["--peer", "vllm=/no/such/program"], "is not NAME=PROGRAM"),
        (["--peer", "vllm=/tmp"], "is not NAME=PROGRAM"),
        (["--peer", f"headway={sys.executable}"], "'headway' is not a peer known here; choose one of vllm, llama.cpp"),
        (["--peer", f"vllm={sys.executable}"] * 2, "a peer is named twice"),
        (["--client", "/no/such/program"], "--client '/no/such/program' is not a program"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--streams", "4", "0"], "--streams is 0; it must be at least 1"),
        (["--output-len", "1"], "--output-len is 1; the time between tokens needs at least 2"),
        (["--rate", "-1"], "--rate is -1; it must not be negative"),
        (["--range-ratio", "1"], "--range-ratio is 1; it must be at least 0 and below 1"),
        (["--peer", f"llama.cpp={sys.executable}", "--range-ratio", "0.5"], "cannot count the tokens of llama.cpp's"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        served.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def _measure(client: Path) -> dict[str, object]:
    return clients.measure([str(client)], "http://x", "model", Path("tokenizer"), Load("", 8, 4, prompts=3), seed=7)


def test_client_gets_the_load_and_its_result_is_read(tmp_path: Path) -> None:
    result = _measure(program(tmp_path, "client"))
    assert (result["completed"], result["output_throughput"]) == (3, 107.0)
    arguments = json.loads((tmp_path / "client.log").read_text())
    for flag, value in (("--base-url", "http://x"), ("--model", "model"), ("--tokenizer", "tokenizer")):
        assert arguments[arguments.index(flag) + 1] == value


def test_results_of_a_run_with_failures_count(tmp_path: Path) -> None:
    some = '"completed": 1, "total_output_tokens": 4'
    saved = RESULT.replace('"failed": 0', '"failed": 2').replace('"completed": prompts', some)
    body = (
        f'prompts, seed = 3, 0; result = {saved}; (pathlib.Path(flag("--result-dir")) / flag("--result-filename"))'
        ".write_text(json.dumps(result)); sys.exit(1)"
    )
    assert _measure(program(tmp_path, "client", client=body))["failed"] == 2


def test_client_without_results_says_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)left no results \(exit code 1\):\n.*connection refused"):
        _measure(program(tmp_path, "client", client='sys.exit("connection refused")'))


def test_run_without_an_answer_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="answered none of the requests"):
        _measure(program(tmp_path, "client", result='{"completed": 0, "failed": 3}'))


def test_tokens_counted_by_the_text_are_counted_anew(tmp_path: Path) -> None:
    gaps = [[0.1, 0.2, 0.3], [0.1, 0.1, 0.1], [0.5, 0.1, 0.3]]
    saved = {"completed": 3, "total_output_tokens": 88, "output_throughput": 44, "duration": 2.0, "itls": gaps}
    result = _measure(program(tmp_path, "client", result=repr(saved | {"median_tpot_ms": 1.0})))
    assert (result["total_output_tokens"], result["output_throughput"]) == (12, 6.0)
    assert result["median_tpot_ms"] == pytest.approx(200)


def test_a_server_that_cuts_answers_short_is_not_measured(tmp_path: Path) -> None:
    short = program(tmp_path, "vllm", answered='asked["max_tokens"] - 1')
    wrong = pytest.raises(SystemExit, match="vllm was asked for 8 tokens and made 7")
    with servers.running("vllm", str(short), TINY) as server, wrong:
        served.check_length(server, 8)


def _until_stopped(process: psutil.Process, stopped: bool) -> None:
    deadline = time.monotonic() + 20
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < deadline, f"still {process.status()}"
        time.sleep(0.01)


def _children() -> set[psutil.Process]:
    """Other tests' servers may be among them."""
    return set(psutil.Process().children())


def test_server_is_stopped_unless_measured_and_leaves_nothing(tmp_path: Path) -> None:
    before = _children()
    with servers.running("vllm", str(program(tmp_path, "vllm")), TINY) as server:
        assert server.version == "version: 1.2 (scripted)"
        (process,) = _children() - before
        _until_stopped(process, True)
        for _ in range(2):
            with server.awake():
                _until_stopped(process, False)
            _until_stopped(process, True)
    assert not process.is_running()
    assert not list(tmp_path.glob("served-*.log"))


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho no such option >&2; exit 3\n")
    binary.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)llama.cpp ended with exit code 3;.*no such option"):
        servers.Server("llama.cpp", str(binary), TINY)
    assert len(list(tmp_path.glob("served-*.log"))) == 1, "the log is kept, as the message names it"


def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    before = _children()
    binary = tmp_path / "vllm"
    binary.write_text("#!/bin/sh\n[ $1 = --version ] || exec sleep 600\n")
    binary.chmod(0o755)
    with pytest.raises(SystemExit, match="vllm was not ready after 0 s; its log is"):
        servers.Server("vllm", str(binary), servers.Settings("tiny", 1, 64, 2, start_seconds=0.3))
    assert _children() <= before


def test_every_server_gets_the_same_settings() -> None:
    for name, launch in servers.ENGINES.items():
        command = launch("/bin/server", 8123, servers.Settings("tiny", 3, 256, 4)).command
        assert command[0] == "/bin/server" and command[command.index("--port") + 1] == "8123"
        assert f"--no-{'cache-prompt' if name == 'llama.cpp' else 'enable-prefix-caching'}" in command
        lengths = {"--max-model-len": "256", "--ctx-size": "1024"}
        flag = next(flag for flag in lengths if flag in command)
        assert command[command.index(flag) + 1] == lengths[flag]
    threads = servers.vllm("/bin/vllm", 1, servers.Settings("tiny", 3, 256, 4)).environment
    assert threads["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"


@pytest.mark.slow
def test_a_sitting_measures_every_server_on_every_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = program(tmp_path, "fake")
    monkeypatch.setattr(served, "HEADWAY", [str(binary)])
    monkeypatch.setitem(
        servers.ENGINES, "headway", lambda _, port, settings: servers.Launch([str(binary), "--port", str(port)], {})
    )
    output = tmp_path / "results" / "served.json"
    sizes = "--shape tiny --streams 1 2 --rate 5 --rate-prompts 3 --rounds 2 --threads 1"
    served.main([*sizes.split(), "--peer", f"vllm={binary}", "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["rounds_finished"] == 2
    assert list(report["servers"]) == ["headway", "vllm"]
    assert list(report["values"]) == ["1 stream", "2 streams", "Poisson, 5 requests/s"]
    for load in report["values"].values():
        assert load["headway"]["output_throughput"] == load["vllm"]["output_throughput"] == [101.0, 102.0]
    rates = [load["headway, offline"]["output_throughput"] for load in list(report["values"].values())[:2]]
    assert all(rate > 0 for both in rates for rate in both) and [len(both) for both in rates] == [2, 2]
    assert len(report["summary"]) == 3 * 2 * len(served.MEASURES) + len(rates)
    assert str(tmp_path) not in json.dumps(report["settings"])
    arguments = [json.loads(line) for line in (tmp_path / "fake.log").read_text().splitlines()]
    urls = [each[each.index("--base-url") + 1] for each in arguments]
    assert len(urls) == 2 + 2 * 3 * 2
    pairs = list(zip(urls[0::2], urls[1::2], strict=True))
    assert all(first != second for first, second in pairs), "both servers under one load, before the next load"
    assert pairs[1] == pairs[2][::-1] == pairs[3], "they take turns in going first"
    assert capsys.readouterr().out.count("| headway / vllm |") == 3
    served.main([*sizes.split(), "--peer", f"vllm={binary}", "--output", str(output), "--append", "--rounds", "1"])
    added = json.loads(output.read_text())
    assert added["rounds_finished"] == 3
    assert added["values"]["1 stream"]["vllm"]["output_throughput"] == [101.0, 102.0, 103.0]
    with pytest.raises(SystemExit, match="was measured with other settings or servers"):
        served.main([*sizes.split(), "--output", str(output), "--append"])


def test_a_server_that_dies_takes_nothing_of_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binary, mute = program(tmp_path, "fake"), program(tmp_path, "mute", answered="sys.exit(5)")
    engine = 'import sys; print(\'{"version": "1", "start_seconds": 0}\', flush=True)\n'
    engine += "for _ in sys.stdin: print('{\"rate\": 50}', flush=True)"
    monkeypatch.setattr(served, "HEADWAY", [str(binary)])
    monkeypatch.setattr(served, "offline_engine", lambda *_: [sys.executable, "-c", engine])
    monkeypatch.setitem(
        servers.ENGINES, "headway", lambda _, port, settings: servers.Launch([str(binary), "--port", str(port)], {})
    )
    monkeypatch.setitem(
        servers.ENGINES, "llama.cpp", lambda _, port, settings: servers.Launch([str(mute), "--port", str(port)], {})
    )
    put_load = served.put_load

    def killing(client: list[str], server: servers.Server, load: Load, tokenizer: Path, seed: int) -> dict[str, float]:
        if (server.name, seed) == ("vllm", 2):
            server._process.kill()
            server._process.wait()
        return put_load(client, server, load, tokenizer, seed)

    monkeypatch.setattr(served, "put_load", killing)
    output = tmp_path / "served.json"
    chosen = "--shape tiny --streams 1 2 --rate 0 --rounds 3 --threads 1"
    chosen += f" --peer vllm={binary} --peer llama.cpp={mute} --output {output}"
    with pytest.raises(SystemExit) as ended:
        served.main(chosen.split())
    assert "vllm ended with exit code -9" in str(ended.value) and "llama.cpp" in str(ended.value)
    report = json.loads(output.read_text())
    assert report["rounds_finished"] == 3 and list(report["died"]) == ["llama.cpp", "vllm"]
    counts = {name: len(each["output_throughput"]) for name, each in report["values"]["1 stream"].items()}
    assert counts == {"headway": 3, "headway, offline": 3, "vllm": 1}
    assert {row["server"] for row in report["summary"]} == set(counts)
    assert "| output tokens/s | 102 (101 .. 103) | 101 | 1.00 | - | - |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has fewer rounds of llama\.cpp, vllm, which died"):
        served.main([*chosen.split(), "--append"])


@pytest.mark.slow
def test_a_sitting_with_the_real_server_and_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "served.json"
    sizes = "--shape tiny --streams 2 --input-len 16 --output-len 4 --rate 0 --rounds 1 --threads 1"
    served.main([*sizes.split(), "--output", str(output)])
    measured = json.loads(output.read_text())["values"]["2 streams"]["headway"]
    assert measured["failed"] == [0] and measured["output_throughput"][0] > 0 and measured["p99_ttft_ms"][0] > 0
    assert "| output tokens/s |" in capsys.readouterr().out
