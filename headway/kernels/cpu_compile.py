"""How the CPU kernels are compiled, in one place."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types


def drop_stale_code(folder: Path) -> None:
    """Delete what Numba keeps of the kernels in `folder` if any of their sources has changed.

    Numba itself notices a change of the file that a function stands in, not of the files it takes functions
    from. A folder that cannot be written is left as it is: Numba keeps nothing there.
    """
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("cpu*.py")))
    stamp, digest = folder / "__pycache__" / "cpu.sources", hashlib.sha256(sources).hexdigest()
    with contextlib.suppress(OSError):
        if stamp.exists() and stamp.read_text() == digest:
            return
        for code in stamp.parent.glob("cpu*.nb[ic]"):
            code.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest)


drop_stale_code(Path(__file__).parent)


def cached(compile_it: Callable[[bool], Any]) -> Any:
    """compile_it(True), which keeps the code on disk; compile_it(False) where Numba can write to no folder."""
    try:
        return compile_it(True)
    except RuntimeError:
        return compile_it(False)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile with Numba: without the interpreter lock, dividing as C does, and kept on disk between starts."""
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., Any]) -> Any:
        return cached(lambda cache: njit(cache=cache, **options)(function))

    return decorate


_aligned_alloc = types.ExternalFunction("aligned_alloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))


@compiled()
def take_memory(size: int) -> int:
    """The address of so many bytes, on a cache line of their own; to be given back.

    Numba ends the life of an array after its last use, and does not count the use of its address.
    """
    return _aligned_alloc(64, (size + 63) // 64 * 64)  # type: ignore[no-any-return]


@compiled()
def give_back(address: int) -> None:
    _free(address)
