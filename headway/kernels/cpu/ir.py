"""LLVM IR that the CPU kernels are put together from: sixteen-lane vectors, loops, reductions, transposition."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
VECTOR_BYTES = 64


class BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite's builder has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16, BF16 = ir.FloatType(), ir.HalfType(), BFloat()
WORDS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
PAIRS = ir.VectorType(BF16, 2 * LANES)


def index(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def read(builder: Any, address: Any, type_: Any) -> Any:
    value = builder.load(builder.inttoptr(address, type_.as_pointer()))
    value.align = 2 if type_ in (I16, F16, BF16) else 4
    return value


def write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 2


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


def shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def word_constant(value: int) -> ir.Constant:
    """The value in all lanes of WORDS."""
    return ir.Constant(WORDS, [value] * LANES)


def splat(builder: Any, scalar: Any, vector_type: Any) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    return shuffle(
        builder, builder.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, [0] * vector_type.count
    )


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at address, into the second-level cache; any address will do."""
    touch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    read, near, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(touch, [builder.inttoptr(address, I8.as_pointer()), read, near, data])


def loop(builder: Any, count: Any, initial: list[Any], body: Any) -> list[Any]:
    """Run body(index, totals) -> (totals, indices advanced) up to count, once at least; return the final totals."""
    entry = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(I64)
    number.add_incoming(index(0), entry)
    totals = [builder.phi(value.type) for value in initial]
    results, advance = body(number, totals)
    following = builder.add(number, index(advance))
    number.add_incoming(following, builder.block)
    for total, start, result in zip(totals, initial, results, strict=True):
        total.add_incoming(start, entry)
        total.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return list(results)


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen lanes, rows and columns exchanged, in four rounds of two-by-two exchanges."""
    for bit in (1, 2, 4, 8):
        low = [j if not j & bit else LANES + (j ^ bit) for j in range(LANES)]
        high = [j | bit if not j & bit else LANES + j for j in range(LANES)]
        exchanged = list(rows)
        for i in range(LANES):
            if not i & bit:
                exchanged[i] = shuffle(builder, rows[i], rows[i | bit], low)
                exchanged[i | bit] = shuffle(builder, rows[i], rows[i | bit], high)
        rows = exchanged
    return rows
