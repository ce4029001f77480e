"""The file that an engine's steps are recorded in: one record to a line, as JSON.

Lines are gathered and written together: when there are many, once a second, and when the engine has nothing to do. So a
process that is killed loses less than a second, and only the last line in the file can be incomplete.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import secrets
import stat
import time
from dataclasses import asdict, replace

import msgspec

from headway.engine.config import EngineConfig
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.recording import FORMAT, Record, RecordedEngine, RecordedScheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.traffic import Traffic
from headway.version import __version__

_FLUSH_BYTES = 1 << 16
_FLUSH_S = 1.0
_encoder = msgspec.json.Encoder()
logger = logging.getLogger("headway.engine")


class RecordFile:
    """Appends records to a file, or to a new one. When writing fails, the file is left as it is.

    Args:
        most_bytes: a file that is larger is begun anew with the record of its engine; None lets it grow.

    Raises:
        ValueError: the file can't be written, another engine writes it, or it is not a recording.
    """

    def __init__(self, path: str, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes, self._engine = path, most_bytes, b""
        self._buffer = bytearray()
        self._flushed = time.monotonic()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise ValueError(f"cannot record steps in {path}: {error.strerror}") from error
        problem = self._problem()
        if problem:
            os.close(self._file)
            raise ValueError(f"cannot record steps in {path}: {problem}; name another file")
        atexit.register(self.close)

    def _problem(self) -> str:
        """Why nothing may be appended, or an empty string. An incomplete last line is ended."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return "it is not a file"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return "another engine is recording there"
        with open(self._path, "rb") as file:
            first = file.readline(_FLUSH_BYTES)
            if not first:
                return ""
            try:
                if msgspec.json.decode(first, type=RecordedEngine).format != FORMAT:
                    return "it is a recording in another format"
            except msgspec.DecodeError:
                return "it exists and is not a recording"
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                self._buffer += b"\n"
        return ""

    def scheduler(
        self, settings: EngineConfig, device: str, kv_cache_dtype: str, config: SchedulerConfig, blocks: KVBlocks
    ) -> RecordedScheduler:
        """A scheduler that is recorded in this file, after a record of the engine that it belongs to."""
        self.begin(settings, device, kv_cache_dtype, config, blocks)
        # Without a random root, anyone who has the file could test guesses of a prompt against its block numbers.
        return RecordedScheduler(config, blocks, self.write, root=secrets.randbits(60))

    def begin(
        self, settings: EngineConfig, device: str, kv_cache_dtype: str, config: SchedulerConfig, blocks: KVBlocks
    ) -> None:
        """Write the record of an engine, to which those that follow belong."""
        engine = RecordedEngine.of(
            config,
            blocks,
            version=__version__,
            model=settings.model,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            settings=asdict(replace(settings, preloaded=[])),  # a recording has no token ids
            began_ns=time.monotonic_ns(),
            began_unix_s=time.time(),
        )
        self._engine = _encoder.encode(engine) + b"\n"
        self.write(engine, idle=True)

    def write(self, record: Record | Traffic, idle: bool) -> None:
        """Add a record. `idle`: the engine has nothing else to do, so write now."""
        if self._file < 0:
            return
        self._buffer += _encoder.encode(record)
        self._buffer += b"\n"
        if idle or len(self._buffer) >= _FLUSH_BYTES or time.monotonic() - self._flushed >= _FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        try:
            while self._buffer and self._file >= 0:
                del self._buffer[: os.write(self._file, self._buffer)]
            if self._most_bytes is not None and self._file >= 0 and os.fstat(self._file).st_size > self._most_bytes:
                os.ftruncate(self._file, 0)
                os.write(self._file, self._engine)
        except OSError as error:
            logger.warning("recording of steps has stopped; cannot write %s: %s", self._path, error.strerror)
            self._buffer.clear()
            self.close()

    def close(self) -> None:
        """Write what is left. Later records are dropped."""
        self._flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
