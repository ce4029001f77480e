"""What is kept of files and batches in a data folder, and for how long."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from headway.server.batches.objects import KEPT_S, Batch
from headway.server.batches.store import DiskFull, Result, Store, StoreError

DAY_S = 24 * 3600


def test_a_data_folder_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch each day: those of the last thirty days are there with their files, and one that is not finished."""
    now = 1_800_000_000
    monkeypatch.setattr("headway.server.batches.store.time.time", lambda: now)
    store = Store(tmp_path)

    def begin(number: int) -> Batch:
        file = store.add_file("", io.BytesIO(b"{}"), f"day {number}", "batch")
        made = Batch(
            id=f"batch-{number}", endpoint="/v1/completions", input_file_id=file.id, completion_window="24h",
            created_at=now, expires_at=now + DAY_S,
        )  # fmt: skip
        assert store.add_batch("", made, KEPT_S)
        return made

    stays = begin(0)
    for day in range(1, 40):
        now += DAY_S
        ended = begin(day)
        outcome = ("completed", "failed", "expired", "cancelled")[day % 4]
        store.finish(ended.id, [Result(1, True, b"{}")], {"status": outcome, f"{outcome}_at": now})
    listed, _ = store.files("", None, None, 1000, True) or ([], False)
    batches, _ = store.batches("", None, 1000) or ([], False)
    assert [batch.id for batch in batches] == [f"batch-{day}" for day in range(39, 9, -1)] + [stays.id]
    assert len(listed) == 2 * 30 + 1 == len(list((tmp_path / "files").iterdir()))
    now += 30 * DAY_S
    store.close()
    store = Store(tmp_path)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [stays.input_file_id], "also where nobody asks"
    assert [batch.id for _, batch in store.open_batches()] == [stays.id]
    store.close()


def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    with pytest.raises(StoreError, match="another process uses"):
        Store(tmp_path / "data")
    store.close()
    Store(tmp_path / "data").close()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file" / "data")


def test_folders_of_another_version_and_leftovers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = store.add_file("", io.BytesIO(b"kept"), "name", "batch")
    store.close()
    (tmp_path / "files" / "file-half-written").write_bytes(b"ha")
    store = Store(tmp_path)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]
    store.close()
    with sqlite3.connect(tmp_path / "headway.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="another version"):
        Store(tmp_path)


def test_a_folder_of_the_first_version_goes_on(tmp_path: Path) -> None:
    """It did not count tokens of reasoning."""
    store = Store(tmp_path)
    file = store.add_file("", io.BytesIO(b"{}"), "name", "batch")
    ends: dict[str, Any] = {"created_at": int(time.time()), "expires_at": int(time.time()) + DAY_S}
    asked = {"endpoint": "/v1/completions", "input_file_id": file.id, "completion_window": "24h"}
    assert store.add_batch("", Batch(id="batch", **asked, **ends), KEPT_S)
    store.close()
    with sqlite3.connect(tmp_path / "headway.sqlite") as db:
        db.execute("ALTER TABLE batches DROP COLUMN reasoning_tokens")
        db.execute("PRAGMA user_version = 1")
    for thought in (3, 7):
        store = Store(tmp_path)
        store.add_result("batch", Result(thought, True, b"{}", (5, 0, 4, thought)))
        found = store.batch("", "batch")
        store.close()
    assert found is not None
    usage = found.usage
    assert usage.output_tokens_details.reasoning_tokens == 10 and usage.total_tokens == 18


def test_an_upload_without_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content goes to a device that is always full."""
    store = Store(tmp_path)
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    real_open = open
    monkeypatch.setattr(
        "builtins.open", lambda path, mode="r", *more: real_open(full if mode == "xb" else path, mode.replace("x", "w"))
    )
    with pytest.raises(DiskFull, match="no space is left"):
        store.add_file("", io.BytesIO(b"x" * 10_000), "name", "batch")
    monkeypatch.undo()
    assert store.files("", None, None, 10, True) == ([], False)
    assert list((tmp_path / "files").iterdir()) == []
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """EFBIG comes of `ulimit -f` and of the largest file of a file system."""
    store = Store(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copyfileobj", refuse)
    with pytest.raises(DiskFull, match=os.strerror(number)):
        store.add_file("", io.BytesIO(b"x"), "name", "batch")
    assert store.files("", None, None, 10, True) == ([], False)
    store.close()
