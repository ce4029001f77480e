"""A chunk of a context's keys and values: where it lies in the cache's blocks, and how it comes near in time.

A layout is (arranged, inputs of a word, head dimension, block size, bytes of an element, elements of a value); arranged
is LATENT for keys whose first elements are the values. A cache is the addresses of
keys, values and their scales, 0 where there are none. A room is the memory that a thread has for attention.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections import namedtuple

from headway.kernels.cpu.cache import key_place, value_place
from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.ir import LANES
from headway.kernels.cpu.simd import FLOAT32, copy_element, load, read_int32, read_int64, store, write_integer
from headway.kernels.cpu.tiles import PANELS_AT_ONCE, ask_for, copy_line, transpose_words

CHUNK = 128
LINE_BYTES = 64
PANELS = CHUNK // LANES
AT_ONCE = PANELS_AT_ONCE * LANES  # keys of one call for scores, elements of one call for values
PLAIN, ARRANGED, LATENT = 0, 1, 2


# The thread's own memory: addresses, and the bytes of a row of queries and of weights.
Room = namedtuple(
    "Room",
    "queries query_bytes scores weights weight_bytes weight_factors out chunk_out maxima sums factors scales key_room"
    " value_room line_room panels lines whole whole_maxima whole_sums first_queries first_factors",
)


@compiled()
def cut_room(memory, rows, width, value_width, inputs, size):
    """Cut a thread's memory, whose size room_bytes tells, into the parts of a Room."""
    out_width = (value_width + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    line = out_width * inputs * size
    query_bytes, weight_bytes = (width + inputs - 1) // inputs * 4, CHUNK // inputs * 4
    scores = memory
    weights = scores + rows * CHUNK * 4
    out = weights + rows * weight_bytes
    chunk_out = out + rows * out_width * 4
    key_room = chunk_out + rows * out_width * 4
    value_room = key_room + CHUNK * width * size
    line_room = value_room + CHUNK * out_width * size
    panels = line_room + line
    lines = panels + 2 * 8 * PANELS
    scales = lines + 2 * 8 * CHUNK
    weight_factors = scales + 2 * 4 * CHUNK
    maxima = weight_factors + 4 * rows
    sums = maxima + 4 * rows
    factors = sums + 4 * rows
    whole_maxima = factors + 4 * rows
    whole_sums = whole_maxima + 4 * rows
    whole = whole_sums + 4 * rows
    first_factors = whole + rows * out_width * 4
    queries = first_factors + 4 * rows
    first_queries = queries + rows * query_bytes
    return Room(
        queries, query_bytes, scores, weights, weight_bytes, weight_factors, out, chunk_out, maxima, sums, factors,
        scales, key_room, value_room, line_room, panels, lines, whole, whole_maxima, whole_sums, first_queries,
        first_factors,
    )  # fmt: skip


@compiled()
def room_bytes(rows, width):
    """Enough for the parts of a Room of any kind."""
    out_width = (width + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    of_row = CHUNK * 8 + out_width * 12 + width * 8 + 48
    return rows * of_row + CHUNK * (width + out_width + 8) * 4 + out_width * 4 + CHUNK * 32 + 1024


@compiled()
def arrange(layout, table, first, count, kv_heads, head, cache, room):
    """Arrange keys and values, which are plainly [token, element] in the cache, as panels and lines of this thread."""
    _, inputs, width, block_size, size, _ = layout
    keys, values, key_scales, value_scales = cache
    out_width = (width + LANES - 1) // LANES * LANES
    for j in range(count):
        block, offset = (first + j) // block_size, (first + j) % block_size
        base = (read_int32(table, block) * kv_heads + head) * block_size + offset
        for d in range(width):
            copy_element(keys, base * width + d, room.key_room, key_place(1, inputs, width, j, d), size)
            copy_element(values, base * width + d, room.value_room, value_place(1, inputs, out_width, j, d), size)
        if key_scales != 0:
            store(room.scales, j, load(key_scales, base, FLOAT32), FLOAT32)
            store(room.scales, CHUNK + j, load(value_scales, base, FLOAT32), FLOAT32)
    for panel in range(CHUNK // LANES):
        write_integer(room.panels, panel, room.key_room + panel * LANES * width * size, 64)
    for line in range((count + inputs - 1) // inputs):
        write_integer(room.lines, line, room.value_room + line * out_width * inputs * size, 64)


@compiled()
def _split_words(words, count, out):
    """Vectors of words of two halves each as twice as many vectors of halves."""
    for word in range(count):
        for lane in range(LANES):
            both = read_int32(words, word * LANES + lane)
            write_integer(out, 2 * word * LANES + lane, both & 0xFFFF, 16)
            write_integer(out, (2 * word + 1) * LANES + lane, both >> 16, 16)


@compiled()
def arrange_latent(layout, table, first, count, latents, room):
    """Arrange latents, which are plainly [token, element] in the cache, as panels of keys and lines of values.

    Panels are in this thread's memory. So are lines of pairs of tokens; a line of one token is where it lies.
    """
    _, inputs, width, block_size, size, value_width = layout
    rows, line_bytes = room.lines + 8 * CHUNK, (value_width + LANES - 1) // LANES * LANES * inputs * size
    for j in range((count + LANES - 1) // LANES * LANES):
        token = first + min(j, count - 1)
        slot = read_int32(table, token // block_size) * block_size + token % block_size
        write_integer(rows, j, latents + slot * width * size, 64)
    is_split = inputs * size < 4  # float16: four bytes are two words
    whole = width * size // 4 // LANES * LANES
    for panel in range(CHUNK // LANES):
        to, lanes = room.key_room + panel * LANES * width * size, rows + panel * LANES * 8
        write_integer(room.panels, panel, to, 64)
        if panel * LANES < count:
            columns = room.value_room if is_split else to
            for word in range(0, whole, LANES):
                transpose_words(lanes, word * 4, columns + word * LANES * 4, LANES * 4)
            if is_split:
                _split_words(columns, whole, to)
            for lane in range(LANES):
                row = read_int64(lanes, lane)
                for d in range(whole * 4 // size, width):
                    copy_element(row, d, to, (d // inputs * LANES + lane) * inputs + d % inputs, size)
    if inputs == 1:
        for j in range(count):
            write_integer(room.lines, j, read_int64(rows, j), 64)
        return
    for line in range((count + 1) // 2):
        to, one, other = room.value_room + line * line_bytes, read_int64(rows, 2 * line), read_int64(rows, 2 * line + 1)
        for d in range(value_width):
            copy_element(one, d, to, 2 * d, size)
            copy_element(other, d, to, 2 * d + 1, size)
        write_integer(room.lines, line, to, 64)


@compiled()
def find(layout, table, first, count, kv_heads, head, cache, panels, lines):
    """The addresses of a chunk's panels of keys, the last of them repeated, and lines of values; asks for scales."""
    _, inputs, width, block_size, size, _ = layout
    keys, values, key_scales, value_scales = cache
    panel_bytes, line_bytes = LANES * width * size, inputs * width * size
    block, offset, done = first // block_size, first % block_size, 0
    panel = line = 0
    while done < count:
        run = min(block_size - offset, count - done)
        base = (read_int32(table, block) * kv_heads + head) * block_size + offset
        at = keys + base * width * size
        for number in range((run + LANES - 1) // LANES):
            write_integer(panels, panel, at + number * panel_bytes, 64)
            panel += 1
        at = values + base * width * size
        for number in range((run + inputs - 1) // inputs):
            write_integer(lines, line, at + number * line_bytes, 64)
            line += 1
        if key_scales != 0:
            for j in range(0, run, LANES):
                ask_for(key_scales + (base + j) * 4)
                ask_for(value_scales + (base + j) * 4)
        done, block, offset = done + run, block + 1, 0
    for rest in range(panel, CHUNK // LANES):
        write_integer(panels, rest, read_int64(panels, panel - 1), 64)


@compiled()
def ask_for_all(layout, count, panels, lines):
    """Prefetch the keys and values of a tile's first chunk, which no chunk before it has asked for."""
    _, inputs, width, _, size, _ = layout
    for panel in range((count + LANES - 1) // LANES):
        for at in range(0, LANES * width * size, LINE_BYTES):
            ask_for(read_int64(panels, panel) + at)
    for line in range((count + inputs - 1) // inputs):
        for at in range(0, inputs * width * size, LINE_BYTES):
            ask_for(read_int64(lines, line) + at)


@compiled()
def copy_scales(block_size, table, first, count, kv_heads, head, cache, scales):
    """The scales of a chunk's keys, one after the other, and those of its values from CHUNK on."""
    _, _, key_scales, value_scales = cache
    block, offset, done = first // block_size, first % block_size, 0
    while done < count:
        run = min(block_size - offset, count - done)
        base = (read_int32(table, block) * kv_heads + head) * block_size + offset
        for j in range(run):
            store(scales, done + j, load(key_scales, base + j, FLOAT32), FLOAT32)
            store(scales, CHUNK + done + j, load(value_scales, base + j, FLOAT32), FLOAT32)
        done, block, offset = done + run, block + 1, 0


@compiled()
def close_line(lines, count, inputs, width, size, room):
    """The last line of values with zeros for the tokens that it has beyond `count`, copied to `room`."""
    line = count // inputs
    source = read_int64(lines, line)
    for d in range(width):
        for part in range(inputs):
            if part < count % inputs:
                copy_element(source, d * inputs + part, room, d * inputs + part, size)
            elif size == 2:
                write_integer(room, d * inputs + part, 0, 16)
            else:
                write_integer(room, d * inputs + part, 0, 8)
    write_integer(lines, line, room, 64)


@compiled()
def join_lines(lines, following, count, padded, line_bytes, to):
    """Copy lines of values one behind the other, and zeros in place of those from `count` on.

    The lines whose addresses stand at `following` are prefetched.
    """
    for line in range(count):
        copy_line(
            read_int64(lines, line), read_int64(following, line), line_bytes // LINE_BYTES, to + line * line_bytes
        )
    for word in range(count * line_bytes // 4, padded * line_bytes // 4):
        write_integer(to, word, 0, 32)
