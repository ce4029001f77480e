"""A request's time cut into the parts that pictures show, from the server's ledger or, without one, from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.load.measures import phases as measured
from headway.load.record import RequestRecord

Group = Literal["compute", "queue", "stall", "other", "client", "unknown"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a latency, which pictures show in one colour."""

    key: str
    label: str
    colour: str  # a name of style.PALETTE
    group: Group
    # Names of the ledger's phases (headway/policy/step/ledger.py) that it sums; () for the client's own.
    phases: tuple[str, ...] = ()


CLIENT = Part("client", "late in the client", "client", "client")
CONNECT = Part("connect", "connecting", "transport", "other")
NETWORK = Part("network", "outside the server's ledger", "network", "other")
WAIT = Part("wait", "until the first token", "queue-capacity", "unknown")
STREAM = Part("stream", "first to last token", "decode-compute", "unknown")
CLOSE = Part("close", "last token to end", "network", "unknown")
FAILED = Part("failed", "failed", "ink", "unknown")
CANCELLED = Part("cancelled", "cancelled by its client", "muted", "unknown")
SERVER_REST = Part("server_rest", "other phases, up to the first token", "server-rest", "other")

BEFORE_FIRST_TOKEN = (
    Part("intake", "reading and tokenizing", "intake", "other", ("receive", "tokenize", "grammar")),
    Part("queue_policy", "queue: others go first", "queue-policy", "queue", ("queue_policy", "queue_window")),
    Part("queue_capacity", "queue: no seat or token budget", "queue-capacity", "queue", ("queue_capacity",)),
    Part("queue_blocks", "queue: no KV blocks", "queue-blocks", "queue", ("queue_blocks", "queue_adapter")),
    Part("prefill_stall", "prefill stalled by others", "prefill-stall", "stall", ("prefill_stall",)),
    Part("prefill_compute", "prefill", "prefill-compute", "compute", ("prefill_compute",)),
)
AFTER = (
    Part(
        "stall_prefill",
        "stalled by others' prompts or objectives",
        "stall-prefill",
        "stall",
        ("decode_stall_prefill", "decode_stall_logprobs", "decode_stall_policy"),
    ),
    Part("stall_preempted", "preempted", "stall-preempted", "stall", ("decode_stall_preempted",)),
    Part("stall_recompute", "recomputing after preemption", "stall-recompute", "stall", ("decode_stall_recompute",)),
    Part("faults", "a step failed, or the engine", "red", "stall", ("step_retry", "engine_lost", "engine_restart")),
    Part("decode_compute", "decode", "decode-compute", "compute", ("decode_compute", "draft", "verify")),
    Part("sampling", "sampling", "sampling", "other", ("sampling",)),
    Part("schedule", "between steps", "schedule", "other", ("schedule",)),
    Part(
        "transport",
        "between processes or servers",
        "transport",
        "other",
        ("transport", "kv_transfer", "route", "network", "backend"),
    ),
    Part("output", "making the answer", "output", "other", ("detokenize", "send")),
    Part("send_blocked", "client did not read", "send-blocked", "other", ("send_blocked",)),
)
# All parts in the order in which they are drawn. Where parts follow each other in time, it is that order.
PARTS = (CLIENT, CONNECT, *BEFORE_FIRST_TOKEN, *AFTER, SERVER_REST, NETWORK, WAIT, STREAM, CLOSE, FAILED, CANCELLED)

GROUP_WORDS: dict[Group, str] = {
    "compute": "computing",
    "queue": "waiting in the queue",
    "stall": "stalled by other requests",
    "other": "in other work",
    "client": "late in the client",
}

Lengths = dict[Part, int]  # nanoseconds


_BY_PHASE = {phase: part for part in (*BEFORE_FIRST_TOKEN, *AFTER) for phase in part.phases}
_BY_PHASE |= {measured.START_LAG: CLIENT, measured.NETWORK_AND_CLIENT: NETWORK, measured.SERVER_REST: SERVER_REST}


def part_of(phase: str) -> Part:
    """The part in which pictures show a phase of the ledger or of the client."""
    return _BY_PHASE.get(phase, SERVER_REST)


def lengths(record: RequestRecord) -> Lengths:
    """The parts of a request from when it was due to its end, in order; they sum to that time.

    Phases of the ledger are totals: one that occurs in many steps is one part.
    """
    if not record.sent_ns or not record.end_ns:
        return {}
    known = measured.phases_of(record)
    if not record.ok:
        parts = {CLIENT: _late(record), CANCELLED if record.cancelled else FAILED: record.end_ns - record.sent_ns}
    elif known is None:
        parts = _from_outside(record) | {
            STREAM: record.last_token_ns - record.first_token_ns,
            CLOSE: record.end_ns - record.last_token_ns,
        }
    else:
        parts = {CLIENT: _late(record)}
        for phase, length in known.items():
            part = part_of(phase)
            parts[part] = parts.get(part, 0) + length
        parts[NETWORK] = record.end_ns - record.sent_ns - sum(known.values())
    return {part: parts[part] for part in PARTS if parts.get(part, 0) > 0}


def _late(record: RequestRecord) -> int:
    return max(record.sent_ns - record.scheduled_ns, 0)


def _from_outside(record: RequestRecord) -> Lengths:
    """Parts up to the first token of an answered request, as far as the client sees them by itself."""
    connect = max(record.connected_ns - record.sent_ns, 0)
    return {CLIENT: _late(record), CONNECT: connect, WAIT: record.first_token_ns - record.sent_ns - connect}


@dataclass(frozen=True, slots=True)
class Slice:
    """Requests of a like rank by one latency, and the mean of their parts in ms."""

    name: str
    parts_ms: dict[Part, float]

    @property
    def total_ms(self) -> float:
        return sum(self.parts_ms.values())

    def share(self, group: Group) -> float:
        """The share of the group's parts in the whole, 0 to 1."""
        mine = sum(ms for part, ms in self.parts_ms.items() if part.group == group)
        return mine / self.total_ms if self.total_ms else 0.0


def median_and_slowest(records: Sequence[RequestRecord], metric: measured.Metric) -> list[Slice]:
    """The mean parts of the requests around the median (the 45th to 55th percentile) and of the slowest 1 %.

    A mean over a slice, and not percentiles of each part: parts add up, percentiles of parts do not. Without a ledger
    the parts are those that can be seen from outside. Empty with fewer than two answered requests.
    """
    done = [record for record in records if record.ok]
    if len(done) < 2:
        return []
    share = "slowest 1 %" if len(done) >= 100 else "the slowest"
    return [
        Slice(name, _mean_parts(done, low, high, metric))
        for name, (low, high) in (("median", measured.MEDIAN), (share, measured.SLOWEST))
    ]


def _mean_parts(done: list[RequestRecord], low: float, high: float, metric: measured.Metric) -> dict[Part, float]:
    by_phase = measured.phase_composition(done, low, high, metric)
    means: dict[Part, float] = {}
    for phase, ms in by_phase.items():
        part = part_of(phase)
        means[part] = means.get(part, 0.0) + max(ms, 0.0)
    if not by_phase:
        seen = [_from_outside(record) if metric == "ttft" else lengths(record) for record in done]
        seen.sort(key=lambda parts: sum(parts.values()))
        first = min(int(low / 100 * len(seen)), len(seen) - 1)
        chosen = seen[first : max(first + 1, round(high / 100 * len(seen)))]
        means = {part: sum(each.get(part, 0) for each in chosen) / len(chosen) / 1e6 for part in PARTS}
    return {part: means[part] for part in PARTS if means.get(part, 0.0) > 0}


def in_words(part: Slice) -> str:
    """Where most of a slice's time went, as in `most_in_words`; "" where the server does not say."""
    words, share = most_in_words(part.parts_ms)
    return "" if part.share("unknown") > share else f"{100 * share:.0f} % of it {words}"


def most_in_words(totals: Mapping[Part, float]) -> tuple[str, float]:
    """The group with the largest share of the known time, with its largest part: "computing, most of it “decode”".

    Returns:
        The words, and the share of all time, 0 to 1.
    """
    groups = {group: sum(total for part, total in totals.items() if part.group == group) for group in GROUP_WORDS}
    group = max(groups, key=lambda each: groups[each])
    words, mine = GROUP_WORDS[group], {part: total for part, total in totals.items() if part.group == group}
    if len(mine) > 1:
        words += f", most of it “{max(mine, key=lambda each: mine[each]).label}”"
    return words, groups[group] / (sum(totals.values()) or 1)


def growth_in_words(median: Slice, slowest: Slice) -> str:
    """Which part makes the slowest slow: "80 % of the difference is prefill"; "" where there is no difference."""
    difference = slowest.total_ms - median.total_ms
    growth = {part: ms - median.parts_ms.get(part, 0.0) for part, ms in slowest.parts_ms.items()}
    if difference <= 0 or not growth:
        return ""
    part = max(growth, key=lambda each: growth[each])
    # Where another part shrank, one part can have grown by more than the whole.
    return f"{min(100 * growth[part] / difference, 100):.0f} % of the difference is “{part.label}”"


def worth_a_legend(longest: dict[Part, float], extent: float) -> set[Part]:
    """Parts that can be seen in a picture: their longest bar is at least a five-hundredth of its extent."""
    return {part for part, length in longest.items() if length >= 0.002 * extent}
