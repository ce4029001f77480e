"""Representative kernels compiled for ARM, and run in an emulator, the package unicorn.

    python -m tests.kernels.on_arm [compile]

Numba takes its target from LLVM's answers, so in this process they are those of an ARM server. Nothing that is compiled
may be called: jobs go to the emulator, which sees this process's memory where it lies.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from llvmlite import binding

TRIPLE, PROCESSOR = "aarch64-unknown-linux-gnu", "neoverse-n1"
SUPERVISOR_CALL, RETURN = 0xD4000001, 0xD65F03C0
STACK_BYTES = 1 << 20


def answer_as_arm() -> None:
    """Before Numba asks; it has no way to name a triple, as it compiles for the machine that it is on."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    features = type(binding.get_host_cpu_features())({"neon": True, "fp-armv8": True, "lse": True})
    binding.get_process_triple = binding.get_default_triple = lambda: TRIPLE
    binding.get_host_cpu_name = lambda: PROCESSOR
    binding.get_host_cpu_features = lambda: features


class Emulator:
    """Runs a job's code. Functions of C that it calls are ours, behind a supervisor call each."""

    def __init__(self) -> None:
        from unicorn import UC_ARCH_ARM64, UC_HOOK_INTR, UC_HOOK_MEM_UNMAPPED, UC_MODE_ARM, Uc, arm64_const

        self._registers = arm64_const
        libc = ctypes.CDLL(None)
        self._functions: list[Callable[[int, int, int], int]] = []
        self._page = ctypes.create_string_buffer(3 << 12)
        self._stubs = -(-ctypes.addressof(self._page) // 4096) * 4096
        for name, count in (("aligned_alloc", 2), ("free", 1), ("memset", 3), ("memcpy", 3), ("memmove", 3)):
            function = getattr(libc, name)
            function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_uint64] * count
            code = (ctypes.c_uint32 * 2).from_address(self._stubs + 8 * len(self._functions))
            code[:] = SUPERVISOR_CALL, RETURN
            binding.add_symbol(name, ctypes.addressof(code))
            self._functions.append(lambda a, b, c, f=function, n=count: f(*(a, b, c)[:n]) or 0)
        self._end = self._stubs + 4096 - 8
        self._stack = ctypes.create_string_buffer(STACK_BYTES)
        self._machine = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._machine.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
        self._machine.hook_add(UC_HOOK_MEM_UNMAPPED, self._show)
        self._machine.hook_add(UC_HOOK_INTR, self._call)
        self._shown: set[int] = set()

    def run(self, code: int, argument: int) -> None:
        registers = self._registers
        self._machine.reg_write(registers.UC_ARM64_REG_X0, argument)
        self._machine.reg_write(registers.UC_ARM64_REG_LR, self._end)
        self._machine.reg_write(registers.UC_ARM64_REG_SP, (ctypes.addressof(self._stack) + STACK_BYTES) & ~63)
        self._machine.emu_start(code, self._end)

    def _show(self, machine: object, access: int, address: int, size: int, value: int, data: object) -> bool:
        """A page of this process, where it has one."""
        for page in {address & ~4095, (address + max(size, 1) - 1) & ~4095} - self._shown:
            if not _is_mapped(page):
                return False
            self._machine.mem_map_ptr(page, 4096, 7, page)
            self._shown.add(page)
        return True

    def _call(self, machine: object, number: int, data: object) -> None:
        registers = self._registers
        place = self._machine.reg_read(registers.UC_ARM64_REG_PC)
        which = (place - 4 - self._stubs) // 8
        if not 0 <= which < len(self._functions):
            raise RuntimeError(f"exception {number} at {place:#x}")
        x = (registers.UC_ARM64_REG_X0, registers.UC_ARM64_REG_X1, registers.UC_ARM64_REG_X2)
        result = self._functions[which](*(self._machine.reg_read(each) for each in x))
        self._machine.reg_write(registers.UC_ARM64_REG_X0, result)


def _is_mapped(page: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(text, 16) for text in line.split(" ", 1)[0].split("-"))
        if first <= page < last:
            return True
    return False


def emulate() -> None:
    """Teams of one thread, whose jobs the emulator runs."""
    from headway.kernels.cpu import jobs
    from headway.kernels.cpu import team as cpu_team

    emulator = Emulator()

    def run(board: int, code: int) -> None:
        ctypes.memset(board + jobs._COUNTERS_AT, 0, jobs.COUNTERS * jobs.LINE)
        emulator.run(code, board + jobs.ARGUMENTS_AT)

    cpu_team.callable_of = lambda function: run


def compile_all() -> int:
    """The jobs of every kind; LLVM ends the process where ARM has no such instruction. Returns how many they were."""
    from headway.kernels.cpu import adapters as cpu_adapters
    from headway.kernels.cpu import attention as cpu_attention
    from headway.kernels.cpu import cache as cpu_cache
    from headway.kernels.cpu import experts as cpu_experts
    from headway.kernels.cpu import groups as cpu_groups
    from headway.kernels.cpu import packing as cpu_packing
    from headway.kernels.cpu import product as cpu_product
    from headway.kernels.cpu import rows as cpu_rows
    from headway.kernels.cpu import sampling as cpu_sampling
    from headway.kernels.cpu.arithmetic import GROUPED, INT4, INT8, WIDE_INT8
    from headway.kernels.cpu.simd import BFLOAT16, FLOAT16, FLOAT32

    plain = [(kind, kind) for kind in (FLOAT32, BFLOAT16, FLOAT16)]
    codes = [cpu_rows.take_job()]
    codes += [make(kind) for kind, _ in plain for make in (cpu_adapters.lower_job, cpu_adapters.raise_job)]
    for x_kind, kind in (*plain, (BFLOAT16, INT8), (BFLOAT16, WIDE_INT8), (BFLOAT16, INT4)):
        codes += [make(x_kind, kind) for make in (cpu_packing.pack_job, cpu_packing.rows_job, cpu_product.product_job)]
    for kind in GROUPED:
        codes += [make(BFLOAT16, kind) for make in (cpu_groups.grouped_rows_job, cpu_product.product_job)]
    for x_kind, kind in (*plain, (BFLOAT16, WIDE_INT8)):
        codes += [make(x_kind, kind) for make in (cpu_cache.store_job, cpu_attention.attend_job)]
    for make in (
        cpu_rows.rms_norm_job, cpu_rows.add_rms_norm_job, cpu_rows.rotate_both_job, cpu_sampling.draw_job,
        cpu_experts.route_job, cpu_experts.mix_job,
    ):  # fmt: skip
        codes.append(make(BFLOAT16))
    return len(set(codes))


def main() -> None:
    answer_as_arm()
    from headway.kernels.cpu import simd as cpu_simd

    assert cpu_simd.IS_ARM
    if sys.argv[1:] == ["compile"]:
        print(compile_all())
        return
    from tests.kernels import on_processor

    emulate()
    on_processor.main()


if __name__ == "__main__":
    main()
