"""Answers of /v1/responses, kept so that later requests may go on from them: in memory, and in a file if there is one.

All are read from memory. A thread writes to the file what has changed, so no request waits for the disk.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.server.errors import ApiError, bad_request, not_found
from headway.server.generation import Generation

MOST_RESPONSES, MOST_BYTES = 4096, 64 << 20
# The file is of one server at a time. It has no more than the memory, and reuses the room of what was given up.
_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY, name TEXT UNIQUE, tenant TEXT, body BLOB, input_items BLOB, messages BLOB);
PRAGMA user_version = 1;
COMMIT;
"""
logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer and what it follows."""

    tenant: str  # whose it is; nobody else finds it
    body: bytes  # the response object, as JSON
    input_items: bytes  # the items of its request
    messages: bytes  # the whole conversation, its answer included, as messages of a chat completion in JSON

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """Keeps the latest answers, within a number and a size; and which answers are under way.

    Args:
        path: the SQLite file that has them over a restart; None for memory alone.

    Raises:
        ValueError: the file cannot be used; one line for the user.
    """

    def __init__(self, path: Path | None = None, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes, self._most, self._most_bytes = 0, most, most_bytes
        self._under_way: dict[str, Generation] = {}
        self._path, self._db = path, None if path is None else _opened(path)
        self._writing = ThreadPoolExecutor(1, "responses")
        if self._db is not None:
            try:
                rows = self._db.execute("SELECT name, tenant, body, input_items, messages FROM responses ORDER BY seq")
                for name, *row in rows.fetchall():
                    self.keep(name, Kept(*row), is_new=False)
            except sqlite3.Error as error:
                raise ValueError(f"--response-store {path}: it is damaged: {error}") from None

    @contextmanager
    def under_way(self, name: str, generation: Generation) -> Iterator[None]:
        """An answer is under way within it, so it may be cancelled."""
        self._under_way[name] = generation
        try:
            yield
        finally:
            del self._under_way[name]

    def keep(self, name: str, kept: Kept, is_new: bool = True) -> None:
        """Keep an answer. Older ones are given up for it; one that is larger than all may be is not kept."""
        if kept.size > self._most_bytes:
            return
        self._kept[name] = kept
        self._bytes += kept.size
        if is_new:
            self._changed(name)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            oldest, given_up = self._kept.popitem(last=False)
            self._bytes -= given_up.size
            self._changed(oldest)

    def find(self, name: str, tenant: str) -> Kept:
        """An answer. Raises ApiError 404."""
        kept = self._kept.get(name)
        if kept is None or kept.tenant != tenant:
            raise _unknown(name)
        return kept

    def delete(self, name: str, tenant: str) -> None:
        """Give an answer up. Raises ApiError 404."""
        self._bytes -= self.find(name, tenant).size
        del self._kept[name]
        self._changed(name)

    def cancel(self, name: str, tenant: str) -> None:
        """End an answer that is under way.

        Raises:
            ApiError: 404 where there is no such answer, 400 where it has ended.
        """
        generation = self._under_way.get(name)
        if generation is not None and generation.terms.tenant == tenant:
            generation.abort(ApiError(499, "the response was cancelled", code="cancelled", kind="cancelled"))
            return
        self.find(name, tenant)
        raise bad_request(f"response {name} has ended; only one that is under way can be cancelled")

    # --- the file -----------------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        if self._db is not None:
            self._writing.submit(self._write, self._db, name)

    def _write(self, db: sqlite3.Connection, name: str) -> None:
        """Have the file say of an answer what the memory says by now."""
        kept = self._kept.get(name)
        try:
            if kept is None:
                db.execute("DELETE FROM responses WHERE name = ?", (name,))
            else:
                db.execute("INSERT OR IGNORE INTO responses VALUES (NULL, ?, ?, ?, ?, ?)", (name, *astuple(kept)))
        except sqlite3.Error as error:
            logger.error("cannot write to %s: %s; response %s ends with the server", self._path, error, name)

    def close(self) -> None:
        """Write what is left."""
        self._writing.shutdown()
        if self._db is not None:
            self._db.close()


def _opened(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        with ExitStack() as failing:
            db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            failing.callback(db.close)
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1):
                raise ValueError(f"--response-store {path}: it was written by another version of Headway")
            if not version and db.execute("SELECT name FROM sqlite_master").fetchone():
                raise ValueError(f"--response-store {path}: it is a database of something else")
            db.executescript(_SCHEMA)
            failing.pop_all()
            return db
    except OSError as error:
        raise ValueError(f"--response-store {path}: {error.strerror}") from None
    except sqlite3.Error as error:
        why = "another server uses it" if "locked" in str(error) else str(error)
        raise ValueError(f"--response-store {path}: {why}") from None


def page_of(items: list[dict[str, Any]], after: str | None, limit: int, newest_first: bool) -> bytes:
    """A list object with some of the items. Raises ApiError 400 where `after` is none of them."""
    items = items[::-1] if newest_first else items
    if after is not None:
        at = next((number for number, item in enumerate(items) if item.get("id") == after), None)
        if at is None:
            raise bad_request(f"after is {after[:60]!r}, which is no item of this response", "after")
        items = items[at + 1 :]
    page = items[:limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0].get("id") if page else None,
            "last_id": page[-1].get("id") if page else None,
            "has_more": len(items) > limit,
        }
    )


def _unknown(name: str) -> ApiError:
    until = "until the server ends (or longer, with --response-store)"
    message = f"there is no response {name[:100]!r}; the latest ones are kept, unless store is false, {until}"
    return not_found(message, "response_not_found")
