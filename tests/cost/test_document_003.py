"""Document 003, "Inference Latency and Throughput": its formulas and rules, as the cost model has them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headway.cost import speculative
from headway.cost.attention import Chunk
from headway.cost.capacity import Settings, capacity
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.efficiency import Efficiency
from headway.cost.memory import activation_bytes, kv_bytes_per_token, kv_cache_bytes, weight_bytes
from headway.cost.parallel import Parallelism, device_weight_bytes
from headway.cost.precision import Precision
from headway.cost.price import cost_per_million, tokens_per_s_per_watt
from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment
from headway.cost.work import Operation, Work, step_work, total
from headway.simulator.serving import closed_loop, open_loop
from tests.cost.machines import LINK, MACHINE, deployment

LLAMA_8B = find_model("llama-3.1-8b").shape
LLAMA_70B = find_model("llama-3.1-70b").shape
A100 = replace(
    MACHINE,
    memory_bytes=80 * 2**30,
    bytes_per_s=2e12,
    flops_per_s={"bf16": 312e12},
    link=replace(LINK, bytes_per_s=3e11),
)
BF16 = Precision()
FP8_KV = Precision.named(kv_cache_dtype="fp8")
ATTENTION = (Operation.SCORES, Operation.VALUES)
HOST = replace(Efficiency.ideal(), step_s=1e-3, token_s=2e-6, request_s=5e-3)


def on_a100(precision: Precision = BF16, **changes: object) -> Deployment:
    return deployment(LLAMA_8B, precision=precision, hardware=A100, **changes)


def attention(chunk: Chunk, precision: Precision = BF16) -> Work:
    work = step_work(LLAMA_8B, [chunk], precision)
    return total(work[op] for op in ATTENTION)


def decode_s(run: Deployment, batch: int = 1, context: int = 2000) -> float:
    return run.step([Chunk(1, context, sequences=batch)]).seconds


def prefill_s(run: Deployment, tokens: int) -> float:
    return run.step([Chunk(tokens)]).seconds


# 1. Definitions and Core Metrics


def test_end_to_end_latency_is_the_sum_of_its_parts():
    """Section 1: T_E2E = queue + batch + prefill + decode + post + network; a host's share stands for the last two."""
    run, workload = on_a100(efficiency=HOST), RequestShape(500, 4)
    alone = open_loop(run, workload, [0.0])
    intake = HOST.request_s + HOST.token_s * 500
    decodes = sum(decode_s(run, context=500 + n) for n in range(3))
    assert alone.e2e_s == pytest.approx(intake + prefill_s(run, 500) + decodes, rel=1e-4)
    served = open_loop(run, workload, [0.0, 0.0], Limits(sequences=1))
    queued = prefill_s(run, 500) + decodes  # the second waits until the first is done
    assert served.e2e_s == pytest.approx(alone.e2e_s + queued / 2, rel=1e-3)


def test_ttft_is_queuing_and_prefill_and_tpot_the_decodes():
    """Section 1: TTFT until the first token, TPOT on average between the others."""
    run = on_a100(efficiency=HOST)
    seen = open_loop(run, RequestShape(500, 9), [0.0])
    assert seen.ttft_s == pytest.approx(HOST.request_s + HOST.token_s * 500 + prefill_s(run, 500))
    assert seen.tpot_s == pytest.approx(sum(decode_s(run, context=500 + n) for n in range(8)) / 8, rel=1e-4)


def test_contradiction_the_first_token_is_counted_twice_in_ttlt():
    """Section 1: TTLT is about TTFT + N TPOT; TTFT ends with the first token, so N - 1 are left (document 001)."""
    for output in (2, 10, 100):
        seen = open_loop(on_a100(), RequestShape(500, output), [0.0])
        assert seen.e2e_s == pytest.approx(seen.ttft_s + (output - 1) * seen.tpot_s)
        assert seen.ttft_s + output * seen.tpot_s - seen.e2e_s == pytest.approx(seen.tpot_s)


def test_throughput_is_output_tokens_by_wall_time():
    """Section 1: Throughput = total output tokens / wall time."""
    served = open_loop(on_a100(), RequestShape(100, 30), [0.0] * 8)
    assert 30 * served.requests_per_s == pytest.approx(8 * 30 / served.e2e_s)  # all begin and end together


# 2. Prefill vs. Decode: Cost Structure


def test_complexity_of_prefill_and_decode():
    """Section 2: attention is O(L^2 d) in prefill, and O(L d) for a token with a cache."""
    assert attention(Chunk(80_000)).flops == pytest.approx(4 * attention(Chunk(40_000)).flops, rel=1e-4)
    assert attention(Chunk(1, 79_999)).flops == 2 * attention(Chunk(1, 39_999)).flops
    assert attention(Chunk(1, 79_999)).kv_read_bytes == 2 * attention(Chunk(1, 39_999)).kv_read_bytes


def test_prefill_dominates_ttft_and_decode_ttlt():
    """Section 2, rule of thumb: the prompt decides TTFT, the tokens after it TTLT."""
    run = on_a100(efficiency=Efficiency())
    seen = open_loop(run, RequestShape(4000, 400), [0.0])
    assert prefill_s(run, 4000) > 0.9 * seen.ttft_s
    assert 399 * seen.tpot_s > 0.9 * seen.e2e_s


# 3. Practical Performance Model


@pytest.mark.parametrize(("precision", "bpe"), [(BF16, 2), (Precision.of("float16"), 2), (FP8_KV, 1)])
def test_bytes_of_the_cache_for_a_token(precision, bpe):
    """Section 3.2: 2 L n_layers H_KV D_head BPE are read; 3.3: 2 n_layers H_KV D_head BPE are kept for each token."""
    length = 3000
    moved = attention(Chunk(1, length - 1), precision).kv_read_bytes
    assert moved == 2 * length * 32 * 8 * 128 * bpe
    assert moved == length * kv_cache_bytes(LLAMA_8B, 1, precision)
    assert kv_bytes_per_token(32, 8, 128, 8 * bpe) == 2 * 32 * 8 * 128 * bpe == kv_cache_bytes(LLAMA_8B, 1, precision)


def test_tpot_of_the_cache_alone():
    """Section 3.2: TPOT = bytes a token / effective bandwidth, and throughput its inverse: attention's share."""
    bandwidth = 0.75 * 2e12
    lossy = on_a100(efficiency=replace(Efficiency.ideal(), kv_bytes=0.75))
    part = next(each for each in lossy.step([Chunk(1, 99_999)]).parts if each.name == "attention")
    assert part.work.kv_read_bytes == 2 * 100_000 * 32 * 8 * 128 * 2
    assert part.seconds == pytest.approx(part.work.kv_read_bytes / bandwidth, rel=1e-3)


def test_contradiction_the_cache_is_not_all_that_a_token_reads():
    """Section 3.2: TPOT from the cache alone; at 4K a token also reads 15 GB of weights, 28 times its 0.54 GB of cache.

    The same document has quantized weights lower TPOT (section 4), which they could not.
    """
    cache_s = kv_cache_bytes(LLAMA_8B, 4096) / 2e12
    assert decode_s(on_a100(), context=4095) == pytest.approx(29 * cache_s, rel=0.02)
    assert weight_bytes(LLAMA_8B) / kv_cache_bytes(LLAMA_8B, 4096) > 28
    batched = decode_s(on_a100(), batch=100, context=4095)
    assert 0.75 * batched < 100 * cache_s < batched  # of a large batch the cache is most


def test_the_cache_bounds_concurrent_tokens():
    """Section 3.3: "drives max concurrent tokens per device": the pool by the bytes of a token."""
    for precision in (BF16, FP8_KV):
        held = capacity(on_a100(precision), 1000, 100, Settings(block_size=1))
        assert held.pool_tokens == held.kv_pool // kv_cache_bytes(LLAMA_8B, 1, precision)


# 4. Throughput-Latency Trade-offs, 5. and 6. Techniques


def test_batch_sizing():
    """Section 4: larger batches increase TTFT and tokens/s."""
    small, large = (closed_loop(on_a100(), RequestShape(500, 50), n, 4 * n) for n in (2, 32))
    assert large.ttft_s > small.ttft_s and large.requests_per_s > small.requests_per_s


def test_max_context_length():
    """Section 4: prefill grows quadratically; section 5, 2: chunked prefill keeps a step short for those who decode."""
    times = [prefill_s(on_a100(), n) for n in (2**17, 2**18, 2**19)]
    assert 2 < times[1] / times[0] < times[2] / times[1] < 4
    decodes = Chunk(1, 1000, sequences=16)
    small, large, whole = (on_a100().step([decodes, Chunk(n, 0, 0)]).seconds for n in (256, 1024, 16_384))
    assert small < large < 0.1 * whole


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_quantization(quantization):
    """Section 4: lowers TPOT and so gives more tokens/s, as a decode reads less; FP8 and INT8 units lower TTFT."""
    units = replace(A100, flops_per_s={"bf16": 312e12, "int8": 624e12, "fp8": 624e12})
    plain, narrow = (
        replace(on_a100(Precision.named(quantization=name)), hardware=units) for name in ("none", quantization)
    )
    most = 0.4 if quantization == "int4" else 0.6
    assert decode_s(narrow) < most * decode_s(plain)
    if quantization != "int4":
        assert prefill_s(narrow, 4000) < 0.7 * prefill_s(plain, 4000)


def test_low_precision_kv():
    """Section 4 and section 6, 2: FP8 keys and values halve the cache's traffic and footprint."""
    assert attention(Chunk(1, 4000), FP8_KV).kv_read_bytes * 2 == attention(Chunk(1, 4000)).kv_read_bytes
    assert decode_s(on_a100(FP8_KV), 64, 4000) < 0.75 * decode_s(on_a100(), 64, 4000)
    ours, theirs = (capacity(on_a100(precision), 4000, 96) for precision in (FP8_KV, BF16))
    assert ours.max_batch == pytest.approx(2 * theirs.max_batch, abs=1)


def test_gqa_and_mqa():
    """Section 4 and section 6, 3: fewer KV heads lower TPOT and increase tokens/s."""
    mha, gqa, mqa = (
        decode_s(replace(on_a100(), shape=replace(LLAMA_8B, kv_heads=heads)), 32, 4000) for heads in (32, 8, 1)
    )
    assert mha > 1.5 * gqa > 1.5 * mqa


def test_speculative_decoding_depends_on_acceptance():
    """Section 4 and section 14: lowers TPOT with a draft that is accepted, and not with one that seldom is."""
    target = on_a100(efficiency=Efficiency())
    draft = replace(target, shape=find_model("llama-3.2-1b").shape)
    plain = decode_s(target)
    assert speculative.tpot_s(target, draft, 1, 2000, 4, acceptance=0.8) < 0.7 * plain
    assert speculative.tpot_s(target, draft, 1, 2000, 4, acceptance=0.1) > plain


def test_graphs():
    """Section 4: CUDA graphs lower launch overhead, which matters in the token loop."""
    launched, captured = (on_a100(efficiency=replace(Efficiency.ideal(), kernel_s=gap)) for gap in (5e-6, 1e-6))
    assert decode_s(captured) < 0.9 * decode_s(launched)
    assert prefill_s(captured, 8000) > 0.99 * prefill_s(launched, 8000)


def test_prompt_caching():
    """Section 4 and section 5, 3: a prefix that is found in the cache lowers TTFT."""
    computed, found = (open_loop(on_a100(), RequestShape(4000, 1, cached), [0.0]) for cached in (0, 3000))
    assert found.ttft_s < 0.3 * computed.ttft_s


def test_flash_attention_for_prefill():
    """Section 5, 1: kernels that keep scores on the chip shorten prefill, the more the longer it is."""
    gains = [prefill_s(on_a100(flash=False), n) / prefill_s(on_a100(), n) for n in (2000, 8000, 32_000)]
    assert 1 < gains[0] < gains[1] < gains[2]
    assert activation_bytes(LLAMA_8B, 8000) < activation_bytes(LLAMA_8B, 8000, flash=False)


# 9. Parallelism


def test_tensor_parallelism_reduces_memory_and_adds_all_reduces():
    """Section 9: TP reduces per-GPU memory, and adds all-reduce on the critical path."""
    one, four = (on_a100(parallelism=Parallelism(tensor=n)) for n in (1, 4))
    assert device_weight_bytes(LLAMA_8B, BF16, Parallelism(tensor=4)) < 0.26 * weight_bytes(LLAMA_8B)
    assert capacity(four, 1000, 100).kv_per_token * 4 == capacity(one, 1000, 100).kv_per_token
    parts = {part.name: part.network_s for part in four.step([Chunk(1, 1000)]).parts}
    assert parts["all_reduce"] >= 65 * LINK.latency_s
    assert not any(part.network_s for part in one.step([Chunk(1, 1000)]).parts)


def test_communication_can_cost_more_than_it_gains():
    """Sections 9 and 14: for small batches communication can hurt TPOT: a small model is slower on 2 devices."""
    small = find_model("qwen2.5-0.5b").shape
    slow = replace(A100, link=replace(LINK, latency_s=3e-5))
    one, two = (deployment(small, hardware=slow, parallelism=Parallelism(tensor=n)) for n in (1, 2))
    assert decode_s(two) > decode_s(one)
    large_one, large_two = (deployment(LLAMA_70B, hardware=slow, parallelism=Parallelism(tensor=n)) for n in (1, 2))
    assert decode_s(large_two) < 0.7 * decode_s(large_one)


def test_pipelines():
    """Section 9: PP has bubbles, which more micro-batches fill, and does not shorten the way of a token."""
    staged = on_a100(parallelism=Parallelism(pipeline=4))
    bubbles = [open_loop(staged, RequestShape(100, 50), [0.0] * n).bubble for n in (1, 2, 4)]
    assert bubbles[0] == pytest.approx(0.75, abs=0.01) and bubbles == sorted(bubbles, reverse=True)
    assert decode_s(staged) > decode_s(on_a100())


# 12. Recommended Defaults


def test_pages_of_16_to_32_kb():
    """Section 12: of one layer of Llama-3.1-8B such pages hold 4 to 8 tokens; blocks of 16 take 64 KB in each layer."""
    of_layer = kv_bytes_per_token(1, LLAMA_8B.kv_heads, LLAMA_8B.head_dim)
    assert (16 * 1024 / of_layer, 32 * 1024 / of_layer) == (4, 8)
    one_layer = replace(LLAMA_8B, layers=1, sliding_windows=())
    assert kv_cache_bytes(one_layer, 1, block_size=16) == 64 * 1024
    assert kv_cache_bytes(LLAMA_8B, 1) > 32 * 1024  # of all layers such a page holds no token at all


# 13. Cost and Efficiency


@pytest.mark.parametrize(("price", "rate", "cost"), [(3.6, 1000, 1.0), (2.0, 2500, 0.2222), (12.0, 100, 33.33)])
def test_cost_of_a_million_tokens(price, rate, cost):
    """Section 13: GPU hour price / 3600 x 10^6 / tokens/s."""
    assert cost_per_million(price, rate) == pytest.approx(cost, rel=1e-3)
    assert cost_per_million(price, rate) == pytest.approx(price / 3600 * 10**6 / rate)


def test_tokens_a_second_for_each_watt():
    """Section 13: tokens/sec/watt; more tokens at the same power are cheaper in both."""
    watts = find_hardware("A100-80GB-SXM").tdp_w
    assert watts is not None and tokens_per_s_per_watt(4 * watts, watts) == 4
    slow, fast = (1 / decode_s(on_a100(Precision.named(quantization=name))) for name in ("none", "int4"))
    assert cost_per_million(2.0, fast) < cost_per_million(2.0, slow)
    assert tokens_per_s_per_watt(fast, watts) > tokens_per_s_per_watt(slow, watts)
    assert math.isclose(cost_per_million(2.0, fast) * fast, cost_per_million(2.0, slow) * slow)
