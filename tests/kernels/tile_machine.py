"""The instructions of matrix tiles, for a process on a processor that has none, or may not use them.

Each of them raises SIGILL there. A handler reads the instruction where it stands and the registers of the thread that
it interrupted, does what Intel's manual says of it (volume 2), and lets the thread go on behind it. So what runs is the
machine code as it was compiled for AMX, in any number of threads. What the processor would refuse ends the process.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import ctypes
import mmap

import numpy as np

from headway.kernels.cpu.compile import address_of, compiled, external
from headway.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    add_to,
    load,
    read_byte,
    read_int32,
    read_int64,
    read_shared,
    store,
    swap_if,
    write_integer,
)

_SIGILL, _SIGINFO, _MAP_FIXED_NOREPLACE = 4, 4, 0x100000
# The places of registers in Linux's ucontext on x86-64, by the numbers that instructions have for them.
_REGISTERS_AT, _PLACES, _INSTRUCTION = 40, (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7), 16
# The state of each thread: whose it is, the configuration, eight tiles.
_THREADS, _CONFIGURATION, _TILES, _TILE_BYTES, _ROW_BYTES = 64, 64, 128, 1024, 64
_STATE_BYTES = _TILES + 8 * _TILE_BYTES
# A place that is no other process's number too, as compiled code is kept.
_STATES_AT = 0x5EAD_0000_0000
_COUNT_AT = _STATES_AT + _THREADS * _STATE_BYTES
_ZERO, _LEAST_NORMAL = np.float32(0), np.float32(2.0**-126)

_thread = external("pthread_self", "int64")
_abort = external("abort", "void")


@compiled()
def _state():
    """The address of this thread's state."""
    thread = _thread()
    for number in range(_THREADS):
        at = _STATES_AT + number * _STATE_BYTES
        if read_shared(at) == thread or swap_if(at, 0, thread):
            return at
    _abort()
    return 0


@compiled()
def _rows(state, tile):
    return read_byte(state + _CONFIGURATION, 48 + tile)


@compiled()
def _columns(state, tile):
    """Bytes of a row."""
    return read_byte(state + _CONFIGURATION, 16 + 2 * tile)


@compiled()
def _row(state, tile, row):
    return state + _TILES + tile * _TILE_BYTES + row * _ROW_BYTES


@compiled()
def _clear(state, first, end):
    for byte in range(first, end):
        write_integer(state, byte, 0, 8)


@compiled()
def _configure(state, address):
    for tile in range(8):
        columns, rows = read_byte(address, 16 + 2 * tile), read_byte(address, 48 + tile)
        if columns > _ROW_BYTES or rows > 16 or (columns == 0) != (rows == 0) or read_byte(address, 17 + 2 * tile):
            _abort()
    for byte in range(64):
        is_reserved = 1 <= byte < 16 or 32 <= byte < 48 or byte >= 56
        if (byte == 0 and read_byte(address, 0) != 1) or (is_reserved and read_byte(address, byte)):
            _abort()
        write_integer(state + _CONFIGURATION, byte, read_byte(address, byte), 8)
    _clear(state, _TILES, _STATE_BYTES)


@compiled()
def _move(state, tile, address, stride, stores):
    """Between a tile and memory; what a load does not reach becomes zero."""
    rows, columns = _rows(state, tile), _columns(state, tile)
    if not stores:
        _clear(state, _TILES + tile * _TILE_BYTES, _TILES + (tile + 1) * _TILE_BYTES)
    for row in range(rows):
        inside, outside = _row(state, tile, row), address + row * stride
        for byte in range(columns):
            if stores:
                write_integer(outside, byte, read_byte(inside, byte), 8)
            else:
                write_integer(inside, byte, read_byte(outside, byte), 8)


@compiled()
def _flushed(value):
    """Numbers too small for a normal float32 count as zero."""
    return value if abs(value) >= _LEAST_NORMAL or value != value else _ZERO


@compiled()
def _add_floats(row, weights, words, lane, start):
    """Even and odd inputs apart, each product rounded once when it is added, then together, then to the start."""
    even = odd = _ZERO
    for word in range(words):
        of_word = weights + word * _ROW_BYTES
        for half in range(2):
            left = np.float64(_flushed(load(row, 2 * word + half, BFLOAT16)))
            product = left * _flushed(load(of_word, 2 * lane + half, BFLOAT16))
            if half == 0:
                even = _flushed(np.float32(even + product))
            else:
                odd = _flushed(np.float32(odd + product))
    return _flushed(_flushed(start) + _flushed(even + odd))


@compiled()
def _add_integers(row, weights, words, lane, total, signed_row, signed_weights):
    for byte in range(4 * words):
        left, right = read_byte(row, byte), read_byte(weights + byte // 4 * _ROW_BYTES, 4 * lane + byte % 4)
        left -= 256 if signed_row and left >= 128 else 0
        right -= 256 if signed_weights and right >= 128 else 0
        total += left * right
    return total


@compiled()
def _multiply(state, opcode, prefix, sums, tokens, weights):
    """tdpbf16ps, and tdpbuud, tdpbusd, tdpbsud and tdpbssd, which prefixes 0 to 3 stand for."""
    rows, words, columns = _rows(state, sums), _columns(state, tokens) // 4, _columns(state, sums)
    fits = _rows(state, tokens) == rows and _rows(state, weights) == words and _columns(state, weights) == columns
    if not fits or rows == 0 or sums in (tokens, weights) or tokens == weights:
        _abort()
    for row in range(rows):
        left, to = _row(state, tokens, row), _row(state, sums, row)
        for lane in range(columns // 4):
            if opcode == 0x5C:
                total = _add_floats(left, _row(state, weights, 0), words, lane, load(to, lane, FLOAT32))
                store(to, lane, total, FLOAT32)
            else:
                start = read_int32(to, lane)
                whole = _add_integers(
                    left, _row(state, weights, 0), words, lane, start, prefix >= 2, prefix == 1 or prefix == 3
                )
                write_integer(to, lane, whole, 32)


@compiled()
def _register(context, number):
    return read_int64(context + _REGISTERS_AT, _PLACES[number])


@compiled()
def _operand(context, at, extensions, modrm):
    """Decode an instruction on memory: its length, the address, and the scaled index, the stride of a tile."""
    mode, base, length, stride = modrm >> 6, modrm & 7, 5, 0
    has_index = base == 4
    if has_index:
        place, length = read_byte(at, 5), 6
        number = (place >> 3 & 7) | ((~extensions >> 6 & 1) << 3)
        stride = 0 if number == 4 else _register(context, number) << (place >> 6)
        base = place & 7
    if mode == 0 and base == 5:
        start = 0 if has_index else at + length + 4
        return length + 4, start + read_int32(at + length, 0), stride
    address = _register(context, base | ((~extensions >> 5 & 1) << 3))
    if mode == 1:
        near = read_byte(at, length)
        return length + 1, address + near - (256 if near >= 128 else 0), stride
    if mode == 2:
        return length + 4, address + read_int32(at + length, 0), stride
    return length, address, stride


@compiled()
def _handle(signal, information, context):
    at = read_int64(context + _REGISTERS_AT, _INSTRUCTION)
    extensions, more, opcode, modrm = read_byte(at, 1), read_byte(at, 2), read_byte(at, 3), read_byte(at, 4)
    prefix, tile, other = more & 3, modrm >> 3 & 7, ~(more >> 3) & 15
    if read_byte(at, 0) != 0xC4 or extensions & 0x9F != 0x82 or more & 0x84 or (opcode in (0x49, 0x4B) and other):
        _abort()
    state, length = _state(), 5
    is_laid_out = read_byte(state + _CONFIGURATION, 0) == 1
    if modrm >> 6 == 3:
        if opcode == 0x49 and prefix == 0:  # tilerelease
            _clear(state, _CONFIGURATION, _STATE_BYTES)
        elif opcode == 0x49 and prefix == 3 and is_laid_out:  # tilezero
            _clear(state, _TILES + tile * _TILE_BYTES, _TILES + (tile + 1) * _TILE_BYTES)
        elif is_laid_out and ((opcode == 0x5C and prefix == 2) or opcode == 0x5E):
            _multiply(state, opcode, prefix, tile, modrm & 7, other)
        else:
            _abort()
    else:
        length, address, stride = _operand(context, at, extensions, modrm)
        if opcode == 0x49 and prefix == 0:  # ldtilecfg
            _configure(state, address + stride)
        elif opcode == 0x4B and prefix >= 2 and is_laid_out and _rows(state, tile):  # tilestored, tileloadd
            _move(state, tile, address, stride, prefix == 2)
        else:
            _abort()
    add_to(_COUNT_AT, 1)
    write_integer(context + _REGISTERS_AT, _INSTRUCTION, at + length, 64)


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def install() -> None:
    """From here on, in all threads of this process."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    if libc.mmap(_STATES_AT, _COUNT_AT + 8 - _STATES_AT, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != _STATES_AT:
        raise OSError("the memory of the tiles cannot be had")
    action = _Action(handler=address_of(_handle), flags=_SIGINFO)
    if libc.sigaction(_SIGILL, ctypes.byref(action), None):
        raise OSError("the handler cannot be installed")


def instructions() -> int:
    """How many have been carried out."""
    return ctypes.c_int64.from_address(_COUNT_AT).value
