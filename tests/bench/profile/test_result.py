"""From records to numbers: achieved fractions against closed forms, opportunities, JSON."""

from __future__ import annotations

import msgspec
import pytest

from headway.bench.profile.achieved import decode_work
from headway.bench.profile.result import opportunities, profile_length
from headway.load.record import FailureKind
from tests.bench.profile.made import PEAKS, QWEN, answered, result
from tests.bench.records import failed, request

WEIGHTS = 2 * 494_032_768
KV = 2 * 24 * 2 * 64 * 2


def profile(records, prompt=256):
    return profile_length(prompt, records, (50.0, 90.0), QWEN, PEAKS)


def test_decode_moves_all_weights_and_the_context():
    """Tied embeddings are read whole by the head, and one row of them by the token; the step's own KV is written."""
    flops, moved = decode_work(QWEN, prompt_tokens=256, output_tokens=4)
    mean_context = 256 + 1
    assert moved == WEIGHTS + 2 * 896 + KV * (mean_context + 1) + KV
    attention = 4 * 24 * 14 * 64 * (mean_context + 1)
    norms_and_biases = 24 * (2 * 896 + (14 + 2 * 2) * 64) + 896
    assert flops == 2 * (494_032_768 - norms_and_biases) + attention + 4 * (2 * 24 + 1) * 896


def test_achieved_decode_bandwidth():
    """Three steps in 150 ms; a model far larger than the caches is held against the memory's rate, 32 GB/s."""
    decode = profile([answered(n, 256) for n in range(3)]).decode
    _, moved = decode_work(QWEN, 256, 4)
    assert decode.measured_ms == 50.0
    assert decode.bytes_per_s == 32e9
    assert decode.bandwidth_share == pytest.approx(moved / 0.050 / 32e9)
    assert decode.bound == "memory"
    assert decode.floor_ms == pytest.approx(1e3 * moved / 32e9)
    assert decode.share == pytest.approx(decode.bandwidth_share)


def test_achieved_prefill_flops():
    prefill = profile([answered(n, 256, prefill_ms=1000.0) for n in range(3)]).prefill
    parameters = 494_032_768 - 136_134_656 - (24 * (2 * 896 + 1152) + 896)
    flops = 2 * 256 * parameters + 2 * 136_134_656 + 4 * 24 * 14 * 64 * (256 * 257 // 2)
    flops += 4 * 256 * (2 * 24 + 1) * 896  # of the norms
    assert prefill.flops == flops
    assert prefill.flops_share == pytest.approx(flops / 400e9)
    assert prefill.bound == "compute"
    assert prefill.floor_ms == pytest.approx(1e3 * flops / 400e9)


def test_latencies_and_counts_of_a_length():
    records = [answered(n, 250, prefill_ms=ms) for n, ms in enumerate((100.0, 200.0, 300.0))]
    each = profile([*records, failed(3, FailureKind.TIMEOUT), failed(4, FailureKind.CUT), failed(5, FailureKind.CUT)])
    assert (each.asked_tokens, each.prompt_tokens, each.output_tokens, each.completed) == (256, 250, 4, 3)
    assert each.failures == {"timeout": 1, "cut": 2}
    assert each.medians_ms == pytest.approx({"ttft_ms": 212.0, "tpot_ms": 50.0, "ttlt_ms": 362.0})
    assert each.latencies["ttft_ms"].minimum == pytest.approx(112.0)
    assert each.latencies["ttft_ms"].percentiles[0].value is None  # three are too few to claim even a median


def test_a_length_without_answers_or_ledgers():
    each = profile([failed(0)])
    assert (each.completed, each.medians_ms, each.stages_ms, each.prefill, each.decode) == (0, {}, {}, None, None)
    bare = profile([request(0, [5.0, 6.0])])
    assert bare.completed == 1 and bare.stages_ms == {} and bare.prefill is None and bare.decode is None


def test_opportunities_are_ranked_by_what_could_be_won():
    each = profile([answered(n, 256, prefill_ms=1000.0) for n in range(3)])
    found = opportunities(each)
    assert [o.winnable_ms for o in found] == sorted((o.winnable_ms for o in found), reverse=True)
    by_stage = {o.stage: o for o in found}
    assert found[0].stage == "prefill"
    assert by_stage["prefill"].floor_ms == each.prefill.floor_ms
    assert by_stage["decode"].floor_ms == pytest.approx(3 * each.decode.floor_ms)
    assert by_stage["sampling"].floor_ms == 0.0 and by_stage["sampling"].winnable_ms == 7.0
    assert sum(o.measured_ms for o in found) == pytest.approx(each.total_ms)


def test_nothing_can_be_won_below_the_floor():
    """Measured faster than the peaks that a busy machine had let us see."""
    each = profile([answered(n, 256, decode_ms=3.0) for n in range(3)])
    decode = next(o for o in opportunities(each) if o.stage == "decode")
    assert decode.floor_ms > decode.measured_ms and decode.winnable_ms == 0.0
    assert each.decode.share > 1


def test_memory_is_that_of_the_formulas():
    memory = result().memory_of(400)
    assert memory["weights"] == WEIGHTS
    assert memory["kv_cache"] == 400 * KV
    assert memory["activations"] == 400 * (896 + 896 + 3 * 4864) * 2
    assert result().memory_of(401)["kv_cache"] == 416 * KV
    assert result().pool_bytes == 16_000 * KV


def test_a_result_is_ok_when_all_was_answered():
    assert result().ok
    lengths = [profile([answered(0, 256), failed(1)])]
    assert not result(lengths=lengths).ok
    assert not result(lengths=[]).ok
    assert result(lengths=[]).typical is None


def test_json_holds_everything():
    made = msgspec.json.decode(msgspec.json.encode(result(notes=["a note"]).as_json()))
    assert made["model"]["kv_bytes_per_token"] == KV
    assert made["model"]["parameters"] == 494_032_768
    assert made["server"]["kv_cache_bytes"] == 16_000 * KV
    assert made["model_loading"]["engine_s"]["convert"] == 0.5
    first = made["prompt_lengths"][0]
    assert first["prompt_tokens"] == 64
    assert sum(first["stage_shares"].values()) == pytest.approx(1)
    assert first["decode_step"]["bound"] == "memory"
    assert 0 < first["decode_step"]["bandwidth_share"] < 1
    assert {o["stage"] for o in made["opportunities"]["64"]} == set(first["stages_ms"])
    assert (made["notes"], made["interrupted"], made["machine"]["busy"]) == (["a note"], False, None)


def test_json_of_a_length_without_answers_has_no_nan():
    made = msgspec.json.decode(msgspec.json.encode(result(lengths=[profile([failed(0)])]).as_json()))
    assert made["prompt_lengths"][0]["latencies"]["ttft_ms"]["mean"] is None
