"""Packed weights on disk: the next start of a model reads them as they lie in memory, while torch is being imported.

A file is named after what its content depends on: the checkpoint's files, the options, the processor, and the code that
packs. It has a header, the bytes of all tensors, and a pickle of the weights, in which tensors stand for their places
in the file, and parts of the kernels for their names. It is written behind the first start, and whole or not at all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import io
import json
import mmap
import os
import pickle
import platform
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.files import cache_folder
from headway.models.folder import weight_files

if TYPE_CHECKING:
    from torch import Tensor

    from headway.engine.config import EngineConfig

_HEADER = struct.Struct("16sQQ")  # a mark, and the bytes of all tensors and of the pickle
_MARK = b"headway weights1"
_LEAST_BYTES = 64 << 20  # fewer bytes of tensors are packed as fast as a file is read
_MOST_BYTES, _MOST_OF_DISK = 64 << 30, 0.1  # limits of all files together
_FREE_OF_DISK = 0.05  # the share of the disk that stays free
_ALIGNMENT, _LARGE_PAGE, _PIECE = 64, 2 << 20, 32 << 20
_READERS = 4  # most of the time, the system fills pages with zeros before it copies into them
_ENDING = ".weights"
_ABANDONED_S = 3600.0
_ROOMS = ("kernels", "models")  # their code says what is packed, and how


class WeightCache:
    """The file of a model's weights.

    Args:
        path: the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept_bytes = 0  # bytes of the file that this start writes
        self._memory: mmap.mmap | None = None
        self._pickle = b""
        self._readers: list[threading.Thread] = []
        self._failed = False

    @classmethod
    def of(cls, config: EngineConfig) -> WeightCache | None:
        """The cache of the model that an engine is to load; None where none is wanted. Raises OSError."""
        folder = Path(config.model)
        if not config.weight_cache or config.load_format == "dummy" or not folder.is_dir():
            return None
        options = config.dtype, config.quantization, config.load_format
        content = json.dumps([*checkpoint_identity(folder), options]).encode()
        digest = hashlib.sha256(content).hexdigest()[:24]
        return cls(cache_folder() / "weights" / f"{folder.name[:80]}-{digest}{_ENDING}")

    # --- reading ------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin to read the file in other threads; False where there is none that can be trusted."""
        if (size := self._look()) is None:
            return False
        self._memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        pieces = iter(range(0, size, _PIECE))
        for _ in range(min(_READERS, os.cpu_count() or 1)):
            reader = threading.Thread(target=self._read, args=(size, pieces), daemon=True, name="headway-weights")
            self._readers.append(reader)
            reader.start()
        return True

    def mapped(self, parts: Mapping[str, object]) -> Any:
        """The weights where they lie in the file, in memory that all processes have in common which map it.

        See weights().
        """
        if self._look() is None:
            return None
        try:
            with self.path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError:
            return None
        return self._unpickled(memory, _place(_HEADER.size), parts)

    def _look(self) -> int | None:
        """Read the pickle; the bytes of all tensors, or None where there is no file that can be trusted."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                mark, size, pickled = _HEADER.unpack(file.read(_HEADER.size))
                if mark != _MARK or status.st_size != _place(_HEADER.size) + size + pickled:
                    return None
                if status.st_uid != os.getuid():  # a pickle of somebody else could run anything
                    return None
                file.seek(_place(_HEADER.size) + size)
                self._pickle = file.read(pickled)
                os.utime(self.path)
        except (OSError, struct.error):
            return None
        return int(size)

    def _read(self, size: int, pieces: Iterator[int]) -> None:
        """Bring pieces into memory as long as there are some that no other thread has taken."""
        assert self._memory is not None
        first = _first_page(self._memory)
        try:
            with self.path.open("rb", buffering=0) as file, memoryview(self._memory) as memory:
                for begin in pieces:
                    file.seek(_place(_HEADER.size) + begin)
                    piece = memory[first + begin : first + min(size, begin + _PIECE)]
                    while piece:
                        if not (count := file.readinto(piece)):
                            raise OSError("the file has become shorter")
                        piece = piece[count:]
        except OSError:
            self._failed = True

    def weights(self, parts: Mapping[str, object]) -> Any:
        """The weights, as `keep` was given them; None where they cannot be had.

        Args:
            parts: parts of the kernels, by the names that they had then.
        """
        if self._memory is None:
            return None
        for reader in self._readers:
            reader.join()
        found = None if self._failed else self._unpickled(self._memory, _first_page(self._memory), parts)
        if found is None:
            self._memory = None  # it is written again
        return found

    def _unpickled(self, memory: mmap.mmap, first: int, parts: Mapping[str, object]) -> Any:
        try:
            return _Unpickler(self._pickle, memory, first, parts).load()
        except Exception:  # the file is damaged, or other code has written it
            return None

    # --- writing ------------------------------------------------------------------------------------

    def keep(self, weights: object, parts: Mapping[str, object]) -> threading.Thread | None:
        """Write the file in a thread, which is returned; None where it is there, or would be too small or too large."""
        if self._memory is not None or not parts:
            return None
        pickler = _Pickler(parts)
        pickler.dump(weights)
        if not _LEAST_BYTES <= pickler.size <= _room(self.path.parent):
            return None
        self.kept_bytes = pickler.size
        thread = threading.Thread(target=self._write, args=(pickler,), daemon=True, name="headway-weights")
        thread.start()
        return thread

    def _write(self, pickler: _Pickler) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        remove = functools.partial(_remove, draft)
        atexit.register(remove)
        with contextlib.suppress(OSError):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with draft.open("xb", buffering=0) as file:
                    os.fchmod(file.fileno(), 0o600)
                    for piece in pickler.pieces():
                        began = time.monotonic()
                        _write_all(file, piece)
                        time.sleep(time.monotonic() - began)  # half of the time is for the first requests
                    os.fsync(file.fileno())
                draft.rename(self.path)
                _evict(self.path)
            finally:
                remove()
                atexit.unregister(remove)


class _Pickler(pickle.Pickler):
    """Pickles weights, and keeps what their tensors are.

    Attributes:
        size: bytes of all tensors, each where a cache line begins.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out, protocol=5)
        self._names = {id(part): name for name, part in parts.items()}
        self._tensors: dict[int, tuple[Tensor, int]] = {}  # each tensor with its place, by its id()
        self.size = 0

    def persistent_id(self, obj: Any) -> Any:
        """A part's name, or a tensor's place, dtype and shape; None for all else."""
        import torch

        if (name := self._names.get(id(obj))) is not None:
            return name
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._tensors:
            self._tensors[id(obj)] = obj, self.size
            self.size = _place(self.size + obj.nbytes)
        return self._tensors[id(obj)][1], str(obj.dtype).removeprefix("torch."), tuple(obj.shape)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the whole file, in pieces."""
        import torch

        pickled = self._out.getvalue()
        yield memoryview(_HEADER.pack(_MARK, self.size, len(pickled)).ljust(_place(_HEADER.size), b"\0"))
        for tensor, place in self._tensors.values():
            content: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            for first in range(0, len(content), _PIECE):
                yield content[first : first + _PIECE]
            yield memoryview(bytes(_place(place + len(content)) - place - len(content)))
        yield memoryview(pickled)


class _Unpickler(pickle.Unpickler):
    """Reads what _Pickler has written, of the classes of weights. Files of other users are not read at all."""

    def __init__(self, content: bytes, memory: mmap.mmap, first: int, parts: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(content))
        self._memory, self._first, self._parts = memory, first, parts

    def persistent_load(self, pid: Any) -> Any:
        """The part or the tensor that stands behind this id."""
        import torch

        if isinstance(pid, str):
            return self._parts[pid]
        place, dtype, shape = pid
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=self._first + place).view(shape)

    def find_class(self, module: str, name: str) -> Any:
        """What has this name, if it is of this package or its objects contain it; else raises UnpicklingError."""
        import torch

        if module.startswith("headway.") or (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not part of weights")


_KNOWN = {("builtins", "getattr"), ("functools", "partial")}


def checkpoint_identity(folder: Path) -> list[object]:
    """What the weights of a checkpoint, as they are packed here, depend on beside options. Raises OSError."""
    files = [_identity(path) for path in weight_files(folder)]
    return [files, (folder / "config.json").read_text(encoding="utf-8"), _processor(), _code()]


def _identity(path: Path) -> tuple[str, int, int]:
    whole = path.resolve()
    status = whole.stat()
    return str(whole), status.st_size, status.st_mtime_ns


def _processor() -> list[str]:
    """The properties of the processor by which the layout of packed weights is chosen."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    chosen = (os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"))
    return [platform.machine(), platform.release(), flags, *chosen]


def _code() -> str:
    package = Path(__file__).parent.parent
    sources = (path.read_bytes() for room in _ROOMS for path in sorted((package / room).rglob("*.py")))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def _place(size: int) -> int:
    """Where the next tensor begins."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _first_page(memory: mmap.mmap) -> int:
    """Where the first large page of a mapping begins."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _LARGE_PAGE


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _write_all(file: Any, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]


def _room(folder: Path) -> int:
    """How many bytes a new file may have. Other files are given up for it, but the disk's last bytes are not used."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        disk = shutil.disk_usage(there)
    except OSError:
        return 0
    return min(_MOST_BYTES, int(_MOST_OF_DISK * disk.total), int(disk.free - _FREE_OF_DISK * disk.total))


def _evict(kept: Path) -> None:
    """Delete the files that were not used for longest, until all together have no more than they may."""
    for draft in kept.parent.glob(f".*{_ENDING}.*"):
        if time.time() - draft.stat().st_mtime > _ABANDONED_S:  # by a process that was killed
            draft.unlink(missing_ok=True)
    disk = shutil.disk_usage(kept.parent)
    most, total = min(_MOST_BYTES, int(_MOST_OF_DISK * disk.total)), 0
    files = [(path.stat(), path) for path in kept.parent.glob(f"*{_ENDING}")]
    for status, path in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
        total += status.st_size
        if total > most and path != kept:
            path.unlink(missing_ok=True)
            total -= status.st_size
