"""The choice of each row's next token on CPU, as one job: edits, penalties, temperature, cuts and the draw.

What is drawn is what headway/engine/draws.py draws, in the same order of steps. Which tokens min_p and top_k keep is
the same bit for bit, and so is the order of equals. Exponentials and sums are rounded otherwise, so a draw may differ
where its uniform number falls within about 1e-6 of an edge between two tokens, or top_p within that of one.

Nothing is sorted. A row's float32 bits, seen as integers, have the order of the numbers: masses are summed by the
first eight bits, then by the next eight among those that begin with the bits found, and so on, until the very logit is
known at which a mass is reached. Blocks' peaks tell which tokens can matter at all.

A row's memory, of P tokens (whole blocks): float32 x [P], candidates [P], weights [P], int32 ids [P], float32 peaks
[P / block], float64 masses [P / block + 256].
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np

from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_rows, tickets
from headway.kernels.cpu.rows import REORDER, exp_of_negative
from headway.kernels.cpu.simd import (
    FLOAT32,
    larger,
    load,
    read_float64,
    read_int32,
    read_int64,
    store,
    take_ticket,
    write_float64,
    write_integer,
)
from headway.kernels.interface import DRAW

BAD_ROW = -1

_BLOCK = 128
_BITS, _BINS = 8, 256  # bits of a logit that are looked at together
_CANDIDATES = 64  # blocks whose peaks are looked at first, where top_p alone cuts
(
    _INVERSE, _LOG_MIN_P, _TOP_K, _TOP_P, _LOG_REST, _SEED, _POSITION, _EDITS, _NUM_EDITS, _REPETITION, _FREQUENCY,
    _PRESENCE, _SEEN, _COUNTS, _NUM_SEEN, _MASK,
) = range(len(DRAW.names or ()))  # fmt: skip
_ROW_BYTES = DRAW.itemsize

# Elements among which the greatest is sought before the place is.
_SEARCHED = 8192
_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)
_LOWEST = np.finfo(np.float32).min
_NO_WEIGHT = np.float32(-87.0)  # the logarithm of about the least float32
_ALMOST_ONE = 1.0 - 2.0**-52

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def padded(size: int) -> int:
    """Tokens of whole blocks that hold so many."""
    return -(-size // _BLOCK) * _BLOCK


@lru_cache
def row_memory(size: int) -> int:
    """Bytes that a row of so many logits needs."""
    blocks = padded(size) // _BLOCK
    return 4 * 4 * blocks * _BLOCK + 4 * (blocks + blocks % 2) + 8 * (blocks + _BINS)


@compiled(fastmath=REORDER)
def _greatest(kind, logits, first, last):
    """The greatest of elements first .. last - 1, and whether one of them is NaN."""
    best, unknown = -_INFINITY, 0
    for i in range(first, last):
        value = load(logits, i, kind)
        best = larger(best, value)
        unknown |= value != value
    return best, unknown


@compiled()
def _place_of(kind, logits, first, last, wanted):
    place = np.int32(last)
    for i in range(first, last):  # to the end, as vectors do; ending at the first would go one by one
        place = min(place, np.int32(i) if load(logits, i, kind) == wanted else np.int32(last))
    return place


@compiled()
def _most_likely(kind, logits, size):
    """The place of the greatest, the first of equals; BAD_ROW if that is infinite or one is NaN."""
    best, begin = -_INFINITY, 0
    for first in range(0, size, _SEARCHED):
        greatest, unknown = _greatest(kind, logits, first, min(first + _SEARCHED, size))
        if unknown != 0:
            return np.int32(BAD_ROW)
        if greatest > best:
            best, begin = greatest, first
    if not abs(best) < _INFINITY:
        return np.int32(BAD_ROW)
    return _place_of(kind, logits, begin, min(begin + _SEARCHED, size), best)


@compiled()
def _widen(kind, logits, size, whole, x):
    """x = logits in float32; a sum with zero is no negative zero, which would have other bits than its equal."""
    for i in range(size):
        store(x, i, load(logits, i, kind) + _ZERO, FLOAT32)
    for i in range(size, whole):
        store(x, i, -_INFINITY, FLOAT32)


@compiled()
def _edit(x, row):
    """Biases, and tokens that may not come yet; then the penalties, whose order of operations is the definition's."""
    edits, count, position = read_int64(row, _EDITS), read_int64(row, _NUM_EDITS), read_int64(row, _POSITION)
    for i in range(count):
        token = np.int64(read_float64(edits, i))
        value = load(x, token, FLOAT32) + np.float32(read_float64(edits, count + i)) + _ZERO
        store(x, token, -_INFINITY if position < read_float64(edits, 2 * count + i) else value, FLOAT32)
    tokens, counts, count = read_int64(row, _SEEN), read_int64(row, _COUNTS), read_int64(row, _NUM_SEEN)
    repetition = np.float32(read_float64(row, _REPETITION))
    frequency, presence = np.float32(read_float64(row, _FREQUENCY)), np.float32(read_float64(row, _PRESENCE))
    for i in range(count):
        token, times = read_int64(tokens, i), load(counts, i, FLOAT32)
        value = load(x, token, FLOAT32)
        value = value / repetition if value > _ZERO else value * repetition
        value -= frequency * times
        value -= presence if times > _ZERO else _ZERO
        store(x, token, value + _ZERO, FLOAT32)


@compiled()
def _forbid(x, whole, mask):
    """x = -inf where the mask has no bit. Words of whole blocks are read; the padding has -inf already."""
    for word in range(whole // 32):
        bits = read_int32(mask, word)
        for i in range(32):
            at = 32 * word + i
            store(x, at, load(x, at, FLOAT32) if (bits >> i) & 1 != 0 else -_INFINITY, FLOAT32)


@compiled(fastmath=REORDER)
def _peaks(x, blocks, peaks):
    """The greatest of each block; returns the greatest of all, NaN where one is."""
    best, unknown = -_INFINITY, 0
    for block in range(blocks):
        peak = -_INFINITY
        for i in range(block * _BLOCK, (block + 1) * _BLOCK):
            value = load(x, i, FLOAT32)
            peak = larger(peak, value)
            unknown |= value != value
        store(peaks, block, peak, FLOAT32)
        best = larger(best, peak)
    return best if unknown == 0 else np.float32(np.nan)


@compiled()
def _scaled(value, best, inverse):
    """A scaled logit, computed without reordering, because min_p compares it."""
    return (value - best) * inverse


@compiled(fastmath=REORDER, inline="always")
def _weight(value, best, inverse, least):
    """The probability relative to the likeliest token's; 0 where its logarithm is below `least`."""
    scaled = _scaled(value, best, inverse)
    weight = exp_of_negative(scaled)
    return weight if scaled >= least else _ZERO


@compiled(fastmath=REORDER)
def _weigh(values, count, best, inverse, least, weights):
    for i in range(count):
        store(weights, i, _weight(load(values, i, FLOAT32), best, inverse, least), FLOAT32)


@compiled(fastmath=REORDER)
def _block_masses(x, blocks, best, inverse, least, masses):
    """The sum of each block's weights; returns that of all."""
    total = 0.0
    for block in range(blocks):
        mass = _ZERO
        for i in range(block * _BLOCK, (block + 1) * _BLOCK):
            mass += _weight(load(x, i, FLOAT32), best, inverse, least)
        write_float64(masses, block, np.float64(mass))
        total += np.float64(mass)
    return total


@compiled()
def _draw_by_id(x, blocks, masses, target, best, inverse, least, weights):
    """The first token, by id, with which the mass exceeds the target."""
    chosen, end = 0, 0.0
    for block in range(blocks):
        mass = read_float64(masses, block)
        if mass > 0.0:
            chosen = block
            end += mass
            if end > target:
                break
    mass = read_float64(masses, chosen)
    # Relative to the block, so that rounding in its sum cannot carry the search past its end.
    rest = min(max((target - end + mass) / mass, 0.0), _ALMOST_ONE)
    _weigh(x + 4 * _BLOCK * chosen, _BLOCK, best, inverse, least, weights)
    mass = 0.0
    for i in range(_BLOCK):
        mass += np.float64(load(weights, i, FLOAT32))
    place, end = 0, 0.0
    for i in range(_BLOCK):
        weight = np.float64(load(weights, i, FLOAT32))
        if weight > 0.0:
            place = i
            end += weight
            if end > rest * mass:
                break
    return chosen * _BLOCK + place


@compiled()
def _key(values, i):
    """The bits of a float32 as an integer in 0 .. 2 ** 32 - 1 that is the greater, the greater the number is."""
    bits = read_int32(values, i)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + (1 << 31)


@compiled()
def _select(values, weights, count, enough, strictly, bins):
    """The key at which the mass, of the greatest values first, reaches `enough` (exceeds, if strictly); mass before it.

    If it never does, the last that has mass. Without weights each value counts as one.
    """
    prefix, before = 0, 0.0
    for shift in (24, 16, 8, 0):
        for b in range(_BINS):
            write_float64(bins, b, 0.0)
        for i in range(count):
            key = _key(values, i)
            if key >> (shift + _BITS) == prefix:
                b = (key >> shift) & (_BINS - 1)
                weight = np.float64(load(weights, i, FLOAT32)) if weights != 0 else 1.0
                write_float64(bins, b, read_float64(bins, b) + weight)
        chosen, end = 0, before
        for b in range(_BINS - 1, -1, -1):
            mass = read_float64(bins, b)
            if mass > 0.0:
                chosen, before = b, end
                end += mass
                if end > enough or (end == enough and not strictly):
                    break
        prefix = prefix << _BITS | chosen
    return prefix, before


@compiled()
def _weight_of(values, weights, count, key):
    """The weight of the tokens with this key."""
    for i in range(count):
        if _key(values, i) == key:
            return np.float64(load(weights, i, FLOAT32))
    return 0.0


@compiled()
def _mass_above(values, weights, count, key):
    mass = 0.0
    for i in range(count):
        mass += np.float64(load(weights, i, FLOAT32)) if _key(values, i) > key else 0.0
    return mass


@compiled()
def _nth(values, count, key, nth):
    """The place of the nth value, from 0 on, with this key; the last where there are fewer."""
    place = 0
    for i in range(count):
        if _key(values, i) == key:
            place = i
            if nth == 0:
                break
            nth -= 1
    return place


@compiled()
def _nth_peak(peaks, blocks, nth, bins):
    key = _select(peaks, 0, blocks, np.float64(nth), False, bins)[0]
    return load(peaks, _nth(peaks, blocks, key, 0), FLOAT32)


@compiled()
def _gather(x, peaks, blocks, least, values, ids):
    """The tokens of at least this logit, by id; returns how many they are."""
    count = 0
    for block in range(blocks):
        if load(peaks, block, FLOAT32) >= least:
            for i in range(block * _BLOCK, (block + 1) * _BLOCK):
                value = load(x, i, FLOAT32)
                store(values, count, value, FLOAT32)
                write_integer(ids, count, i, 32)
                count += value >= least
    return count


@compiled(fastmath=REORDER)
def _mass_of(weights, count):
    mass = 0.0
    for i in range(count):
        mass += np.float64(load(weights, i, FLOAT32))
    return mass


@compiled()
def _draw_by_rank(values, weights, count, kept, top_k, top_p, uniform, bins):
    """A candidate's place: of what top_k, then top_p keep, the first, by rank, with which the mass exceeds its share.

    kept: the mass of all that top_p is a share of, where top_k is 0.
    """
    last_key, last_nth = 0, count  # the last token that is kept
    if top_k > 0:
        last_key, above = _select(values, 0, count, np.float64(top_k), False, bins)
        last_nth = int(min(top_k, count) - above) - 1
        kept = _mass_above(values, weights, count, last_key)
        kept += np.float64(last_nth + 1) * _weight_of(values, weights, count, last_key)
    if top_p < 1.0:
        enough = top_p * kept
        key, before = _select(values, weights, count, enough, False, bins)
        weight = _weight_of(values, weights, count, key)
        nth = max(int(np.ceil((enough - before) / weight)), 1) - 1
        if key > last_key or (key == last_key and nth < last_nth):
            last_key, last_nth = key, nth
        kept = before + np.float64(nth + 1) * weight
    target = uniform * kept
    key, before = _select(values, weights, count, target, True, bins)
    nth = int((target - before) / _weight_of(values, weights, count, key))
    if key < last_key:  # rounding can do that
        key, nth = last_key, last_nth
    elif key == last_key:
        nth = min(nth, last_nth)
    return _nth(values, count, key, max(nth, 0))


@compiled()
def _mix(state):
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


@compiled()
def _uniform(seed, position):
    """The uniform number of a seed at a position, by the definition in headway/engine/tensor_sampling.py."""
    stream = _mix(np.uint64(seed) + _GOLDEN)
    return np.float64(_mix(stream + np.uint64(position + 1) * _GOLDEN) >> np.uint64(12)) * 2.0**-52


@compiled()
def draw_row(kind, logits, size, row, memory):
    """A row's token, or BAD_ROW if its logits, edited, hold NaN or +inf or nothing above -inf."""
    inverse = np.float32(read_float64(row, _INVERSE))
    mask = read_int64(row, _MASK)
    edited = read_int64(row, _NUM_EDITS) + read_int64(row, _NUM_SEEN) + mask != 0
    if inverse == _ZERO and not edited:
        return np.int64(_most_likely(kind, logits, size))
    blocks = -(-size // _BLOCK)
    whole = blocks * _BLOCK
    x, values, weights, ids = memory, memory + 4 * whole, memory + 8 * whole, memory + 12 * whole
    peaks = memory + 16 * whole
    masses = peaks + 4 * (blocks + blocks % 2)
    bins = masses + 8 * blocks
    _widen(kind, logits, size, whole, x)
    if edited:
        _edit(x, row)
    if mask != 0:
        _forbid(x, whole, mask)
    best = _peaks(x, blocks, peaks)
    if not abs(best) < _INFINITY:
        return BAD_ROW
    if inverse == _ZERO:
        first = np.int64(_place_of(FLOAT32, peaks, 0, blocks, best)) * _BLOCK
        return np.int64(_place_of(FLOAT32, x, first, first + _BLOCK, best))
    least = max(np.float32(read_float64(row, _LOG_MIN_P)), _NO_WEIGHT)
    top_k, top_p = read_int64(row, _TOP_K), read_float64(row, _TOP_P)
    uniform = _uniform(read_int64(row, _SEED), read_int64(row, _POSITION))
    total = 0.0
    if top_k == 0:
        total = _block_masses(x, blocks, best, inverse, least, masses)
        if top_p == 1.0:
            return _draw_by_id(x, blocks, masses, uniform * total, best, inverse, least, weights)
    most = top_k if top_k > 0 else min(_CANDIDATES, blocks)
    # The blocks with the greatest peaks hold the greatest logits.
    floor = _nth_peak(peaks, blocks, most, bins) if most <= blocks else _LOWEST
    count = _gather(x, peaks, blocks, floor, values, ids)
    _weigh(values, count, best, inverse, least, weights)
    if top_k == 0 and _mass_of(weights, count) < top_p * total:
        # All that is less likely than this has together less than the rest that top_p leaves.
        floor = best + np.float32(read_float64(row, _LOG_REST)) / inverse
        count = _gather(x, peaks, blocks, floor, values, ids)
        _weigh(values, count, best, inverse, least, weights)
    place = _draw_by_rank(values, weights, count, total, top_k, top_p, uniform, bins)
    return read_int32(ids, place)


DRAW_ROWS = struct.Struct("9q")


@once_per_kind
def draw_job(kind: Any) -> int:
    """Arguments: 2 the logits, 3 bytes of a row of them, 4 their number, 5 rows of DRAW, 6 int64 results.

    7 and 8: memory, and bytes of it for each thread.
    """

    def rows(a: int) -> None:
        count = arg(a, 1)
        row = take_rows(a, 1)
        if row < count:
            memory = arg(a, 7) + take_ticket(tickets(a, 1)) * arg(a, 8)
            while row < count:
                token = draw_row(kind, arg(a, 2) + row * arg(a, 3), arg(a, 4), arg(a, 5) + row * _ROW_BYTES, memory)
                write_integer(arg(a, 6), row, token, 64)
                row = take_rows(a, 1)

    return job(rows)


@compiled(fastmath=REORDER)
def _mass_beside(kind, logits, size, best):
    """The sum of all probabilities, relative to the likeliest token's."""
    total = _ZERO
    for i in range(size):
        total += exp_of_negative(load(logits, i, kind) - best)
    return total


LIKELIEST_ROWS = struct.Struct("7q")


@once_per_kind
def likeliest_job(kind: Any) -> int:
    """Arguments: 2 the logits, 3 bytes of a row of them, 4 how many count, 5 int64 tokens, 6 float64 masses.

    Nothing is written for a bad row.
    """

    def rows(a: int) -> None:
        count, size = arg(a, 1), arg(a, 4)
        row = take_rows(a, 1)
        while row < count:
            logits = arg(a, 2) + row * arg(a, 3)
            token = np.int64(_most_likely(kind, logits, size))
            if token >= 0:
                write_integer(arg(a, 5), row, token, 64)
                write_float64(arg(a, 6), row, np.float64(_mass_beside(kind, logits, size, load(logits, token, kind))))
            row = take_rows(a, 1)

    return job(rows)
