"""How the CPU kernels are compiled, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def cached(compile_it: Callable[[bool], Any]) -> Any:
    """compile_it(True), which keeps the code on disk; compile_it(False) where Numba can write to no folder."""
    try:
        return compile_it(True)
    except RuntimeError:
        return compile_it(False)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile with Numba: without the interpreter lock, dividing as C does, and kept on disk between starts.

    Numba notices a change of the file that a function stands in, not of the files it takes functions from:
    after editing cpu_ir, cpu_simd or cpu_tiles, delete the .nbi and .nbc files in __pycache__.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., Any]) -> Any:
        return cached(lambda cache: njit(cache=cache, **options)(function))

    return decorate
