"""The row operations on CUDA in Triton: norms, RoPE, the gate of the feed-forward, the cache's writes."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, outer_stride, inner, inner_stride, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Row i of x starts at (i // inner) * outer_stride + (i % inner) * inner_stride; out is dense."""
    row = tl.program_id(0).to(tl.int64)
    at = (row // inner) * outer_stride + (row % inner) * inner_stride
    dim = tl.arange(0, PADDED)
    mask = dim < WIDTH
    value = tl.load(x + at + dim, mask=mask, other=0.0).to(tl.float32)
    value = tl.div_rn(value, tl.sqrt_rn(tl.sum(value * value, axis=0) / WIDTH + eps))
    value = value * tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + dim, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """residual += x, x = rms_norm(residual), both dense."""
    at = tl.program_id(0).to(tl.int64) * WIDTH
    dim = tl.arange(0, PADDED)
    mask = dim < WIDTH
    total = tl.load(x + at + dim, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + at + dim, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    tl.store(residual + at + dim, rounded, mask=mask)
    value = rounded.to(tl.float32)
    value = tl.div_rn(value, tl.sqrt_rn(tl.sum(value * value, axis=0) / WIDTH + eps))
    value = value * tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + at + dim, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def let_through(gate, up, slope, cubic, limit, shift):
    """See Gate; in float32."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + shift
    return gate / (1.0 + tl.exp(-gate * (slope + cubic * gate * gate))) * up


@triton.jit
def gate_kernel(x, out, width, slope, cubic, limit, shift, BLOCK: tl.constexpr):
    """out[i, d] = x[i, width + d] as its gate x[i, d] lets it through (see Gate), dense."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dim < width
    gate = tl.load(x + row * 2 * width + dim, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + dim, mask=mask, other=0.0).to(tl.float32)
    value = let_through(gate, up, slope, cubic, limit, shift)
    tl.store(out + row * width + dim, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def forbid_kernel(x, tokens, marked, width, BLOCK: tl.constexpr):
    """Logits that are not allowed become -inf, program (marked row, block of tokens); the others are not touched."""
    marks = marked + tl.program_id(0).to(tl.int64) * width
    row = tl.load(marks).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    word = tl.load(marks + 1 + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(x + row * tokens + token, -float("inf"), mask=inside & forbidden)


@triton.jit
def rotate_kernel(
    query, query_stride, key, key_stride, cos, sin, positions, last,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """RoPE in place: program (token, head), the heads of key following those of query."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED)
    mask = dim < HALF
    table = tl.minimum(tl.load(positions + token), last) * HALF + dim
    c = tl.load(cos + table, mask=mask, other=0.0)
    s = tl.load(sin + table, mask=mask, other=0.0)
    if head < HEADS:
        row = query + token * query_stride + head * WIDTH
    else:
        row = key + token * key_stride + (head - HEADS) * WIDTH
    low = tl.load(row + dim, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row + HALF + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(row + dim, (low * c - high * s).to(query.dtype.element_ty), mask=mask)
    tl.store(row + HALF + dim, (high * c + low * s).to(query.dtype.element_ty), mask=mask)


@triton.jit
def _float8(x):
    """Numbers of float32 as bytes of e4m3fn, to nearest even and at most 448; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = (
        (bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20
    ) - 960  # the exponents' biases are 127 and 7, 8 codes for each
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # a sum whose last bit counts ones
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _store_rounded(source, to, scale_to, mask, live, CACHE: tl.constexpr):
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if CACHE == "int8":
        largest = tl.max(tl.abs(x), axis=0)
        rounded = x * tl.where(largest > 0.0, 127.0 / largest, 0.0) + 12582912.0
        tl.store(to, (rounded.to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8), mask=mask)
        tl.store(scale_to, largest / 127.0, mask=live)
    else:
        tl.store(to, _float8(x).to(tl.uint8), mask=mask)


@triton.jit
def store_rounded_kernel(
    key, key_stride, value, value_stride, keys, values, key_scales, value_scales, slots,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Do as store_kernel for a cache of "int8" with scales [N, G, B], or of bytes of "fp8"."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED)
    slot = tl.load(slots + token)
    mask = (dim < WIDTH) & (slot >= 0)
    place = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    at, live = place * WIDTH + dim, slot >= 0
    _store_rounded(key + token * key_stride + head * WIDTH + dim, keys + at, key_scales + place, mask, live, CACHE)
    _store_rounded(
        value + token * value_stride + head * WIDTH + dim, values + at, value_scales + place, mask, live, CACHE
    )


@triton.jit
def store_kernel(
    key, key_stride, value, value_stride, keys, values, slots,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One token's key and value of one head to its slot of keys and values [N, G, B, D]; to none below 0."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED)
    slot = tl.load(slots + token)
    mask = (dim < WIDTH) & (slot >= 0)
    at = ((slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * WIDTH + dim
    tl.store(keys + at, tl.load(key + token * key_stride + head * WIDTH + dim, mask=mask), mask=mask)
    tl.store(values + at, tl.load(value + token * value_stride + head * WIDTH + dim, mask=mask), mask=mask)
