"""How the CPU kernels are compiled, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile with Numba: without the interpreter lock, dividing as C does, and kept on disk between starts.

    Numba notices a change of the file that a function stands in, not of the files it takes functions from:
    after editing cpu_ir, cpu_simd or cpu_tiles, delete the .nbi and .nbc files in __pycache__.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            # Numba refuses where neither the package's folder nor the user's cache can be written.
            return njit(**options)(function)

    return decorate
