"""Traces of real services: when each request came, how long it was, and what it shared with others.

Formats: the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (CSV: Timestamp in
seconds, Model, Request tokens, Response tokens, Total tokens, Log Type) and Mooncake (JSON Lines: timestamp in
milliseconds, input_length, output_length, hash_ids; and tenant, which is ours). They hold no text: prompts of the same
lengths are made up.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from headway.load.errors import BenchError
from headway.load.workload.datasets import Dataset, SampleRequest, Turns
from headway.load.workload.files import count_of, numbered_lines, read_text, wrong
from headway.load.workload.lengths import Distribution, tokens
from headway.load.workload.spec import MOONCAKE_BLOCK_SIZE

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_EXAMPLE = '{"timestamp": 40, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}'
T = TypeVar("T")
Row = tuple[int, SampleRequest]  # nanoseconds from any origin, and the request


class TraceRows(Dataset):
    """The requests of a trace, by their time.

    Attributes:
        output_len: tokens of answers, instead of those that were recorded.
    """

    def __init__(self, name: str, path: Path, rows: list[Row], shares_blocks: bool) -> None:
        super().__init__()
        self.name, self.path = name, path
        self.has_times, self.repeats_prompts = True, shares_blocks
        self.output_len: Distribution | None = None
        rows = self._usable(rows)
        first = rows[0][0]
        # Whole nanoseconds until here, so that gaps are those of the file.
        self._turns: list[Turns] = [(replace(request, arrival_s=(at - first) / 1e9),) for at, request in rows]
        self.rows = len(rows)

    def _usable(self, rows: list[Row]) -> list[Row]:
        kept = [row for row in rows if row[1].output_tokens and row[1].input_tokens]
        if len(kept) < len(rows):
            failed = sum(not request.output_tokens for _, request in rows)
            empty = len(rows) - len(kept) - failed
            what = [f"{failed} without an answer"] * bool(failed) + [f"{empty} without a prompt"] * bool(empty)
            self.notes.append(f"{self.path.name}: {' and '.join(what)} of {len(rows)} requests left out")
        if not kept:
            raise BenchError(f"{self.path} has no request with a prompt and an answer; it cannot be replayed")
        late = sum(after[0] < before[0] for before, after in itertools.pairwise(kept))
        if late:
            self.notes.append(f"{self.path.name}: {late} requests come before the one above them; put in order of time")
            kept.sort(key=lambda row: row[0])
        return kept

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        taken = self._turns[:count]
        if self.output_len is None:
            return taken
        lengths = tokens(self.output_len, len(taken), rng).tolist()
        return [(replace(turns[0], output_tokens=length),) for turns, length in zip(taken, lengths, strict=True)]

    def describe(self) -> str:
        return f"{self.name} trace {self.path.name}"


def _csv_rows(path: Path, needed: Sequence[str], form: str) -> Iterator[tuple[int, list[str], str]]:
    """(line number, values of the needed columns, value of the column Model) of each row."""
    reader = csv.reader(io.StringIO(read_text(path), newline=None))
    rows = _rows(path, reader)
    header = [name.strip() for name in next(rows)]
    missing = [name for name in needed if name not in header]
    if missing:
        raise wrong(path, reader.line_num, f"no column {missing[0]}", f"{form} begins with {','.join(needed)}")
    at = [header.index(name) for name in needed]
    model_at = header.index("Model") if "Model" in header else None
    found = 0
    for row in rows:
        if len(row) != len(header):
            raise wrong(path, reader.line_num, f"{len(row)} values", f"the header has {len(header)} columns")
        found += 1
        yield reader.line_num, [row[column] for column in at], row[model_at] if model_at is not None else ""
    if not found:
        raise BenchError(f"{path} has a header and no requests below it")


def _rows(path: Path, reader: Any) -> Iterator[list[str]]:
    """Yield the rows that are not empty. Raises BenchError with the number of a line that is not CSV."""
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise wrong(path, reader.line_num, str(error), "a line of CSV is expected") from None


def _request(path: Path, line: int, columns: Sequence[str], prompt: str, answer: str) -> SampleRequest:
    input_tokens = count_of(path, line, columns[1], prompt)
    return SampleRequest(count_of(path, line, columns[2], answer), input_tokens)


def read_azure(path: Path) -> TraceRows:
    """An Azure LLM inference trace.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    rows = []
    for line, (came, prompt, answer), _ in _csv_rows(path, AZURE_COLUMNS, "an Azure trace"):
        rows.append((_azure_time(path, line, came), _request(path, line, AZURE_COLUMNS, prompt, answer)))
    return TraceRows("Azure", path, rows, shares_blocks=False)


def _azure_time(path: Path, line: int, said: str) -> int:
    """Nanoseconds since 1970 of "2023-11-16 18:15:46.6805900", which has more digits than datetime keeps."""
    whole, _, fraction = said.removesuffix("Z").removesuffix("+00:00").partition(".")
    try:
        seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
        return seconds * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        raise wrong(path, line, f"TIMESTAMP is '{said}'", "expected as 2023-11-16 18:15:46.6805900") from None


def read_burstgpt(path: Path, model: str | None = None) -> TraceRows:
    """A BurstGPT trace; with `model` only the requests to that model.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    rows, models = [], set()
    for line, (came, prompt, answer), asked in _csv_rows(path, BURSTGPT_COLUMNS, "a BurstGPT trace"):
        models.add(asked)
        if model is None or asked == model:
            at = _nanoseconds(path, line, "Timestamp", came, 1_000_000_000)
            rows.append((at, _request(path, line, BURSTGPT_COLUMNS, prompt, answer)))
    if not rows:
        raise BenchError(f"{path} has no requests to the model '{model}'; it has {', '.join(sorted(models))}")
    return TraceRows("BurstGPT", path, rows, shares_blocks=False)


def _nanoseconds(path: Path, line: int, name: str, said: str | float, unit: int) -> int:
    try:
        value = float(said)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise wrong(path, line, f"{name} is '{said}'", "a number is expected")
    return round(value * unit)


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    tenant: str = ""


def read_mooncake(path: Path, block_size: int = MOONCAKE_BLOCK_SIZE) -> TraceRows:
    """A Mooncake trace: each hash id stands for a block of `block_size` tokens, the last one for what is left.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    if block_size < 1:
        raise BenchError(f"--trace-block-size is {block_size}; it must be 1 or more")
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    rows = []
    for line, said in numbered_lines(path):
        row = decoded(decode, path, line, said, MOONCAKE_EXAMPLE)
        if min(row.input_length, row.output_length, *(row.hash_ids or ())) < 0:
            raise wrong(path, line, "a length or hash id below 0", "whole numbers of 0 or more are expected")
        shared = _blocks(path, line, row, block_size)
        at = _nanoseconds(path, line, "timestamp", row.timestamp, 1_000_000)
        rows.append((at, SampleRequest(row.output_length, row.input_length, shared, tenant=row.tenant)))
    return TraceRows("Mooncake", path, rows, shares_blocks=any(request.shared for _, request in rows))


def _blocks(path: Path, line: int, row: _MooncakeRow, block_size: int) -> tuple[tuple[int, int], ...]:
    if not row.hash_ids:
        return ()
    needed = math.ceil(row.input_length / block_size)
    if len(row.hash_ids) != needed:
        raise wrong(
            path,
            line,
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens",
            f"{needed} blocks of {block_size} tokens are expected; is --trace-block-size right?",
        )
    last = row.input_length - (needed - 1) * block_size
    return tuple((block, block_size) for block in row.hash_ids[:-1]) + ((row.hash_ids[-1], last),)


def decoded(decode: Callable[[str], T], path: Path, line: int, said: str, expected: str) -> T:
    """One line of JSON.

    Raises:
        BenchError: naming the line and what is wrong in it.
    """
    try:
        return decode(said)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise wrong(path, line, str(error), f"expected as {expected}") from None
