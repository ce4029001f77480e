"""A recording of steps as looks at the engine, which the page of a server plays in place of a live one.

The decisions are made again by the real scheduler, so ledgers, blocks and slack are those that were. What came before
the engine and after it was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from headway.engine.explaining import explanation
from headway.engine.messages import Explain
from headway.policy.step.ledger import Phase
from headway.policy.step.recording import Arrival, End, Record, Step
from headway.policy.step.request import NEVER, FinishReason
from headway.policy.step.request import Sequence as Choice
from headway.policy.step.scheduler import Scheduler
from headway.server.looks import NS_PER_MS, classes_look, in_ms, sequence_look, step_look
from headway.server.page.document import page
from headway.simulator.recording import Recording
from headway.simulator.replay import Changed, Replay

# Looks are half a second apart, as those of a server; of a short recording nearer, so that it can be played slowly.
MOST_LOOKS, EVERY_S, LEAST_S = 2400, 0.5, 0.05
MOST_STEPS, MOST_SEQUENCES = 64, 64


def page_of(recordings: Sequence[Recording], since_s: float = 0.0, until_s: float | None = None) -> bytes:
    """A page that plays the part of a recording between two times, in seconds since its first record.

    Raises:
        DifferentStep: this scheduler decides otherwise than the one that was recorded did.
        ValueError: there is nothing in this part, or too much.
    """
    times = [at for recording in recordings for at in _times(recording)]
    if not times:
        raise ValueError("nothing was recorded but the start of the engine")
    first, last = min(times), max(times)
    since = first + round(since_s * 1e9)
    until = last if until_s is None else min(last, first + round(until_s * 1e9))
    if since > until:
        raise ValueError(
            f"the recording is {(last - first) / 1e9:.1f} s long; there is nothing between --from and --to"
        )
    every_s = max(LEAST_S, (until - since) / 1e9 / MOST_LOOKS)
    if every_s > EVERY_S:
        raise ValueError(
            f"the recording is {(last - first) / 1e9:,.0f} s long, and a page has room for {MOST_LOOKS * EVERY_S:,.0f} "
            "s; choose a part with --from and --to"
        )
    looks: list[dict[str, Any]] = []
    for number, recording in enumerate(recordings, start=1):
        looks += _Looks(recording, f"{number}-" if len(recordings) > 1 else "", round(every_s * 1e9)).within(
            since, until
        )
    if not looks:
        raise ValueError("nothing happened between --from and --to; choose another part")
    told = {"model": name_of(recordings[-1]), "looks": looks}
    return page(msgspec.json.encode(told)).html.encode()


def name_of(recording: Recording) -> str:
    """What the model was called; a folder goes by its last part."""
    model = recording.engine.model
    return Path(model).name if Path(model).is_absolute() else model


def _times(recording: Recording) -> Iterator[int]:
    """The times of the first record and of the last one that have any."""
    timed = [each for each in recording.records if _is_timed(each)]
    yield from map(_time, timed[:1] + timed[-1:])


def _is_timed(record: Record) -> TypeGuard[Arrival | Step | End]:
    """Whether it says when something changed. Ends but for aborts stand before the step that they follow from."""
    is_abort = isinstance(record, End) and record.reason is FinishReason.ABORT
    return isinstance(record, Arrival | Step) or is_abort


def _time(record: Arrival | Step | End) -> int:
    return record.times[2] if isinstance(record, Step) and record.times is not None else record.now


@dataclass(slots=True)
class _Looks:
    """Makes the looks at one engine.

    Args:
        prefix: what ids begin with.
        every_ns: time between two looks.
    """

    recording: Recording
    prefix: str
    every_ns: int
    _steps_ns: int = 0
    _ended: list[dict[str, Any]] = field(default_factory=list)
    _first_ns: dict[int, int] = field(default_factory=dict)  # when sequences had their first token

    def within(self, since: int, until: int) -> Iterator[dict[str, Any]]:
        """The looks between two times. Those of all steps before are made too, as the scheduler needs them."""
        replay, due, after, is_first = Replay(self.recording), since, since, True
        timed = [each for each in self.recording.records if _is_timed(each)]
        later = iter([*map(_time, timed[1:]), NEVER])
        for record, changed in replay.run():
            if not _is_timed(record):
                continue
            now, next_ns = _time(record), next(later)
            if isinstance(record, Step) and record.times is not None:
                self._steps_ns += record.times[2] - record.times[0]
            self._note(replay, changed, now)
            if now > until:
                return
            if now >= since and (now >= due or next_ns >= now + self.every_ns):  # also before a pause, and the end
                look = self._look(replay.scheduler, now, after)
                yield look | ({"about": self._about(replay)} if is_first else {})
                is_first, due, after = False, now + self.every_ns, now

    def _note(self, replay: Replay, changed: Changed, now: int) -> None:
        """Note first tokens, and who has ended."""
        for sequence, tokens in changed:
            if tokens:
                self._first_ns.setdefault(sequence.seq_id, now)
            if sequence.finish_reason is not None:
                self._ended.append(self._ended_look(sequence, now))

    def _ended_look(self, sequence: Choice, now: int) -> dict[str, Any]:
        first_ns, ledger = self._first_ns.pop(sequence.seq_id, None), sequence.ledger
        before = {Phase.RECEIVE: ledger.began_ns - sequence.arrival_ns}
        ttft_ns = None if first_ns is None else first_ns - sequence.arrival_ns
        met = None
        if first_ns is not None and (sequence.due_ns < NEVER or sequence.tpot_ns < NEVER):
            further = max(1, sequence.output_len - 1)
            met = first_ns <= sequence.due_ns and (now - first_ns) / further <= sequence.tpot_ns
        return {
            "id": f"{self.prefix}{sequence.request_id}/{sequence.index}",
            "service_class": sequence.service.name,
            "reason": str(sequence.finish_reason),
            "arrived_ms": sequence.arrival_ns / NS_PER_MS,
            "e2e_ms": (ledger.last_ns - sequence.arrival_ns) / NS_PER_MS,
            "ttft_ms": None if ttft_ns is None else ttft_ns / NS_PER_MS,
            "tokens": sequence.output_len,
            "met": met,
            "phases_ms": in_ms({str(phase): length for phase, length in (before | ledger.phases_ns).items()}),
        }

    def _look(self, scheduler: Scheduler, now: int, after: int) -> dict[str, Any]:
        told = explanation(scheduler, Explain(MOST_STEPS, after, MOST_SEQUENCES, with_words=False), now)
        ended, self._ended = self._ended, []
        sequences = scheduler.sequences
        found = [sequence_look(each) for each in told.sequences]
        return {
            "state": "ready",
            "at_ms": now / NS_PER_MS,
            "steps": [step_look(each) for each in told.steps],
            "sequences": [each | {"id": self.prefix + each["id"]} for each in found],
            "cached_blocks": told.cached_blocks,
            "ended": ended,
            "engine_cpu_ms": None,
            "steps_ms": self._steps_ns / NS_PER_MS,
            "clients_behind": None,
            "unread_bytes": None,
            "running": len(sequences.running),
            "waiting": len(sequences.waiting),
            "used_blocks": sum(scheduler.blocks.used.values()),
            "running_of_class": dict(sequences.running.of_class),
            "waiting_of_class": dict(sequences.waiting.of_class),
        }

    def _about(self, replay: Replay) -> dict[str, Any]:
        engine = self.recording.engine
        return {
            "version": engine.version,
            "blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "has_roofline": False,
            "classes": classes_look(replay.classes),
        }
