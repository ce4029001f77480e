"""Keeps the CPU kernels' machine code between starts, and decides which process compiles it.

Code is kept twice: beside the sources, for all users of this installation, and in a folder of the user, for all of the
user's installations. It is loaded only from folders where no other user can have put it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headway.files import cache_folder

ENDING = ".native"
_BESIDE = Path(__file__).parent / "__pycache__"
_MOST_VERSIONS, _UNUSED_DAYS = 16, 30
_compiling = threading.RLock()
_held: set[Path] = set()


def code_folders() -> list[Path]:
    """The folders in which code is looked for, in this order, and kept in each that can be written.

    It is NUMBA_CACHE_DIR alone, if that is set; or a folder beside the sources, then one in the user's cache, or in the
    system's folder of temporary files if the user has none.
    """
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    temporary = Path(tempfile.gettempdir()) / f"headway-{os.geteuid()}"
    own = _own_folder(cache_folder() / "kernels") or _own_folder(temporary)
    return [_BESIDE] if own is None else [_BESIDE, own]


def can_keep() -> bool:
    """Whether one of the folders can be written, or made."""
    there = [next(each for each in (folder, *folder.parents) if each.exists()) for folder in code_folders()]
    return any(each.is_dir() and os.access(each, os.W_OK) for each in there)


def place_of(name: str) -> Path:
    """The path of a file: where it is, or else in the last of the folders, whose locks are for all installations."""
    places = [folder / name for folder in code_folders()]
    return next((place for place in places if place.exists()), places[-1])


@functools.lru_cache(maxsize=4)
def _own_folder(base: Path) -> Path | None:
    """The folder of these sources in `base`, which belongs to this user alone; None where there can be none.

    Code that is loaded is executed: so another user must neither own the base, nor may write there or put another
    folder in its place.
    """
    folder = base / sources()[:16]
    try:
        with contextlib.suppress(OSError):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        about, above = base.lstat(), base.parent.stat().st_mode
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            return None
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            return None
        if not folder.exists():
            _drop_unused(base)
            folder.mkdir(exist_ok=True)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it can still be read
        os.utime(folder)  # a sign that it is in use
    return folder


def _drop_unused(base: Path) -> None:
    """Delete the code of other sources that no process has used for long, or that is more than the most recent."""
    with contextlib.suppress(OSError):
        used = sorted(((each.stat().st_mtime, each) for each in base.iterdir()), reverse=True)
        for place, (at, each) in enumerate(used, start=1):
            if place >= _MOST_VERSIONS or time.time() - at > _UNUSED_DAYS * 86400:
                shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Keep other processes that ask for the same lock file, and other threads of this one, out of the block.

    If there can be no lock, because its folder cannot be written or its file system has none, nobody is kept out.
    """
    with _compiling, contextlib.ExitStack() as stack:
        if lock not in _held:
            with contextlib.suppress(OSError):
                lock.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(lock.open("ab")), fcntl.LOCK_EX)
            _held.add(lock)
            stack.callback(_held.discard, lock)
        yield


def is_being_compiled(path: Path) -> bool:
    """Whether a process is compiling the code that will be here."""
    with contextlib.suppress(OSError), path.with_suffix(".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@functools.lru_cache(maxsize=1)
def sources() -> str:
    """A digest of all that compiled code is made of. File names have it, so that changed sources find no old code."""
    folder = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in (*sorted(folder.glob("*.py")), folder.parent / "interface.py"))
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    return hashlib.sha256(sources + repr(versions).encode()).hexdigest()


def drop_stale_code(folder: Path, sources: str) -> None:
    """Delete the code in a folder that comes of other sources. A folder that cannot be written is left as it is."""
    stamp = folder / "cpu.sources"
    with contextlib.suppress(OSError):
        if stamp.exists() and stamp.read_text() == sources:
            return
        with exclusive(stamp.with_suffix(".lock")):
            for code in [each for ending in (ENDING, ".nb[ic]", ".ways") for each in folder.glob(f"cpu*{ending}")]:
                code.unlink(missing_ok=True)
            stamp.write_text(sources)


def read(name: str) -> bytes | None:
    """An object file that `keep` has written; None where there is none, or a damaged one."""
    for folder in code_folders():
        with contextlib.suppress(OSError):
            content = (folder / name).read_bytes()
            if hashlib.sha256(content[:-32]).digest() == content[-32:]:
                return content[:-32]
    return None


def keep(name: str, code: bytes) -> None:
    """Write an object file and, at its end, its digest."""
    write(name, code + hashlib.sha256(code).digest())


def write(name: str, content: bytes) -> None:
    """Write a file into each folder that can be written."""
    for folder in code_folders():
        draft = folder / f"{name}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            drop_stale_code(folder, sources())
            draft.write_bytes(content)
            draft.replace(folder / name)
