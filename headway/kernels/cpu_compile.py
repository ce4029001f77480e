"""How the CPU kernels are compiled, in one place."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite.binding import Linkage
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature

_held: set[Path] = set()


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Inside, no other process that asks for the same lock file is, nor another thread of this one.

    A lock that cannot be had, as its folder cannot be written or its file system has none, keeps nobody out.
    """
    with contextlib.ExitStack() as stack:
        # Numba's own lock comes first: a thread that waited for it holding a file would wait for itself.
        stack.enter_context(global_compiler_lock)
        if lock not in _held:
            with contextlib.suppress(OSError):
                lock.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(lock.open("ab")), fcntl.LOCK_EX)
            _held.add(lock)
            stack.callback(_held.discard, lock)
        yield


def drop_stale_code(folder: Path) -> None:
    """Delete what Numba keeps of the kernels in `folder` if any of their sources has changed.

    Numba itself notices a change of the file that a function stands in, not of the files it takes functions
    from. A folder that cannot be written is left as it is: Numba keeps nothing there.
    """
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("cpu*.py")))
    stamp, digest = folder / "__pycache__" / "cpu.sources", hashlib.sha256(sources).hexdigest()
    with contextlib.suppress(OSError), alone(stamp.with_suffix(".lock")):
        if stamp.exists() and stamp.read_text() == digest:
            return
        for code in stamp.parent.glob("cpu*.nb[ic]"):
            code.unlink(missing_ok=True)
        stamp.write_text(digest)


drop_stale_code(Path(__file__).parent)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile with Numba: without the interpreter lock, dividing as C does, and kept on disk between starts.

    Processes that start together compile each function once, in the first that needs it. Without a lock they would
    also write code for different types under the same name, as Numba numbers it by what it finds.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., Any]) -> Any:
        lock = _lock_of(function)
        dispatcher = njit(cache=lock is not None, **options)(function)
        compile_or_load = dispatcher.compile
        if lock is not None:

            def compile_alone(signature: Any) -> Any:
                with alone(lock):
                    return compile_or_load(signature)

            dispatcher.compile = compile_alone
        return dispatcher

    return decorate


class _Callback(CFunc):
    """A callback that calls its own copies of the functions that it uses.

    Numba optimises a function alone, and again within each that calls it, so copies can differ in the order of sums.
    All have one name, and of a name LLVM takes the code that it met first: results would depend on what the process has
    compiled or loaded before.
    """

    def _compile_uncached(self) -> Any:
        result = super()._compile_uncached()  # type: ignore[misc]
        code = result.library
        finish = code._finalize_final_module

        def finish_privately() -> None:
            for function in code._final_module.functions:
                if function.linkage == Linkage.linkonce_odr:
                    function.linkage = Linkage.internal
            finish()

        code._finalize_final_module = finish_privately
        return result


def compiled_callback(function: Callable[[int], None]) -> Any:
    """Compile a function of one address for callers that know its own, kept on disk as `compiled` does."""
    lock = _lock_of(function)
    options = {"nopython": True, "error_model": "numpy"}
    callback = _Callback(function, normalize_signature("void(int64)"), locals={}, options=options)
    with alone(lock) if lock is not None else contextlib.nullcontext():
        if lock is not None:
            callback.enable_caching()
        callback.compile()
    return callback


def _lock_of(function: Callable[..., Any]) -> Path | None:
    """Beside a function's compiled code; None where Numba can write to no folder."""
    try:
        folder = FunctionCache(function).cache_path
    except RuntimeError:
        return None
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}.lock"
    return Path(folder) / name.replace("<", "").replace(">", "")


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
