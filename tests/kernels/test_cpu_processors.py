"""The kernels on processors other than this one, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding
from numba.core import config
from numba.core.codegen import JITCPUCodegen

from headway.kernels.cpu import compile as cpu_compile
from headway.kernels.cpu import jobs
from headway.kernels.cpu.matrix import has_matrix_tiles
from headway.kernels.cpu.simd import IS_X86

pytestmark = pytest.mark.timeout(600)

AVX2 = "+avx2,+fma,+f16c"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
TILES = "+amx-tile,+amx-bf16,+amx-int8"
HERE = {name for name, present in binding.get_host_cpu_features().items() if present}


def _compiles_for_arm() -> bool:
    binding.initialize_all_targets()
    try:
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        return False
    return True


def run(module: str, *arguments: str, **environment: str) -> str:
    """What `python -m module` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="x86 alone")
@pytest.mark.parametrize(
    ("name", "features", "printed"),
    [("x86-64", "", "0 0"), ("x86-64-v3", AVX2, "0 256"), ("x86-64-v4", AVX512, "0 512")],
)
def test_x86(name: str, features: str, printed: str) -> None:
    """Kernels are right when they are compiled for this processor, as they are in use."""
    missing = {mark[1:] for mark in features.split(",") if mark} - HERE
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    assert run("tests.kernels.on_processor", NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features) == printed


@pytest.mark.slow
@pytest.mark.skipif("avxvnni" not in HERE and not {"avx512vnni", "avx512vl"} <= HERE, reason="needs VNNI of 256 bits")
def test_vnni_without_avx512(tmp_path: Path) -> None:
    """The same instruction has another encoding with AVX-512, which Numba takes here."""
    assert run("tests.kernels.on_processor", "avx2,avxvnni", NUMBA_CACHE_DIR=str(tmp_path)) == "256 256"


@pytest.mark.slow
@pytest.mark.skipif(not _compiles_for_arm(), reason="this LLVM has no ARM")
def test_arm_compiles(tmp_path: Path) -> None:
    """Every kind of job, without running it."""
    assert run("tests.kernels.on_arm", "compile", NUMBA_CACHE_DIR=str(tmp_path)) == "49"


@pytest.mark.slow
@pytest.mark.skipif(not _compiles_for_arm(), reason="this LLVM has no ARM")
def test_arm(tmp_path: Path) -> None:
    """Kernels for ARM run in an emulator, which has one thread and cannot show errors in the order of memory."""
    pytest.importorskip("unicorn")
    assert run("tests.kernels.on_arm", NUMBA_CACHE_DIR=str(tmp_path)) == "0 0"


@pytest.mark.parametrize(
    ("scheme", "printed"),
    [
        # Where the processor has tiles, other tests use them.
        pytest.param("none", "23", marks=pytest.mark.slow if has_matrix_tiles() else ()),
        pytest.param("attention", "29", marks=pytest.mark.slow),
        pytest.param("int8", "100", marks=pytest.mark.slow),
        pytest.param("int4", "99", marks=pytest.mark.slow),
        pytest.param("int8-weight-only", "99", marks=pytest.mark.slow),
        pytest.param("groups", "145", marks=pytest.mark.slow),
        pytest.param("engine", "30", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(not IS_X86, reason="x86 alone")
def test_matrix_tiles(tmp_path: Path, scheme: str, printed: str) -> None:
    """The machine code for them, whose instructions are carried out by tile_machine where the processor has none."""
    features = f"{binding.get_host_cpu_features().flatten()},{TILES}"
    got = run("tests.kernels.on_tiles", scheme, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_CPU_FEATURES=features)
    assert got == f"{printed} on tiles"


def test_code_for_two_processors_is_kept_apart() -> None:
    """The names of files differ, and the target is the one that Numba compiles for."""
    names = set()
    try:
        for features in (AVX2, AVX512):
            for name in ("x86-64-v3", "znver3"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("NUMBA_CPU_NAME", name)
                    patch.setenv("NUMBA_CPU_FEATURES", features)
                    cpu_compile.target.cache_clear()
                    config.reload_config()
                    assert cpu_compile.target() == JITCPUCodegen("other").magic_tuple()
                    names.add(cpu_compile._path_of(jobs.run_job.__wrapped__).name)
    finally:
        cpu_compile.target.cache_clear()
        config.reload_config()
    assert len(names) == 4
