"""The orders of the policies `priority` and `slo`: who is served first, and who must go."""

from __future__ import annotations

import math
from operator import attrgetter

from headway.policy.step.order import OrderKey, Orders
from headway.policy.step.request import NEVER, Sequence

# Deadlines that are closer together than this are equal: what has less work goes first.
SAME_DEADLINE_NS = 20_000_000
# Waiting ages: a sequence that has waited this much longer goes before one whose priority is better by 1.
AGEING_NS = 10_000_000_000

MOST_PREEMPTIONS = 3
BEHIND_ALL = (1,)  # `deadline` gives keys from here on to sequences behind all promises
_LAST_RANK = 1_000_000


def priority(sequence: Sequence) -> OrderKey:
    """Lower priority values first, each worth AGEING_NS of waiting; then first come, first served."""
    return (sequence.priority * AGEING_NS + sequence.arrival_ns, sequence.seq_id)


def deadline(sequence: Sequence) -> OrderKey:
    """The earliest planned time first, then the least work; sequences behind all promises come last, by class.

    One that has starved comes before all. A sequence's key changes when it yields or has starved: take it out of the
    list, and add it again.
    """
    if sequence.has_starved:
        return (-1, 0, 0, sequence.arrival_ns, sequence.seq_id)
    if sequence.is_behind:
        return (1, sequence.rank, 0, sequence.arrival_ns, sequence.seq_id)
    return (0, sequence.planned_ns // SAME_DEADLINE_NS, sequence.expected_len, sequence.arrival_ns, sequence.seq_id)


def least_loss(sequence: Sequence) -> OrderKey:
    """The order of victims: those without a promise go first, the last class before the others.

    Then those with the most time left go, and of these those that have computed least.

    One that was preempted MOST_PREEMPTIONS times stays if anybody else can go, so that everybody gets on.
    """
    due_ns = sequence.last_token_ns + sequence.tpot_ns if sequence.output_len else sequence.due_ns
    no_promise = sequence.has_yielded or due_ns >= NEVER
    goes_again = sequence.preemptions < MOST_PREEMPTIONS and not sequence.has_starved
    return (goes_again, no_promise, sequence.rank, due_ns, -sequence.num_computed, sequence.seq_id)


def class_rank(sequence: Sequence) -> int:
    """The rank of its class; one that has starved comes before all."""
    return -1 if sequence.has_starved else sequence.rank


def promise_rank(sequence: Sequence) -> int:
    """The rank of its class, behind all classes for one without a promise; one that has starved comes before all."""
    if sequence.has_starved:
        return -1
    return sequence.rank + (_LAST_RANK if sequence.has_yielded or sequence.due_ns == NEVER else 0)


_level = attrgetter("priority")
PRIORITY = Orders(priority, priority, priority, _level, displaces=3, line=_level)
SLO = Orders(deadline, deadline, least_loss, promise_rank, displaces=math.inf, line=class_rank)
