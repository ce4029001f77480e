"""Memory formulas with the figures of document 000, and the roofline."""

from __future__ import annotations

import pytest

from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.memory import activation_bytes, kv_bytes_per_token, kv_cache_bytes, weight_bytes
from headway.cost.precision import FP32, INT8, Precision
from headway.cost.roofline import Roofline
from headway.cost.work import Work, step_work, total
from tests.cost import published

QWEN_7B = read_shape(published.QWEN2_5_7B)


def test_kv_cache_of_document_000_s_models():
    """The formula of document 000 for its three models, in bfloat16."""
    assert kv_bytes_per_token(layers=28, kv_heads=4, head_dim=128) == 57_344  # Qwen 2.5 7B, DeepSeek R1 Distill 7B
    assert kv_bytes_per_token(layers=24, kv_heads=8, head_dim=64) == 49_152  # GPT OSS 20B
    assert kv_cache_bytes(QWEN_7B, 1) == 57_344


def test_document_000_contradicts_its_own_formula_for_qwen():
    """It gives 61.5 MB for 400 tokens of Qwen 2.5 7B; its formula gives 22.9 MB. The formula wins."""
    assert kv_cache_bytes(QWEN_7B, 400) == 22_937_600
    assert kv_cache_bytes(QWEN_7B, 400) / 1e6 == pytest.approx(22.9, abs=0.05)
    assert kv_cache_bytes(QWEN_7B, 400) / 1e6 < 0.4 * 61.5


def test_document_000_contradicts_its_own_formula_for_gpt_oss():
    """It gives 49.2 MB for 400 tokens of GPT OSS 20B, which is its 49,152 B a token times 1,000; 400 take 19.7 MB."""
    assert 400 * kv_bytes_per_token(24, 8, 64) / 1e6 == pytest.approx(19.7, abs=0.05)
    assert 1000 * kv_bytes_per_token(24, 8, 64) / 1e6 == pytest.approx(49.2, abs=0.05)


def test_document_000_s_full_context_holds():
    """About 7.0 GB (Qwen) and 6.0 GB (GPT OSS) for 128 K tokens: GiB, of 2**17 tokens."""
    assert kv_cache_bytes(QWEN_7B, 2**17) / 2**30 == 7.0
    assert 2**17 * kv_bytes_per_token(24, 8, 64) / 2**30 == 6.0


def test_document_000_contradicts_its_own_weights():
    """It gives both ~14 GB (7B parameters at 2 bytes) and ~10.8 GB for the same model in bfloat16; counted: 15.2 GB."""
    assert weight_bytes(QWEN_7B) == 2 * 7_615_616_512
    assert weight_bytes(QWEN_7B) / 1e9 == pytest.approx(15.2, abs=0.05)


def test_blocks_round_up():
    assert kv_cache_bytes(QWEN_7B, 17, block_size=16) == 32 * 57_344
    assert kv_cache_bytes(QWEN_7B, 16, block_size=16, sequences=3) == 48 * 57_344
    assert kv_cache_bytes(QWEN_7B, 0, block_size=16) == 0
    assert kv_cache_bytes(QWEN_7B, 10, Precision(kv=INT8)) == 10 * 57_344 // 2
    with pytest.raises(ValueError, match="block_size 0"):
        kv_cache_bytes(QWEN_7B, 1, block_size=0)


def test_activations_grow_with_the_step_and_with_the_logits():
    """A prompt's are those of its feed-forward layer: the residual, its input, and gate, up and product."""
    assert activation_bytes(QWEN_7B, 400) == 400 * (3584 + 3584 + 3 * 18944) * 2
    assert activation_bytes(QWEN_7B, 1) == (3584 + 3584 + 152064) * 2
    assert activation_bytes(QWEN_7B, 1, precision=Precision(activations=FP32)) == (3584 + 3584 + 152064) * 4


def test_roofline_of_document_000_s_gpu():
    """H100 PCIe: 2.0 TB/s; decode of Qwen 2.5 7B is bound by bytes, a prompt of 1,024 tokens by arithmetic."""
    machine = Roofline(flops_per_s=756e12, bytes_per_s=2.0e12)
    assert machine.ridge == 378
    decode, prefill = (step_work(QWEN_7B, [chunk]) for chunk in (Chunk(1, 399), Chunk(1024)))
    weights = 2 * (QWEN_7B.num_parameters - QWEN_7B.parameters()["embedding"] + QWEN_7B.hidden)
    step, prompt = total(decode.values()), total(prefill.values())
    assert machine.least_seconds(step.flops, step.kept_bytes) == (weights + 400 * 57_344 + 57_344) / 2.0e12
    assert machine.least_seconds(prompt.flops, prompt.kept_bytes) == prompt.flops / 756e12


def test_each_operation_has_its_own_bound():
    machine = Roofline(flops_per_s=10.0, bytes_per_s=2.0)
    parts = [Work(flops=100, weight_bytes=4), Work(flops=1, kv_read_bytes=6, activation_bytes=4)]
    assert machine.seconds(parts) == 10.0 + 5.0
    assert machine.seconds(parts, activations=False) == 10.0 + 3.0
    assert machine.attainable(3.0) == 6.0 and machine.attainable(50.0) == 10.0


def test_a_machine_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="not above 0"):
        Roofline(flops_per_s=0.0, bytes_per_s=1.0)
    with pytest.raises(ValueError, match="not above 0"):
        Roofline(flops_per_s=float("nan"), bytes_per_s=1.0)
