"""Importing torch in less time: a thread loads its libraries, and meanwhile the code of its modules is read.

Loading the libraries takes a fifth of the import and does not need the interpreter. Reading the code takes as long, and
does not need the libraries; only running it does. Which modules there are is known from an earlier start.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType

from headway.files import cache_folder, write_files

_LIBRARY = "lib/libtorch.so"  # which needs all others that do not need the interpreter
_MODULES = "torch-modules"  # a file of their names
_PACKAGES = ("torch", "torchgen")


class _Read(SourceFileLoader):
    """Has read a module's code before the module is imported."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._code = super().get_code(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code, once; a module that is imported again is read again."""
        code, self._code = self._code, None
        return code or super().get_code(fullname)


class _Ahead:
    """Finds modules whose code was read. Imports that do not find theirs here go on as always."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec] = {}
        self._folders: dict[str, list[str] | None] = {"": None}

    def read(self, name: str) -> None:
        """Find a module, after its package, and read it."""
        package = name.rpartition(".")[0]
        if package not in self._folders:
            self.read(package)
        self._folders.setdefault(name, [])
        spec = PathFinder.find_spec(name, self._folders[package])
        if spec is not None and type(spec.loader) is SourceFileLoader and name not in self._specs:
            self._folders[name] = spec.submodule_search_locations or []
            spec.loader = _Read(name, spec.loader.path)
            self._specs[name] = spec

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As importlib asks its finders."""
        return self._specs.pop(name, None)


_ahead: _Ahead | None = None


def load_libraries() -> threading.Thread | None:
    """Load them in a thread, which is returned, and read code as long as that takes; None where there is nothing to do.

    What fails here, importing torch will report.
    """
    global _ahead
    if "torch" in sys.modules or _ahead is not None:
        return None
    spec = importlib.util.find_spec("torch")  # which does not import it
    if spec is None or not spec.submodule_search_locations:
        return None
    library = os.path.join(spec.submodule_search_locations[0], _LIBRARY)
    # ctypes.CDLL(library) would keep the interpreter to itself while it loads; a call of a function lets others go on.
    open_library = ctypes.CDLL(None).dlopen
    thread = threading.Thread(
        target=open_library, args=(os.fsencode(library), os.RTLD_NOW), daemon=True, name="headway-libraries"
    )
    thread.start()
    _ahead = _read_ahead(thread.is_alive)
    sys.meta_path.insert(0, _ahead)
    return thread


def import_torch() -> None:
    """Import it, and keep what its modules are called for the next start."""
    global _ahead
    if "torch" in sys.modules:
        return
    try:
        import torch  # noqa: F401
    finally:
        if _ahead is not None:
            sys.meta_path.remove(_ahead)
            _ahead = None
    _keep([name for name in sys.modules if _is_of_torch(name)])


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] in _PACKAGES


def _read_ahead(is_wanted: Callable[[], bool]) -> _Ahead:
    ahead = _Ahead()
    with suppress(Exception):  # a damaged list: what is not read here, the import reads
        for name in (cache_folder() / _MODULES).read_text().split():
            if not is_wanted():
                break
            if _is_of_torch(name):
                ahead.read(name)
    return ahead


def _keep(names: list[str]) -> None:
    path, content = cache_folder() / _MODULES, "\n".join(names).encode()
    with suppress(OSError):
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_files({path: content})
