"""The libraries of torch, loaded beside imports.

The system's linker takes a fifth of the time of importing torch, and does not need the interpreter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading

_LIBRARY = "lib/libtorch.so"  # which needs all others that do not need the interpreter


def load_libraries() -> threading.Thread | None:
    """Load them in a thread, which is returned; None where there is nothing to do.

    What fails here, importing torch will report.
    """
    if "torch" in sys.modules:
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
    return thread
