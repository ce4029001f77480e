"""Document 000, "A Deep Dive into LLM Inference Latencies": its formulas and figures, as the cost model has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cost.attention import Chunk
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.efficiency import Efficiency
from headway.cost.loading import loading
from headway.cost.memory import activation_bytes, kv_bytes_per_token, kv_cache_bytes, weight_bytes
from headway.cost.precision import BF16, Precision
from headway.cost.requests import RequestShape
from headway.cost.roofline import Roofline
from headway.cost.timing import Deployment
from headway.cost.work import Operation, step_work, total
from headway.simulator.serving import open_loop
from tests.cost.machines import MACHINE

QWEN_7B = find_model("qwen2.5-7b").shape
DISTILL_7B = find_model("deepseek-r1-distill-qwen-7b").shape
GPT_OSS = find_model("gpt-oss-20b").shape
# "Uses ~10.6 GB [...] due to MXFP4 quantization (4.25 bits per parameter)": in the experts, as it is published.
MXFP4 = Precision.named("bfloat16", "mxfp4").for_experts_only()
# The document's machine: 2.0 TB/s, and a link to the host of PCIe 4.0 x16, 31.5 GB/s each way.
H100_PCIE = replace(MACHINE, bytes_per_s=2.0e12, flops_per_s={"bf16": 756e12}, host_bytes_per_s=31.5e9)


# Experimental Configuration


def test_the_hardware_of_the_benchmarks():
    """Experimental Configuration: H100 PCIe with 80 GB at 2.0 TB/s and 350 W; SXM5 has 3.35 TB/s and 700 W, double."""
    pcie, sxm = find_hardware("H100-PCIe"), find_hardware("H100-SXM")
    assert pcie.bytes_per_s == pytest.approx(2.0e12, rel=0.03)
    assert sxm.bytes_per_s == pytest.approx(3.35e12, rel=0.005)
    assert pcie.memory_bytes / 1e9 == pytest.approx(80, rel=0.08)
    assert (pcie.tdp_w, sxm.tdp_w) == (350, 700)


# Models: Memory Components and the KV Cache Formula


def test_parameters_in_bfloat16():
    """Memory Components: 7B parameters at 2 bytes are about 14 GB."""
    assert BF16.bytes_of(7_000_000_000) == 14_000_000_000


@pytest.mark.parametrize("kv_bits", [8, 16, 32])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 400), (7, 129)])
def test_kv_cache_formulas(batch, length, kv_bits):
    """KV Cache Formula: batch x length x layers x heads x head_dim x 2 x dtype_size, and with KV heads for GQA."""
    precision = {8: Precision.named(kv_cache_dtype="fp8"), 16: Precision(), 32: Precision.of("float32")}[kv_bits]
    mha = replace(QWEN_7B, kv_heads=QWEN_7B.heads)
    for shape, heads in ((mha, 28), (QWEN_7B, 4)):
        whole = batch * length * 28 * heads * 128 * 2 * kv_bits // 8
        assert kv_cache_bytes(shape, length, precision, sequences=batch) == whole
        assert batch * length * kv_bytes_per_token(28, heads, 128, kv_bits) == whole


@pytest.mark.parametrize(("shape", "ratio"), [(QWEN_7B, 28 / 4), (GPT_OSS, 64 / 8)])
def test_gqa_reduces_the_cache_by_the_ratio_of_the_heads(shape, ratio):
    """Key Differences: GQA reduces the KV cache by num_heads / num_kv_heads."""
    mha = replace(shape, kv_heads=shape.heads)
    assert shape.heads / shape.kv_heads == ratio
    assert kv_cache_bytes(mha, 400) == ratio * kv_cache_bytes(shape, 400)


# Models: the three of them


@pytest.mark.parametrize("shape", [QWEN_7B, DISTILL_7B])
def test_qwen_and_its_distillate(shape):
    """Models 1 and 2: 7.61B parameters, 28 layers, 28 query and 4 KV heads, 57,344 B of cache for a token."""
    assert shape.num_parameters / 1e9 == pytest.approx(7.61, abs=0.006)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (28, 28, 4, 128)
    assert kv_cache_bytes(shape, 1) == 57_344 == kv_bytes_per_token(layers=28, kv_heads=4, head_dim=128)


def test_gpt_oss():
    """Model 3: 21B parameters, 3.6B of them active, 24 layers, 64 query and 8 KV heads, 4.25 bits of MXFP4."""
    assert GPT_OSS.num_parameters / 1e9 == pytest.approx(21, abs=0.1)
    assert GPT_OSS.active_parameters / 1e9 == pytest.approx(3.6, abs=0.05)
    assert (GPT_OSS.layers, GPT_OSS.heads, GPT_OSS.kv_heads, GPT_OSS.head_dim) == (24, 64, 8, 64)
    assert MXFP4.of_experts.bits_per_element == 4.25
    assert kv_cache_bytes(GPT_OSS, 1) == 49_152 == kv_bytes_per_token(layers=24, kv_heads=8, head_dim=64)


def test_cache_at_full_context():
    """Models: about 7.0 GB (Qwen) and 6.0 GB (GPT OSS) for 128K tokens hold, as GiB of 2^17 tokens."""
    assert kv_cache_bytes(QWEN_7B, 2**17) / 2**30 == kv_cache_bytes(DISTILL_7B, 2**17) / 2**30 == 7.0
    assert kv_cache_bytes(GPT_OSS, 2**17) / 2**30 == 6.0


def test_contradiction_every_second_layer_of_gpt_oss_needs_no_full_context():
    """Models: 6.0 GB for 128K tokens of GPT OSS; half of its layers see 128 tokens, so 3.0 GiB are enough."""
    assert GPT_OSS.sliding_windows.count(128) == 12
    assert kv_cache_bytes(GPT_OSS, 2**17, rolling=True) / 2**30 == pytest.approx(3.0, abs=0.005)


def test_contradiction_61_5_mb_of_cache_for_qwen():
    """Models 1 and 2: 61.5 MB for 400 tokens; by its own formula they take 22.9 MB, and 61.5 MB hold 1,072."""
    formula = kv_cache_bytes(QWEN_7B, 400)
    assert formula == 22_937_600 and formula / 1e6 == pytest.approx(22.9, abs=0.05)
    assert 61.5 / (formula / 1e6) == pytest.approx(2.68, abs=0.005)
    assert kv_cache_bytes(QWEN_7B, 1072) / 1e6 == pytest.approx(61.5, abs=0.05)


def test_contradiction_49_2_mb_of_cache_for_gpt_oss():
    """Model 3: 49.2 MB for 400 tokens; the formula gives 19.7 MB, and 49.2 MB for 1,000."""
    assert kv_cache_bytes(GPT_OSS, 400) / 1e6 == pytest.approx(19.7, abs=0.05)
    assert kv_cache_bytes(GPT_OSS, 1000) / 1e6 == pytest.approx(49.2, abs=0.05)


def test_contradiction_10_8_gb_of_weights_for_qwen():
    """Models 1 and 2: ~10.8 GB in BF16; 7.61B parameters of 2 bytes are 15.2 GB, and 7B would be 14 by its own rule."""
    for shape in (QWEN_7B, DISTILL_7B):
        assert weight_bytes(shape) == 2 * 7_615_616_512
        assert weight_bytes(shape) / 1e9 == pytest.approx(15.2, abs=0.05)
        assert 0.72 * weight_bytes(shape) > 10.8e9


def test_contradiction_10_6_gb_of_weights_for_gpt_oss():
    """Model 3: ~10.6 GB at 4.25 bits a parameter; 21B take 11.1 GB, and 13.8 GB with only the experts in MXFP4."""
    everywhere = MXFP4.of_experts.bytes_of(GPT_OSS.num_parameters)
    assert everywhere / 1e9 == pytest.approx(11.1, abs=0.05)
    assert weight_bytes(GPT_OSS, MXFP4) / 1e9 == pytest.approx(13.8, abs=0.05)
    of_experts = MXFP4.of_experts.bytes_of(GPT_OSS.matrices()["experts"])
    assert of_experts / 1e9 == pytest.approx(10.2, abs=0.06)  # without embedding, head, attention and biases


@pytest.mark.parametrize(
    ("shape", "precision", "said", "gigabytes"), [(QWEN_7B, Precision(), 10.9, 15.3), (GPT_OSS, MXFP4, 10.7, 13.8)]
)
def test_contradiction_total_memory_usage(shape, precision, said, gigabytes):
    """Models: 10.9 and 10.7 GB at 400 tokens follow from the figures above, and err with them: 15.3 and 13.8 GB."""
    counted = weight_bytes(shape, precision) + kv_cache_bytes(shape, 400, precision)
    assert counted / 1e9 == pytest.approx(gigabytes, abs=0.06)
    assert said * 1e9 < 0.8 * counted


# Model Loading


@pytest.mark.parametrize(("rate", "seconds"), [(7e9, 1.5), (3.5e9, 3.0)])
def test_storage_read(rate, seconds):
    """Model Loading 1: ~10.8 GB at 3.5 to 7 GB/s take 1.5 to 3 seconds."""
    assert loading(10_800_000_000, 0, H100_PCIE, rate).storage_s == pytest.approx(seconds, rel=0.03)


def test_contradiction_storage_read_of_what_is_really_stored():
    """Model Loading 1: 1.5 to 3 s for 10.8 GB; the checkpoint has 15.2 GB, which take 2.2 to 4.4 s."""
    whole = weight_bytes(QWEN_7B)
    fast, slow = (loading(whole, whole, H100_PCIE, rate).storage_s for rate in (7e9, 3.5e9))
    assert (fast, slow) == (pytest.approx(2.2, abs=0.05), pytest.approx(4.4, abs=0.05))


def test_way_to_the_device():
    """Model Loading 3: one way sustains 25 to 28 GB/s; 64 GB/s is what both ways of PCIe 4.0 x16 have together."""
    whole = 10_800_000_000
    rate = whole / loading(whole, whole, H100_PCIE).transfer_s
    assert 25e9 <= rate <= 28e9
    both_ways = 2 * H100_PCIE.host_bytes_per_s
    assert both_ways / 1e9 == pytest.approx(64, rel=0.02)
    assert rate < 0.45 * both_ways  # a transfer in one direction at 64 GB/s would end in less than half the time


def test_layout_and_the_sum_of_the_stages():
    """Model Loading 2 and 4: each stage takes time, and the layout is written at the device's 2 TB/s."""
    stages = loading(10_800_000_000, 10_800_000_000, H100_PCIE)
    assert stages.layout_s == pytest.approx(2 * 10.8e9 / 2.0e12)
    assert stages.deserialize_s > 0
    parts = (stages.storage_s, stages.deserialize_s, stages.transfer_s, stages.layout_s)
    assert stages.seconds == pytest.approx(sum(parts)) and stages.least_s == max(parts)


# Input Processing


def test_input_processing_is_linear_in_the_prompt():
    """Input Processing 2: tokenization is O(n); with a model that takes no time, it is all that grows with a prompt."""
    instant = replace(MACHINE, bytes_per_s=1e30, flops_per_s={"bf16": 1e30})
    slow_tokenizer = replace(Efficiency.ideal(), token_s=2e-6)
    deployment = Deployment(QWEN_7B, Precision(), instant, slow_tokenizer)
    times = [open_loop(deployment, RequestShape(n, 1), [0.0]).ttft_s for n in (400, 800, 1600)]
    assert times == pytest.approx([400 * 2e-6, 800 * 2e-6, 1600 * 2e-6])


# KV-Cache Prefilling and Decode


def test_flash_attention_has_linear_memory():
    """KV-Cache Prefilling 1: O(n) memory instead of O(n^2)."""
    tiled = [activation_bytes(QWEN_7B, n) for n in (4096, 8192, 16384)]
    assert tiled[1] == 2 * tiled[0] and tiled[2] == 4 * tiled[0]
    stored = [activation_bytes(QWEN_7B, n, flash=False) for n in (2**16, 2**17, 2**18)]
    assert stored[1] / stored[0] == pytest.approx(4, rel=0.02) and stored[2] / stored[1] == pytest.approx(4, rel=0.01)


def test_flash_attention_moves_no_scores():
    """KV-Cache Prefilling 1: traffic of attention is linear in the prompt with tiling, and quadratic without."""

    def moved(tokens: int, flash: bool) -> int:
        work = step_work(QWEN_7B, [Chunk(tokens)], flash=flash)
        return work[Operation.SCORES].bytes + work[Operation.VALUES].bytes

    assert moved(8192, True) == 2 * moved(4096, True)
    assert moved(2**17, False) / moved(2**16, False) == pytest.approx(4, rel=0.01)


def test_cache_is_populated_by_the_prompt():
    """KV-Cache Prefilling 2: a prompt writes keys and values of each of its tokens, once."""
    assert step_work(QWEN_7B, [Chunk(400)])[Operation.KV_STORE].kv_write_bytes == kv_cache_bytes(QWEN_7B, 400)


def test_prefill_is_bound_by_arithmetic_and_decode_by_bytes():
    """KV-Cache Prefilling ("computationally intensive") and Decode, on the document's GPU of 2.0 TB/s."""
    machine = H100_PCIE.roofline()
    assert machine == Roofline(756e12, 2.0e12) and machine.ridge == 378
    decode, prefill = (step_work(QWEN_7B, [chunk]) for chunk in (Chunk(1, 399), Chunk(1024)))
    weights = 2 * (QWEN_7B.num_parameters - QWEN_7B.parameters()["embedding"] + QWEN_7B.hidden)
    step, prompt = total(decode.values()), total(prefill.values())
    assert machine.least_seconds(step.flops, step.kept_bytes) == (weights + 400 * 57_344 + 57_344) / 2.0e12
    assert machine.least_seconds(prompt.flops, prompt.kept_bytes) == prompt.flops / 756e12
