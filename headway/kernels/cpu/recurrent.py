"""Recurrent layers on CPU: convolutions of channels, and the gated delta rule, token after token.

The work of a sequence is done in the order of its tokens, by one thread for some channels or for a head. So what a
token gets does not depend on how steps divide its sequence, or on others. Spans (see Span) are read from memory that is
the same in every step that is repeated.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.experts import sigmoid_of
from headway.kernels.cpu.jobs import arg, job, once_per_kind, real_arg, take_rows
from headway.kernels.cpu.rows import REORDER
from headway.kernels.cpu.simd import FLOAT32, load, read_int64, store
from headway.kernels.interface import Span

_ZERO, _ONE = np.float32(0), np.float32(1)
_SPAN = len(Span._fields)  # numbers
_CHANNELS = 512  # channels that a thread takes at a time
_SMALL = np.float32(1e-6)  # beside the squared length of queries and keys


@compiled()
def _copy(source, target, first, last):
    """Floats first .. last - 1 of the memory at source, which is zeros at 0."""
    for i in range(first, last):
        store(target, i, load(source, i, FLOAT32) if source != 0 else _ZERO, FLOAT32)


@compiled(fastmath=REORDER)
def _seen(kind, x, at, gate, gate_at, first, last, line):
    """Elements first .. last - 1 of a row, multiplied with their gate where there is one."""
    if gate == 0:
        for c in range(first, last):
            store(line, c, load(x, at + c, kind), FLOAT32)
    else:
        for c in range(first, last):
            store(line, c, load(x, at + c, kind) * load(gate, gate_at + c, kind), FLOAT32)


@compiled(fastmath=REORDER)
def _add_tap(line, tap, first, last, totals):
    for c in range(first, last):
        store(totals, c, load(totals, c, FLOAT32) + load(line, c, FLOAT32) * load(tap, c, FLOAT32), FLOAT32)


@compiled(fastmath=REORDER)
def _open(kind, totals, gate, gate_at, first, last, out, at):
    for c in range(first, last):
        total = load(totals, c, FLOAT32)
        by = sigmoid_of(total) * total if gate == 0 else total * load(gate, gate_at + c, kind)
        store(out, at + c, by, kind)


@compiled()
def _convolve(
    kind, span, first, last, x, stride, before, behind, gate_stride, taps, width, channels, bias, states, out, totals
):
    """Channels first .. last - 1 of a span. A slot has the inputs of the last width - 1 tokens, oldest first."""
    begin, tokens, source = read_int64(span, 0), read_int64(span, 1), read_int64(span, 2)
    lines = width - 1
    size = lines * channels * 4
    state = states + read_int64(span, 3) * size
    row = channels * 4
    keep = span
    if read_int64(span, 3) != source:
        for line in range(lines):
            _copy(states + source * size + line * row if source >= 0 else 0, state + line * row, first, last)
    for number in range(tokens):
        token = begin + number
        newest = totals + row
        _seen(kind, x, token * stride, before, token * gate_stride, first, last, newest)
        _copy(bias, totals, first, last)
        for line in range(lines):
            _add_tap(state + line * row, taps + line * row, first, last, totals)
        _add_tap(newest, taps + lines * row, first, last, totals)
        _open(kind, totals, behind, token * gate_stride, first, last, out, token * channels)
        for line in range(1, lines):
            _copy(state + line * row, state + (line - 1) * row, first, last)
        if lines:
            _copy(newest, state + (lines - 1) * row, first, last)
        if number + 1 == read_int64(keep, 4):
            kept = states + read_int64(keep, 5) * size
            for line in range(lines):
                _copy(state + line * row, kept + line * row, first, last)
            keep += read_int64(keep, 6) * _SPAN * 8


CONVOLVE = struct.Struct("12q")


@once_per_kind
def convolve_job(kind: Any) -> int:
    def parts(a: int) -> None:
        spans, channels = arg(a, 0), arg(a, 8)
        panels = (channels + _CHANNELS - 1) // _CHANNELS
        count = read_int64(spans, 0) * panels
        totals = take_memory(2 * channels * 4)
        part = take_rows(a, 1)
        while part < count:
            first = part % panels * _CHANNELS
            _convolve(
                kind, spans + (1 + part // panels) * _SPAN * 8, first, min(first + _CHANNELS, channels), arg(a, 1),
                arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7), channels, arg(a, 9), arg(a, 10),
                arg(a, 11), totals,
            )  # fmt: skip
            part = take_rows(a, 1)
        give_back(totals)

    return job(parts)


@compiled(fastmath=REORDER)
def _widen(kind, x, at, count, scaled, out):
    """Floats of so many elements, divided by their length if they are to be `scaled`, times that factor."""
    factor = _ONE
    if scaled != _ZERO:
        total = _SMALL
        for d in range(count):
            value = load(x, at + d, kind)
            total += value * value
        factor = scaled / np.sqrt(total)
    for d in range(count):
        store(out, d, load(x, at + d, kind) * factor, FLOAT32)


@compiled(fastmath=REORDER)
def _product(first, second, count):
    total = _ZERO
    for d in range(count):
        total += load(first, d, FLOAT32) * load(second, d, FLOAT32)
    return total


@compiled(fastmath={"contract"})
def _read(matrix, key, query, key_dim, value_dim, found, result):
    """found = S^T k and result = S^T q, four rows of S at a time."""
    for c in range(value_dim):
        store(found, c, _ZERO, FLOAT32)
        store(result, c, _ZERO, FLOAT32)
    whole = key_dim // 4 * 4
    for r in range(0, whole, 4):
        k0, k1 = load(key, r, FLOAT32), load(key, r + 1, FLOAT32)
        k2, k3 = load(key, r + 2, FLOAT32), load(key, r + 3, FLOAT32)
        q0, q1 = load(query, r, FLOAT32), load(query, r + 1, FLOAT32)
        q2, q3 = load(query, r + 2, FLOAT32), load(query, r + 3, FLOAT32)
        at = r * value_dim
        for c in range(value_dim):
            s0, s1 = load(matrix, at + c, FLOAT32), load(matrix, at + value_dim + c, FLOAT32)
            s2, s3 = load(matrix, at + 2 * value_dim + c, FLOAT32), load(matrix, at + 3 * value_dim + c, FLOAT32)
            store(found, c, load(found, c, FLOAT32) + s0 * k0 + s1 * k1 + s2 * k2 + s3 * k3, FLOAT32)
            store(result, c, load(result, c, FLOAT32) + s0 * q0 + s1 * q1 + s2 * q2 + s3 * q3, FLOAT32)
    for r in range(whole, key_dim):
        k0, q0 = load(key, r, FLOAT32), load(query, r, FLOAT32)
        for c in range(value_dim):
            s0 = load(matrix, r * value_dim + c, FLOAT32)
            store(found, c, load(found, c, FLOAT32) + s0 * k0, FLOAT32)
            store(result, c, load(result, c, FLOAT32) + s0 * q0, FLOAT32)


@compiled(fastmath={"contract"})
def _write(matrix, key, written, kept, key_dim, value_dim):
    """S = kept S + k written^T."""
    for r in range(key_dim):
        k, at = load(key, r, FLOAT32), r * value_dim
        for c in range(value_dim):
            store(matrix, at + c, load(matrix, at + c, FLOAT32) * kept + load(written, c, FLOAT32) * k, FLOAT32)


@compiled(fastmath={"contract"})
def _correct(value, found, result, kept, writes, meets, value_dim):
    """found becomes what is written, beta (v - f S^T k), and result the new matrix's: f S^T q + (k q) written."""
    for c in range(value_dim):
        written = writes * (load(value, c, FLOAT32) - kept * load(found, c, FLOAT32))
        store(found, c, written, FLOAT32)
        store(result, c, load(result, c, FLOAT32) * kept + meets * written, FLOAT32)


@compiled(fastmath=REORDER)
def _norm_and_gate(kind, result, norm, eps, gate, gate_at, value_dim, out, at):
    scale = _ONE / np.sqrt(_product(result, result, value_dim) / np.float32(value_dim) + eps)
    for c in range(value_dim):
        opens = load(gate, gate_at + c, kind)
        store(out, at + c, load(result, c, FLOAT32) * scale * load(norm, c, FLOAT32) * opens * sigmoid_of(opens), kind)


@compiled()
def _kept_share(number, rate):
    """exp(-rate * softplus(number)), of any number."""
    soft = max(number, _ZERO) + np.log1p(np.exp(-abs(number))) if number == number else number
    return np.float32(np.exp(-rate * soft))


@compiled()
def _delta_rule(
    kind, span, head, heads, key_heads, key_dim, value_dim, mixed, gate, gate_stride, numbers, rate, offset, norm, eps,
    states, out, by_turns, memory,
):  # fmt: skip
    """One head of a span, in its slot's matrix."""
    begin, tokens, source = read_int64(span, 0), read_int64(span, 1), read_int64(span, 2)
    elements = key_dim * value_dim
    matrix = states + (read_int64(span, 3) * heads + head) * elements * 4
    if read_int64(span, 3) != source:
        _copy(states + (source * heads + head) * elements * 4 if source >= 0 else 0, matrix, 0, elements)
    query, key = memory, memory + key_dim * 4
    value, found, result = (
        memory + 2 * key_dim * 4, memory + (2 * key_dim + value_dim) * 4, memory + 2 * (key_dim + value_dim) * 4
    )  # fmt: skip
    channels = 2 * key_heads * key_dim + heads * value_dim
    key_head = head % key_heads if by_turns else head * key_heads // heads
    root = _ONE / np.sqrt(np.float32(key_dim))
    keep = span
    for number in range(tokens):
        token = begin + number
        at = token * channels
        _widen(kind, mixed, at + key_head * key_dim, key_dim, root, query)
        _widen(kind, mixed, at + (key_heads + key_head) * key_dim, key_dim, _ONE, key)
        _widen(kind, mixed, at + 2 * key_heads * key_dim + head * value_dim, value_dim, _ZERO, value)
        writes = sigmoid_of(load(numbers, token * 2 * heads + head, kind))
        forgets = load(numbers, (token * 2 + 1) * heads + head, kind) + load(offset, head, FLOAT32)
        kept = _kept_share(forgets, load(rate, head, FLOAT32))
        _read(matrix, key, query, key_dim, value_dim, found, result)
        _correct(value, found, result, kept, writes, _product(key, query, key_dim), value_dim)
        _write(matrix, key, found, kept, key_dim, value_dim)
        gate_at, out_at = token * gate_stride + head * value_dim, (token * heads + head) * value_dim
        _norm_and_gate(kind, result, norm, eps, gate, gate_at, value_dim, out, out_at)
        if number + 1 == read_int64(keep, 4):
            _copy(matrix, states + (read_int64(keep, 5) * heads + head) * elements * 4, 0, elements)
            keep += read_int64(keep, 6) * _SPAN * 8


DELTA_RULE = struct.Struct("14qdq")


@once_per_kind
def delta_rule_job(kind: Any) -> int:
    def parts(a: int) -> None:
        spans, heads, key_dim, value_dim = arg(a, 0), arg(a, 1), arg(a, 3), arg(a, 4)
        count = read_int64(spans, 0) * heads
        memory = take_memory((2 * key_dim + 3 * value_dim) * 4)
        part = take_rows(a, 1)
        while part < count:
            _delta_rule(
                kind, spans + (1 + part // heads) * _SPAN * 8, part % heads, heads, arg(a, 2), key_dim, value_dim,
                arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11),
                np.float32(real_arg(a, 14)), arg(a, 12), arg(a, 13), arg(a, 15), memory,
            )  # fmt: skip
            part = take_rows(a, 1)
        give_back(memory)

    return job(parts)


@compiled(fastmath=REORDER)
def _gate_rows(kind, first, last, x, gate, gate_stride, width):
    for row in range(first, last):
        for d in range(width):
            at = row * width + d
            store(x, at, load(x, at, kind) * sigmoid_of(load(gate, row * gate_stride + d, kind)), kind)


GATE = struct.Struct("6q")


@once_per_kind
def gate_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        first = take_rows(a, step)
        while first < count:
            _gate_rows(kind, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5))
            first = take_rows(a, step)

    return job(rows)


@compiled(fastmath=REORDER)
def _gated_rows(kind, first, last, x, up, up_stride, width, slope, cubic):
    for i in range(first, last):
        for c in range(width):
            by = load(x, i * width + c, kind)
            opened = by * sigmoid_of(by * (slope + cubic * by * by))
            store(x, i * width + c, opened * load(up, i * up_stride + c, kind), kind)


GATED = struct.Struct("6q2d")


@once_per_kind
def gated_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        slope, cubic = np.float32(real_arg(a, 6)), np.float32(real_arg(a, 7))
        first = take_rows(a, step)
        while first < count:
            last = min(first + step, count)
            _gated_rows(kind, first, last, arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), slope, cubic)
            first = take_rows(a, step)

    return job(rows)
