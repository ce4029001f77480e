"""Calibrated machines on disk: names, files that are whole or not there, and what is said of broken ones."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.calibration import store
from headway.calibration.store import (
    LONGEST_NAME,
    CalibratedMachine,
    StoreError,
    check_name,
    check_place,
    folder,
    load,
    path_of,
    save,
    slug,
)
from headway.files import cache_folder
from tests.calibration.machines import a_machine


def test_an_entry_comes_back_as_it_went(entries: Path) -> None:
    machine = a_machine()
    assert save(machine) == entries / "mine.json" == path_of("mine")
    assert load(entries / "mine.json") == machine
    assert stat.S_IMODE((entries / "mine.json").stat().st_mode) == 0o644
    assert json.loads((entries / "mine.json").read_text())["hardware"]["key"] == "mine"


def test_a_second_measurement_takes_the_place_of_the_first(entries: Path) -> None:
    save(a_machine())
    save(replace(a_machine(), rounds=40))
    assert load(path_of("mine")).rounds == 40
    assert [each.name for each in entries.iterdir()] == ["mine.json"]


def test_another_place(tmp_path: Path, entries: Path) -> None:
    assert save(a_machine(), tmp_path / "here.json") == tmp_path / "here.json"
    assert load(tmp_path / "here.json") == a_machine()
    assert not entries.exists()


@pytest.mark.parametrize(("said", "base"), [("", ".config"), ("relative/path", ".config"), ("/etc/xdg", "/etc/xdg")])
def test_where_entries_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, base: str) -> None:
    """A relative path counts as none by the XDG Base Directory Specification."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", said)
    assert folder() == tmp_path / base / "headway" / "hardware"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert folder() == tmp_path / ".config" / "headway" / "hardware"


def test_a_user_without_a_home_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a container may run under an id that is no user's."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert not folder().exists() and not cache_folder().exists()


@pytest.mark.parametrize(
    "name",
    ["", " ", "../up", "a/b", "a\\b", ".hidden", "-flag", "Upper", "with space", "a\n", "ä", "nul\0", "a" * 65],
)
def test_what_can_be_no_name(name: str) -> None:
    with pytest.raises(StoreError, match="use lower-case letters, digits") as said:
        check_name(name)
    assert "\n" not in str(said.value)
    with pytest.raises(StoreError):
        path_of(name)


@pytest.mark.parametrize("name", ["a", "7", "amd-epyc_9.4", "h100-sxm", "a" * LONGEST_NAME])
def test_what_can_be_a_name(name: str) -> None:
    assert check_name(name) == name
    assert path_of(name).parent == folder()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("Intel(R) Xeon(R) Platinum 8480+ @ 2.00GHz", "intel-xeon-platinum-8480-2-00ghz"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("Some™ GPU", "some-gpu"),
        ("", "machine"),
        ("¿?", "machine"),
    ],
)
def test_a_name_from_a_device(name: str, expected: str) -> None:
    assert slug(name) == expected


@given(st.text())
def test_every_device_has_a_name(name: str) -> None:
    assert check_name(slug(name))


def test_nothing_is_left_of_a_file_that_could_not_be_written(entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(a_machine())
    before = (entries / "mine.json").read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match=r"cannot write .*mine\.json: No space left on device; choose another"):
        save(replace(a_machine(), rounds=99))
    assert [each.name for each in entries.iterdir()] == ["mine.json"]
    assert (entries / "mine.json").read_bytes() == before


def test_nothing_is_left_after_an_interrupt(entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(a_machine())
    assert list(entries.iterdir()) == []


def test_a_place_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    check_place(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("{}")
    check_place(tmp_path / "old.json")
    for place, why in (
        (tmp_path / "none" / "new.json", "there is no such folder; make it"),
        (tmp_path / "old.json" / "new.json", "there is no such folder"),
        (tmp_path, "which is not a file"),
        (Path("/dev/null"), "which is not a file"),
        (Path(""), "which is not a file"),
    ):
        with pytest.raises(StoreError, match=why):
            check_place(place)


def test_the_folder_of_entries_is_made_when_the_first_is_saved(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_place()
    assert not entries.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="choose another with --output"):
        check_place()
    with pytest.raises(StoreError, match="cannot write"):
        save(a_machine())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="no permission"):
        check_place(tmp_path / "new.json")
    with pytest.raises(StoreError, match="Permission denied"):
        save(a_machine(), tmp_path / "new.json")


def edited(**changes: Any) -> bytes:
    """An entry whose fields were changed by hand; dots lead into its objects."""
    content = json.loads(a_machine().to_json())
    for path, value in changes.items():
        *inner, last = path.split("__")
        target = content
        for key in inner:
            target = target[key]
        target[last] = value
    return json.dumps(content).encode()


BROKEN = {
    "empty": b"",
    "cut off": a_machine().to_json()[:-200],
    "null": b"null",
    "a list": b"[]",
    "no format": b"{}",
    "an older format": edited(format=store.FORMAT - 1),
    "a newer format": edited(format=store.FORMAT + 1),
    "not UTF-8": b'{"format": 2, "hardware": "\xff"}',
    "too deep": b'{"format": 2, "x":' + b"[" * 100_000,
    "a field is missing": b'{"format": 1}',
    "a wrong type": edited(threads="two"),
    "no bandwidth": edited(hardware__bytes_per_s=0),
    "no rates": edited(hardware__flops_per_s={}),
    "a rate below 0": edited(hardware__flops_per_s={"bf16": -1.0}),
    "an impossible share": edited(efficiency__kv_bytes=0),
    "an unknown kind of sample": edited(samples=[{"piece": {"kind": "nope"}}]),
    "a curve that goes back": edited(efficiency__linear=[[4, 1.0], [1, 1.0]]),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_is_named_in_one_line(entries: Path, content: bytes) -> None:
    entries.mkdir(parents=True)
    (entries / "old.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"old\.json is not a calibrated machine.*calibrate --name old") as said:
        load(entries / "old.json")
    assert "\n" not in str(said.value)


def test_the_format_that_a_file_has_is_said(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_bytes(edited(format=7))
    with pytest.raises(StoreError, match="its format is 7, this version reads 2"):
        load(tmp_path / "old.json")


def test_a_file_that_cannot_be_read_is_named(entries: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*none\.json: No such file"):
        load(entries / "none.json")
    (entries / "folder.json").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"cannot read .*folder\.json: Is a directory"):
        load(entries / "folder.json")


def test_fields_of_later_versions_are_passed_over() -> None:
    assert CalibratedMachine.from_json(edited(more={"a": 1})) == a_machine()


def test_reading_entries_needs_no_torch() -> None:
    program = "import sys, headway.calibration.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
