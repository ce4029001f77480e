"""What is counted of a run with a fault."""

from __future__ import annotations

from benchmarks.chaos import FAULTS, figures, table
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt

S = 1_000_000_000


def record(sent_s: float, took_s: float, kind: FailureKind | None = None) -> RequestRecord:
    made = RequestRecord.of(PlannedRequest(0, Prompt(text="x"), 1, 1), 0)
    made.sent_ns, made.end_ns = round(sent_s * S), round((sent_s + took_s) * S)
    made.chunk_ns.append(made.end_ns)
    made.failure = None if kind is None else Failure(kind, "")
    return made


def test_errors_are_told_from_what_breaks_off_without_a_word() -> None:
    found = figures(
        [
            record(1, 0.5),
            record(3, 1.5),
            record(4, 0.1, FailureKind.STREAM_ERROR),
            record(5, 0.2, FailureKind.SERVER_ERROR),
            record(9, 0.2, FailureKind.CUT),
            record(10, 0.4),
        ],
        2 * S,
        8 * S,
    )
    assert found == {
        "requests": 6,
        "not good": 4,
        "error": 2,
        "no word": 1,
        "longest, s": 1.5,
        "last, s": 7.0,
        "after its end": 1,
    }
    assert "| killed | 6 | 4 | 2 | 1 | 1.5 | 7 | 1 |" in table({"killed": found}) and "killed" in FAULTS
