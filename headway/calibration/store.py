"""Calibrated machines on disk: what `headway calibrate` measured, for every command that plans. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.calibration.peaks import MachinePeaks
from headway.calibration.samples import Kind, Sample
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.files import config_folder, write_files

FORMAT = 2  # version of the file; raised when its meaning changes
LONGEST_NAME = 64
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
_NOT_IN_A_SLUG = re.compile(r"[^a-z0-9]+")
_TRADE_MARKS = re.compile(r"\((r|tm|c)\)|®|™", re.IGNORECASE)


class StoreError(ValueError):
    """A stored machine cannot be read or written; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class CalibratedMachine:
    """A machine as it was measured, and what this engine reaches of it."""

    hardware: Hardware
    efficiency: Efficiency
    threads: int  # threads of the CPU that took part; 0 on a GPU
    date: str  # ISO 8601, of the measurement
    versions: dict[str, str]  # of headway, torch and whatever else the figures depend on
    rounds: int  # the number of rounds that each sample was measured in
    seconds: float  # seconds that all of it took
    peaks: MachinePeaks  # the peaks of the device, with repeats and scatter
    samples: tuple[Sample, ...]  # what the efficiency was fitted to
    fit_error: dict[str, float]  # the error by kind of sample, median of |fitted / measured - 1|
    # The residuals by kind of sample, factors on what is fitted between which four in five runs lie.
    residuals: dict[str, tuple[float, float]]
    busy: str | None = None  # why the figures may be too low; None when the machine was quiet
    format: int = FORMAT

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str) -> CalibratedMachine:
        """Raises msgspec.DecodeError when it is not what to_json() writes."""
        found = msgspec.json.decode(text, type=_Version).format
        if found != FORMAT:
            raise msgspec.ValidationError(f"its format is {found}, this version reads {FORMAT}")
        machine = msgspec.json.decode(text, type=cls)
        hardware = machine.hardware
        rates = (hardware.bytes_per_s, *hardware.flops_per_s.values(), *(rate for _, rate in hardware.reads))
        if not hardware.flops_per_s or min(hardware.memory_bytes, *rates) <= 0:
            raise msgspec.ValidationError("its memory and all of its rates must be above 0")
        if set(machine.residuals) != set(map(str, Kind)):
            raise msgspec.ValidationError(f"residuals must be of {', '.join(Kind)}")
        if any(not 0 < low <= 1 <= high for low, high in machine.residuals.values()):
            raise msgspec.ValidationError("residuals must lie on both sides of 1, above 0")
        return machine


class _Version(msgspec.Struct):
    format: int = 0


def folder() -> Path:
    """Where calibrated machines are kept: $XDG_CONFIG_HOME/headway/hardware, by default below ~/.config."""
    return config_folder() / "hardware"


def slug(name: str) -> str:
    """A processor's or GPU's name in lower case, with dashes: the default name of its entry."""
    dashed = _NOT_IN_A_SLUG.sub("-", _TRADE_MARKS.sub("", name).lower()).strip("-")
    return dashed[:LONGEST_NAME].rstrip("-") or "machine"


def check_name(name: str) -> str:
    """The name, if it can be one. Raises StoreError."""
    if _NAME.fullmatch(name) is None:
        raise StoreError(
            f"name is {name!r}; use lower-case letters, digits, dots, dashes and underscores, {LONGEST_NAME} at most, "
            "and begin with a letter or digit"
        )
    return name


def path_of(name: str) -> Path:
    """The file of an entry. Raises StoreError for a name that cannot be one."""
    return folder() / f"{check_name(name)}.json"


def check_place(path: Path | None = None) -> None:
    """Whether `save` could write to `path`, or to `folder()`; for before a measurement, which takes its time.

    Raises:
        StoreError: it could not.
    """
    if path is None:
        # The folder is made with the first entry. Until then the nearest folder above it counts.
        parent = next(each for each in (folder(), *folder().parents) if os.path.exists(each))
    elif os.path.exists(path) and not os.path.isfile(path):
        raise StoreError(f"output is {path}, which is not a file; give the name of a file")
    else:
        parent = path.parent
    if not os.path.isdir(parent):
        raise StoreError(f"cannot write to {parent}: there is no such folder; make it, or choose another with --output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"cannot write to {parent}: no permission; choose another folder with --output")


def save(machine: CalibratedMachine, path: Path | None = None) -> Path:
    """Write an entry, whole or not at all, to its place in `folder()` or to `path`, whose folder must be there.

    Raises:
        StoreError: it cannot be written.
    """
    target = path_of(machine.hardware.key) if path is None else path
    try:
        if path is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        write_files({target: machine.to_json() + b"\n"})
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}; choose another place with --output") from None
    return target


def load(path: Path) -> CalibratedMachine:
    """One entry.

    Raises:
        StoreError: it cannot be read, or was written by another version.
    """
    try:
        return CalibratedMachine.from_json(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path} is not a calibrated machine of this version ({' '.join(str(error).split())}); delete it, or "
            f"measure again with `headway calibrate --name {path.stem}`"
        ) from None
