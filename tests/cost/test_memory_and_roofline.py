"""Rounding, activations and the roofline; the documents' own figures are in tests of their own."""

from __future__ import annotations

from headway.cost.config import read_shape
from headway.cost.memory import activation_bytes, kv_cache_bytes
from headway.cost.precision import FP32, INT8, Precision
from headway.cost.roofline import Roofline
from tests.cost import published

QWEN_7B = read_shape(published.QWEN2_5_7B)


def test_blocks_round_up():
    assert kv_cache_bytes(QWEN_7B, 17, block_size=16) == 32 * 57_344
    assert kv_cache_bytes(QWEN_7B, 16, block_size=16, sequences=3) == 48 * 57_344
    assert kv_cache_bytes(QWEN_7B, 0, block_size=16) == 0
    assert kv_cache_bytes(QWEN_7B, 10, Precision(kv=INT8)) == 10 * 57_344 // 2


def test_activations_grow_with_the_step_and_with_the_logits():
    """A prompt's are those of its feed-forward layer: the residual, its input, and gate, up and product."""
    assert activation_bytes(QWEN_7B, 400) == 400 * (3584 + 3584 + 3 * 18944) * 2
    assert activation_bytes(QWEN_7B, 1) == (3584 + 3584 + 152064) * 2
    assert activation_bytes(QWEN_7B, 1, precision=Precision(activations=FP32)) == (3584 + 3584 + 152064) * 4


def test_each_operation_has_its_own_bound():
    machine = Roofline(flops_per_s=10.0, bytes_per_s=2.0)
    assert machine.attainable(3.0) == 6.0 and machine.attainable(50.0) == 10.0
