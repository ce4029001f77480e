"""Decides which requests a run has, and when: it combines datasets, classes and arrivals.

What is drawn for one purpose (lengths, times, the order of classes, prompts) does not move when another is changed: at
twice the rate the same prompts come twice as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from headway.load.errors import BenchError
from headway.load.workload.arrivals import AllAtOnce, Times, Trace
from headway.load.workload.datasets import Dataset, Turns
from headway.load.workload.making import make_dataset
from headway.load.workload.mix import MixClass
from headway.load.workload.prompts import TokenSource
from headway.load.workload.spec import DEFAULT_NUM_PROMPTS, WorkloadSpec, fitted

# Requests planned for a closed loop that ends with a duration: so many a second for each user, and at most so many.
MOST_PER_USER_S, MOST_PLANNED = 10, 10_000
MOST_REQUESTS, LATEST_S = 100_000_000, 1e9  # limits of a workload; more is a slip of the hand
# Purposes of random numbers.
_LENGTHS, _TIMES, _ORDER, _CANCELLATIONS, PROBES = range(5)


@dataclass(frozen=True, slots=True)
class Part:
    """A class of the workload with its dataset and its number among the classes."""

    number: int
    of_class: MixClass
    dataset: Dataset


Conversation = tuple[Part, Turns]


@dataclass
class Schedule:
    """Conversations in the order of their coming."""

    conversations: list[Conversation]
    times: Times  # those of first turns, in seconds, of shape [conversations]; NaN where the load generator decides
    recorded: bool = False  # the times are the trace's own
    notes: list[str] = field(default_factory=list)


def parts_of(
    spec: WorkloadSpec, classes: Sequence[MixClass], source: TokenSource, context: int | None = None
) -> list[Part]:
    """The classes with their datasets. The run's limits of lengths apply to each class.

    Args:
        context: tokens that the model has room for, for lengths that were left open; None where it is not known.

    Raises:
        BenchError: from make_dataset, naming the class of a mix.
    """
    parts = []
    for number, of_class in enumerate(classes):
        own = of_class.options
        limited = replace(
            own,
            max_input_len=_smaller(spec.max_input_len, own.max_input_len),
            max_output_len=_smaller(spec.max_output_len, own.max_output_len),
        )
        options = fitted(limited, context)
        try:
            dataset = make_dataset(options, source)
        except BenchError as error:
            where = f"class '{of_class.name}' of the mix: " if spec.mix is not None else ""
            raise BenchError(f"{where}{error}") from None
        parts.append(Part(number, replace(of_class, options=options), dataset))
    return parts


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((each for each in (first, second) if each is not None), default=None)


def make_schedule(spec: WorkloadSpec, parts: Sequence[Part]) -> Schedule:
    """Conversations and their times.

    Raises:
        BenchError: when number, duration, arrivals and dataset do not go together.
    """
    if spec.no_oversample and all(part.dataset.rows is None for part in parts):
        raise BenchError("--no-oversample does not apply, because no requests are read from a file; leave it out")
    made = _schedule(spec, parts) if parts[0].of_class.load is None else _own_arrivals(spec, parts)
    if not made.conversations:
        raise BenchError(f"no request arrives within --duration {spec.duration_s} s; raise the duration or the rate")
    if np.any(made.times > LATEST_S):  # false for NaN
        latest = np.nanmax(made.times)
        raise BenchError(f"a request comes after {latest:.3g} s, which is above {LATEST_S:g} s; raise the rate")
    return made


def _check_number(requests: float) -> None:
    if requests > MOST_REQUESTS:
        raise BenchError(
            f"the workload has {requests:.3g} requests; at most {MOST_REQUESTS:,} can be planned: lower --num-prompts, "
            "or --duration or the rate"
        )


def _schedule(spec: WorkloadSpec, parts: Sequence[Part]) -> Schedule:
    """The schedule of classes that share one arrival process."""
    if spec.mix is None and parts[0].dataset.has_times and spec.arrival is None and not spec.users:
        return _recorded(spec, parts[0])
    if spec.time_scale != 1:
        raise BenchError("--time-scale does not apply, because no recorded times are replayed; leave it out")
    bounded = isinstance(spec.arrival, AllAtOnce) and spec.num_prompts is not None
    if spec.duration_s is not None and spec.arrival is not None and not bounded:
        return _within_duration(spec, parts, spec.duration_s)
    return _numbered(spec, parts)


def _own_arrivals(spec: WorkloadSpec, parts: Sequence[Part]) -> Schedule:
    """Classes with arrivals of their own, in order of time; closed loops come last."""
    made = []
    for part in parts:
        try:
            made.append(_class_schedule(spec, part))
        except BenchError as error:
            raise BenchError(f"class '{part.of_class.name}' of the mix: {error}") from None
    times = np.concatenate([each.times for each in made])
    conversations = [conversation for each in made for conversation in each.conversations]
    order = np.argsort(times, kind="stable")  # NaN is the largest
    notes = [note for each in made for note in each.notes]
    return Schedule([conversations[place] for place in order], times[order], notes=notes)


def _class_schedule(spec: WorkloadSpec, part: Part) -> Schedule:
    load = part.of_class.load
    assert load is not None
    replays = load.arrival is None and load.users is None
    if load.num_prompts is None and spec.duration_s is None and not replays:
        raise BenchError("its requests never end; set num_prompts, or give --duration")
    own = replace(
        spec,
        mix=None,
        arrival=load.arrival,
        users=load.users or 0,
        num_prompts=load.num_prompts,
        no_oversample=spec.no_oversample and part.dataset.rows is not None,
    )
    if replays:
        return _schedule(own, [part])
    # The process runs on a clock that is `time_scale` times as fast; users of a closed loop have no times.
    until_s = None if spec.duration_s is None else spec.duration_s * spec.time_scale
    made = _schedule(replace(own, duration_s=until_s, time_scale=1.0), [part])
    made.times = made.times / spec.time_scale
    return made


def _recorded(spec: WorkloadSpec, part: Part) -> Schedule:
    """The schedule of a trace at its own times."""
    turns = part.dataset.draw(None, np.random.default_rng([spec.seed, _LENGTHS, part.number]))
    trace = Trace(tuple(each[0].arrival_s or 0.0 for each in turns), spec.time_scale)
    rng = np.random.default_rng([spec.seed, _TIMES])
    times = trace.offsets(len(turns), rng) if spec.duration_s is None else trace.offsets_until(spec.duration_s, rng)
    conversations = [(part, _scaled(each, spec.time_scale)) for each in turns[: len(times)]]
    if spec.num_prompts is not None:
        conversations = _cut(conversations, spec.num_prompts)
    made = Schedule(conversations, times[: len(conversations)], recorded=True)
    there = _requests(turns)
    if spec.num_prompts is not None and spec.num_prompts > there:
        made.notes.append(f"{spec.num_prompts} requests were asked for and the trace has {there}: all are sent")
    return made


def _scaled(turns: Turns, scale: float) -> Turns:
    """The turns with their recorded times so many times as fast; waits for answers and tools stay as they are."""
    if scale == 1 or not any(each.not_before_s for each in turns):
        return turns
    return tuple(replace(each, not_before_s=round(each.not_before_s / scale, 9)) for each in turns)


def _within_duration(spec: WorkloadSpec, parts: Sequence[Part], duration_s: float) -> Schedule:
    """Draw as many conversations as the arrival process starts within the duration."""
    assert spec.arrival is not None
    _check_number(duration_s * (spec.arrival.mean_rate or 0.0))
    times = spec.arrival.offsets_until(duration_s, _times_rng(spec, parts))
    counts = _apportioned(len(times), [part.of_class.share / part.dataset.mean_turns for part in parts])
    notes: list[str] = []
    drawn = [_drawn(spec, part, count, True, notes, len) for part, count in zip(parts, counts, strict=True)]
    conversations = _shuffled(spec, drawn)
    if spec.num_prompts is not None:
        conversations = _cut(conversations, spec.num_prompts)
    return Schedule(conversations, times[: len(conversations)], notes=notes)


def _numbered(spec: WorkloadSpec, parts: Sequence[Part]) -> Schedule:
    """Draw a given number of requests, at the times of the arrival process or without times."""
    requests, is_exact = _number_of_requests(spec, parts)
    _check_number(requests)
    counts = _apportioned(requests, [part.of_class.share for part in parts])
    notes: list[str] = []
    if spec.num_prompts is None and spec.duration_s is not None:
        notes.append(
            f"the closed loop has {requests} requests for --duration; it ends earlier when all have been sent: "
            "--num-prompts plans more"
        )
    drawn = [
        _cut(_drawn(spec, part, count, is_exact, notes, _requests), count)
        for part, count in zip(parts, counts, strict=True)
    ]
    conversations = _shuffled(spec, drawn)
    times = np.full(len(conversations), np.nan)
    if spec.arrival is not None:
        times = spec.arrival.offsets(len(conversations), _times_rng(spec, parts))
    return Schedule(conversations, times, notes=notes)


def _times_rng(spec: WorkloadSpec, parts: Sequence[Part]) -> np.random.Generator:
    """A class with arrivals of its own is planned alone, and has a stream of its own."""
    return np.random.default_rng([spec.seed, _TIMES, parts[0].number])


def _number_of_requests(spec: WorkloadSpec, parts: Sequence[Part]) -> tuple[int, bool]:
    """How many, and whether a dataset with fewer is begun again for it."""
    if spec.num_prompts is not None:
        return spec.num_prompts, True
    if spec.duration_s is not None:
        return min(MOST_PLANNED, math.ceil(spec.users * max(1.0, spec.duration_s) * MOST_PER_USER_S)), True
    if isinstance(spec.arrival, Trace):
        return len(spec.arrival.timestamps), True
    only = parts[0].dataset
    if len(parts) > 1 or only.rows is None:
        return DEFAULT_NUM_PROMPTS, True
    requests = round(only.rows * only.mean_turns)
    return requests if only.has_times or only.mean_turns > 1 else min(requests, DEFAULT_NUM_PROMPTS), False


def _apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total`: the largest remainders are rounded up."""
    exact: NDArray[np.float64] = total * np.array(shares) / sum(shares)
    counts = np.floor(exact).astype(int)
    left = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    return [int(count) for count in counts]


def _requests(turns: Sequence[Turns]) -> int:
    return sum(map(len, turns))


def _drawn(
    spec: WorkloadSpec,
    part: Part,
    count: int,
    is_exact: bool,
    notes: list[str],
    counted: Callable[[Sequence[Turns]], int],
) -> list[Conversation]:
    """Draw up to `count` conversations of one class. If the number is exact, a dataset that ends starts over.

    Args:
        counted: what the number is of.
    """
    if not count:
        return []
    seed = spec.seed_of_prompts if part.dataset.repeats_prompts else spec.seed
    turns = list(part.dataset.draw(count, np.random.default_rng([seed, _LENGTHS, part.number])))
    there = counted(turns)
    if there < count and is_exact:
        what = f"{part.dataset.describe()}: {count} requests were asked for and {there} are there"
        if spec.no_oversample:
            notes.append(f"{what}; each is sent once")
        else:
            same = "the same prompts, as a prefix cache notices" if part.dataset.repeats_prompts else "with new prompts"
            notes.append(f"{what}; taken again from the start, {same}")
            turns = list(islice(cycle(turns), count))
    return [(part, each) for each in turns]


def _shuffled(spec: WorkloadSpec, drawn: Sequence[list[Conversation]]) -> list[Conversation]:
    """Classes in random order, each class in its own."""
    owners = np.repeat(np.arange(len(drawn)), [len(each) for each in drawn])
    queues = [iter(each) for each in drawn]
    return [next(queues[owner]) for owner in np.random.default_rng([spec.seed, _ORDER]).permutation(owners)]


def with_cancellations(
    spec: WorkloadSpec, parts: Sequence[Part], conversations: Sequence[Conversation]
) -> list[Conversation]:
    """The same conversations; in those of classes with a `cancel_share`, some requests are given up by their client."""
    left = {part.number: _patience(spec, part, conversations) for part in parts}
    return [
        (part, tuple(replace(request, cancel_after_s=next(left[part.number])) for request in turns))
        if part.of_class.options.cancel_share
        else (part, turns)
        for part, turns in conversations
    ]


def _patience(spec: WorkloadSpec, part: Part, conversations: Sequence[Conversation]) -> Iterator[float | None]:
    """For each request of a class, after how many seconds its client gives it up; None where it waits."""
    options = part.of_class.options
    if options.cancel_after_s is None:
        return iter(())
    count = sum(len(turns) for of_turns, turns in conversations if of_turns is part)
    rng = np.random.default_rng([spec.seed, _CANCELLATIONS, part.number])
    gives_up = rng.random(count) < options.cancel_share
    after_s = np.round(options.cancel_after_s.values(count, rng), 6).tolist()
    return (seconds if will else None for will, seconds in zip(gives_up, after_s, strict=True))


def _cut(conversations: list[Conversation], requests: int) -> list[Conversation]:
    """The first conversations, until there are so many requests; the last one may be cut short."""
    kept: list[Conversation] = []
    for part, turns in conversations:
        if requests <= 0:
            break
        kept.append((part, turns[:requests]))
        requests -= len(turns)
    return kept
