"""Traces of real services: when each request came, how long it was, and what it shared with others.

Formats: the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (CSV: Timestamp in
seconds, Model, Request tokens, Response tokens, Total tokens, Log Type) and Mooncake (JSON Lines: timestamp in
milliseconds, input_length, output_length, hash_ids; and tenant, which is ours). They hold no text: prompts of the same
lengths are made up. Rows of Mooncake may also have what AIPerf added to them: sessions, waits and texts.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from headway.load.errors import BenchError
from headway.load.request import Message
from headway.load.workload.datasets import DEFAULT_OUTPUT_TOKENS, Dataset, Links, SampleRequest, Turns
from headway.load.workload.files import Line, count_of, lines_of, read_text
from headway.load.workload.lengths import Distribution, tokens
from headway.load.workload.spec import MOONCAKE_BLOCK_SIZE

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_EXAMPLE = '{"timestamp": 40, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}'
Row = tuple[int, Turns]  # nanoseconds from any origin, and what came then


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
        self._turns: list[Turns] = [(replace(turns[0], arrival_s=(at - first) / 1e9), *turns[1:]) for at, turns in rows]
        self.rows = len(rows)

    @property
    def mean_turns(self) -> float:
        return sum(map(len, self._turns)) / len(self._turns)

    def _usable(self, rows: list[Row]) -> list[Row]:
        kept = [row for row in rows if all(each.output_tokens and _says_something(each) for each in row[1])]
        if len(kept) < len(rows):
            failed = sum(not all(each.output_tokens for each in turns) for _, turns in rows)
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
        lengths = iter(tokens(self.output_len, sum(map(len, taken)), rng).tolist())
        return [tuple(replace(each, output_tokens=next(lengths)) for each in turns) for turns in taken]

    def describe(self) -> str:
        return f"{self.name} trace {self.path.name}"


def _csv_rows(path: Path, needed: Sequence[str], form: str) -> Iterator[tuple[Line, list[str], str]]:
    """(line, values of the needed columns, value of the column Model) of each row."""
    reader = csv.reader(io.StringIO(read_text(path), newline=None))
    rows = _rows(path, reader)
    header = [name.strip() for name in next(rows)]
    missing = [name for name in needed if name not in header]
    if missing:
        raise Line(path, reader.line_num).wrong(f"no column {missing[0]}", f"{form} begins with {','.join(needed)}")
    at = [header.index(name) for name in needed]
    model_at = header.index("Model") if "Model" in header else None
    found = 0
    for row in rows:
        if len(row) != len(header):
            raise Line(path, reader.line_num).wrong(f"{len(row)} values", f"the header has {len(header)} columns")
        found += 1
        yield Line(path, reader.line_num), [row[column] for column in at], row[model_at] if model_at is not None else ""
    if not found:
        raise BenchError(f"{path} has a header and no requests below it")


def _rows(path: Path, reader: Any) -> Iterator[list[str]]:
    """Yield the rows that are not empty. Raises BenchError with the number of a line that is not CSV."""
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise Line(path, reader.line_num).wrong(str(error), "a line of CSV is expected") from None


def _request(at: Line, columns: Sequence[str], prompt: str, answer: str) -> SampleRequest:
    input_tokens = count_of(at, columns[1], prompt)
    return SampleRequest(count_of(at, columns[2], answer), input_tokens)


def read_azure(path: Path) -> TraceRows:
    """An Azure LLM inference trace.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    rows: list[Row] = []
    for at, (came, prompt, answer), _ in _csv_rows(path, AZURE_COLUMNS, "an Azure trace"):
        rows.append((_azure_time(at, came), (_request(at, AZURE_COLUMNS, prompt, answer),)))
    return TraceRows("Azure", path, rows, shares_blocks=False)


def _azure_time(at: Line, said: str) -> int:
    """Nanoseconds since 1970 of "2023-11-16 18:15:46.6805900", which has more digits than datetime keeps."""
    whole, _, fraction = said.removesuffix("Z").removesuffix("+00:00").partition(".")
    try:
        seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
        return seconds * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        raise at.wrong(f"TIMESTAMP is '{said}'", "expected as 2023-11-16 18:15:46.6805900") from None


def read_burstgpt(path: Path, model: str | None = None) -> TraceRows:
    """A BurstGPT trace; with `model` only the requests to that model.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    rows, models = list[Row](), set[str]()
    for at, (came, prompt, answer), asked in _csv_rows(path, BURSTGPT_COLUMNS, "a BurstGPT trace"):
        models.add(asked)
        if model is None or asked == model:
            when = _nanoseconds(at, "Timestamp", came, 1_000_000_000)
            rows.append((when, (_request(at, BURSTGPT_COLUMNS, prompt, answer),)))
    if not rows:
        raise BenchError(f"{path} has no requests to the model '{model}'; it has {', '.join(sorted(models))}")
    return TraceRows("BurstGPT", path, rows, shares_blocks=False)


def _nanoseconds(at: Line, name: str, said: str | float, unit: int) -> int:
    try:
        value = float(said)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise at.wrong(f"{name} is '{said}'", "a number is expected")
    return round(value * unit)


class MooncakeRow(msgspec.Struct):
    """A row of a Mooncake trace, also as AIPerf writes it: with exactly one of input_length, text_input, messages."""

    timestamp: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    tenant: str = ""
    session_id: str = ""  # rows of a session come one after the other
    delay: float | None = None  # milliseconds after the answer to the row before
    text_input: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    # "history" where messages are the whole prompt, "delta" where they are added to what was said.
    message_mode: Literal["history", "delta"] = "history"
    extra: dict[str, Any] = {}  # further fields of the request's body
    payload: Any = None


def read_mooncake(path: Path, block_size: int = MOONCAKE_BLOCK_SIZE) -> TraceRows:
    """A Mooncake trace: each hash id stands for a block of `block_size` tokens, the last one for what is left.

    Raises:
        BenchError: naming the file, the line, and what is wrong with it.
    """
    if block_size < 1:
        raise BenchError(f"--trace-block-size is {block_size}; it must be 1 or more")
    rows = []
    for session in sessions_of(lines_of(path), MOONCAKE_EXAMPLE):
        at, first = session[0]
        if first.timestamp is None:
            raise at.wrong("there is no timestamp", "agents without times are read by --dataset-name agents")
        rows.append((_nanoseconds(at, "timestamp", first.timestamp, 1_000_000), session_of(session, block_size)))
    repeats = any(each.shared or _is_text(each) for _, turns in rows for each in turns)
    return TraceRows("Mooncake", path, rows, shares_blocks=repeats)


def sessions_of(lines: Iterable[tuple[Line, str]], example: str) -> Iterable[list[tuple[Line, MooncakeRow]]]:
    """The rows of each session; a row without one is a session of its own. Raises BenchError."""
    decode = msgspec.json.Decoder(MooncakeRow).decode
    sessions: dict[str, list[tuple[Line, MooncakeRow]]] = {}
    for at, said in lines:
        row = at.decoded(decode, said, example)
        sessions.setdefault(row.session_id or f"line {at.number}", []).append((at, row))
    return sessions.values()


def session_of(rows: Sequence[tuple[Line, MooncakeRow]], block_size: int = MOONCAKE_BLOCK_SIZE) -> Turns:
    """The turns of a session. Raises BenchError for one that cannot be sent."""
    began, tools, turns = rows[0][1].timestamp, None, list[SampleRequest]()
    for place, (at, row) in enumerate(rows):
        if (row.input_length, row.text_input, row.messages).count(None) != 2 or row.payload is not None:
            raise at.wrong(
                "not exactly one of input_length, text_input and messages", f"expected as {MOONCAKE_EXAMPLE}"
            )
        answer = DEFAULT_OUTPUT_TOKENS if row.output_length is None else row.output_length
        if row.input_length is not None and row.output_length is None:
            raise at.wrong("there is no output_length", f"expected as {MOONCAKE_EXAMPLE}")
        if min(row.input_length or 0, answer, *(row.hash_ids or ())) < 0:
            raise at.wrong("a length or hash id below 0", "whole numbers of 0 or more are expected")
        adds = row.messages is None or row.message_mode == "delta"
        tools = row.tools or (tools if adds else None)
        before_s = 0.0 if row.timestamp is None or began is None else (row.timestamp - began) / 1e3
        links = Links(place - 1 if adds else None, () if adds else (place - 1,)) if place else Links()
        turns.append(
            SampleRequest(
                answer,
                row.input_length or 0,
                _blocks(at, row, block_size),
                text=row.text_input,
                messages=checked_messages(at, row.messages or []),
                extra_body=({"tools": tools} if tools and row.messages else {}) | row.extra,
                links=links if len(rows) > 1 else None,
                think_s=seconds_of(at, "delay", row.delay or 0.0) if place else 0.0,
                not_before_s=seconds_of(at, "timestamp", before_s * 1e3) if place else 0.0,
                tenant=row.tenant,
            )
        )
    return tuple(turns)


def checked_messages(at: Line, messages: list[Message]) -> tuple[Message, ...]:
    """Raises BenchError where one has no role."""
    if any(not isinstance(each.get("role"), str) for each in messages):
        raise at.wrong("a message without a role", 'expected as {"role": "user", "content": "..."}')
    return tuple(messages)


def seconds_of(at: Line, name: str, milliseconds: float) -> float:
    """Raises BenchError where it is below 0, or no number."""
    if not 0 <= milliseconds < math.inf:
        raise at.wrong(f"{name} is {milliseconds:g}", "milliseconds of 0 or more, and not falling, are expected")
    return round(milliseconds / 1e3, 6)


def _is_text(request: SampleRequest) -> bool:
    return request.text is not None or bool(request.messages)


def _says_something(request: SampleRequest) -> bool:
    return bool(request.input_tokens or request.text or request.messages)


def _blocks(at: Line, row: MooncakeRow, block_size: int) -> tuple[tuple[int, int], ...]:
    if not row.hash_ids:
        return ()
    length = row.input_length or 0
    needed = math.ceil(length / block_size)
    if len(row.hash_ids) != needed:
        raise at.wrong(
            f"{len(row.hash_ids)} hash_ids for {length} tokens",
            f"{needed} blocks of {block_size} tokens are expected; is --trace-block-size right?",
        )
    last = length - (needed - 1) * block_size
    return tuple((block, block_size) for block in row.hash_ids[:-1]) + ((row.hash_ids[-1], last),)
