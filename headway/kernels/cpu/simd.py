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

from headway.kernels.cpu.compile import compiled, intrinsic, target, types
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


@intrinsic
def load(typing: Any, address: Any, index: Any, kind: Any) -> Any:
    """Element index of the memory at address, widened to float32."""
    stored = _STORED[kind.name]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], stored.as_pointer()), [arguments[1]])
        value = builder.load(pointer)
        if stored is F16:
            return builder.fpext(value, F32)
        if stored is I16:
            return builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)
        return value

    return types.float32(types.int64, types.int64, kind), generate


@intrinsic
def store(typing: Any, address: Any, index: Any, value: Any, kind: Any) -> Any:
    """Write a float32 as element index of the memory at address, rounded to nearest even."""
    stored = _STORED[kind.name]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], stored.as_pointer()), [arguments[1]])
        value = arguments[2]
        if stored is F16:
            value = builder.fptrunc(value, F16)
        elif stored is I16:
            value = _round_to_bfloat16(builder, value)
        builder.store(value, pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, kind), generate


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    """The upper half of a float32 after rounding to nearest even; NaN stays NaN."""
    if _ROUNDS_TO_BFLOAT16:
        return builder.bitcast(builder.fptrunc(value, BF16), I16)
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
    magnitude = builder.and_(bits, ir.Constant(I32, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, ir.Constant(I32, 0x7F800000))
    chosen = builder.select(is_nan, builder.or_(bits, ir.Constant(I32, 0x400000)), rounded)
    return builder.trunc(builder.lshr(chosen, ir.Constant(I32, 16)), I16)


@intrinsic
def read_int32(typing: Any, address: Any, index: Any) -> Any:
    """Element index of the int32 memory at address, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], I32.as_pointer()), [arguments[1]])
        return builder.sext(builder.load(pointer), I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read_int64(typing: Any, address: Any, index: Any) -> Any:
    """Element index of the int64 memory at address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(arguments[0], I64.as_pointer()), [arguments[1]]))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read_float64(typing: Any, address: Any, index: Any) -> Any:
    """Element index of the float64 memory at address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        double = ir.DoubleType().as_pointer()
        return builder.load(builder.gep(builder.inttoptr(arguments[0], double), [arguments[1]]))

    return types.float64(types.int64, types.int64), generate


@intrinsic
def write_float64(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a float64 as element index of the memory at address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        double = ir.DoubleType().as_pointer()
        builder.store(arguments[2], builder.gep(builder.inttoptr(arguments[0], double), [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64), generate


@intrinsic
def read_byte(typing: Any, address: Any, index: Any) -> Any:
    """Byte index of the memory at address, 0 to 255, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], I8.as_pointer()), [arguments[1]])
        return builder.zext(builder.load(pointer), I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def write_integer(typing: Any, address: Any, index: Any, value: Any, bits: Any) -> Any:
    """The low `bits`, a literal, of an int64 as element index of the memory at address."""
    if not isinstance(bits, types.IntegerLiteral):
        return None
    element = ir.IntType(bits.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], element.as_pointer()), [arguments[1]])
        builder.store(builder.trunc(arguments[2], element) if element.width < 64 else arguments[2], pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, bits), generate


@intrinsic
def nearest(typing: Any, value: Any) -> Any:
    """The whole number nearest to a float32, halves to even, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(declare(builder, "llvm.nearbyint.f32", F32, [F32]), arguments)

    return types.float32(types.float32), generate


@intrinsic
def write_rounded(typing: Any, address: Any, index: Any, value: Any, kind: Any) -> Any:
    """Write a whole float32 as element index of int8 (kind np.int8) or int16 memory, and return it as int32."""
    element = {types.int8: I8, types.int16: I16}.get(kind)
    if element is None:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(arguments[0], element.as_pointer()), [arguments[1]])
        whole = builder.fptosi(arguments[2], I32)
        builder.store(builder.trunc(whole, element), pointer)
        return whole

    return types.int32(types.int64, types.int64, types.float32, kind), generate


@intrinsic
def take_ticket(typing: Any, address: Any) -> Any:
    """Add one to the int64 at address, atomically, and return what it was: work is shared out as it is done."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), index(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def read_shared(typing: Any, address: Any) -> Any:
    """The int64 at address, with all that was written before it in sight."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def write_shared(typing: Any, address: Any, value: Any) -> Any:
    """Write the int64 at address, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to(typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at address, atomically, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap_if(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace old by new at address, atomically; False when something else stands there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, arguments[1], arguments[2], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def call_address(typing: Any, code: Any, argument: Any) -> Any:
    """Call the code at an address with one int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if IS_X86:
            builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif IS_ARM:  # isb; most of these processors do nothing at a yield, and would look far more often
            builder.call(declare(builder, "llvm.aarch64.isb", ir.VoidType(), [I32]), [ir.Constant(I32, 15)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def reset_tickets(typing: Any, address: Any) -> Any:
    """Start the count at address again from zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(index(0), builder.inttoptr(arguments[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def exponential_of_two(typing: Any, power: Any) -> Any:
    """2 ** power of an int32 in -126 .. 127, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        biased = builder.add(arguments[0], ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), F32)

    return types.float32(types.int32), generate


@intrinsic
def larger(typing: Any, first: Any, second: Any) -> Any:
    """The larger of two float32, neither of them NaN; unlike max(), a loop of it becomes vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = declare(builder, "llvm.maxnum.f32", F32, [F32, F32])
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), generate


@compiled()
def copy_element(source: int, at: int, target: int, to: int, size: int) -> None:
    """Element `at` of the memory at source, of 1, 2 or 4 bytes, as element `to` of the memory at target."""
    if size == 4:
        write_integer(target, to, read_int32(source, at), 32)
    elif size == 2:
        write_integer(target, to, read_byte(source, 2 * at) | read_byte(source, 2 * at + 1) << 8, 16)
    else:
        write_integer(target, to, read_byte(source, at), 8)
