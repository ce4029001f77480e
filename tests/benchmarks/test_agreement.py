"""The comparison of load generators: its statistics, and that both get the same load."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
from scipy import stats

from benchmarks import agreement, servers
from tests.benchmarks.peers import RESULT, program


@pytest.mark.parametrize("freedom", [1, 2, 5, 30])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.975, 0.99375])
def test_student_quantile_is_scipys(probability: float, freedom: int) -> None:
    expected = stats.t.ppf(probability, freedom)
    assert agreement.student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_interval_is_that_of_a_paired_t_test() -> None:
    ours, theirs = [10.0, 12.0, 9.0, 11.0], [9.5, 12.5, 9.1, 10.0]
    row = agreement.agreement("median_ttft_ms", ours, theirs, 0.95)
    interval = stats.ttest_rel([math.log(a) for a in ours], [math.log(b) for b in theirs]).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert row.ratio == pytest.approx(10.5 / 9.75)


def _runs(factor: float, draw: random.Random, seeds: int = 6) -> dict[str, dict[str, list[float]]]:
    """Two clients whose runs scatter by 2 %; ours reads `factor` times theirs."""
    measured: dict[str, dict[str, list[float]]] = {"headway": {}, "vllm": {}}
    for key in agreement.MEASURES:
        measured["vllm"][key] = [50 * math.exp(draw.gauss(0, 0.02)) for _ in range(seeds)]
        measured["headway"][key] = [50 * factor * math.exp(draw.gauss(0, 0.02)) for _ in range(seeds)]
    return measured


def test_chance_alone_is_rarely_called_a_difference() -> None:
    draw = random.Random(0)
    false_alarms = sum(any(row.verdict == "differ" for row in agreement.judge(_runs(1.0, draw))) for _ in range(200))
    assert false_alarms <= 20, "1 in 20 is what 95 % confidence of all four measures together means"


def test_a_real_difference_is_seen_and_named() -> None:
    rows = agreement.judge(_runs(1.2, random.Random(0)))
    assert {row.verdict for row in rows} == {"differ"}
    said = agreement.verdict(rows)
    assert said.startswith("At 95% confidence they differ in TTFT median, TTFT P99, TPOT median, TPOT P99. The noise")
    assert agreement.table(rows).splitlines()[2].endswith("| differ |")


def test_agreement_says_what_it_could_not_have_seen() -> None:
    row = agreement.Agreement("median_ttft_ms", [10.0, 10.0], [10.0, 10.0], 1.0, low=1 / 1.1, high=1.1)
    assert agreement.verdict([row]) == (
        "At 95% confidence they agree within noise in all measures. The noise is largest in TTFT median: +-10.0%."
    )
    assert agreement.table([row]).splitlines()[2] == (
        "| TTFT median, ms | 10.0 | 10.0 | 1.000 | 1.000 .. 1.000 | 0.909 .. 1.100 | within noise |"
    )


def test_an_interval_too_wide_is_no_agreement() -> None:
    rows = [
        agreement.Agreement("median_ttft_ms", [10.0, 10.0], [10.0, 10.0], 1.0, low=0.97, high=1.01),
        agreement.Agreement("p99_ttft_ms", [10.0, 90.0], [90.0, 10.0], 1.0, low=0.5, high=2.0),
    ]
    assert [row.verdict for row in rows] == ["within noise", "too noisy to tell"]
    assert "there is too much noise to tell in TTFT P99. The noise is largest in TTFT P99: +-100.0%" in (
        agreement.verdict(rows)
    )


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_what_has_no_interval_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="needs two pairs of positive values"):
        agreement.agreement("median_ttft_ms", ours, theirs, 0.95)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --vllm"),
        (["--vllm", "/no/such/vllm"], "--vllm '/no/such/vllm' is not a program"),
        (["--vllm", sys.executable, "--seeds", "3"], "--seeds is 3; it must be at least 4"),
        (["--vllm", sys.executable, "--output-len", "1"], "--output-len is 1; it must be at least 2"),
        (["--vllm", sys.executable, "--rate", "0"], "--rate is 0; it must be more than 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        agreement.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def _scripted_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (servers, agreement):
        monkeypatch.setattr(module, "CHECKPOINTS", tmp_path / "checkpoints")
    server = str(program(tmp_path, "server"))
    monkeypatch.setitem(
        servers.ENGINES, "headway", lambda _, port, settings: servers.Launch([server, "--port", str(port)], {})
    )


SIZES = "--shape tiny --rate 20 --prompts 5 --input-len 8 --output-len 4 --seeds 4 --threads 1"


@pytest.mark.usefixtures("_scripted_server")
def test_a_sitting_gives_both_clients_the_same_load_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both.log"
    result = f"(open({str(both)!r}, 'a').write(NAME), {RESULT})[1]"
    ours = program(tmp_path, "headway", result=result.replace("NAME", "'h'"))
    theirs = program(tmp_path, "vllm", result=result.replace("NAME", "'v'"))
    monkeypatch.setattr(agreement, "HEADWAY", [str(ours)])
    output = tmp_path / "agreement.json"
    agreement.main([*SIZES.split(), "--vllm", str(theirs), "--output", str(output)])
    assert both.read_text() == "hv" + "hvvhhvvh", "one opening run each, then turns in going first"
    mine, other = [
        [json.loads(line) for line in (tmp_path / f"{name}.log").read_text().splitlines()]
        for name in ("headway", "vllm")
    ]
    for sent, received in zip(mine, other, strict=True):
        assert received[:3] == ["bench", "serve", "--disable-tqdm"]
        ignored = sent.index("--result-dir")
        assert sent[:ignored] == received[3 : ignored + 3]
    report = json.loads(output.read_text())
    assert report["summary"][0]["ours"] == [21.0, 22.0, 23.0, 24.0]
    assert all(row["verdict"] == "within noise" for row in report["summary"])
    assert "agree within noise" in capsys.readouterr().out


@pytest.mark.usefixtures("_scripted_server")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"completed": prompts', '"completed": 4'), "headway: 4 of 5 requests were answered"),
        (('"p99_tpot_ms": 8.0', '"p99_tpot_ms": 0.0'), "a latency of 0 cannot be compared"),
    ],
)
def test_runs_that_cannot_be_compared_end_the_sitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], message: str
) -> None:
    binary = program(tmp_path, "client", result=RESULT.replace(*change))
    monkeypatch.setattr(agreement, "HEADWAY", [str(binary)])
    with pytest.raises(SystemExit, match=message):
        agreement.main([*SIZES.split(), "--vllm", str(binary), "--output", str(tmp_path / "agreement.json")])
    assert not (tmp_path / "agreement.json").exists()
