"""Scalar operations for Numba, written as LLVM IR, over memory addressed by plain integers.

An integer (`tensor.data_ptr()`) costs a tenth of what handing an array to Numba does, and these operations
still become vector instructions in a loop.

A kind is a numpy scalar whose type says what memory holds, so that Numba compiles one function per kind:
float32 for itself, uint16 for bfloat16, int16 for float16 (Numba has no 16-bit floats of its own on CPU).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir

from headway.kernels.cpu.compile import (
    Kind,
    Number,
    boolean,
    compiled,
    emitted,
    float32,
    float64,
    int32,
    int64,
    target,
    types,
)
from headway.kernels.cpu.ir import BF16, F16, F32, I8, I16, I32, I64, declare, index

FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.uint16(0), np.int16(0)
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_STORED = {"float32": F32, "uint16": I16, "int16": F16}


_TRIPLE, _, _EXTENSIONS = target()
IS_X86, IS_ARM = _TRIPLE.startswith("x86_64"), _TRIPLE.startswith(("aarch64", "arm64"))


def cpu_features() -> set[str]:
    """The instruction set extensions that Numba compiles for, by LLVM's names.

    They are this processor's unless NUMBA_CPU_FEATURES lists others. What a processor of NUMBA_CPU_NAME has besides
    is not known here: with an empty list the code is right, and does without instructions that not all have.
    """
    marks = {mark[1:]: mark[0] == "+" for mark in _EXTENSIONS.split(",") if mark}
    return {name for name, present in marks.items() if present}


# LLVM calls this library, of GCC 12 or later, to convert from and to float16 if there is no instruction for that.
if not IS_ARM and "f16c" not in cpu_features():
    binding.load_library_permanently("libgcc_s.so.1")

_ROUNDS_TO_BFLOAT16 = IS_X86 and {"avx512bf16", "avx512vl"} <= cpu_features()


@emitted
def load(builder: Any, address: int64, index: int64, kind: Kind) -> float32:
    """Element index of the memory at address, widened to float32."""
    stored = _STORED[kind.name]
    pointer = builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])
    value = builder.load(pointer)
    if stored is F16:
        return builder.fpext(value, F32)
    if stored is I16:
        return builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)
    return value


@emitted
def store(builder: Any, address: int64, index: int64, value: float32, kind: Kind) -> None:
    """Write a float32 as element index of the memory at address, rounded to nearest even."""
    stored = _STORED[kind.name]
    pointer = builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])
    value = value
    if stored is F16:
        value = builder.fptrunc(value, F16)
    elif stored is I16:
        value = round_to_bfloat16(builder, value)
    builder.store(value, pointer)


def round_to_bfloat16(builder: Any, value: Any) -> Any:
    """The upper halves of a float32, or of a vector of them, after rounding to nearest even; NaN stays NaN."""

    def like(element: Any) -> Any:
        return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element

    def whole(number: int) -> ir.Constant:
        return ir.Constant(like(I32), [number] * like(I32).count if like(I32) != I32 else number)

    if _ROUNDS_TO_BFLOAT16:
        return builder.bitcast(builder.fptrunc(value, like(BF16)), like(I16))
    bits = builder.bitcast(value, like(I32))
    odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
    rounded = builder.add(bits, builder.add(odd, whole(0x7FFF)))
    magnitude = builder.and_(bits, whole(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, whole(0x7F800000))
    chosen = builder.select(is_nan, builder.or_(bits, whole(0x400000)), rounded)
    return builder.trunc(builder.lshr(chosen, whole(16)), like(I16))


@emitted
def store_float8(builder: Any, address: int64, index: int64, value: float32) -> None:
    """Write a float32 as element index of the e4m3fn memory at address: to nearest even, at most 448; NaN stays NaN."""

    def whole(number: int) -> ir.Constant:
        return ir.Constant(I32, number)

    def unary(name: str, x: Any) -> Any:
        return builder.call(declare(builder, f"llvm.{name}.f32", F32, [F32]), [x])

    is_nan = builder.fcmp_unordered("uno", value, value)
    least = declare(builder, "llvm.minnum.f32", F32, [F32, F32])
    size = builder.call(least, [unary("fabs", value), ir.Constant(F32, 448.0)])
    bits = builder.bitcast(size, I32)
    odd = builder.and_(builder.lshr(bits, whole(20)), whole(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, whole(0x7FFFF))), whole(20))
    normal = builder.sub(rounded, whole(120 << 3))  # the exponents' biases are 127 and 7
    small = builder.fptosi(unary("nearbyint", builder.fmul(size, ir.Constant(F32, 512.0))), I32)
    code = builder.select(builder.fcmp_ordered("<", size, ir.Constant(F32, 2.0**-6)), small, normal)
    code = builder.select(is_nan, whole(0x7F), code)
    sign = builder.and_(builder.lshr(builder.bitcast(value, I32), whole(24)), whole(0x80))
    pointer = builder.gep(builder.inttoptr(address, I8.as_pointer()), [index])
    builder.store(builder.trunc(builder.or_(code, sign), I8), pointer)


@emitted
def read_int32(builder: Any, address: int64, index: int64) -> int64:
    """Element index of the int32 memory at address, as int64."""
    pointer = builder.gep(builder.inttoptr(address, I32.as_pointer()), [index])
    return builder.sext(builder.load(pointer), I64)


@emitted
def read_int64(builder: Any, address: int64, index: int64) -> int64:
    """Element index of the int64 memory at address."""
    return builder.load(builder.gep(builder.inttoptr(address, I64.as_pointer()), [index]))


@emitted
def read_float64(builder: Any, address: int64, index: int64) -> float64:
    """Element index of the float64 memory at address."""
    double = ir.DoubleType().as_pointer()
    return builder.load(builder.gep(builder.inttoptr(address, double), [index]))


@emitted
def write_float64(builder: Any, address: int64, index: int64, value: float64) -> None:
    """Write a float64 as element index of the memory at address."""
    double = ir.DoubleType().as_pointer()
    builder.store(value, builder.gep(builder.inttoptr(address, double), [index]))


@emitted
def read_byte(builder: Any, address: int64, index: int64) -> int64:
    """Byte index of the memory at address, 0 to 255, as int64."""
    pointer = builder.gep(builder.inttoptr(address, I8.as_pointer()), [index])
    return builder.zext(builder.load(pointer), I64)


@emitted
def write_integer(builder: Any, address: int64, index: int64, value: int64, bits: Number) -> None:
    """The low `bits` of an int64 as element index of the memory at address."""
    element = ir.IntType(bits)
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
    builder.store(builder.trunc(value, element) if element.width < 64 else value, pointer)


@emitted
def nearest(builder: Any, value: float32) -> float32:
    """The whole number nearest to a float32, halves to even, as float32."""
    return builder.call(declare(builder, "llvm.nearbyint.f32", F32, [F32]), [value])


@emitted
def write_rounded(builder: Any, address: int64, index: int64, value: float32, kind: Kind) -> int32:
    """Write a whole float32 as element index of int8 (kind np.int8) or int16 memory, and return it as int32."""
    element = {types.int8: I8, types.int16: I16}[kind]
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
    whole = builder.fptosi(value, I32)
    builder.store(builder.trunc(whole, element), pointer)
    return whole


@emitted
def take_ticket(builder: Any, address: int64) -> int64:
    """Add one to the int64 at address, atomically, and return what it was: work is shared out as it is done."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), index(1), "acq_rel")


@emitted
def read_shared(builder: Any, address: int64) -> int64:
    """The int64 at address, with all that was written before it in sight."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "acquire", 8)


@emitted
def write_shared(builder: Any, address: int64, value: int64) -> None:
    """Write the int64 at address, after all that was written before."""
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "release", 8)


@emitted
def add_to(builder: Any, address: int64, value: int64) -> int64:
    """Add to the int64 at address, atomically, and return what it was."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.atomic_rmw("add", pointer, value, "acq_rel")


@emitted
def swap_if(builder: Any, address: int64, old: int64, new: int64) -> boolean:
    """Replace old by new at address, atomically; False when something else stands there."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)


@emitted
def call_address(builder: Any, code: int64, argument: int64) -> None:
    """Call the code at an address with one int64."""
    function = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
    builder.call(builder.inttoptr(code, function), [argument])


@emitted
def call_with(builder: Any, code: int64, a: int64, b: int64, c: int64, d: int64, e: int64) -> None:
    """Call the code at an address with five int64."""
    function = ir.FunctionType(ir.VoidType(), [I64] * 5).as_pointer()
    builder.call(builder.inttoptr(code, function), [a, b, c, d, e])


@emitted
def pause(builder: Any) -> None:
    """Tell the processor that this is a loop that waits."""
    if IS_X86:
        builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif IS_ARM:  # isb; most of these processors do nothing at a yield, and would look far more often
        builder.call(declare(builder, "llvm.aarch64.isb", ir.VoidType(), [I32]), [ir.Constant(I32, 15)])


@emitted
def reset_tickets(builder: Any, address: int64) -> None:
    """Start the count at address again from zero."""
    builder.store(index(0), builder.inttoptr(address, I64.as_pointer()))


@emitted
def exponential_of_two(builder: Any, power: int32) -> float32:
    """2 ** power of an int32 in -126 .. 127, as float32."""
    biased = builder.add(power, ir.Constant(I32, 127))
    return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), F32)


@emitted
def larger(builder: Any, first: float32, second: float32) -> float32:
    """The larger of two float32, neither of them NaN; unlike max(), a loop of it becomes vectors."""
    function = declare(builder, "llvm.maxnum.f32", F32, [F32, F32])
    return builder.call(function, [first, second], fastmath=("nnan", "nsz"))


@compiled()
def copy_element(source: int, at: int, target: int, to: int, size: int) -> None:
    """Element `at` of the memory at source, of 1, 2 or 4 bytes, as element `to` of the memory at target."""
    if size == 4:
        write_integer(target, to, read_int32(source, at), 32)
    elif size == 2:
        write_integer(target, to, read_byte(source, 2 * at) | read_byte(source, 2 * at + 1) << 8, 16)
    else:
        write_integer(target, to, read_byte(source, at), 8)
