"""The fit to published measurements, its error bars, and that what is written down is what the model says."""

from __future__ import annotations

import json
import math
import multiprocessing.dummy
import random
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import plan_accuracy
from benchmarks.published import fit as fitting
from benchmarks.published.fit import (
    METRICS,
    WELL_MEASURED,
    Compared,
    Parameter,
    Table,
    compare,
    error_bar,
    fit,
    fit_in_turn,
    leave_one_out,
    weights,
)
from benchmarks.published.predict import planned_ttft_ms, predict
from benchmarks.published.rows import Row
from headway.cost import catalogue
from headway.cost.catalogue import find_hardware
from headway.cost.efficiency import Efficiency
from tests.benchmarks.published import ROW, ROWS, SOURCE, compared, figures, of_source

TOML = catalogue.FOLDER / "efficiency.toml"
WRITTEN = json.loads(plan_accuracy.OUTPUT.read_text())
DOCS = Path(__file__).parents[2] / "docs" / "cost-model.md"
ENGINES = catalogue.engines()


# Error bars


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_the_bar_holds_its_share_of_figures_like_those_it_was_taken_from(share):
    draw, logarithm = random.Random(3), NormalDist(0.2, 0.4)
    bar = error_bar([compared(draw.lognormvariate(0.2, 0.4)) for _ in range(4000)], share)
    below, up_to = (logarithm.cdf(math.log(each)) for each in bar)
    assert [below, 1 - up_to] == pytest.approx([(1 - share) / 2] * 2, abs=0.02)


def test_a_source_counts_as_the_square_root_of_its_figures():
    """A hundred figures of one source, and four of another, weigh 10 to 2: these lie above the 75th percentile only."""
    many, few = of_source("many", [0.999 + 1e-5 * i for i in range(100)]), of_source("few", [2.0] * 4)
    assert error_bar(many + few, 0.5)[1] < 1.01 and error_bar(many + few, 0.8)[1] == pytest.approx(2.0)
    squared = weights(many + few) ** 2
    assert (sum(squared[:100]), sum(squared[100:])) == (pytest.approx(10), pytest.approx(2))


def test_no_figure_no_bar():
    with pytest.raises(ValueError, match=r"^no figure to take an error bar from$"):
        error_bar([])


def test_bars_are_of_times_and_never_narrower_elsewhere():
    """What was measured at 1.5 times the predicted time, or at that part of the predicted rate, is on the high side."""
    here = of_source("a", [0.9, 1.1], "ttft_ms") + of_source("b", [0.8, 1 / 1.5], "output_tokens_per_s")
    there = of_source("c", [0.95, 1.3], "ttft_ms", "L40S") + of_source("d", [0.7, 1.05], hardware="L40S")
    assert find_hardware("L40S").architecture not in WELL_MEASURED
    bars = plan_accuracy.error_bars(here + there)
    assert bars == {
        "ttft": pytest.approx((0.9, 1.1)),
        "tpot": pytest.approx((1.25, 1.5)),
        "ttft_elsewhere": pytest.approx((0.9, 1.3)),
        "tpot_elsewhere": pytest.approx((0.7, 1.5)),
    }


@pytest.mark.parametrize("hardware", ["H100-SXM", "L40S"])
@pytest.mark.parametrize("metric", METRICS)
def test_inside_counts_what_lies_between(hardware, metric):
    low, high = catalogue.uncertainty(find_hardware(hardware), "ttft" if metric == "ttft_ms" else "tpot")
    times = [low * 0.99, low * 1.01, 1.0, high * 0.99, high * 1.01]
    ratios = [1 / each for each in times] if metric == "output_tokens_per_s" else times
    assert plan_accuracy.inside(of_source("a", ratios, metric, hardware)) == pytest.approx(3 / 5)


# The fit


TRUTH = {
    Parameter("all", "matmul_flops.bf16", 0.7, doubt=5.0): 0.52,
    Parameter("all", "matmul_bytes", 0.85, doubt=5.0, most=0.95): 0.71,
    Parameter("engine.vllm", "step_s", 1e-3, doubt=5.0): 3e-3,
    Parameter("engine.vllm", "request_s", 1e-2, doubt=5.0): 2.5e-2,
}
# Models of two sizes, as weights and the host's part of a step can't be told apart by one.
LOADS = [
    (model, n, prompt) for model in ("llama-3.2-1b", "llama-3.1-8b") for n, prompt in ((1, 128), (4, 2048), (64, 512))
]


def measured(values: dict[Parameter, float], **changes: object) -> list[Row]:
    """What would be measured, were these the efficiencies."""
    found = Table(list(values), list(values.values()))
    loads = {1: "concurrency"}  # of one client, whose requests cost a server their time; larger batches have none
    made = [
        replace(ROW, model=model, load=loads.get(n, "batch"), load_value=n, prompt_tokens=prompt, **changes)
        for model, n, prompt in LOADS
    ]
    exact = [predict(row, found.efficiency) for row in made]
    return [replace(row, ttft_ms=each.ttft_ms, tpot_ms=each.tpot_ms) for row, each in zip(made, exact, strict=True)]


@pytest.fixture
def threads(monkeypatch):
    """Threads instead of processes: a test process that has threads of its own should not be forked."""
    monkeypatch.setattr(fitting, "multiprocessing", SimpleNamespace(get_context=lambda _: multiprocessing.dummy))


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_the_fit_finds_the_efficiencies_that_rows_were_made_with():
    found = fit(measured(TRUTH), list(TRUTH), rounds=30)
    assert found == {parameter: pytest.approx(value, rel=0.02) for parameter, value in TRUTH.items()}


@pytest.mark.usefixtures("threads")
def test_an_outlier_is_held_down():
    """One decode that took three times as long. Squared, its error would nearly double what the host takes."""
    first, *others = measured(TRUTH)
    step = next(each for each in TRUTH if each.field == "step_s")
    known = {parameter: value for parameter, value in TRUTH.items() if parameter is not step}
    found = fit([replace(first, tpot_ms=3 * first.tpot_ms), *others], [step], rounds=30, fixed=known)
    assert found == {step: pytest.approx(3e-3, rel=0.35)}


@pytest.mark.usefixtures("threads")
def test_beliefs_bounds_and_what_is_fixed():
    """What no row speaks of stays as believed; nothing gets above its bound; what is fixed is taken as it is."""
    flops, bandwidth, step, request = TRUTH
    silent = Parameter("architecture.cdna3", "link", 0.5)
    capped = replace(bandwidth, guess=0.5, most=0.6)
    found = fit(measured(TRUTH), [step, capped, silent], rounds=30, fixed={flops: 0.52, request: 2.5e-2})
    assert set(found) == {step, capped, silent}
    assert found[silent] == pytest.approx(0.5) and found[capped] == pytest.approx(0.6, rel=1e-3)
    sure = replace(step, guess=1e-3, doubt=1e-4)
    assert fit(measured(TRUTH), [sure], rounds=30)[sure] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_little_known_architectures_do_not_move_what_all_share():
    """The rows of an L40S were made with another bandwidth, and are left to find what is its own."""
    shared = {parameter: value for parameter, value in TRUTH.items() if parameter.field != "matmul_flops.bf16"}
    own = Parameter("architecture.ada", "matmul_bytes", 0.8, doubt=5.0)
    elsewhere = measured({**shared, own: 0.4}, hardware="L40S")
    found = fit_in_turn([*measured(shared), *elsewhere], [*shared, own], rounds=30)
    assert found == {each: pytest.approx(value, rel=0.02) for each, value in {**shared, own: 0.4}.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_no_family_is_predicted_by_what_was_fitted_to_it():
    """Two families whose steps take 2 and 4 ms are each predicted with the other's, and so is what is only judged."""
    step = Parameter("engine.vllm", "step_s", 1e-3, doubt=5.0)
    quick, slow = (replace(SOURCE, key=name, family=name) for name in ("quick", "slow"))
    fitted = measured({step: 2e-3}, source=quick) + measured({step: 4e-3}, source=slow)
    judged = measured({step: 2e-3}, source=replace(quick, key="quick again", use="test"))
    unrelated = measured({step: 2e-3}, source=replace(SOURCE, key="new", family="new", use="test"))
    start = {step: 3e-3}
    of_quick, of_slow = leave_one_out(fitted, [*judged, *unrelated], [step], start)
    assert {each.row.source.key for each in of_quick} == {"quick", "quick again"}
    assert {each.row.source.key for each in of_slow} == {"slow"}
    for group, off in ((of_quick, 2.0), (of_slow, -2.0)):
        tpots = [
            each.predicted - each.measured for each in group if each.metric == "tpot_ms" and each.row.load_value == 1
        ]
        assert tpots == pytest.approx([off] * len(tpots), abs=0.1) and tpots


# What is written down


def test_the_table_of_efficiencies_is_as_the_fit_writes_it():
    """Its own numbers, written again, give the same text: nobody changed it by hand."""
    text = TOML.read_text()
    read = tomllib.loads(text)
    bars = {name: tuple(bar) for name, bar in read.pop("uncertainty").items() if name != "measured"}
    sections = {"all": read["all"]}
    for kind in ("architecture", "engine"):
        sections |= {f"{kind}.{name}": fields for name, fields in read[kind].items()}
    assert plan_accuracy.as_toml(sections, bars) == text
    parameters = {(each.section, each.field): each for each in plan_accuracy.PARAMETERS}
    assert len(parameters) == len(plan_accuracy.PARAMETERS)
    values = {}
    for section, fields in sections.items():
        for name, value in fields.items():
            entries = (
                {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
            values |= {(section, field): each for field, each in entries.items()}
    assert set(values) == set(parameters)
    assert all(0 < value <= parameters[key].most * 1.0001 for key, value in values.items())


def test_the_bar_of_arrivals_is_that_of_the_rows_under_such_a_load():
    """The figures are those last written down. The bar is no narrower than the widest other bar of TTFT."""
    under_load = [
        Compared(row, "ttft_ms", row.ttft_ms, entry["predicted"])
        for entry in WRITTEN["figures"]
        if entry["metric"] == "ttft_ms" and (row := published()[of_entry(entry)]).load == "rate"
    ]
    assert len(under_load) == 39
    elsewhere = catalogue.uncertainty(find_hardware("L40S"), "ttft")
    expected = plan_accuracy.load_bar(under_load, elsewhere)
    assert catalogue.uncertainty(find_hardware("H100-SXM"), "ttft_arrivals") == pytest.approx(expected, abs=2e-3)
    assert expected[0] <= elsewhere[0] and expected[1] >= elsewhere[1]


def test_the_catalogue_reads_what_the_fit_writes(monkeypatch):
    """Sections are merged alike: an engine's over an architecture's over all."""
    draw = random.Random(5)
    found = Table(plan_accuracy.PARAMETERS, [each.guess * draw.uniform(0.5, 1) for each in plan_accuracy.PARAMETERS])
    bars = {f"{metric}{where}": (0.5, 2.0) for metric in ("ttft", "tpot") for where in ("", "_elsewhere")}
    machines = catalogue.hardware().values()
    text = plan_accuracy.as_toml(found.sections, {**bars, "ttft": (0.25, 4.0)})
    monkeypatch.setattr(catalogue, "_efficiencies", lambda: tomllib.loads(text))
    merged = {(each.key, engine): catalogue.efficiency(each, engine) for each in machines for engine in ENGINES}
    assert catalogue.uncertainty(find_hardware("H100-SXM"), "ttft") == (0.25, 4.0)
    assert len({repr(each) for each in merged.values()}) > 2 * len(ENGINES)
    for (key, engine), efficiency in merged.items():
        expected = found.efficiency(find_hardware(key), engine)
        for name in Efficiency.__slots__:
            assert getattr(efficiency, name) == pytest.approx(getattr(expected, name), rel=1e-3), (key, engine, name)


def of_entry(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a figure of the results unmistakable."""
    return tuple(entry[name] for name in ("source", "engine", "deployment", "metric", "measured"))


def published() -> dict[tuple[Any, ...], Row]:
    """The row of each figure, whose key is as `of_entry` makes it."""
    return {
        (row.source.key, row.engine, row.label, metric, value): row
        for row in ROWS
        for metric, value in figures(row).items()
        if metric != "output_tokens_per_s" or row.tpot_ms is None
    }


def again() -> list[Compared]:
    """The written figures as `compare` gives them."""
    known = published()
    return [
        Compared(known[of_entry(each)], each["metric"], each["measured"], each["predicted"])
        for each in WRITTEN["figures"]
    ]


def test_the_results_have_every_published_figure_once():
    assert Counter(of_entry(each) for each in WRITTEN["figures"]) == Counter(dict.fromkeys(published(), 1))
    assert len(published()) == sum(
        len(figures(row)) - (row.tpot_ms is not None and row.output_tokens_per_s is not None) for row in ROWS
    )


@pytest.mark.parametrize("every", [160, pytest.param(9, marks=pytest.mark.slow)])
def test_the_results_are_what_the_model_says_today(every):
    """Some rows are checked: all would take longer than a test should. `make bench-plan_accuracy` repairs it."""
    then = {of_entry(each): each["predicted"] for each in WRITTEN["figures"]}
    for now in plan_accuracy.result(list(compare(ROWS[::every], catalogue.efficiency)))["figures"]:
        assert now["predicted"] == pytest.approx(then[of_entry(now)], rel=1e-3), now


def test_the_summary_is_of_the_figures():
    """For each source, and for all of each use together."""
    entries = plan_accuracy.result(again())["summary"]
    assert len(entries) == len(WRITTEN["summary"])
    for entry, old in zip(entries, WRITTEN["summary"], strict=True):
        assert entry == {
            name: value if isinstance(value, str) else pytest.approx(value, abs=1e-3) for name, value in old.items()
        }
    assert sum(entry["figures"] for entry in entries if entry["source"] == "all") == len(WRITTEN["figures"])


# Rows of the documentation's table that are of one source.
NAMED = {
    "gpt-oss-120b on H200": "inferencemax-h200",
    "1.5B to 70B dense on H100 PCIe": "iog",
    "Qwen2.5-72B on two H100": "tenstorrent-gpu-qwen2.5-72b",
    "8B to 405B on H100 and H200": "trtllm-perf-overview-v10",
    "gpt-oss-20b in the month it came out": "sariekr-gpu-conc",
    "DeepSeek R1 on MI325X": "inferencemax-mi325x-sglang",
}


def shown(group: list[Compared]) -> list[float]:
    """Median error and share inside the bar, as the documentation rounds them; nothing of no figures."""
    if not group:
        return []
    return [100 * float(np.median([abs(each.error) for each in group])), 100 * plan_accuracy.inside(group)]


def test_the_documentation_shows_these_results():
    _, _, table = DOCS.read_text().partition("<!-- figures: benchmarks/results/plan_accuracy.json -->")
    lines = [line for line in table.partition("<!-- end")[0].splitlines() if line.startswith("|")][2:]
    every = again()
    checked = set()
    for line in lines:
        name, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        use = name.partition(" ")[0]
        source = next((key for start, key in NAMED.items() if start in name), None)
        group = [each for each in every if source in (None, each.row.source.key)]
        if source is None:
            group = [each for each in group if each.row.source.use == use]
            assert f"({len({each.row.source.key for each in group})} sources)" in name
        checked.add(source or use)
        times = shown([each for each in group if each.metric != "ttft_ms"])
        firsts = shown([each for each in group if each.metric == "ttft_ms"])
        said = [float(cell.removesuffix(" %")) for cell in cells if cell]
        assert int(said[0]) == len(group), name
        for number, expected in zip(said[1:], times + firsts, strict=True):
            assert number == pytest.approx(expected, abs=0.6 if number >= 1 else 0.06), name
    assert checked == {"fit", "test", "other", *NAMED.values()}


@pytest.mark.parametrize(
    ("load", "value", "bar"), [("rate", 2.0, "ttft_arrivals"), ("concurrency", 8, "ttft_clients"), ("batch", 8, "ttft")]
)
def test_ttft_has_the_bar_that_a_plan_gives_of_its_load(load, value, bar):
    row = replace(ROW, load=load, load_value=value)
    _, high = catalogue.uncertainty(find_hardware(row.hardware), bar)
    within, beyond = ([compared(ratio * high, row, "ttft_ms")] for ratio in (0.99, 1.01))
    assert plan_accuracy.inside(within) == 1.0 and plan_accuracy.inside(beyond) == 0.0


def test_errors_by_engine_are_of_what_only_judges():
    judged = replace(ROW, source=replace(SOURCE, use="test"))
    early = replace(judged, engine="vllm-v0", model="mixtral-8x7b")
    fitted = replace(ROW, source=replace(SOURCE, use="fit"))
    rate = Compared(judged, "output_tokens_per_s", measured=8.5, predicted=10.0)
    found = plan_accuracy.by_engine(
        [compared(1.0, judged), rate, compared(1.25, early, "ttft_ms"), compared(9.0, fitted)]
    )
    assert [(each["engine"], each["model"], each["metric"], each["figures"]) for each in found] == [
        ("all", "MoE", "TTFT", 1),
        ("all", "dense", "TPOT", 2),
        ("other", "MoE", "TTFT", 1),
        ("vLLM", "dense", "TPOT", 2),
    ]
    assert found[2]["median_error"] == pytest.approx(0.2)
    # The rate counts as the time that it stands for, whose bar holds 1 / 0.85, and not 0.85.
    assert found[3]["median_error"] == pytest.approx(0.075) and found[3]["inside_80_percent_bar"] == 1.0


def test_a_loop_is_inside_its_bar_or_not():
    """One deployment has figures at the estimate and beyond either end; one client is no load."""
    loop = replace(ROW, load="concurrency", load_value=8, num_prompts=80)
    found = planned_ttft_ms(loop, catalogue.efficiency)
    low, high = catalogue.uncertainty(find_hardware(loop.hardware), "ttft_clients")
    times = [found, 0.99 * low * found, 1.01 * high * found]
    said = plan_accuracy.under_load([replace(loop, ttft_ms=each) for each in times] + [replace(loop, load_value=1)])
    assert said["all"]["figures"] == 3 and said["all"]["inside_80_percent_bar"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_the_bar_of_clients_is_that_of_closed_loops_that_only_judge():
    judged = [row for row in ROWS if row.source.use == "test"]
    elsewhere = catalogue.uncertainty(find_hardware("L40S"), "ttft")
    expected = plan_accuracy.load_bar(plan_accuracy.planned_loops(judged, catalogue.efficiency), elsewhere)
    assert catalogue.uncertainty(find_hardware("H100-SXM"), "ttft_clients") == pytest.approx(expected, abs=2e-3)


def test_the_program_prints_and_writes_what_it_compared(monkeypatch, tmp_path, capsys):
    """It compares the rows of two sources, one of which was fitted to."""
    some = [row for row in ROWS if row.source.key in ("gpt-fast", "llmservingsim-bench")]
    monkeypatch.setattr(plan_accuracy, "rows", lambda: some)
    output = tmp_path / "accuracy.json"
    monkeypatch.setattr("sys.argv", ["plan_accuracy", "--rows", "--output", str(output)])
    plan_accuracy.main()
    printed = capsys.readouterr().out
    assert "gpt-fast" in printed and "llmservingsim-bench" in printed and "llama-2-7b int4 A100-80GB-SXM" in printed
    kept = json.loads(output.read_text())
    assert {entry["source"] for entry in kept["summary"]} == {"gpt-fast", "llmservingsim-bench", "all"}
    assert len(kept["figures"]) == sum(entry["figures"] for entry in kept["summary"] if entry["source"] == "all")


def test_a_refit_keeps_what_it_judges_out_of_the_fit(monkeypatch, tmp_path):
    """Bars come from families left out, and from sources for tests of families that nothing was fitted to."""
    step = Parameter("engine.vllm", "step_s", 1e-3, doubt=5.0)
    own, strange = (replace(SOURCE, key=name, family=name, use="test") for name in ("own", "strange"))
    table = [replace(ROW, source=source) for source in (SOURCE, replace(own, family=SOURCE.family), strange)]
    table.append(replace(ROW, source=replace(SOURCE, key="young", family="young", use="other")))
    fits: list[set[str]] = []
    held: list[list[Compared]] = []

    def fake_fit(rows, parameters, start=None, rounds=12):
        fits.append({row.source.key for row in rows})
        return {step: 1e-3 if len(fits) == 1 else 7e-3}

    def fake_bars(compared):
        held.append(list(compared))
        return {"ttft": (0.5, 2.0)}

    monkeypatch.setattr(plan_accuracy, "PARAMETERS", [step])
    monkeypatch.setattr(plan_accuracy, "fit_in_turn", fake_fit)
    monkeypatch.setattr(fitting, "fit_in_turn", fake_fit)
    monkeypatch.setattr(plan_accuracy, "error_bars", fake_bars)
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    plan_accuracy.refit(table, Console(quiet=True))
    assert fits == [{"paper"}, set()]
    predicted = {each.row.source.key: each.predicted for each in held[0] if each.metric == "tpot_ms"}
    assert set(predicted) == {"paper", "own", "strange"}
    assert predicted["own"] == predicted["paper"] == pytest.approx(predicted["strange"] + 6)
    assert tomllib.loads((tmp_path / "efficiency.toml").read_text())["engine"]["vllm"] == {"step_s": 1e-3}
