"""The file in which changes of quotas are kept, so that a restart loses and doubles nothing.

Each change is a line of JSON, and is with the operating system before it counts: a server that is killed loses none.
It is on the disk within SYNC_S, so a power cut loses no more than that. A State stands for all lines before it; with it
the file begins anew, and is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from pathlib import Path

import msgspec

from headway.files import write_files
from headway.policy.admission.quota import Record, Reserve, State

SYNC_S = 1.0
logger = logging.getLogger("headway.server")
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class QuotaJournal:
    """The journal of one server.

    Args:
        path: where the file is, in a folder that exists.

    Attributes:
        past: the records that the file had.

    Raises:
        ValueError: it cannot be read or written, is damaged, or another server has it. One line for the user.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).resolve()
        self._file = -1
        self._pending = b""  # lines that could not be written
        self._is_dirty = False
        self.size = 0
        try:
            self._lock = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.past = self._read()
        except BlockingIOError:
            raise ValueError(f"another server uses {path}; give each its own --quota-journal") from None
        except OSError as error:
            raise ValueError(
                f"cannot keep quotas in {error.filename}: {error.strerror}; choose another place with --quota-journal"
            ) from None

    def _read(self) -> list[Record]:
        """The records of the file. What was being written when the machine stopped never counted, and is left out."""
        lines = self._path.read_bytes().split(b"\n") if self._path.exists() else [b""]
        records, damaged = list[Record](), 0
        for number, line in enumerate(lines, 1):
            try:
                record = _decoder.decode(line)
            except msgspec.MsgspecError:
                damaged = damaged or number
                continue
            if damaged:
                where = f"{self._path}, line {damaged}"
                raise ValueError(f"{where}: damaged; move the file away to start with full budgets")
            if number < len(lines):  # the last one has no end
                records.append(record)
        if records and not isinstance(records[0], State):
            raise ValueError(f"{self._path}, line 1: not a quota journal; choose another file with --quota-journal")
        return records

    def append(self, record: Record) -> None:
        """Write a change. What cannot be written is kept and tried again with the next one.

        Raises:
            OSError: a Reserve cannot be written; it is forgotten.
        """
        line = _encoder.encode(record) + b"\n"
        if isinstance(record, State) and self._begin_anew(line):
            return
        self._pending += line
        try:
            self._flush()
        except OSError as error:
            if isinstance(record, Reserve):
                self._pending = self._pending[: -len(line)]
                raise
            logger.error("cannot write %s: %s; it is tried again", self._path, error.strerror)

    def _begin_anew(self, line: bytes) -> bool:
        """Replace the file by one that has this line only. Returns whether that could be done."""
        try:
            write_files({self._path: line})
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError:
            if self._file < 0:
                raise
            return False  # the old one is still there, and goes on
        if self._file >= 0:
            os.close(self._file)
        self._file, self._pending, self.size = file, b"", len(line)
        return True

    def _flush(self) -> None:
        """Write what is pending, or leave the file as it was."""
        written = os.write(self._file, self._pending)
        if written < len(self._pending):
            os.ftruncate(self._file, self.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.size += written
        self._pending = b""
        self._is_dirty = True

    async def sync(self) -> None:
        """Get what was written onto the disk."""
        if self._is_dirty:
            self._is_dirty = False
            file = os.dup(self._file)
            try:
                await asyncio.to_thread(os.fsync, file)
            finally:
                os.close(file)

    def close(self) -> None:
        """Get all onto the disk, and let another server have the file."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        os.close(self._lock)
