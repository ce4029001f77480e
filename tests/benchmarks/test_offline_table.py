"""The arithmetic of the offline benchmark's table: bytes, FLOPs, shares of peaks, and who is the best peer."""

from __future__ import annotations

import pytest

from benchmarks import tables, work
from benchmarks.checkpoint import SHAPES
from benchmarks.points import decode, held, prefill
from benchmarks.sitting import Entry, Sitting

QWEN = work.shape_of(SHAPES["qwen2.5-0.5b"])
PEAKS = {"read": 50e9, "bf16": 500e9, "int8": 1000e9}
LINEAR = 24 * (896 * 896 * 2 + 2 * 896 * 128 + 3 * 896 * 4864)
HEAD = 151936 * 896


def test_weights_of_a_step() -> None:
    assert work.weight_bytes(QWEN, "bf16") == 2 * (LINEAR + HEAD)
    assert work.weight_bytes(QWEN, "int8") == LINEAR + HEAD
    assert work.weight_bytes(QWEN, "int4") == LINEAR / 2 + HEAD
    untied = work.shape_of(SHAPES["qwen2.5-0.5b"] | {"tie_word_embeddings": False})
    assert work.weight_bytes(untied, "bf16") == 2 * (LINEAR + HEAD), "the embedding's table is not read"


def test_a_decode_at_batch_1_is_a_share_of_the_read() -> None:
    kv = 2 * 24 * 2 * 64 * 2  # of a token, in bytes
    expected = 20 * (2 * (LINEAR + HEAD) + (128 + 32) * kv) / 50e9
    assert work.share(QWEN, "bf16", decode(1, 128, 64), 20.0, PEAKS) == pytest.approx(expected)
    assert work.share(QWEN, "bf16", decode(4, 128, 64), 20.0, PEAKS) is None
    long = work.share(QWEN, "int8", held(1, 16384, 16), 20.0, PEAKS)
    assert long == pytest.approx(20 * (LINEAR + HEAD + (16384 + 8) * kv) / 50e9)


def test_a_prefill_is_a_share_of_the_product_in_its_precision() -> None:
    pairs = 512 * 513 / 2
    norms = 4 * (2 * 24 + 1) * 896 * 512
    flops = 2 * LINEAR * 512 + 2 * HEAD + 24 * 2 * 2 * 14 * 64 * pairs + norms
    assert work.prefill_flops(QWEN, 1, 512) == pytest.approx(flops)
    assert work.prefill_flops(QWEN, 8, 512) == pytest.approx(8 * flops)
    expected = 400 * flops / 512
    assert work.share(QWEN, "bf16", prefill(1, 512), 400.0, PEAKS) == pytest.approx(expected / 500e9)
    assert work.share(QWEN, "int4", prefill(1, 512), 400.0, PEAKS) == pytest.approx(expected / 1000e9)
    assert work.share(QWEN, "int8", prefill(1, 512), 400.0, PEAKS | {"int8": 0.0}) is None


def test_headway_is_held_against_the_peer_with_the_best_median() -> None:
    measured = {"headway": [10.0, 40.0, 30.0], "a": [5.0, 40.0, 10.0], "b": [9.0, 9.0, 9.0], "c": [99.0, 99.0, 99.0]}
    mine, *others = tables.compared("decode, batch 4", measured, {"c"}, max)
    assert (mine.median, mine.low, mine.high) == (30, 10, 40)
    assert (mine.best, mine.ratio, mine.ratio_low, mine.ratio_high) == ("a", 3, 1, 3)
    assert all(row.best is None and row.ratio is None for row in others)


def test_of_times_the_lowest_is_the_best() -> None:
    mine, *_ = tables.compared("start", {"headway": [2.0], "a": [1.0], "b": [4.0]}, set(), min)
    assert (mine.best, mine.ratio) == ("a", 2)


def test_alone_there_is_no_best_peer() -> None:
    (mine,) = tables.compared("start", {"headway": [2.0]}, set(), min)
    assert mine.best is None and mine.ratio is None


def test_of_some_instructions_the_peak_of_products_is_not_known() -> None:
    engines = [Entry("headway", "headway", "python", isa="avx2")]
    sitting = Sitting("qwen2.5-0.5b", "bf16", [prefill(1, 512), decode(1, 128, 64)], engines)
    for point in sitting.points:
        sitting.add(point, "headway", 40.0)
        sitting.peaks[point.label] = [PEAKS]
    prefilled, decoded = tables.rows(sitting)
    assert prefilled.share is None and decoded.share is not None


def test_shares_go_with_the_peaks_of_their_round() -> None:
    point = prefill(1, 512)
    engines = [Entry("headway", "headway", "python"), Entry("openvino", "openvino", "python")]
    sitting = Sitting("qwen2.5-0.5b", "bf16", [point], engines)
    for rate, peak in ((400.0, 500e9), (200.0, 250e9), (300.0, 375e9)):
        sitting.add(point, "headway", rate)
        sitting.add(point, "openvino", rate / 2)
        sitting.peaks.setdefault(point.label, []).append(PEAKS | {"bf16": peak})
    mine, other = tables.rows(sitting)
    expected = 400 * work.prefill_flops(QWEN, 1, 512) / 512 / 500e9
    assert mine.share == pytest.approx(expected) and other.share == pytest.approx(expected / 2)
    assert tables.table("qwen2.5-0.5b, bf16: tokens/s", [mine, other], {"decode": "as it is too large"}) == (
        "**qwen2.5-0.5b, bf16: tokens/s**\n\n"
        "| | engine | median (range) | of the peak | Headway / best peer |\n|---|---|---:|---:|---|\n"
        f"| prefill, 1 x 512 | headway | 300 (200 .. 400) | {expected:.0%} | 2.00 openvino |\n"
        f"| prefill, 1 x 512 | openvino | 150 (100 .. 200) | {expected / 2:.0%} |  |\n"
        "\ndecode: left out, as it is too large.\n"
    )
