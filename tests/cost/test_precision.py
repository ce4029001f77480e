"""Formats and schemes: bytes with groups and scales, and which part of a model is kept how."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.memory import weight_bytes
from headway.cost.precision import BF16, FP8, FP16, FP32, INT8, KV_DTYPES, QUANTIZATIONS, Format, Precision
from headway.cost.work import Operation, step_work, weight_format
from tests.cost.machines import DENSE, MIXTURE, SHAPES


@given(
    elements=st.integers(0, 10**7),
    bits=st.integers(1, 64),
    group=st.integers(0, 300),
    scale_bits=st.integers(0, 32),
)
def test_bytes_are_elements_and_a_scale_for_each_group_begun(elements, bits, group, scale_bits):
    format_ = Format("any", bits, "bf16", group, scale_bits)
    groups = ceil(Fraction(elements, group)) if group else 0
    assert format_.bytes_of(elements) == ceil(Fraction(elements * bits + groups * scale_bits, 8))
    if group and elements % group == 0:
        assert format_.bytes_of(elements) * 8 == pytest.approx(elements * format_.bits_per_element, abs=8)


def test_bytes_of_known_formats_by_hand():
    """MXFP4 (document 000): 32 elements of 4 bits and a scale of 8 in 17 bytes; int4: 128 and 16 bits in 66."""
    mxfp4, int4 = (Precision.named(quantization=name).linear for name in ("mxfp4", "int4"))
    assert (mxfp4.bytes_of(32), mxfp4.bytes_of(33), mxfp4.bits_per_element) == (17, 19, 4.25)
    assert (int4.bytes_of(128), int4.bytes_of(256), int4.bits_per_element) == (66, 132, 4.125)
    assert [each.bytes_of(3) for each in (FP32, BF16, FP16, FP8, INT8)] == [12, 6, 6, 3, 3]


@pytest.mark.parametrize(
    ("quantization", "bits", "compute"),
    [
        ("none", 16, "bf16"),
        ("fp8", 8, "fp8"),
        ("fp8-weight-only", 8, "bf16"),
        ("fp8-block", 8, "fp8"),
        ("int8", 8, "int8"),
        ("int8-weight-only", 8, "bf16"),
        ("int4", 4, "bf16"),
        ("w4a8", 4, "int8"),
        ("mxfp4", 4, "mxfp4"),
        ("nvfp4", 4, "nvfp4"),
        ("nf4", 4, "bf16"),
    ],
)
def test_schemes_keep_matrices_narrow_and_nothing_else(quantization, bits, compute):
    precision = Precision.named("bfloat16", quantization)
    assert (precision.linear.bits, precision.linear.compute) == (bits, compute)
    assert precision.of_experts == precision.linear
    assert (precision.head, precision.rest, precision.activations, precision.kv) == (BF16,) * 4
    assert quantization in QUANTIZATIONS and len(QUANTIZATIONS) == 17


@pytest.mark.parametrize(("quantization", "bits"), [("int4-experts", 4.125), ("nvfp4-experts", 4.5)])
def test_schemes_of_experts_leave_all_other_matrices_as_they_are(quantization, bits):
    """Weight-only int4 of a mixture (groups of 128 with 16 bits), and NVFP4: 4 bits and 8 more for each 16."""
    precision = Precision.named("bfloat16", quantization)
    assert precision.of_experts.bits_per_element == bits
    assert (precision.linear, precision.head, precision.rest) == (BF16,) * 3


def test_this_engine_s_int4_is_counted_by_hand():
    """A matrix [65, 40] is stored as [128, 64]: half a byte each, a byte for 32, and four for each row."""
    found = Precision.of_engine("bfloat16", "int4", "int8", 64)
    assert found.linear.bytes_of_matrices([(3, 65, 40)]) == 3 * (128 * 64 // 2 + 128 * 64 // 32 + 128 * 4)
    assert found.head.bytes_of_matrices([(1, 65, 41)]) == 128 * 44 + 128 * 4
    assert found.kv.bytes_of(2 * 8 * 64) == 2 * 8 * (64 + 4)
    assert found.linear.compute == found.head.compute == "int8"
    assert Precision.of_engine("bfloat16", "none", "auto", 64) == Precision.named("bfloat16")


def test_weights_alone_are_multiplied_in_the_dtype_of_activations():
    assert Precision.named("float16", "int4").linear.compute == "fp16"
    assert Precision.named("float32", "fp8-weight-only").linear.compute == "fp32"


@pytest.mark.parametrize(
    ("kv", "kept"), [("auto", FP16), ("fp8", FP8), ("int8", INT8), ("bf16", BF16), ("fp16", FP16), ("fp32", FP32)]
)
def test_the_cache_has_a_format_of_its_own(kv, kept):
    assert Precision.named("half", "int4", kv).kv == Precision.named("half", "none", kv).kv == kept
    assert kv in KV_DTYPES and len(KV_DTYPES) == 6


def test_unknown_names_are_refused_with_those_that_are_known():
    with pytest.raises(
        ValueError, match="quantization is 'int2'; it must be one of none, fp8, fp8-weight-only, fp8-block, int8"
    ):
        Precision.named(quantization="int2")
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp4'; it must be one of auto, fp8, int8, bf16"):
        Precision.named(kv_cache_dtype="fp4")


def test_a_scheme_for_experts_leaves_all_else_plain():
    """gpt-oss: experts in MXFP4, attention, router, head and embedding in bfloat16."""
    precision = Precision.named("bfloat16", "mxfp4", "fp8").for_experts_only()
    assert precision.of_experts.bits_per_element == 4.25
    assert precision.linear == precision.head == precision.rest == precision.activations == BF16
    assert precision.kv == FP8
    plain = weight_bytes(DENSE)
    assert weight_bytes(DENSE, precision) == plain
    matrices = 3 * 8 * 3 * 64 * 48
    assert weight_bytes(MIXTURE, precision) == weight_bytes(MIXTURE) - 2 * matrices + matrices * 17 // 32


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_large_step_reads_as_many_bytes_as_the_model_has(shape, quantization):
    """What a step reads and what memory holds are counted in different places, and agree but for rounded groups."""
    precision = Precision.named("bfloat16", quantization)
    work = step_work(shape, [Chunk(4096)], precision)
    again = precision.head.bytes_of(shape.vocab * shape.hidden) if shape.tied_embeddings else 0
    read = sum(part.weight_bytes for part in work.values())
    assert read - again == pytest.approx(weight_bytes(shape, precision), abs=100)


def test_each_operation_s_matrices_have_one_format():
    named = ("linear", "experts", "head", "rest", "activations", "kv")
    precision = Precision(*(Format(name, 16, "bf16") for name in named))
    kept = {op: weight_format(op, precision).name for op in Operation}
    assert kept.pop(Operation.EXPERTS) == "experts"
    assert kept.pop(Operation.HEAD) == "head"
    assert kept.pop(Operation.ROUTER) == "rest"
    assert {kept[op] for op in (Operation.QKV, Operation.OUTPUT, Operation.DOWN, Operation.SHARED_EXPERTS)} == {
        "linear"
    }
