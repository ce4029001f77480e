"""The instructions of matrix tiles as they are encoded, on any machine; see also test_cpu_processors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from llvmlite import binding, ir
from numba import types

from headway.kernels.cpu.ir import I64
from headway.kernels.cpu.matrix import configure, multiply_one, multiply_two, release

SAPPHIRE_RAPIDS = "+amx-tile,+amx-int8,+amx-bf16,+avx512f,+avx512vl"
VOID = ir.VoidType()


def machine_code(intrinsic: object, *kind: types.Type, addresses: int) -> bytes:
    """What LLVM makes of an intrinsic of some addresses, for a processor with tiles."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM has no x86")
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * addresses), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    _, generate = intrinsic._defn(None, *kind, *[types.int64] * addresses)  # type: ignore[attr-defined]
    context = SimpleNamespace(get_dummy_value=lambda: None)
    generate(context, builder, None, [*[None for _ in kind], *function.args])
    builder.ret_void()
    processor = target.create_target_machine(cpu="sapphirerapids", features=SAPPHIRE_RAPIDS, opt=2)
    return bytes(processor.emit_object(binding.parse_assembly(str(module))))


def dot(sums: int, tokens: int, weights: int, opcode: int, prefix: int = 0xF3) -> bytes:
    """Intel's manual, volume 2: VEX.128.`prefix`.0F38.W0 `opcode` 11:rrr:bbb; sums reg, tokens r/m, weights vvvv."""
    short = {0x66: 0b01, 0xF3: 0b10, 0xF2: 0b11}[prefix]
    return bytes((0xC4, 0xE2, (~weights & 15) << 3 | short, opcode, 0xC0 | sums << 3 | tokens))


@pytest.mark.parametrize(("kind", "opcode"), [(types.uint16, 0x5C), (types.uint8, 0x5E)], ids=["bfloat16", "int8"])
def test_products_are_encoded_as_the_manual_has_them(kind: types.Type, opcode: int) -> None:
    """tdpbf16ps, and tdpbsud: of signed bytes of tokens and unsigned ones of weights."""
    code = machine_code(multiply_one, kind, addresses=6)
    for vector in range(4):
        assert code.count(dot(vector, 4, 6 + vector % 2, opcode)) == 1
    code = machine_code(multiply_two, kind, addresses=8)
    for sums, tokens, weights in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
        assert code.count(dot(sums, tokens, weights, opcode)) == 1
    for tile in range(4):
        assert code.count(bytes((0xC4, 0xE2, 0x7B, 0x49, 0xC0 | tile << 3))) == 1  # tilezero


def test_planes_of_bytes_are_told_apart_by_their_signs() -> None:
    """tdpbssd of high bytes, tdpbusd of low ones, which are unsigned."""
    code = machine_code(multiply_two, types.int8, addresses=8)
    for sums, tokens, weights, prefix in ((0, 4, 6, 0xF2), (1, 4, 7, 0xF2), (2, 5, 6, 0x66), (3, 5, 7, 0x66)):
        assert code.count(dot(sums, tokens, weights, 0x5E, prefix)) == 1


def test_tiles_are_laid_out_and_given_up() -> None:
    assert bytes((0xC4, 0xE2, 0x78, 0x49, 0x07)) in machine_code(configure, addresses=1)  # ldtilecfg (%rdi)
    assert bytes((0xC4, 0xE2, 0x78, 0x49, 0xC0)) in machine_code(release, addresses=0)
