"""KV blocks that are kept on disk or in Redis when the pool gives them up, and loaded when a prompt asks for them.

Threads read and write; the engine's thread only names pages (`policy.cache.offload`), and copies what has come when its
request is admitted. A page that cannot be read as it was written is not there. The first write that fails ends all
writing, with one line in the log, and reading goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import struct
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headway.engine.config import EngineConfig
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest
from headway.engine.prepare import EngineError
from headway.engine.swap import HostBlocks
from headway.engine.weight_cache import checkpoint_identity
from headway.policy.cache.offload import LoadTime, Offloading
from headway.policy.cache.sizing import PoolSize
from headway.policy.step.request import Sequence, cache_key
from headway.policy.step.scheduler import Scheduler

_HEADER = struct.Struct("16s32sQ32s")  # a mark, the page's name, bytes of its content, and their SHA-256
_MARK = b"headway kvpage 1"
_ENDING, _DRAFT = ".kv", ".draft"
_ABANDONED_S = 3600.0
_MEASURED_PAGES = 8
# Host memory for blocks on their way.
_STAGED_BYTES, _LEAST_STAGED = 256 << 20, 64
_REDIS_S = 2.0  # for an answer
_REDIS_NAMES = 1_000_000  # names of pages that are remembered as written
logger = logging.getLogger("headway.engine")


class StoreError(ValueError):
    """A store that cannot be used; the message says why and what to do."""


def packed(name: bytes, content: bytes | memoryview) -> bytes:
    """A page as it is kept: its content under its name, so that damage shows."""
    return _HEADER.pack(_MARK, name, len(content), hashlib.sha256(content).digest()) + content


def unpacked(name: bytes, kept: bytes, size: int) -> memoryview | None:
    """The content of `size` bytes of what was kept under this name; None where it is anything else."""
    if len(kept) != _HEADER.size + size:
        return None
    content = memoryview(kept)[_HEADER.size :]
    digest = hashlib.sha256(content).digest()
    return content if _HEADER.unpack_from(kept) == (_MARK, name, size, digest) else None


class PageStore(Protocol):
    """Where pages are kept. Its methods may wait and raise OSError, but for `is_kept` and `may_have`."""

    def is_kept(self, name: bytes) -> bool: ...

    def may_have(self, name: bytes) -> bool: ...

    def read(self, name: bytes) -> bytes | None:
        """What was written; None where there is nothing any more."""

    def write(self, name: bytes, page: bytes) -> None: ...

    def drop(self, name: bytes) -> None:
        """Forget a page that is of no use."""


class FolderStore:
    """Pages in files. Those that were not used for longest are deleted when all together have more than `most_bytes`.

    Pages of other models in the same folder count too, and go in the same order.

    Raises:
        StoreError: the folder cannot be used.
    """

    def __init__(self, folder: Path, model: str, most_bytes: int) -> None:
        self._own, self._most, self._total = folder / model, most_bytes, 0
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # the least recently used first
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            found = []
            for path in folder.glob(f"*/*{_ENDING}"):
                with suppress(FileNotFoundError):  # another server may have deleted it
                    found.append((path.stat().st_mtime_ns, path, path.stat().st_size))
            for draft in self._own.glob("*" + _DRAFT):  # of a server that was killed
                if time.time() - draft.stat().st_mtime > _ABANDONED_S:
                    draft.unlink(missing_ok=True)
            probe = self._own / f".{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StoreError(f"kv_offload: {folder} cannot be used ({error.strerror}); name another folder") from None
        for _, path, size in sorted(found):
            self._sizes[path] = size
            self._total += size
        self._lock = threading.Lock()

    def _path(self, name: bytes) -> Path:
        return self._own / (name.hex() + _ENDING)

    def is_kept(self, name: bytes) -> bool:
        return self._path(name) in self._sizes

    may_have = is_kept

    def read(self, name: bytes) -> bytes | None:
        path = self._path(name)
        try:
            page = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            self._forget(path)
            return None
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
        return page

    def write(self, name: bytes, page: bytes) -> None:
        path = self._path(name)
        draft = path.with_suffix(f".{os.getpid()}{_DRAFT}")
        try:
            draft.write_bytes(page)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        with self._lock:
            self._total += len(page) - self._sizes.pop(path, 0)
            self._sizes[path] = len(page)
            while self._total > self._most and len(self._sizes) > 1:
                oldest, size = self._sizes.popitem(last=False)
                self._total -= size
                oldest.unlink(missing_ok=True)

    def drop(self, name: bytes) -> None:
        self._path(name).unlink(missing_ok=True)
        self._forget(self._path(name))

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._total -= self._sizes.pop(path, 0)


class RedisStore:
    """Pages in a Redis, which itself bounds how much it keeps, and gives up what was not used for longest.

    Raises:
        StoreError: it cannot be asked, or keeps all for ever.
    """

    def __init__(self, url: str, model: str) -> None:
        try:
            import redis
        except ModuleNotFoundError:
            raise StoreError("kv_offload: the package redis is not installed; pip install 'headway[redis]'") from None
        self._prefix = f"headway:kv:{model}:".encode()
        self._written: OrderedDict[bytes, None] = OrderedDict()
        self._errors = redis.RedisError
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S)
            memory = self._redis.info("memory")
        except (redis.RedisError, ValueError) as error:
            raise StoreError(f"kv_offload: {' '.join(str(error).split())}; check the address of Redis") from None
        if not memory.get("maxmemory") or memory.get("maxmemory_policy") == "noeviction":
            raise StoreError(
                "kv_offload: this Redis would keep all pages for ever; start it with --maxmemory BYTES "
                "--maxmemory-policy allkeys-lru"
            )

    def is_kept(self, name: bytes) -> bool:
        return name in self._written

    def may_have(self, name: bytes) -> bool:
        return True

    def read(self, name: bytes) -> bytes | None:
        try:
            page: bytes | None = self._redis.get(self._prefix + name)
        except self._errors as error:
            raise OSError(str(error)) from None
        if page is None:
            self._written.pop(name, None)
        return page

    def write(self, name: bytes, page: bytes) -> None:
        try:
            self._redis.set(self._prefix + name, page)
        except self._errors as error:
            raise OSError(str(error)) from None
        self._written[name] = None
        if len(self._written) > _REDIS_NAMES:
            self._written.popitem(last=False)

    def drop(self, name: bytes) -> None:
        self._written.pop(name, None)
        with suppress(self._errors):
            self._redis.delete(self._prefix + name)


def open_store(target: str, model: str, most_bytes: int) -> PageStore:
    """The store that --kv-offload names, for pages of this model. Raises StoreError."""
    if target.startswith(("redis://", "rediss://", "unix://")):
        return RedisStore(target, model)
    if "://" in target:
        raise StoreError(f"kv_offload is {target!r}; it must be a folder or an address as redis://HOST:PORT")
    return FolderStore(Path(target).expanduser(), model, most_bytes)


def model_name(folder: Path, content: object) -> str:
    """A name for the pages of a model: that of its folder, and a digest of all that their bytes depend on."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    return f"{folder.name[:80]}-{digest[:24]}"


class Loading(Future[None]):
    """Pages of a request that are being read. It is done when it has waited long enough, too.

    Attributes:
        pages: what was read, from the first page that was asked for on.
    """

    def __init__(self, salt: str, first: int, names: list[bytes], wait_ns: float) -> None:
        super().__init__()
        self.salt, self.first, self.names = salt, first, names
        self.pages: list[memoryview] = []
        self._due_ns = time.monotonic_ns() + wait_ns

    @property
    def is_late(self) -> bool:
        return not super().done() and time.monotonic_ns() >= self._due_ns

    def done(self) -> bool:
        return super().done() or self.is_late

    def exception(self, timeout: float | None = None) -> None:
        """Nothing that goes wrong here ends a request."""


class Offload(StepHooks):
    """Moves blocks between the host's memory and a store.

    Args:
        host: whose blocks go out, and which are given what is loaded.

    Raises:
        StoreError: nothing can be written.
    """

    def __init__(self, store: PageStore, scheduler: Scheduler, host: HostBlocks) -> None:
        assert scheduler.host is not None
        self._store, self._host, self._pool = store, host, scheduler.host
        self._writes = True
        self._overdue: Loading | None = None
        self._loading: dict[str, Loading] = {}
        self._incoming: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[bytes, int, Tensor]] = queue.SimpleQueue()
        for name, work in (("read", self._read_all), ("write", self._write_all)):
            threading.Thread(target=work, daemon=True, name=f"headway-kv-{name}").start()
        host.keep = self._keep
        step_time = scheduler.accounting.step_time
        decided = scheduler.blocks, scheduler.host, step_time, store.is_kept, store.may_have
        self.policy = Offloading(*decided, self._measured())
        scheduler.block_manager.offloading, scheduler.blocks.on_evicted = self.policy, self.policy.evicted

    # --- out ----------------------------------------------------------------------------------------

    def _keep(self, host_blocks: list[int], names: list[bytes], rows: Tensor) -> None:
        for host_block, name in zip(host_blocks, names, strict=True):
            self._outgoing.put((name, host_block, rows[host_block]))

    def _write_all(self) -> None:
        while True:
            name, host_block, row = self._outgoing.get()
            if self._writes and not self._store.is_kept(name):
                self._write(name, row)
            self._pool.stored.append(host_block)

    def _write(self, name: bytes, row: Tensor) -> None:
        try:
            self._store.write(name, packed(name, row.numpy().data))
        except OSError as error:
            self._writes = False
            logger.error("kv_offload: no more KV blocks are kept: %s", error.strerror or error)

    # --- in -----------------------------------------------------------------------------------------

    def awaited(self, request: AddRequest) -> Loading | None:
        """Begin to read what of a prompt pays to be loaded; None where there is nothing."""
        if request.handle is not None or request.pooling is not None or request.resumed:
            return None
        if request.params.prompt_logprobs is not None or (self._overdue is not None and self._overdue.is_late):
            return None
        salt = cache_key(request.cache_salt, request.adapter)
        first, names, wait_ns = self.policy.wanted(request.prompt_token_ids, salt)
        if not names:
            return None
        loading = self._loading[request.request_id] = Loading(salt, first, names, wait_ns)
        self._incoming.put(loading)
        return loading

    def _read_all(self) -> None:
        while True:
            self._read(self._incoming.get())

    def _read(self, loading: Loading) -> None:
        began = time.monotonic_ns()
        with suppress(OSError):
            for name in loading.names:
                if loading.is_late or (page := self._page(name)) is None:
                    break
                loading.pages.append(page)
        if loading.pages:
            self.policy.load_time.took(len(loading.pages), time.monotonic_ns() - began)
        loading.set_result(None)

    def _page(self, name: bytes) -> memoryview | None:
        page = self._store.read(name)
        if page is None:
            return None
        content = unpacked(name, page, self._host.block_bytes)
        if content is None:
            logger.warning("kv_offload: a kept KV block was damaged, and is computed again: %s", name.hex())
            self._store.drop(name)
        return content

    def queued(self, request: AddRequest, sequences: list[Sequence]) -> None:
        """Give the first sequence what was read for its request, if anything was."""
        loading = self._loading.pop(request.request_id, None)
        if loading is None:
            return
        if loading.is_late:
            self._overdue = loading
            self._pool.counts["late"] += 1
            return
        if sequences[0].cache_salt != loading.salt or sequences[0].swapped is not None:
            return
        host_blocks = self.policy.loaded(sequences[0], loading.first, len(loading.pages))
        self._host.arrived.update(zip(host_blocks, loading.pages, strict=False))

    def left(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    # --- how long it takes --------------------------------------------------------------------------

    def _measured(self) -> LoadTime:
        """The time of a load of one page and of several, that were just written; nothing is kept where that fails."""
        content = memoryview(bytes(self._host.block_bytes))
        names = [hashlib.sha256(b"%d %d" % (os.getpid(), number)).digest() for number in range(_MEASURED_PAGES)]
        times = []
        try:
            for name in names:
                self._store.write(name, packed(name, content))
            for count in (1, _MEASURED_PAGES):
                began = time.monotonic_ns()
                for name in names[:count]:
                    self._page(name)
                times.append(time.monotonic_ns() - began)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"kv_offload: nothing can be kept ({reason}); name another place") from None
        finally:
            for name in names:
                self._store.drop(name)
        page_ns = max(1.0, (times[1] - times[0]) / (_MEASURED_PAGES - 1))
        return LoadTime(max(0.0, times[0] - page_ns), page_ns)


def staged_blocks(config: EngineConfig, pool: PoolSize, block_bytes: int) -> int:
    """How many blocks of the host's memory hold what is on its way.

    Raises:
        EngineError: nothing can be kept beyond the host's memory; one line.
    """
    wrong = {
        "layers with a window have block tables of their own": bool(pool.groups),
        "states of recurrent layers are not kept": pool.checkpoints is not None,
        "ranks keep nothing": config.ranks > 1,
        "there is no prefix cache (enable_prefix_caching)": not config.enable_prefix_caching,
        "record_steps cannot tell what was loaded": config.record_steps is not None,
    }
    if why := next((reason for reason, holds in wrong.items() if holds), None):
        raise EngineError(f"kv_offload: {why}; leave it out")
    return max(_STAGED_BYTES // block_bytes, _LEAST_STAGED)


def offload_of(config: EngineConfig, folder: Path, scheduler: Scheduler, host: HostBlocks, device: str) -> Offload:
    """What keeps evicted blocks, under a name of all that their bytes depend on. Raises EngineError."""
    assert config.kv_offload is not None
    sizes = [device, host.block_bytes, config.block_size, scheduler.config.max_model_len]
    options = config.dtype, config.quantization, config.load_format, config.seed, config.kv_cache_dtype
    name = model_name(folder, [checkpoint_identity(folder), *sizes, *options])
    try:
        return Offload(open_store(config.kv_offload, name, round(config.kv_offload_size * 2**30)), scheduler, host)
    except StoreError as error:
        raise EngineError(str(error)) from None
