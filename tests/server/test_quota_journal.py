"""The journal of quotas on a disk that is full, damaged, torn, or somebody else's."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from headway.policy.admission.quota import Quotas
from headway.policy.admission.tenants import Tenant, TenantTable
from headway.server.quota_journal import QuotaJournal

TABLE = TenantTable((Tenant(name="acme", tokens_per_minute=1000),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quotas.journal"


def opened(path: Path, now: int = 0) -> tuple[QuotaJournal, Quotas]:
    journal = QuotaJournal(str(path))
    return journal, Quotas(TABLE, now, journal.append, journal.past)


def killed(journal: QuotaJournal) -> None:
    """As kill -9 would: nothing is written any more, and the lock is free."""
    os.close(journal._file)
    os.close(journal._lock)


def test_a_restart_at_any_byte_loses_and_doubles_nothing(path: Path, tmp_path: Path) -> None:
    """A journal that ends anywhere is one of the states that the server was in."""
    journal, quotas = opened(path)
    states = [path.read_bytes()]
    settled = [0]
    for number, used in enumerate((30, None, 250, 700)):
        quotas.reserve("acme", 200, number)
        states.append(path.read_bytes())
        quotas.settle(number, used, number)
        states.append(path.read_bytes())
        settled += [settled[-1], settled[-1] + (used or 0)]
    killed(journal)
    whole = path.read_bytes()
    for length in range(len(states[0]), len(whole) + 1):
        torn = tmp_path / f"torn-{length}"
        torn.write_bytes(whole[:length])
        again, found = opened(torn, now=10)
        at = max(number for number, state in enumerate(states) if len(state) <= length)
        tokens = found.of("acme")[1]
        assert (tokens.settled, tokens.outstanding) == (settled[at], 0)
        assert tokens.reserved == tokens.settled + tokens.refunded
        assert torn.read_bytes().count(b"\n") == 1, "it begins anew"
        again.close()


def test_a_full_disk_refuses_reservations_and_loses_no_settlement(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, quotas = opened(path)
    quotas.reserve("acme", 200, 0)
    written, write = path.read_bytes(), os.write

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2])

    def none(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for full in (half, none):
        monkeypatch.setattr("headway.server.quota_journal.os.write", full)
        with pytest.raises(OSError, match="No space left"):
            quotas.reserve("acme", 100, 0)
        assert path.read_bytes() == written and quotas.of("acme")[1].reserved == 200
    quotas.settle(0, 50, 0)
    monkeypatch.undo()
    quotas.reserve("acme", 10, 0)
    killed(journal)
    tokens = opened(path)[1].of("acme")[1]
    assert (tokens.reserved, tokens.settled, tokens.refunded) == (210, 50, 160)


def test_it_begins_anew_when_it_is_long(path: Path) -> None:
    journal, quotas = opened(path)
    for number in range(50):
        quotas.settle(quotas.reserve("acme", 10, number), 1, number)  # type: ignore[arg-type]
    before = journal.size
    quotas.reserve("acme", 10, 0)
    quotas.compact(0)
    assert journal.size < before / 10 and path.stat().st_size == journal.size
    asyncio.run(journal.sync())
    journal.close()
    again, found = opened(path)
    assert found.of("acme")[1].settled == 50 and found.of("acme")[1].refunded == 460
    again.close()


def test_a_place_that_cannot_be_used(path: Path, tmp_path: Path) -> None:
    journal, quotas = opened(path)
    with pytest.raises(ValueError, match=r"another server uses .*--quota-journal"):
        QuotaJournal(str(path))
    quotas.reserve("acme", 10, 0)
    quotas.settle(0, 5, 0)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{\n" + lines[2])
    with pytest.raises(ValueError, match="line 2: damaged; move the file away to start with full budgets"):
        QuotaJournal(str(path))
    other = tmp_path / "other"
    other.write_bytes(lines[1])
    with pytest.raises(ValueError, match="line 1: not a quota journal"):
        QuotaJournal(str(other))
    with pytest.raises(ValueError, match=r"cannot keep quotas in .*/none/.*: No such file"):
        QuotaJournal(str(tmp_path / "none" / "x"))
