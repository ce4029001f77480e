"""Results on disk: JSON with the keys of `vllm bench serve` and our own under "headway", and a CSV of the requests.

docs/bench-definitions.md describes both files.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

import headway
from headway.bench.result_columns import Nanoseconds, from_columns, to_columns
from headway.bench.result_csv import csv_text
from headway.bench.result_vllm import model_name, read_vllm, vllm_keys
from headway.files import write_files
from headway.load.errors import BenchError
from headway.load.measures.numbers import PERCENTILES, Summary
from headway.load.measures.phases import MEDIAN, SLOWEST, phase_composition
from headway.load.record import ClientHealth, RequestRecord, RunResult

FORMAT = 1
_WANTED = "give the JSON file of a run, such as one of bench-results/"
MOST_NAME_BYTES = 80  # most bytes of a label or a model in the name of a file


def to_json(
    result: RunResult,
    summaries: Sequence[Summary],
    *,
    percentiles: Sequence[float] = PERCENTILES,
    save_detailed: bool = False,
    date: datetime | None = None,
) -> dict[str, Any]:
    """All that is known of a run, as an object for `write_json`.

    Args:
        summaries: the summaries of `summarise_all`.
        percentiles: those in the keys of `vllm bench serve` (`p99_ttft_ms` and so on); those are plain numbers, however
            few requests there were. Ours are in the summaries, with intervals, or null where the claim is refused.
        save_detailed: the lists of `vllm bench serve --save-detailed` too.
        date: the date of the result; None is now.
    """
    keys = vllm_keys(result, percentiles, date or datetime.now().astimezone(), save_detailed)
    return keys | {
        "headway": {
            "format": FORMAT,
            "version": headway.__version__,
            "settings": result.settings,
            "interrupted": result.interrupted,
            "began_ns": result.began_ns,
            "ended_ns": result.ended_ns,
            "summaries": [_summary(summary) for summary in summaries],
            "composition_ms": {
                metric: {
                    "median": phase_composition(result.records, *MEDIAN, metric=metric),
                    "slowest_1_percent": phase_composition(result.records, *SLOWEST, metric=metric),
                }
                for metric in ("e2el", "ttft")
            },
            "failures": _failures(result.records),
            "client": {"bound": result.client.bound, **asdict(result.client)},
            "server": result.server,
            "energy_joules": result.energy_joules,
            "requests": to_columns(result.records, result.began_ns),
            **({"probes": to_columns(result.probes, result.began_ns)} if result.probes else {}),
        }
    }


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object whole or not at all; numbers that are not finite become null. Folders are made.

    Raises:
        BenchError: the file cannot be written there.
    """
    try:
        content = msgspec.json.encode(values, enc_hook=_encodable)
    except UnicodeEncodeError:  # half a character from a server
        content = msgspec.json.encode(_whole_characters(values), enc_hook=_encodable)
    _write(path, content)


def write_csv(path: Path, result: RunResult) -> None:
    """Write a row for each request, whole or not at all; see `result_csv.csv_text`. Folders are made.

    Raises:
        BenchError: the file cannot be written there.
    """
    _write(path, csv_text(result).encode(errors="replace"))


def load_json(path: Path) -> RunResult:
    """A run that `write_json` saved, exactly as it was; or what `vllm bench serve --save-detailed` tells of one.

    Raises:
        BenchError: the file cannot be read, is not JSON, or has no requests that could be read.
    """
    try:
        values = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}; {_WANTED}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BenchError(f"{path} is not JSON: {error}; {_WANTED}") from None
    if not isinstance(values, dict):
        raise BenchError(f"{path} is not a result: it holds a {type(values).__name__}, not an object")
    ours = values.get("headway")
    if isinstance(ours, dict) and ours.get("format") != FORMAT:
        raise BenchError(
            f"{path} has format {ours.get('format')}, written by Headway {ours.get('version')}; this is Headway"
            f" {headway.__version__}, which reads format {FORMAT}"
        )
    if ours is None and "request_throughput" in values and "ttfts" not in values:
        raise BenchError(f"{path} has totals only, no requests; run `vllm bench serve` with --save-detailed")
    try:
        return read_vllm(values) if ours is None else _read_headway(ours)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise BenchError(f"{path} is not a result of `headway bench` or `vllm bench serve`: {what}") from None


def default_file_name(result: RunResult, date: datetime | None = None) -> str:
    """The file name that `vllm bench serve` would use: {label or backend}-{rate}qps-{model}-{date}.json."""
    settings = result.settings
    rate, most = settings.get("request_rate"), settings.get("max_concurrency")
    parts = [
        _shortened(str(settings.get("label") or settings.get("backend") or "openai")),
        f"{'inf' if rate is None else round(float(rate), 4)}qps" + (f"-concurrency{most}" if most is not None else ""),
        _shortened(model_name(result).rstrip("/").split("/")[-1]),
        (date or datetime.now().astimezone()).strftime("%Y%m%d-%H%M%S"),
    ]
    return re.sub(r"[^\w.+=@-]", "_", "-".join(parts)) + ".json"


def _shortened(name: str) -> str:
    """A file system takes names of 255 bytes, and there is more in one than this."""
    return name.encode(errors="replace")[:MOST_NAME_BYTES].decode(errors="ignore")


def _summary(summary: Summary) -> dict[str, Any]:
    values = asdict(summary)
    if summary.attainment is not None:
        values["attainment"]["share"] = summary.attainment.share
    if summary.validity is not None:
        values["validity"]["share"] = summary.validity.share
    return values


def _failures(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """The number of failures of each kind, and the message of the first."""
    failures: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.failure is not None and record.failed:
            failure = failures.setdefault(str(record.failure.kind), {"count": 0, "example": record.failure.message})
            failure["count"] += 1
    return dict(sorted(failures.items()))


class _Saved(msgspec.Struct):
    """What `load_json` needs of the object under "headway"."""

    settings: dict[str, Any]
    began_ns: Nanoseconds
    ended_ns: Nanoseconds
    interrupted: bool
    client: ClientHealth
    server: dict[str, Any]
    energy_joules: float | None
    requests: dict[str, Any]
    probes: dict[str, Any] | None = None


def _read_headway(values: Any) -> RunResult:
    saved = msgspec.structs.asdict(msgspec.convert(values, _Saved))
    began_ns, requests, probes = saved["began_ns"], saved.pop("requests"), saved.pop("probes")
    records = from_columns(requests, began_ns)
    return RunResult(records=records, probes=from_columns(probes, began_ns) if probes else [], **saved)


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_whole_characters(key): _whole_characters(each) for key, each in value.items()}
    return [_whole_characters(each) for each in value] if isinstance(value, list | tuple) else value


def _encodable(value: Any) -> Any:
    """Make JSON of any value, so that a finished run is not lost over one value of its settings."""
    if isinstance(value, array):
        return value.tolist()
    if hasattr(value, "item"):  # numpy's scalars
        return value.item()
    return str(value)


def _write(path: Path, content: bytes) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_files({path: content})
    except OSError as error:
        raise BenchError(
            f"cannot write {path}: {error.strerror or error}; choose another place with --result-dir"
        ) from None
