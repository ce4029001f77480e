"""The requests of a run as columns of a JSON object, and back.

Times are nanoseconds after the run's begin, null for those that have not come; `chunk_ns` of a request holds its first
chunk's time and then gaps. A column that holds nothing but its default is left out.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np

from headway.load.record import Failure, RequestRecord

TIMES = ("scheduled_ns", "sent_ns", "connected_ns", "headers_ns", "answer_ns", "end_ns")
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# Columns that are fields as they stand: the type of a value, and what a missing column stands for.
PLAIN: dict[str, tuple[Any, Any]] = {
    "index": (int, 0),
    "class_name": (str, ""),
    "planned_prompt_tokens": (Count | None, None),
    "planned_output_tokens": (int, 0),
    "tokens_per_chunk_known": (bool, False),
    "prompt_tokens": (Count | None, None),
    "output_tokens": (Count | None, None),
    "cached_tokens": (Count | None, None),
    "finish_reason": (str | None, None),
    "resent": (int, 0),
    "timings": (dict[str, Any] | None, None),
    "text": (str | None, None),
    "invalid": (str | None, None),
    "tenant": (str, ""),
    "graph": (int | None, None),
    "graph_size": (int, 1),
    "calls": (list[dict[str, Any]], []),
}


def to_columns(records: Sequence[RequestRecord], began_ns: int) -> dict[str, Any]:
    """All that is known of these requests; `from_columns` gives back the same."""
    columns: dict[str, Any] = {"count": len(records)}
    for name, (_, default) in PLAIN.items():
        _put(columns, name, [getattr(record, name) for record in records], default)
    for name in TIMES:
        _put(columns, name, [_offset(getattr(record, name), began_ns) for record in records], None)
    _put(columns, "chunk_ns", [_gaps(record.chunk_ns, began_ns) for record in records], [])
    _put(columns, "chunk_tokens", [_tokens(record) for record in records], None)
    _put(columns, "failure", [record.failure and asdict(record.failure) for record in records], None)
    return columns


def from_columns(columns: dict[str, Any], began_ns: int) -> list[RequestRecord]:
    """The requests of such columns.

    Raises:
        KeyError, ValueError, OverflowError, msgspec.ValidationError: the columns are not what `to_columns` makes.
    """
    count = msgspec.convert(columns["count"], int)
    fields = {name: _get(columns, name, count, kind, default) for name, (kind, default) in PLAIN.items()}
    for name in TIMES:
        times = _get(columns, name, count, Nanoseconds | None, None)
        fields[name] = [0 if ns is None else ns + began_ns for ns in times]
    chunks = [_times(gaps, began_ns) for gaps in _get(columns, "chunk_ns", count, list[Nanoseconds], [])]
    fields["chunk_ns"] = chunks
    fields["chunk_tokens"] = [
        array("i", [1] * len(times) if tokens is None else tokens)
        for times, tokens in zip(chunks, _get(columns, "chunk_tokens", count, list[Count] | None, None), strict=True)
    ]
    fields["failure"] = _get(columns, "failure", count, Failure | None, None)
    names = list(fields)
    records = [RequestRecord(**dict(zip(names, values, strict=True))) for values in zip(*fields.values(), strict=True)]
    for record in records:
        if len(record.chunk_ns) != len(record.chunk_tokens):
            raise ValueError(f"request {record.index} has tokens for {len(record.chunk_tokens)} chunks, not for all")
        if any(later < earlier for earlier, later in itertools.pairwise((record.sent_ns, *record.chunk_ns))):
            raise ValueError(
                f"request {record.index} has a token that came before it was sent, or before an earlier one"
            )
    return records


def _put(columns: dict[str, Any], name: str, values: list[Any], default: Any) -> None:
    if any(value != default for value in values):
        columns[name] = values


def _get(columns: dict[str, Any], name: str, count: int, kind: Any, default: Any) -> list[Any]:
    if name not in columns:
        return [default] * count
    values = msgspec.convert(columns[name], list[kind])
    if len(values) != count:
        raise ValueError(f"column {name!r} has {len(values)} values for {count} requests")
    return values


def _offset(ns: int, began_ns: int) -> int | None:
    return ns - began_ns if ns else None


def _gaps(chunk_ns: array[int], began_ns: int) -> list[int]:
    gaps: list[int] = np.diff(np.frombuffer(chunk_ns, np.int64), prepend=began_ns).tolist() if chunk_ns else []
    return gaps


def _times(gaps: list[int], began_ns: int) -> array[int]:
    return array("q", list(itertools.accumulate(gaps, initial=began_ns))[1:])


def _tokens(record: RequestRecord) -> list[int] | None:
    return None if all(tokens == 1 for tokens in record.chunk_tokens) else list(record.chunk_tokens)
