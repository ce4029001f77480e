"""Imports torch in less time: its libraries are loaded beside imports, and modules that no engine uses are put off.

The system's linker takes a fifth of the time of importing torch, and does not need the interpreter. Another fifth is
for the shapes of what operations would return, which only torch's own compiler and tensors without storage ask for.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

_LIBRARY = "lib/libtorch.so"  # it needs all others that do not need the interpreter
_PUT_OFF = "torch._meta_registrations"
# The linker loads one library at a time, so those of all others come before torch's, which take it longest.
_EXTENSIONS = (
    "msgspec", "numpy", "asyncio", "_bisect", "_blake2", "_bz2", "_csv", "_ctypes", "_datetime", "_hashlib",
    "_heapq", "_json", "_lzma", "_multiprocessing", "_opcode", "_posixshmem", "_posixsubprocess", "_queue", "_random",
    "_sha512", "_socket", "_ssl", "_struct", "_uuid", "array", "binascii", "cmath", "fcntl", "grp", "mmap", "select",
    "unicodedata", "zlib",
)  # fmt: skip
# Modules of other packages that torch imports.
_OTHERS = (
    "argparse", "csv", "glob", "gzip", "importlib.metadata", "multiprocessing.connection",
    "multiprocessing.spawn", "pickletools", "tarfile", "timeit", "tqdm", "unittest.mock", "urllib.request",
)  # fmt: skip


class _PutOff(ModuleType):
    """Stands for a module until something asks it for a name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def begin_import() -> None:
    """Begin the parts of importing torch in the best order, in a process where nobody else uses torch."""
    if "torch" in sys.modules:
        return
    if not os.path.exists("/dev/nvidiactl"):  # only the CPU's way was tried without
        sys.modules[_PUT_OFF] = _PutOff(_PUT_OFF)
    _import(_EXTENSIONS)
    load_libraries()
    _import(_OTHERS)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):  # the code that needs it will say so
            importlib.import_module(name)


def load_libraries() -> threading.Thread | None:
    """Load the libraries of torch in a thread, which is returned; None where there is nothing to do.

    If loading fails, importing torch will report it.
    """
    if "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")  # this does not import it
    if spec is None or not spec.submodule_search_locations:
        return None
    library = os.path.join(spec.submodule_search_locations[0], _LIBRARY)
    # ctypes.CDLL(library) would keep the interpreter to itself while it loads; a call of a function lets others go on.
    open_library = ctypes.CDLL(None).dlopen
    # No daemon: a process that ends early, as for want of the model, waits for it, or the linker would crash.
    thread = threading.Thread(target=open_library, args=(os.fsencode(library), os.RTLD_NOW), name="headway-libraries")
    thread.start()
    return thread
