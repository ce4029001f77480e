"""The libraries of torch, loaded beside imports.

The system's linker takes a quarter of the time of importing torch, and does not need the interpreter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from contextlib import suppress
from pathlib import Path


def load_libraries() -> threading.Thread | None:
    """Load them in a thread, which is returned; None without torch. What fails here, importing torch will report."""
    spec = importlib.util.find_spec("torch")  # which does not import it
    if spec is None or not spec.submodule_search_locations:
        return None
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_python.so"

    def load() -> None:
        with suppress(OSError):
            ctypes.CDLL(str(library))

    thread = threading.Thread(target=load, daemon=True, name="headway-libraries")
    thread.start()
    return thread
