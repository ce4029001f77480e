"""Published measurements: that each can be, what the model predicts of them, and how both are compared."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.published import fit as fitting
from benchmarks.published.fit import Compared, compare, summary
from benchmarks.published.predict import deployment, precision_of, predict
from benchmarks.published.rows import Row, sources
from headway.cost import catalogue
from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.cost.requests import Limits, RequestShape
from headway.simulator.serving import closed_loop, open_loop
from tests.benchmarks.published import ROW, ROWS, SOURCE, compared, figures

# The table


def test_every_source_says_where_it_is_and_has_rows():
    known = sources()
    for source in known.values():
        assert source.url.startswith("https://") and source.title and source.engine_version, source.key
        assert re.match(r"20\d\d|unknown$", source.date) and len(source.protocol) > 40 and source.family, source.key
        assert source.use in ("fit", "test", "other"), source.key
    assert {row.source.key for row in ROWS} == set(known)


def test_every_row_is_of_a_known_deployment_and_has_a_figure():
    for row in ROWS:
        found = deployment(row, catalogue.efficiency)
        assert row.engine in catalogue.engines() and found.hardware.kind == "gpu", row
        assert row.load in ("batch", "concurrency", "rate", "burst") and row.load_value > 0, row
        assert row.load == "rate" or row.load_value == int(row.load_value), row
        assert row.statistic in ("mean", "median") and 0 <= row.spread < 1, row
        assert row.prompt_tokens >= 1 and row.output_tokens >= 1 and (row.num_prompts or 1) >= 1, row
        assert figures(row) and all(0 < value < 1e6 for value in figures(row).values()), row


def test_nothing_is_both_fitted_and_judged():
    """Neither a source nor, under another source's name, the same deployment under the same load."""
    seen: dict[tuple[object, ...], set[str]] = {}
    for row in ROWS:
        seen.setdefault((row.label, row.engine, row.kv_cache_dtype, row.num_prompts), set()).add(row.source.use)
    assert {frozenset(uses) for uses in seen.values()} == {frozenset({use}) for use in ("fit", "test", "other")}
    assert max(Counter(replace(row, notes="") for row in ROWS).values()) == 1


def test_no_measurement_beats_physics():
    """A decode of one sequence takes no less in any batch, and nor does the first prompt of many."""

    def ideal(hardware: Hardware, engine: str) -> Efficiency:
        return Efficiency.ideal()

    for row in ROWS:
        found = deployment(row, ideal)
        decode_s = found.step([Chunk(1, row.prompt_tokens)]).seconds
        if row.tpot_ms is not None:
            assert row.tpot_ms / 1e3 > decode_s, row
        if row.ttft_ms is not None:
            # Lengths of some data sets differ, of which the table has the mean.
            assert row.ttft_ms / 1e3 > 0.8 * found.step([Chunk(row.prompt_tokens)]).seconds, row
        if row.output_tokens_per_s is not None and row.load == "batch":
            together = found.step([Chunk(1, row.prompt_tokens, sequences=int(row.load_value))]).seconds
            assert row.output_tokens_per_s < row.load_value / min(together, row.load_value * decode_s), row


def test_no_longer_prompt_takes_less_time_than_its_further_tokens():
    """This compares rows of one client of one server. If a longer prompt took less time, a prefix was cached."""
    alone: dict[tuple[object, ...], list[Row]] = {}
    for row in ROWS:
        if row.ttft_ms is not None and row.load_value == 1 and row.load in ("batch", "concurrency"):
            key = (row.source.key, row.model, row.hardware, row.engine, row.tensor_parallel, row.quantization, row.load)
            alone.setdefault(key, []).append(row)
    for row, longer in itertools.chain(*(itertools.permutations(group, 2) for group in alone.values())):
        if row.prompt_tokens < longer.prompt_tokens:
            ideal = deployment(row, lambda hardware, engine: Efficiency.ideal())
            short_s, long_s = (ideal.step([Chunk(each.prompt_tokens)]).seconds for each in (row, longer))
            assert longer.ttft_ms - row.ttft_ms > 1e3 * (long_s - short_s), longer


# Predictions


def losses(**changes: float) -> Efficiency:
    return replace(Efficiency(), step_s=0.0, sequence_s=0.0, token_s=0.0, request_s=0.0, **changes)


def test_one_request_by_hand():
    """The prompt after what its request and its tokens cost the host, then a step for each further token."""
    lossy = replace(Efficiency(), token_s=1e-5, request_s=0.02)
    row = replace(ROW, output_tokens_per_s=1.0)
    on = deployment(row, lambda hardware, engine: lossy)
    first_s = 0.02 + 512 * 1e-5 + on.step([Chunk(512)]).seconds
    decodes_s = [on.step([Chunk(1, 512 + i)]).seconds for i in range(7)]
    found = predict(row, lambda hardware, engine: lossy)
    assert found.ttft_ms == pytest.approx(1e3 * first_s)
    assert found.tpot_ms == pytest.approx(1e3 * sum(decodes_s) / 7, rel=1e-3)
    assert found.output_tokens_per_s == pytest.approx(8 / (first_s + sum(decodes_s)), rel=1e-3)


def test_only_what_was_published_is_predicted():
    found = predict(replace(ROW, ttft_ms=None), catalogue.efficiency)
    assert found.ttft_ms is None and found.tpot_ms is not None and found.output_tokens_per_s is None


@pytest.mark.parametrize(("statistic", "field"), [("mean", "ttft_s"), ("median", "ttft_p50_s")])
def test_loads_are_those_of_the_row(statistic, field):
    """A closed loop with fewer prompts than clients is a burst; small memories take smaller steps."""
    row = replace(ROW, statistic=statistic, load_value=12, prompt_tokens=900)
    on, load = deployment(row, catalogue.efficiency), RequestShape(900, 8, 0, 0.0)
    bare, usual = deployment(replace(row, load="batch"), catalogue.efficiency), Limits(8192, 1024)
    for changes, served, first in (
        ({"load": "batch"}, open_loop(bare, load, [0.0] * 12, usual), "ttft_p99_s"),
        ({"load": "burst", "num_prompts": 30}, open_loop(bare, load, [0.0] * 30, usual), field),
        ({"num_prompts": 7}, closed_loop(on, load, 12, 7, usual), field),
        ({"num_prompts": 36}, closed_loop(on, load, 12, 36, usual), field),
    ):
        predicted = predict(replace(row, **changes), catalogue.efficiency)
        assert predicted.ttft_ms == pytest.approx(1e3 * getattr(served, first)), changes
        assert predicted.tpot_ms == pytest.approx(1e3 * served.tpot_s), changes
    small = replace(row, hardware="A100-40GB", num_prompts=7)
    served = open_loop(deployment(small, catalogue.efficiency), load, [0.0] * 7, Limits(2048, 256))
    assert predict(small, catalogue.efficiency).ttft_ms == pytest.approx(1e3 * getattr(served, field))


def test_a_batch_is_given_to_the_engine_without_a_server():
    """Its first token is there when the last prompt is done: so long does it take with one token each."""
    row = replace(ROW, load="batch", load_value=20, prompt_tokens=1000, engine="vllm-v0")
    on = deployment(row, catalogue.efficiency)
    steps = [[Chunk(1000, sequences=8), Chunk(192)], [Chunk(808, 192), Chunk(1000, sequences=7), Chunk(384)]]
    steps.append([Chunk(616, 384), Chunk(1000, sequences=3)])
    assert on.efficiency.request_s == on.efficiency.token_s == on.efficiency.output_s == 0.0
    expected = sum(on.step(step).seconds for step in steps)
    assert predict(row, catalogue.efficiency).ttft_ms == pytest.approx(1e3 * expected, rel=0.02)


def test_a_source_says_how_its_servers_and_clients_were_run():
    """Fewer tokens in a step, steps that are scheduled ahead, and clients that begin one after the other."""
    row = replace(ROW, load_value=4, prompt_tokens=2000, num_prompts=40, output_tokens=300, spread=0.3)

    def ttft(**said: float) -> float:
        return predict(replace(row, source=replace(SOURCE, **said)), catalogue.efficiency).ttft_ms

    on = deployment(row, catalogue.efficiency)
    alone = 1e3 * (on.step([Chunk(2000)]).seconds + on.efficiency.request_s + 2000 * on.efficiency.token_s)
    ramp = ttft(ramp_s=5.0)
    assert alone <= ramp < 1.1 * alone < ttft()  # apart from each other
    assert ttft(ramp_s=5.0, max_num_batched_tokens=512) > 1.1 * ramp
    assert ramp < ttft(ramp_s=5.0, ahead=True) < ramp + 1e3 * 2 * on.step([Chunk(1, 2300, sequences=4)]).seconds


def test_arrivals_that_are_far_apart_are_served_alone():
    alone = predict(ROW, catalogue.efficiency)
    rare = predict(replace(ROW, load="rate", load_value=0.001, num_prompts=20), catalogue.efficiency)
    often = predict(replace(ROW, load="rate", load_value=30.0, num_prompts=200), catalogue.efficiency)
    assert (rare.ttft_ms, rare.tpot_ms) == (pytest.approx(alone.ttft_ms), pytest.approx(alone.tpot_ms))
    assert often.ttft_ms > rare.ttft_ms and often.tpot_ms > rare.tpot_ms


def test_formats_of_checkpoints():
    """mxfp4 is of experts only; gpt-fast, unlike others, narrows the head too, and int4 in groups of 32."""
    sparse = precision_of(replace(ROW, model="gpt-oss-20b", quantization="mxfp4"))
    assert (sparse.of_experts.name, sparse.linear.name) == ("mxfp4", "bf16")
    vllm, fast = (precision_of(replace(ROW, engine=engine, quantization="int4")) for engine in ("vllm", "gpt-fast"))
    assert vllm.linear.bits == fast.linear.bits == fast.head.bits == 4 and vllm.head.bits == 16
    assert fast.linear.bits_per_element > vllm.linear.bits_per_element
    assert precision_of(replace(ROW, kv_cache_dtype="fp8")).kv.bits == 8


# Comparing


def test_a_rate_that_repeats_tpot_is_left_out():
    both, rate = replace(ROW, output_tokens_per_s=9.0), replace(ROW, tpot_ms=None, output_tokens_per_s=9.0)
    found = list(compare([both, rate], catalogue.efficiency))
    assert [each.metric for each in found] == ["ttft_ms", "tpot_ms", "ttft_ms", "output_tokens_per_s"]
    assert found[-1].measured == 9.0 and found[0].predicted == predict(both, catalogue.efficiency).ttft_ms


def test_errors_are_of_the_prediction_and_point_the_same_way_for_rates():
    late = Compared(ROW, "tpot_ms", measured=10.0, predicted=12.0)
    slow = Compared(ROW, "output_tokens_per_s", measured=12.0, predicted=10.0)
    assert late.error == pytest.approx(0.2) and late.as_time is late
    assert slow.error == pytest.approx(-1 / 6) and slow.as_time.error == pytest.approx(0.2)
    assert late.log_ratio == pytest.approx(math.log(1.2)) == slow.as_time.log_ratio


def test_known_predictions_are_not_made_again(monkeypatch):
    known: fitting.Known = {}
    once = list(compare([ROW], catalogue.efficiency, known))
    monkeypatch.setattr(fitting, "predict", lambda *_: pytest.fail("predicted again"))
    assert list(compare([ROW], catalogue.efficiency, known)) == once and len(known) == 1


def test_a_summary_by_hand():
    found = summary([compared(1 / (1 + error)) for error in (-0.5, -0.1, 0.0, 0.2, 0.3)])
    assert (found["figures"], found["median_error"], found["median_ratio"]) == (5, pytest.approx(0.2), pytest.approx(1))
    assert found["p90_error"] == pytest.approx(0.3 + 0.6 * 0.2)  # 3.6 of the 4 steps from the least to the largest
