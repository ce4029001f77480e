"""Document 001, "Bottlenecks": its complexities, and its figures for Llama 3 405B, as the cost model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from headway.cost.attention import Chunk
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.memory import activation_bytes, kv_bytes_per_token, kv_cache_bytes, weight_bytes
from headway.cost.precision import Precision
from headway.cost.requests import RequestShape
from headway.cost.shape import ModelShape
from headway.cost.work import Operation, Work, step_work, total
from headway.simulator.serving import closed_loop, open_loop
from tests.cost.machines import MACHINE, deployment

LLAMA_405B = find_model("llama-3.1-405b").shape
# The document counts 11 d^2 of weights in a layer: 4 of MHA and 7 of a feed-forward layer of two matrices 3.5 d wide.
ELEVEN = replace(LLAMA_405B, kv_heads=128, gated=False, ffn=57_344)
# The document's "H100 yielding 1 PFLOPS", with the bandwidth of its data sheet.
H100 = replace(MACHINE, bytes_per_s=3.35e12, flops_per_s={"bf16": 1e15})
PETAFLOPS = H100.roofline()
# Without a window, with equal heads for everything and a narrow vocabulary: what the complexities are about.
PLAIN = ModelShape(layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=16)
DOUBLE_WIDTH = replace(PLAIN, hidden=1024, heads=16, kv_heads=16, ffn=4096)
ATTENTION = (Operation.SCORES, Operation.VALUES)
LINEAR = (Operation.QKV, Operation.OUTPUT, Operation.GATE_UP, Operation.DOWN)
LONG = 100_000


def of_linear(shape: ModelShape, chunks: Sequence[Chunk], flash: bool = True) -> int:
    work = step_work(shape, chunks, flash=flash)
    return sum(work[op].flops for op in LINEAR)


def of_attention(shape: ModelShape, chunks: Sequence[Chunk], flash: bool = True) -> int:
    work = step_work(shape, chunks, flash=flash)
    return sum(work[op].flops for op in ATTENTION)


def step(chunk: Chunk, flash: bool = True) -> Work:
    return total(step_work(LLAMA_405B, [chunk], flash=flash).values())


# Chapter 4: Core Metrics


@pytest.mark.parametrize("output", [2, 5, 40])
def test_latency_is_ttft_and_the_time_between_the_others(output):
    """Chapter 4: Latency = TTFT + (GeneratedTokens - 1) x TBT."""
    seen = open_loop(deployment(), RequestShape(100, output), [0.0])
    assert seen.e2e_s == pytest.approx(seen.ttft_s + (output - 1) * seen.tpot_s)


def test_tps_is_the_inverse_of_tbt():
    """Chapter 4: TPS = 1 / TBT: a decode step of one sequence gives one token."""
    tbt = deployment().step([Chunk(1, 100)]).seconds
    seen = open_loop(deployment(), RequestShape(100, 2), [0.0])
    assert 1 / seen.tpot_s == pytest.approx(1 / tbt, rel=1e-2)  # contexts are rounded


def test_throughput_is_tokens_by_time():
    """Chapter 4: tokens or requests that the server processes in a second, over all its clients."""
    seen = open_loop(deployment(), RequestShape(50, 20), [0.0] * 6)
    assert seen.requests_per_s * seen.e2e_s == pytest.approx(6)  # all six begin and end together
    more = closed_loop(deployment(), RequestShape(50, 20), 12, 48)
    assert more.requests_per_s > seen.requests_per_s and more.tpot_s > seen.tpot_s


# Chapter 5: naive inference


def test_naive_compute_is_linear_and_quadratic():
    """Chapter 5, section 2: O(L (N d^2 + N^2 d)): linear layers by N and d^2, attention by N^2 and d, both by L."""
    deeper = replace(PLAIN, layers=8, sliding_windows=())
    for count, by_length, by_width in ((of_linear, 2, 4), (of_attention, 4, 2)):
        base = count(PLAIN, [Chunk(4000)], False)
        assert count(PLAIN, [Chunk(8000)], False) == by_length * base
        assert count(DOUBLE_WIDTH, [Chunk(4000)], False) == by_width * base
        assert count(deeper, [Chunk(4000)], False) == 2 * base


def test_naive_storage():
    """Chapter 5, section 2: weights O(L d^2) whatever the context, activations O(N d + N^2)."""
    in_layers = PLAIN.parameters()["attention"] + PLAIN.parameters()["ffn"]
    assert sum(DOUBLE_WIDTH.parameters()[part] for part in ("attention", "ffn")) == 4 * in_layers
    deeper = replace(PLAIN, layers=8, sliding_windows=()).parameters()
    assert deeper["attention"] + deeper["ffn"] == 2 * in_layers
    tiled, stored = (activation_bytes(PLAIN, 5000, flash=flash) for flash in (True, False))
    attention = 2 * 5000 * (2 * 512 + 4 * 512)  # residual, input, queries, keys, values and result
    assert stored == attention + 2 * 8 * 5000**2
    assert tiled < stored and activation_bytes(PLAIN, 10_000) == 2 * tiled


def test_744_tflop_for_a_thousand_words():
    """Chapter 5, projection: 2 x L x (11 x N x d^2), about 744 TFLOP, in the layers of a model with 11 d^2 in each."""
    assert of_linear(ELEVEN, [Chunk(1000)]) == 2 * 126 * 11 * 1000 * 16_384**2
    assert of_linear(ELEVEN, [Chunk(1000)]) / 1e12 == pytest.approx(744, abs=0.5)


def test_contradiction_744_tflop_is_not_what_llama_405b_takes():
    """Chapter 5, projection: 744 TFLOP; Llama 3 405B has 11.875 d^2 in a layer: 803, and 807 with attention."""
    in_layers = of_linear(LLAMA_405B, [Chunk(1000)])
    assert in_layers / (2 * 126 * 1000 * 16_384**2) == 11.875
    assert in_layers / 1e12 == pytest.approx(803, abs=0.5)
    assert step(Chunk(1000)).flops / 1e12 == pytest.approx(807, abs=0.7)
    assert ELEVEN.num_parameters / 1e9 == pytest.approx(376, abs=0.5)  # 7 % too few


def test_a_word_in_0_74_seconds():
    """Chapter 5, projection: 744 / 1000, about 0.74 s at 1 PFLOPS, which is an H100's peak; 1 to 2 words a second."""
    assert PETAFLOPS.least_seconds(of_linear(ELEVEN, [Chunk(1000)]), 0) == pytest.approx(0.74, abs=0.005)
    assert find_hardware("H100-SXM").rate("fp16") == pytest.approx(1e15, rel=0.02)

    def naive_s(tokens: int) -> float:
        return deployment(LLAMA_405B, hardware=H100).step([Chunk(tokens)]).seconds

    assert naive_s(1000) == pytest.approx(0.83, abs=0.005)  # all operations, and 11.875 d^2
    assert 1 <= 10 / sum(naive_s(1000 + word) for word in range(10)) <= 2
    assert naive_s(4000) > 4 * naive_s(1000)  # "slowing further as contexts lengthen"


def test_two_and_a_half_hours_for_token_1_000_001():
    """Chapter 5, projection: about 2.5 h, with 11 d^2 in a layer and the whole square of scores, at 1 PFLOPS."""
    flops = total(step_work(ELEVEN, [Chunk(10**6)], flash=False).values()).flops
    assert PETAFLOPS.least_seconds(flops, 0) / 3600 == pytest.approx(2.5, abs=0.01)
    assert of_attention(ELEVEN, [Chunk(10**6)], False) > 10 * of_linear(ELEVEN, [Chunk(10**6)])


def test_contradiction_two_and_a_half_hours_count_what_the_mask_hides():
    """Chapter 5, projection: 2.5 h; chapter 8 says that words attend to preceding words only, which takes 1.4 h."""
    flops = step(Chunk(10**6)).flops
    assert PETAFLOPS.least_seconds(flops, 0) / 3600 == pytest.approx(1.37, abs=0.01)


# Chapter 6: the KV cache


def test_compute_with_and_without_a_cache():
    """Chapter 6, section 3: O(L (N d^2 + N^2 d)) against O(L (d^2 + N d))."""
    for length in (1000, 4000):
        naive, cached = [Chunk(length)], [Chunk(1, length - 1)]
        assert of_linear(PLAIN, naive) == length * of_linear(PLAIN, cached)
        assert of_attention(PLAIN, naive, False) == length * of_attention(PLAIN, cached)
    assert of_linear(PLAIN, [Chunk(1, 999)]) == of_linear(PLAIN, [Chunk(1, 3999)])
    assert 4 * of_attention(PLAIN, [Chunk(1, 999)]) == of_attention(PLAIN, [Chunk(1, 3999)])
    assert of_linear(DOUBLE_WIDTH, [Chunk(1, 999)]) == 4 * of_linear(PLAIN, [Chunk(1, 999)])
    assert of_attention(DOUBLE_WIDTH, [Chunk(1, 999)]) == 2 * of_attention(PLAIN, [Chunk(1, 999)])


def test_storage_with_a_cache():
    """Chapter 6, section 3: O(L N d) on top of the weights."""
    base = kv_cache_bytes(PLAIN, 1000)
    assert kv_cache_bytes(PLAIN, 2000) == kv_cache_bytes(DOUBLE_WIDTH, 1000) == 2 * base
    assert kv_cache_bytes(replace(PLAIN, layers=8, sliding_windows=()), 1000) == 2 * base


def test_8064_kb_of_cache_for_a_token():
    """Chapter 6, section 3: K and V of Llama 3 405B as MHA in FP16: 64 KB in a layer, 64 x 126 = 8064 KB in all."""
    mha = replace(LLAMA_405B, kv_heads=LLAMA_405B.heads)
    assert kv_bytes_per_token(1, 128, 128) == 64 * 1024
    assert kv_cache_bytes(mha, 1, Precision.of("float16")) == 8064 * 1024


def test_8_26_tb_of_cache_for_a_million_tokens():
    """Chapter 6, section 3: 8064 KB x 1,000,000, about 8.26 TB: KB of 1024 bytes, TB of 10^12."""
    mha = replace(LLAMA_405B, kv_heads=LLAMA_405B.heads)
    assert kv_cache_bytes(mha, 10**6) / 1e12 == pytest.approx(8.26, abs=0.005)


def test_contradiction_llama_405b_is_no_mha():
    """Chapter 6, section 3: 8.26 TB, called unoptimized MHA; the model has 8 KV heads, and takes 516 GB, 16 times less.

    Chapter 8 of the same document counts those: 51.6 GB for 100,000 tokens, and not 826.
    """
    assert kv_cache_bytes(LLAMA_405B, 10**6) / 1e9 == pytest.approx(516, abs=0.5)
    mha = replace(LLAMA_405B, kv_heads=LLAMA_405B.heads)
    assert kv_cache_bytes(mha, 1) == 16 * kv_cache_bytes(LLAMA_405B, 1)
    assert kv_cache_bytes(mha, LONG) / 1e9 == pytest.approx(826, abs=0.5)


# Chapter 7: batching


def test_a_batch_reads_weights_once_and_a_cache_for_each():
    """Chapter 7, section 2: weights are fetched once for all users, their caches one by one."""

    def decode(batch: int) -> Work:
        return total(step_work(LLAMA_405B, [Chunk(1, 999, sequences=batch)]).values())

    one, many = decode(1), decode(32)
    rows = 2 * 31 * LLAMA_405B.hidden  # of the embedding, for the other 31 tokens
    assert many.weight_bytes == one.weight_bytes + rows
    assert many.kv_read_bytes == 32 * one.kv_read_bytes == 32 * kv_cache_bytes(LLAMA_405B, 1000)
    assert many.flops == 32 * one.flops


def test_padding_of_static_batches():
    """Chapter 7, section 3: shorter requests are padded, and are held up by the longest one."""
    asked = [(400, 10), (100, 50), (50, 5)]
    padded = [[Chunk(400, sequences=3)], *([Chunk(1, 400 + i, sequences=3)] for i in range(49))]
    leaving = [[Chunk(prompt) for prompt, _ in asked]]
    leaving += [[Chunk(1, prompt + i) for prompt, output in asked if output > i + 1] for i in range(49)]
    assert sum(each.sequences for step in padded for each in step if each.tokens == 1) == 3 * 49
    assert sum(len(step) for step in leaving[1:]) == 9 + 49 + 4

    def whole(steps: list[list[Chunk]]) -> tuple[float, int]:
        flops = sum(total(step_work(LLAMA_405B, step).values()).flops for step in steps)
        return sum(deployment().step(step).seconds for step in steps), flops

    assert whole(padded)[0] > whole(leaving)[0] and whole(padded)[1] > 2 * whole(leaving)[1]


# Chapter 8: prefill and decode of Llama 3 405B at N = 100,000


def test_flops_of_a_prefill_of_100_000():
    """Chapter 8, section 1: 2 N P = 8.1e16 and 4 L N^2 d = 8.26e16, together 1.64e17, of the whole square of scores."""
    linear = of_linear(LLAMA_405B, [Chunk(LONG)])
    assert linear == pytest.approx(2 * LONG * 405e9, rel=0.011)  # P also counts the embedding, which is looked up
    attention = of_attention(LLAMA_405B, [Chunk(LONG)], flash=False)
    assert attention == 4 * 126 * LONG**2 * 16_384 == pytest.approx(8.26e16, rel=0.001)
    assert step(Chunk(LONG), flash=False).flops == pytest.approx(1.64e17, rel=0.01)


def test_861_6_gb_of_a_prefill():
    """Chapter 8, section 1: 810 GB of weights, and 51.6 GB of cache that is written."""
    work = step(Chunk(LONG))
    assert weight_bytes(LLAMA_405B) / 1e9 == pytest.approx(810, rel=0.003)
    assert work.weight_bytes / 1e9 == pytest.approx(810, rel=0.003)
    assert work.kv_write_bytes / 1e9 == kv_cache_bytes(LLAMA_405B, LONG) / 1e9 == pytest.approx(51.6, abs=0.05)
    assert (work.weight_bytes + work.kv_write_bytes) / 1e9 == pytest.approx(861.6, rel=0.003)


def test_190_000_flops_for_each_byte_of_a_prefill():
    """Chapter 8, section 1: (linear + attention) / (weights + cache written), about 190,000 FLOPs/Byte."""
    work = step(Chunk(LONG), flash=False)
    assert work.flops / (work.weight_bytes + work.kv_write_bytes) == pytest.approx(190_000, rel=0.01)


def test_contradiction_190_000_count_what_the_mask_hides():
    """Chapter 8, section 1: 190,000 though "each word only attends to preceding words": with half the square, 140,000.

    By the same token attention is not "on par with linear layers" but half of them.
    """
    work = step(Chunk(LONG))
    assert work.flops / (work.weight_bytes + work.kv_write_bytes) == pytest.approx(140_000, rel=0.01)
    attention = of_attention(LLAMA_405B, [Chunk(LONG)])
    assert attention / of_attention(LLAMA_405B, [Chunk(LONG)], flash=False) == pytest.approx(0.5, rel=0.001)
    assert attention / of_linear(LLAMA_405B, [Chunk(LONG)]) == pytest.approx(0.51, abs=0.01)


def test_300_flops_for_each_byte_of_an_h100():
    """Chapter 8, section 1: an H100's inflection is at roughly 300 FLOPs/Byte, and a prefill lies far above it."""
    machine = find_hardware("H100-SXM").roofline("fp16")
    assert machine.ridge == pytest.approx(300, rel=0.02)
    work = step(Chunk(LONG))
    assert machine.least_seconds(work.flops, work.bytes) == work.flops / machine.flops_per_s


def test_a_decode_step_at_100_000():
    """Chapter 8, section 2: 2 P = 8.1e11 and 4 L N d = 8.25e11, in all 1.635e12 FLOPs; 810 + 51.6 = 861.6 GB."""
    chunks = [Chunk(1, LONG - 1)]
    assert of_linear(LLAMA_405B, chunks) == pytest.approx(2 * 405e9, rel=0.011)
    assert of_attention(LLAMA_405B, chunks) == 4 * 126 * LONG * 16_384 == pytest.approx(8.25e11, rel=0.001)
    work = step(Chunk(1, LONG - 1))
    assert work.flops == pytest.approx(1.635e12, rel=0.003)
    assert work.kv_read_bytes / 1e9 == pytest.approx(51.6, abs=0.05)
    assert (work.weight_bytes + work.kv_read_bytes) / 1e9 == pytest.approx(861.6, rel=0.004)


def test_1_9_flops_for_each_byte_of_a_decode_step():
    """Chapter 8, section 2: about 1.9 FLOPs/Byte, far below the inflection: bandwidth decides."""
    work = step(Chunk(1, LONG - 1))
    assert work.flops / (work.weight_bytes + work.kv_read_bytes) == pytest.approx(1.9, abs=0.01)
    assert work.intensity == pytest.approx(1.9, abs=0.01)  # the activations of one token are nothing beside it
    machine = find_hardware("H100-SXM").roofline("fp16")
    assert machine.least_seconds(work.flops, work.bytes) == work.bytes / machine.bytes_per_s


def test_what_each_phase_reads_and_writes():
    """Chapter 8, section 3: prefill reads weights and writes the cache; decode reads both and appends a token."""
    prefill, decode = step(Chunk(LONG)), step(Chunk(1, LONG - 1))
    assert prefill.kv_write_bytes == kv_cache_bytes(LLAMA_405B, LONG) == decode.kv_read_bytes
    assert decode.kv_write_bytes == kv_cache_bytes(LLAMA_405B, 1)
    assert decode.weight_bytes == pytest.approx(prefill.weight_bytes, rel=0.006)  # but for rows of the embedding


def test_larger_batches_give_more_tokens_and_make_each_wait_longer():
    """Chapter 8, the paradox, 1: throughput rises with the batch, and so does the time between tokens."""
    times = [deployment().step([Chunk(1, 500, sequences=batch)]).seconds for batch in (1, 4, 16, 64)]
    assert times == sorted(times) and len(set(times)) == 4
    rates = [batch / seconds for batch, seconds in zip((1, 4, 16, 64), times, strict=True)]
    assert rates == sorted(rates)


def test_prompts_hold_up_decodes_that_share_their_step():
    """Chapter 8, the paradox, 2: prefills among decodes make the time between tokens jump."""
    decodes = Chunk(1, 500, sequences=8)
    alone, mixed = (deployment().step(chunks).seconds for chunks in ([decodes], [decodes, Chunk(2000)]))
    assert mixed > 5 * alone


def test_each_phase_has_its_bound():
    """Chapter 8, section 3: prefill is compute-bound and decode memory-bound."""
    big = deployment(LLAMA_405B, hardware=H100)
    assert big.step([Chunk(LONG)]).bound == "compute" and big.step([Chunk(1, LONG - 1)]).bound == "memory"
