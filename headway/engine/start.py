"""Starts an engine in the least time: what needs no torch is done while torch is being imported.

The import takes one core a second. Meanwhile another thread reads the packed weights, where the cache has them. Else
the weights' files are read ahead, and the memory for packed weights is taken from the system, which has to fill it with
zeros.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.engine.config import EngineConfig
from headway.engine.weight_cache import WeightCache
from headway.models.config import ModelConfig
from headway.models.folder import read_ahead, weight_files
from headway.models.gguf.config import gguf_files
from headway.models.tensors import expected_tensors

if TYPE_CHECKING:
    from headway.engine.build import LoadedEngine

# The least bytes that a packed weight takes.
_PACKED_BYTES = {
    "int8": 1.0, "int8-weight-only": 1.0, "int4": 0.53, "int4-weight-only": 0.5, "float4-weight-only": 0.5,
    "float8-weight-only": 1.0, "normal4-weight-only": 0.5,
}  # fmt: skip
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE, of Linux 5.14; it changes nothing that is written meanwhile
_PIECE = 32 << 20
_MOST_GROWTH = 4  # how much packed weights may grow; a config.json that claims more does not fit the files


def start_engine(config: EngineConfig, on_stage: Callable[[str, int], None] | None = None) -> LoadedEngine:
    """Import the engine and build it. `import` is the stage before those of build_engine.

    Raises what build_engine() raises.
    """
    with uncollected(), ExitStack() as beside:
        began = time.monotonic_ns()
        memory, cache = _prepare(config)
        from headway.engine.build import build_engine

        imported = time.monotonic_ns() - began
        if on_stage is not None:
            on_stage("import", imported)
        engine = build_engine(config, on_stage, memory, cache, beside)
    engine.ready.startup_ns = {"import": imported, **engine.ready.startup_ns}
    return engine


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside, and count what was made inside as old: a collection would find only what stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # so that this moves all objects to the oldest generation
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _prepare(config: EngineConfig) -> tuple[mmap.mmap | None, WeightCache | None]:
    """Begin to read the packed weights; or the weights' files ahead, and to fill the memory of a CPU's weights.

    Returns:
        That memory, and the cache of packed weights. None where nothing can be done. Errors in the model are left to
        build_engine, which says what they are.
    """
    with_gpu = config.device == "cuda" or (config.device == "auto" and Path("/dev/nvidiactl").exists())
    # On several memory nodes, LargePages itself chooses where its pages come from before they are filled.
    several_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1
    can_prepare, cache = not with_gpu and not several_nodes and sys.platform == "linux", None
    try:
        folder = Path(config.model)
        is_whole = config.ranks == 1  # parts of ranks are not kept
        cache = WeightCache.of(config) if can_prepare and is_whole else None
        if cache is not None and cache.begin():
            return None, cache
        if config.load_format != "dummy":
            read_ahead(folder)
        size = packed_bytes(config, ModelConfig.from_folder(folder)) // config.ranks
        stored = sum(path.stat().st_size for path in weight_files(folder))
        claims_too_much = config.load_format != "dummy" and size > _MOST_GROWTH * stored
        if not can_prepare or size < _PIECE or claims_too_much:
            return None, cache
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (ValueError, OSError):
        return None, cache
    threading.Thread(target=_populate, args=(mapping,), daemon=True, name="headway-memory").start()
    return mapping, cache


def packed_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """The least bytes that the model's matrices take when they are packed; 0 for an unknown dtype."""
    if model.packed is not None and model.packed.scheme == "gguf":  # panels are larger than blocks
        return sum(path.stat().st_size for path in gguf_files(Path(config.model)))
    dtype = model.dtype or "float32" if config.dtype == "auto" else config.dtype
    packed = model.packed
    # In gpt-oss with MXFP4, only the experts are packed, and they are not counted here.
    scheme = config.quantization if packed is None or packed.layout == "mxfp4" else packed.scheme
    size = _PACKED_BYTES.get(scheme, _DTYPE_BYTES.get(dtype, 0.0))
    shapes = expected_tensors(replace(model, packed=None))
    if not model.shape.tied_embeddings:
        del shapes["model.embed_tokens.weight"]  # it is not packed
    matrices = (shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight"))
    return int(size * sum(map(math.prod, matrices)))


def _populate(mapping: mmap.mmap) -> None:
    """Have the system fill the mapping now, in pieces, without the interpreter's lock."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for done in range(0, len(mapping), _PIECE):
        if madvise(start + done, min(_PIECE, len(mapping) - done), _POPULATE_WRITE) != 0:
            return  # an older system fills memory when it is first written
