"""Recurrent layers on CUDA in Triton: convolutions of channels, and the gated delta rule.

A program has a sequence's part of the step (see Span), with some channels or with a head. So the slots of its states
are written by the program that has read them, a prompt needs one launch like a decode, and what a token gets does not
depend on how steps divide its sequence.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.interface import LayerState, Span, StepGeometry
from headway.kernels.weights import DeltaRule

_SPAN = tl.constexpr(len(Span._fields))
_CHANNELS, _TOKENS = 128, 16  # channels and tokens that a program of a convolution has at a time


@triton.jit
def _input(x, x_stride, before, gate_stride, token, col, there):
    """The input of the convolution: x [tokens, columns], times its gate if it has one; float32."""
    seen = tl.load(x + token * x_stride + col, mask=there, other=0.0).to(tl.float32)
    if before is not None:
        seen *= tl.load(before + token * gate_stride + col, mask=there, other=0.0).to(tl.float32)
    return seen


@triton.jit
def _leave(
    x, x_stride, before, gate_stride, states, first, source, slot, count, col, there, channels, LINES: tl.constexpr
):  # fmt: skip
    """The state behind `count` tokens, to its slot; from the oldest line on, so that it may be where it came from."""
    for line in tl.static_range(LINES):
        place = count + line - LINES  # among the tokens of the span; before the first in the state before it
        known = tl.load(
            states + (source * LINES + place + LINES) * channels + col,
            mask=there & (place < 0) & (source >= 0),
            other=0.0,
        )
        seen = _input(x, x_stride, before, gate_stride, first + place, col, there & (place >= 0))
        tl.store(states + (slot * LINES + line) * channels + col, tl.where(place < 0, known, seen), mask=there)


@triton.jit
def convolve_kernel(
    spans, x, x_stride, before, behind, gate_stride, taps, bias, states, out, channels,
    LINES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels). A slot has the inputs of the last LINES tokens, oldest first."""
    span = spans + (1 + tl.program_id(0)) * _SPAN
    first, tokens, source, target = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    col = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = col < channels
    for begin in range(0, tokens, TOKENS):
        number = begin + tl.arange(0, TOKENS)
        live = (number < tokens)[:, None] & there[None, :]
        totals = tl.zeros([TOKENS, CHANNELS], tl.float32)
        if bias is not None:
            totals += tl.load(bias + col, mask=there, other=0.0)[None, :]
        for tap in tl.static_range(LINES + 1):
            place = (number + tap - LINES)[:, None]
            known = tl.load(
                states + (source * LINES + place + LINES) * channels + col[None, :],
                mask=live & (place < 0) & (source >= 0), other=0.0,
            )  # fmt: skip
            seen = _input(x, x_stride, before, gate_stride, first + place, col[None, :], live & (place >= 0))
            weight = tl.load(taps + tap * channels + col, mask=there, other=0.0)
            totals += (known + seen) * weight[None, :]
        token = (first + number)[:, None]
        if behind is not None:
            gate = tl.load(behind + token * gate_stride + col[None, :], mask=live, other=0.0)
            totals *= gate.to(tl.float32)
        else:
            totals *= tl.sigmoid(totals)
        tl.store(out + token * channels + col[None, :], totals.to(out.dtype.element_ty), mask=live)
    keep, count = span, tl.load(span + 4)
    while count > 0:
        slot = tl.load(keep + 5)
        _leave(x, x_stride, before, gate_stride, states, first, source, slot, count, col, there, channels, LINES)
        further = tl.load(keep + 6)
        keep += further * _SPAN
        count = tl.where(further > 0, tl.load(keep + 4), 0)
    tl.debug_barrier()  # other threads may still read what is written now
    _leave(x, x_stride, before, gate_stride, states, first, source, target, tokens, col, there, channels, LINES)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)). The device's own logarithm is coarse near 1, and decays add up its error from token to token.

    log(1 + e) is 2 artanh(e / (2 + e)), and eight terms of the series do for e up to 1 (Abramowitz and Stegun, 4.1.27).
    """
    small = tl.exp(-tl.abs(x))
    part = tl.div_rn(small, 2.0 + small)
    square = part * part
    series = square / 15.0 + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * part * (series * square + 1.0)


@triton.jit
def delta_rule_kernel(
    spans, mixed, gate, gate_stride, numbers, rate, offset, norm, eps, states, out,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEYS_PADDED: tl.constexpr, VALUES_PADDED: tl.constexpr, BY_TURNS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head), token after token, with the head's matrix in registers."""
    span = spans + (1 + tl.program_id(0)) * _SPAN
    head = tl.program_id(1)
    first, tokens, source, target = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    k, v = tl.arange(0, KEYS_PADDED), tl.arange(0, VALUES_PADDED)
    is_key, is_value = k < KEYS, v < VALUES
    inside = is_key[:, None] & is_value[None, :]
    of_head = states + head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    size = HEADS * KEYS * VALUES
    matrix = tl.load(of_head + source * size, mask=inside & (source >= 0), other=0.0)
    forgets_by, offset_by = tl.load(rate + head), tl.load(offset + head)
    weight = tl.load(norm + v, mask=is_value, other=0.0)
    key_head = head % KEY_HEADS if BY_TURNS else head * KEY_HEADS // HEADS
    keep, count = span, tl.load(span + 4)
    for number in range(tokens):
        token = first + number
        row = mixed + token * (2 * KEY_HEADS * KEYS + HEADS * VALUES)
        query = tl.load(row + key_head * KEYS + k, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(row + (KEY_HEADS + key_head) * KEYS + k, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(row + 2 * KEY_HEADS * KEYS + head * VALUES + v, mask=is_value, other=0.0).to(tl.float32)
        query = tl.div_rn(query, tl.sqrt_rn((tl.sum(query * query, axis=0) + 1e-6) * KEYS))
        key = tl.div_rn(key, tl.sqrt_rn(tl.sum(key * key, axis=0) + 1e-6))
        writes = tl.sigmoid(tl.load(numbers + token * 2 * HEADS + head).to(tl.float32))
        forgets = tl.load(numbers + (token * 2 + 1) * HEADS + head).to(tl.float32) + offset_by
        matrix *= tl.exp(-forgets_by * _softplus(forgets))
        written = writes * (value - tl.sum(matrix * key[:, None], axis=0))
        matrix += key[:, None] * written[None, :]
        result = tl.sum(matrix * query[:, None], axis=0)
        result = tl.div_rn(result, tl.sqrt_rn(tl.sum(result * result, axis=0) / VALUES + eps)) * weight
        opens = tl.load(gate + token * gate_stride + head * VALUES + v, mask=is_value, other=0.0).to(tl.float32)
        result *= opens * tl.sigmoid(opens)
        tl.store(out + (token * HEADS + head) * VALUES + v, result.to(out.dtype.element_ty), mask=is_value)
        if number + 1 == count:
            tl.store(of_head + tl.load(keep + 5) * size, matrix, mask=inside)
            further = tl.load(keep + 6)
            keep += further * _SPAN
            count = tl.where(further > 0, tl.load(keep + 4), 0)
    tl.store(of_head + target * size, matrix, mask=inside)


def convolve(
    x: Tensor, gates: tuple[Tensor, Tensor] | None, taps: Tensor, bias: Tensor | None, state: LayerState,
    step: StepGeometry,
) -> Tensor:  # fmt: skip
    width, channels = taps.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before, behind = gates or (None, None)
    convolve_kernel[(step.num_sequences, triton.cdiv(channels, _CHANNELS))](
        _spans(step), x, x.stride(0), before, behind, 0 if before is None else before.stride(0), taps, bias,
        state.inputs, out, channels, LINES=width - 1, TOKENS=_TOKENS, CHANNELS=_CHANNELS,
    )  # fmt: skip
    return out


def delta_rule(
    mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
) -> Tensor:
    matrices = state.matrices
    if matrices is None:
        raise ValueError("a layer whose state has no matrices has no delta rule")
    heads, keys, values = matrices.shape[1:]
    out = torch.empty((len(mixed), heads * values), dtype=mixed.dtype, device=mixed.device)
    delta_rule_kernel[(step.num_sequences, heads)](
        _spans(step), mixed, gate, gate.stride(0), numbers, rule.rate, rule.offset, rule.norm, rule.eps, matrices, out,
        HEADS=heads, KEY_HEADS=rule.key_heads, KEYS=keys, VALUES=values,
        KEYS_PADDED=triton.next_power_of_2(keys), VALUES_PADDED=triton.next_power_of_2(values),
        BY_TURNS=rule.by_turns, num_warps=8,
    )  # fmt: skip
    return out


def _spans(step: StepGeometry) -> Tensor:
    if step.spans is None:
        raise ValueError("a step of a model with recurrent layers has no spans")
    return step.spans
