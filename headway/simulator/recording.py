"""Reads what `headway serve --record-steps` has written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.policy.step.recording import (
    FORMAT,
    AdapterLoaded,
    Arrival,
    End,
    NewClasses,
    Proposal,
    Record,
    RecordedEngine,
    Step,
)

_decoder = msgspec.json.Decoder(Record)


@dataclass(slots=True)
class Recording:
    """The life of one engine process: its records in order."""

    engine: RecordedEngine
    records: list[Arrival | NewClasses | AdapterLoaded | Proposal | Step | End] = field(default_factory=list)


def read_recordings(path: Path | str) -> list[Recording]:
    """What engine processes have recorded in a file, one after the other.

    A process that was killed may have left half a line as its last; that is left out.

    Raises:
        ValueError: the file can't be read, or is no recording; one line that says why.
    """
    recordings: list[Recording] = []
    broken = 0
    for number, record in _records(path):
        if isinstance(record, RecordedEngine):
            if record.format != FORMAT:
                raise ValueError(
                    f"{path}, line {number}: recorded in format {record.format}; this version reads {FORMAT}"
                )
            recordings.append(Recording(record))
            broken = 0
        elif broken or not recordings:
            raise ValueError(f"{path}, line {broken or number}: this is not a record of an engine's steps")
        elif record is None:
            broken = number
        else:
            recordings[-1].records.append(record)
    if not recordings:
        raise ValueError(f"{path} has no recording in it")
    return recordings


def _records(path: Path | str) -> Iterator[tuple[int, Record | None]]:
    """The number of each line and what it says; None where that is no record."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, _decoder.decode(line)
                except msgspec.DecodeError:
                    yield number, None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
