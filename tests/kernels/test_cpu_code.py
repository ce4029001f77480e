"""Compiled code is kept where no other user can put any, for all installations, and dropped when its time is over."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from headway.kernels.cpu import code as cpu_code
from headway.kernels.cpu.code import can_keep, code_folders, drop_stale_code, exclusive, keep, place_of, read, sources

NAME = "cpu_b.f-0123.native"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Beside the sources, in the user's cache, and in the folder for temporary files."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o1777)
    monkeypatch.setattr(cpu_code, "_BESIDE", tmp_path / "installed")
    cpu_code._own_folder.cache_clear()
    temporary = tmp_path / "temporary" / f"headway-{os.geteuid()}"
    return tmp_path / "installed", tmp_path / "cache" / "headway" / "kernels", temporary


def test_code_is_dropped_when_a_source_changes_and_kept_when_none_does(tmp_path: Path) -> None:
    code = tmp_path / "cpu_b.f-0123.native"
    drop_stale_code(tmp_path, "one")
    code.write_text("compiled")
    drop_stale_code(tmp_path, "one")
    assert code.exists()
    drop_stale_code(tmp_path, "two")
    assert not code.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    drop_stale_code(tmp_path / "file", "one")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    keep(NAME, b"code")
    assert read(NAME) is None and not can_keep()


def test_code_is_kept_for_all_users_of_an_installation_and_all_installations_of_a_user(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, base, _ = folders
    installed.mkdir()
    own = base / sources()[:16]
    assert code_folders() == [installed, own] and place_of(NAME) == own / NAME
    keep(NAME, b"code")
    assert (installed / NAME).read_bytes() == (own / NAME).read_bytes()
    assert read(NAME) == b"code" and place_of(NAME) == installed / NAME
    (installed / NAME).write_bytes(b"damaged")
    assert read(NAME) == b"code"
    monkeypatch.setattr(cpu_code, "_BESIDE", installed.parent / "another")
    assert read(NAME) == b"code" and place_of(NAME) == own / NAME
    assert not (installed.parent / "another").exists()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(installed.parent))
    assert code_folders() == [installed.parent] and read(NAME) is None


def test_a_user_without_a_home_has_a_private_folder_of_temporary_files(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert code_folders()[1:] == [folders[2] / sources()[:16]] and can_keep()
    assert folders[2].stat().st_mode & 0o777 == 0o700
    keep(NAME, b"code")
    assert read(NAME) == b"code"


def link(base: Path) -> None:
    (base.parent / "elsewhere").mkdir(parents=True)
    base.symlink_to(base.parent / "elsewhere")


def others_may_write(base: Path) -> None:
    base.mkdir(parents=True)
    base.chmod(0o720)


def others_may_move_it(base: Path) -> None:
    base.mkdir(parents=True)
    base.parent.chmod(0o777)


@pytest.mark.parametrize("poison", [link, others_may_write, others_may_move_it])
@pytest.mark.parametrize("which", [1, 2])
def test_nothing_is_loaded_from_where_another_user_can_write(
    folders: tuple[Path, Path, Path], which: int, poison: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of temporary files takes the place of the cache; nothing takes the place of the former."""
    assert callable(poison)
    poison(folders[which])
    (folders[which] / sources()[:16]).mkdir()
    if which == 2:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert code_folders()[1:] == [folders[2] / sources()[:16]][: 2 - which]


def test_nothing_is_loaded_from_a_folder_of_another_user(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens to root, who has the HOME of whoever became root."""
    assert len(code_folders()) == 2
    cpu_code._own_folder.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert code_folders() == [folders[0]]


def test_code_of_sources_that_are_used_no_more_is_deleted(folders: tuple[Path, Path, Path]) -> None:
    base, now = folders[1], time.time()
    days = [31, 29, *range(1, 15), 28]
    for number, day in enumerate(days):
        (base / str(number)).mkdir(mode=0o700, parents=True)
        (base / str(number) / NAME).write_bytes(b"code")
        os.utime(base / str(number), (now, now - day * 86400))
    base.chmod(0o700)
    own = code_folders()[1]
    kept = {days[int(each.name)] for each in base.iterdir() if each != own}
    assert kept == {*range(1, 15), 28}
    os.utime(own, (0, 0))
    cpu_code._own_folder.cache_clear()
    assert code_folders()[1].stat().st_mtime > now - 60


def test_a_lock_is_let_go_of_whatever_happens_and_may_be_taken_again_inside(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "f.lock"
    for _ in range(2):
        with pytest.raises(KeyError), exclusive(lock), exclusive(lock):
            raise KeyError
    (tmp_path / "file").write_text("")
    with exclusive(tmp_path / "file" / "f.lock"):
        pass
