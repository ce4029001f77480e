"""Files and batches on disk: rows in SQLite, contents in a folder beside it.

Whatever is killed and whenever: a file is there whole or not at all, and each line of a batch has at most one answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headway.server.batches.objects import KEPT_S, Batch, FileObject

_ENDED_AT = "coalesce({})".format(
    ", ".join(f"json_extract(document, '$.{each}_at')" for each in ("completed", "failed", "expired", "cancelled"))
)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, purpose TEXT, expires_at INTEGER, document TEXT);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, input_file_id TEXT, is_open INTEGER,
    output_expiry_s INTEGER,
    completed INTEGER DEFAULT 0, failed INTEGER DEFAULT 0,
    input_tokens INTEGER DEFAULT 0, cached_tokens INTEGER DEFAULT 0, output_tokens INTEGER DEFAULT 0, document TEXT,
    reasoning_tokens INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT, line INTEGER, is_ok INTEGER, answer BLOB, PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended ON batches ({_ENDED_AT});
"""
_VERSION = 2
# What makes a database of an older version one of the next.
_CHANGES = {1: "ALTER TABLE batches ADD COLUMN reasoning_tokens INTEGER DEFAULT 0;"}
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
# Numbers of an OSError that says that the disk is full.
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(ValueError):
    """The data folder cannot be used; one line for the user."""


class DiskFull(Exception):
    """There is no room for what was to be written. What was there before is unharmed."""


class InUse(Exception):
    """The file is the input of a batch that is not finished."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a line of a batch."""

    line: int
    is_ok: bool
    answer: bytes  # the line of the output or the error file, without its end
    # Tokens of the prompt, those of them that were cached, tokens of the output, and those of them that were reasoning.
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)


@contextlib.contextmanager
def _telling_when_full() -> Iterator[None]:
    """Turn errors that say that the disk is full into DiskFull."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in _FULL:
            raise DiskFull(f"no space is left for the data folder: {error}") from None
        raise
    except OSError as error:
        if error.errno in FULL_ERRORS:
            raise DiskFull(f"no space is left for the data folder: {error.strerror}") from None
        raise


class Store:
    """What is kept in one data folder. Not for several threads at once.

    Args:
        folder: the data folder, which is made if it is not there. One process at a time has it.

    Raises:
        StoreError: it cannot be made or written, another process has it, or it is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = folder / "files"
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = sqlite3.connect(folder / "headway.sqlite", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, *_CHANGES, _VERSION):
                raise StoreError(f"the data folder {folder} was written by another version of Headway")
            self._db.executescript(f"{_CHANGES.get(version, '')} {_SCHEMA} PRAGMA user_version = {_VERSION};")
        except BlockingIOError:
            raise StoreError(f"another process uses the data folder {folder}") from None
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the data folder {folder} cannot be used: {error}") from None
        self._forget_expired()
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():  # left by a process that was killed as it wrote them
            if path.name not in known:
                path.unlink()

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    @contextlib.contextmanager
    def _transaction(self, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Keep all changes or none. What is not `durable` outlives the process, but maybe not a power failure."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # --- files --------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Where the content of a file is; the file must exist."""
        return self._files / file_id

    @_telling_when_full()
    def add_file(
        self, owner: str, content: BinaryIO, filename: str, purpose: Any, expiry_s: int = KEPT_S
    ) -> FileObject:
        """Keep what can be read from `content`. Raises DiskFull."""
        self._forget_expired()
        with self._written(owner, filename, purpose, expiry_s) as (file, add):
            shutil.copyfileobj(content, file, 2**20)
            with self._transaction():
                return add()

    @contextlib.contextmanager
    def _written(
        self, owner: str, filename: str, purpose: Any, expiry_s: int
    ) -> Iterator[tuple[BinaryIO, Callable[[], FileObject]]]:
        """A file to write, and a function that adds its row within a transaction. Without a row the file is deleted."""
        file_id, now = f"file-{secrets.token_hex(12)}", int(time.time())
        path, added = self.path(file_id), False
        try:
            with open(path, "xb") as file:

                def add() -> FileObject:
                    nonlocal added
                    file.flush()
                    os.fsync(file.fileno())
                    made = FileObject(
                        id=file_id,
                        bytes=file.tell(),
                        created_at=now,
                        expires_at=now + expiry_s,
                        filename=filename,
                        purpose=purpose,
                    )
                    row = (file_id, owner, purpose, made.expires_at, made.model_dump_json())
                    self._db.execute(
                        "INSERT INTO files (id, owner, purpose, expires_at, document) VALUES (?, ?, ?, ?, ?)", row
                    )
                    added = True
                    return made

                yield file, add
        except BaseException:
            added = False
            raise
        finally:
            if not added:
                path.unlink(missing_ok=True)

    def file(self, owner: str, file_id: str) -> FileObject | None:
        """A file; None where there is none, or it is another owner's."""
        self._forget_expired()
        row = self._db.execute("SELECT document FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else FileObject.model_validate_json(row[0])

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileObject], bool] | None:
        """Some files, and whether there are more. None where there is no file `after`."""
        self._forget_expired()
        where, values = ("AND purpose = ?", [purpose]) if purpose is not None else ("", [])
        rows = self._page("files", owner, after, limit, newest_first, where, values)
        return None if rows is None else ([FileObject.model_validate_json(row[-1]) for row in rows[0]], rows[1])

    def _page(
        self, table: str, owner: str, after: str | None, limit: int, newest_first: bool, where: str, values: list[Any]
    ) -> tuple[list[Any], bool] | None:
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        if after is not None:
            row = self._db.execute(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
            if row is None:
                return None
            where, values = f"{where} AND seq {beyond} ?", [*values, row[0]]
        asked = f"SELECT * FROM {table} WHERE owner = ? {where} ORDER BY seq {order} LIMIT ?"
        rows = self._db.execute(asked, (owner, *values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit

    @_telling_when_full()
    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file. False where there is none. Raises InUse, DiskFull."""
        if self.file(owner, file_id) is None:
            return False
        if self._db.execute("SELECT 1 FROM batches WHERE is_open AND input_file_id = ?", (file_id,)).fetchone():
            raise InUse
        self._drop([file_id])
        return True

    def _forget_expired(self) -> None:
        """Delete files whose time is up, but no inputs of open batches, and batches that ended long ago."""
        now = int(time.time())
        expired = self._db.execute(
            "SELECT id FROM files WHERE expires_at <= ?"
            " AND id NOT IN (SELECT input_file_id FROM batches WHERE is_open)",
            (now,),
        ).fetchall()
        old = self._db.execute(f"SELECT id FROM batches WHERE {_ENDED_AT} <= ?", (now - KEPT_S,)).fetchall()
        with contextlib.suppress(DiskFull), _telling_when_full():  # then they go later
            if expired:
                self._drop([row[0] for row in expired])
            if old:
                with self._transaction() as db:
                    db.executemany("DELETE FROM batches WHERE id = ?", old)

    def _drop(self, file_ids: list[str]) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)

    # --- batches ------------------------------------------------------------------------------------

    @_telling_when_full()
    def add_batch(self, owner: str, batch: Batch, output_expiry_s: int) -> bool:
        """Keep a new batch. False where its input file is not there. Raises DiskFull."""
        if self.file(owner, batch.input_file_id) is None:
            return False
        with self._transaction() as db:
            db.execute(
                "INSERT INTO batches (id, owner, input_file_id, is_open, output_expiry_s, document)"
                " VALUES (?, ?, ?, 1, ?, ?)",
                (batch.id, owner, batch.input_file_id, output_expiry_s, batch.model_dump_json()),
            )
            return True

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """A batch; None where there is none, or it is another owner's."""
        row = self._db.execute("SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        return None if row is None else _batch_of(row)

    def batches(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool] | None:
        """Some batches, the newest first, and whether there are more. None where there is no batch `after`."""
        rows = self._page("batches", owner, after, limit, True, "", [])
        return None if rows is None else ([_batch_of(row) for row in rows[0]], rows[1])

    def open_batches(self) -> list[tuple[str, Batch]]:
        """Batches that are not finished, each after its owner; the oldest first."""
        rows = self._db.execute("SELECT owner, * FROM batches WHERE is_open ORDER BY seq")
        return [(row[0], _batch_of(row)) for row in rows]

    @_telling_when_full()
    def move(
        self, batch_id: str, before: Collection[str], changes: Mapping[str, Any], results: Iterable[Result] = ()
    ) -> Batch:
        """Change a batch, and add results, if its status is one of `before`. Returns the batch as it is then.

        Raises:
            DiskFull: nothing has changed.
        """
        with self._transaction():
            batch = self._batch(batch_id)
            if batch.status not in before:
                return batch
            for result in results:
                self._add(batch_id, result)
            return self._change(batch_id, changes)

    def _batch(self, batch_id: str) -> Batch:
        return _batch_of(self._db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())

    def _change(self, batch_id: str, changes: Mapping[str, Any]) -> Batch:
        batch = self._batch(batch_id).model_copy(update=changes)
        self._db.execute(
            "UPDATE batches SET document = ?, is_open = ? WHERE id = ?",
            (batch.model_dump_json(), batch.is_open, batch_id),
        )
        return batch

    @_telling_when_full()
    def add_result(self, batch_id: str, result: Result) -> None:
        """Keep a line's answer; nothing happens where it has one. Raises DiskFull."""
        with self._transaction(durable=False):
            self._add(batch_id, result)

    def _add(self, batch_id: str, result: Result) -> None:
        row = (batch_id, result.line, result.is_ok, result.answer)
        added = self._db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", row).rowcount
        if added:
            self._db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?, "
                "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?, "
                "reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
                (result.is_ok, not result.is_ok, *result.tokens, batch_id),
            )

    def answered(self, batch_id: str) -> set[int]:
        """Lines of a batch that have an answer."""
        return {row[0] for row in self._db.execute("SELECT line FROM results WHERE batch = ?", (batch_id,))}

    @_telling_when_full()
    def finish(
        self, batch_id: str, rest: Iterable[Result], changes: Mapping[str, Any], is_mixed: bool = False
    ) -> Batch:
        """Write a batch's output and error file and finish it.

        Args:
            rest: answers to lines that have none yet.
            is_mixed: write one file, with errors among the answers.

        Raises:
            DiskFull: nothing has changed.
        """
        with contextlib.ExitStack() as files, self._transaction() as db:
            for result in rest:
                self._add(batch_id, result)
            files_made = {}
            owner, expiry_s = db.execute(
                "SELECT owner, output_expiry_s FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            for name, kinds in (("output", "0, 1"),) if is_mixed else (("output", "1"), ("error", "0")):
                rows = db.execute(
                    f"SELECT answer FROM results WHERE batch = ? AND is_ok IN ({kinds}) ORDER BY line", (batch_id,)
                )
                first = rows.fetchone()
                if first is None:
                    continue
                written = self._written(owner, f"{batch_id}_{name}.jsonl", "batch_output", expiry_s)
                file, add = files.enter_context(written)
                file.write(first[0] + b"\n")
                file.writelines(row[0] + b"\n" for row in rows)
                files_made[f"{name}_file_id"] = add().id
            db.execute("DELETE FROM results WHERE batch = ?", (batch_id,))
            return self._change(batch_id, {**changes, **files_made})


def _batch_of(row: Any) -> Batch:
    completed, failed, input_tokens, cached_tokens, output_tokens, document, reasoning_tokens = row[-7:]
    batch = Batch.model_validate_json(document)
    batch.request_counts.completed, batch.request_counts.failed = completed, failed
    usage = batch.usage
    usage.input_tokens, usage.output_tokens = input_tokens, output_tokens
    usage.input_tokens_details.cached_tokens, usage.total_tokens = cached_tokens, input_tokens + output_tokens
    usage.output_tokens_details.reasoning_tokens = reasoning_tokens
    return batch
