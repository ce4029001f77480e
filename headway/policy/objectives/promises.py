"""Which sequences can still be served in time, and what a step may do beside them: the decisions of the policy `slo`.

A sequence is promised its first token by `due_ns`, and from then on each token at most `tpot_ns` after the last. One
that has no objective is served as well as it goes: behind the promised ones, but not for ever.

First tokens: prompts are computed in order of their deadlines, and the time at which each will be done is predicted. As
long as one would come too late, another yields: of those up to it the one of the last class with the most work (Moore
1968, with classes). That leaves the most others in time. One that has yielded is planned as if it came then, so it goes
before what is due later than that. It yields again before any that is promised.

Tokens: a step may take as long as the tightest promised token allows. Prompts fill what decoding leaves of that time;
decoding without an objective is left out of the step where it would not fit, or where a prompt is urgent. An answer
whose first token was late is promised the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from headway.policy.objectives.fairness import FairSequences
from headway.policy.objectives.orders import promise_rank
from headway.policy.step.accounting import StepTimes
from headway.policy.step.request import NEVER, Sequence
from headway.policy.step.step_time import StepTimeModel, StepWork

# A promised prompt is urgent when it would be done only after this share of its time.
URGENT_SHARE = 0.5
# The share of the time between two tokens that decoding alone may take; the rest is for prompts.
DECODE_SHARE = 0.8
# The share of a step's prompt tokens that a starved sequence may take while prompts are promised.
STARVED_SHARE = 0.25
# How many waiting prompts have their end predicted in a step, from the first deadline on.
LOOKED_AT = 32
# The predicted work of a waiting prompt is used for so many steps, unless a sequence would yield because of it.
_WORK_HOLDS = 16
# A sequence without a promise is left out of steps for at most this long.
MOST_LEFT_OUT_NS = 2_000_000_000
# The least factor on predicted times, and how fast the measured time between steps is followed.
LEAST_MARGIN = 1.05
_FOLLOWED = 0.1
# A step that was planned so soon after the last one was waited for.
_SAME_RUN_NS = 20_000_000
# A prompt that is kept: its promise_rank() and its work in nanoseconds, both negative, and its number, negative too.
_Kept = tuple[int, float, int, Sequence]


@dataclass(frozen=True, slots=True)
class Yield:
    """A promised prompt is put behind those that can still be in time."""

    sequence: Sequence
    # `oversized`: it could not be in time even alone; `late`: it has waited too long; `overload`: because of it others
    # would not be in time.
    reason: str
    backlog_ns: float  # the time that prompts before it take


@dataclass(slots=True)
class Outlook:
    """The limits of a step."""

    # The time until the tightest promised token is due, less a margin; infinite where none is promised.
    slack_ns: float = math.inf
    tightest: Sequence | None = None  # the sequence whose token that is
    left_out: list[Sequence] = field(default_factory=list)  # decoding sequences that get no token in the step
    urgent: Sequence | None = None  # a prompt for which others are held back


@dataclass(slots=True)
class _Promised:
    """Running sequences with a promise: how many, their tokens, and the tightest time per token that can be kept."""

    count: int = 0
    context: int = 0
    tpot_ns: int = NEVER
    least_tpot_ns: float = 0.0  # the time per token of one that decodes alone; a tighter objective can't be kept

    def add(self, sequence: Sequence) -> None:
        self.count += 1
        self.context += len(sequence.tokens)
        if self.least_tpot_ns <= sequence.tpot_ns < self.tpot_ns:
            self.tpot_ns = sequence.tpot_ns


@dataclass(slots=True)
class _Decoding:
    """The sequences of a step that decode with a promise."""

    count: int = 0
    context: int = 0  # how many tokens they have computed
    # One of the sequences for each pair of when the latest token came and the promised time per token.
    alike: dict[tuple[int, int], Sequence] = field(default_factory=dict)

    @classmethod
    def of(cls, decoding: list[Sequence]) -> _Decoding:
        promised = [s for s in decoding if s.tpot_ns != NEVER or s.due_ns != NEVER]
        context = sum([sequence.num_computed for sequence in promised])
        return cls(len(promised), context, {(each.last_token_ns, each.tpot_ns): each for each in promised})

    def tightest_ns(self, least_ns: float = 0.0) -> int:
        """The least promised time per token that is not below `least_ns`."""
        return min([tpot_ns for _, tpot_ns in self.alike if tpot_ns >= least_ns], default=NEVER)


class Promises:
    """Predicts by `step_time` which promises can be kept.

    Args:
        known_tokens: says how many tokens of a waiting sequence need not be computed.

    Attributes:
        step_tokens: most tokens of a step.
        are_prompts_promised: some prompts that yielding() looked at last are promised their first token.
    """

    def __init__(self, step_time: StepTimeModel, step_tokens: int, known_tokens: Callable[[Sequence], int]) -> None:
        self._step_time = step_time
        self.step_tokens = step_tokens
        self._known_tokens = known_tokens
        self._promised_running = _Promised()
        self._decoding = _Decoding()
        self._passes = 0
        self.are_prompts_promised = False
        self.between_steps_ns = 0.0
        self._last_sampled_ns = 0

    @property
    def margin(self) -> float:
        """The factor on predicted times before anything is promised by them."""
        return max(LEAST_MARGIN, self._step_time.overrun)

    def heed(self, planned_ns: int, steps: Iterable[StepTimes]) -> None:
        """Learn from steps' times what a step takes on top of its forward pass.

        Args:
            planned_ns: when the first was planned; each further one was when the one before had ended.
        """
        between_ns, last_ns = self.between_steps_ns, self._last_sampled_ns
        for times in steps:
            sampled_ns = times.sampled_ns
            overhead_ns = (sampled_ns - planned_ns) - (times.computed_ns - times.launched_ns)
            if planned_ns - last_ns < _SAME_RUN_NS:
                overhead_ns += planned_ns - last_ns
            between_ns += _FOLLOWED * (overhead_ns - between_ns)
            planned_ns = last_ns = sampled_ns
        self.between_steps_ns, self._last_sampled_ns = between_ns, last_ns

    def step_ns(self, decoding: int, context: int) -> float:
        """How long a step takes in which so many sequences decode, with so many tokens in all; margin included."""
        work = StepWork(decode_tokens=decoding, decode_context=context)
        return self.margin * self._step_time.predict_ns(work) + self.between_steps_ns

    # --- first tokens -------------------------------------------------------------------------------

    def yielding(
        self, prompts: list[Sequence], decoding: list[Sequence], now: int, fair: FairSequences | None = None
    ) -> tuple[list[Yield], Sequence | None]:
        """Which promised prompts yield, and the first of the others that is urgent.

        Args:
            prompts: the promised prompts in order of their deadlines, and what else is computed before them.
            fair: the waiting sequences, where tenants take turns.
        """
        self._decoding = _Decoding.of(decoding)
        if not prompts:
            self.has_no_prompts(1)
        if not prompts or not self._step_time.is_trained:
            return [], None
        self._passes += 1
        yields, urgent = self._find_yielding(prompts, now, fair, refresh=False)
        return self._find_yielding(prompts, now, fair, refresh=True) if yields else (yields, urgent)

    def has_no_prompts(self, steps: int) -> None:
        """Nobody waits for a first token in the steps that begin."""
        if self._step_time.is_trained:
            self._passes += steps
            self.are_prompts_promised = False

    def _find_yielding(
        self, prompts: list[Sequence], now: int, fair: FairSequences | None, refresh: bool
    ) -> tuple[list[Yield], Sequence | None]:
        """What yielding() returns. Unless `refresh`, the work of some waiting prompts was predicted some steps ago."""
        pace, refreshed = self._pace(), self._passes % _WORK_HOLDS
        done, kept = float(now), list[_Kept]()
        gone: dict[int, Yield] = {}
        hurrying: list[Sequence] = []
        are_owed = False
        for sequence in prompts:
            if sequence.parent is not None:  # the prompt is computed once, for the first choice of its request
                if sequence.parent.seq_id in gone:
                    gone[sequence.seq_id] = replace(gone[sequence.parent.seq_id], sequence=sequence)
                continue
            if sequence.has_starved:  # it comes first, and there is one at most
                pace *= 1 - STARVED_SHARE
                continue
            if refresh or sequence.num_computed or not sequence.work_ns or sequence.seq_id % _WORK_HOLDS == refreshed:
                sequence.work_ns = self.prefill_ns(sequence)
            work = sequence.work_ns / pace
            if sequence.is_behind or sequence.output_len:
                done += work
                continue
            due_ns = sequence.planned_ns
            if now + work > due_ns:
                if fair is not None and fair.is_owed(sequence):  # late, but before all others
                    done += work
                    hurrying.append(sequence)
                    continue
                oversized = sequence.arrival_ns + work * pace > due_ns
                gone[sequence.seq_id] = Yield(sequence, "oversized" if oversized else "late", done - now)
                continue
            done += work
            if fair is not None and fair.is_owed(sequence):  # it stays
                are_owed = True
            else:
                heapq.heappush(kept, (-promise_rank(sequence), -work, -sequence.seq_id, sequence))
            if done > due_ns and fair is not None:
                done = _give_up_in_turn(fair, kept, sequence, done, done - now, gone)
            elif done > due_ns:
                done = _give_up(kept, sequence, done, done - now, gone)
            is_late = done > sequence.arrival_ns + URGENT_SHARE * (due_ns - sequence.arrival_ns)
            if is_late and not sequence.has_yielded:
                hurrying.append(sequence)
        self.are_prompts_promised = are_owed or bool(kept)
        return list(gone.values()), next((each for each in hurrying if each.seq_id not in gone), None)

    def prefill_ns(self, sequence: Sequence) -> float:
        """The time that the rest of a sequence's known tokens takes alone, with the margin."""
        start = sequence.num_computed or self._known_tokens(sequence)
        return self.margin * self._step_time.prefill_ns(len(sequence.tokens) - start, start)

    def _pace(self) -> float:
        """The share of the time that promised tokens leave to prompts."""
        decoding_ns = self.step_ns(self._decoding.count, self._decoding.context)
        full = self.margin * self._step_time.prefill_ns(self.step_tokens, 0)
        spare = self._decoding.tightest_ns() - decoding_ns
        prompts = min(full, spare) if spare > 0 else full  # an objective that can't be met holds up nobody
        return max(0.01, prompts / (decoding_ns + prompts)) if prompts > 0 else 1.0

    # --- tokens -------------------------------------------------------------------------------------

    def outlook(self, decoding: list[Sequence], prompts: list[Sequence], urgent: Sequence | None, now: int) -> Outlook:
        """The limits that the running sequences set to the next step."""
        promised, least_ns = self._decoding, self.step_ns(1, 0) / DECODE_SHARE
        known = promised.context + promised.count
        self._promised_running = _Promised(promised.count, known, promised.tightest_ns(least_ns), least_ns)
        outlook = Outlook(urgent=urgent)
        for sequence in prompts:
            self.begins(sequence)
        if not decoding or not self._step_time.is_trained:
            return outlook
        needed = self.step_ns(promised.count, promised.context)
        # A token that can't be in time whatever the step leaves out binds nobody.
        binding = [times for times in promised.alike if needed <= times[1] < NEVER]
        if binding:
            first = min(binding, key=sum)
            outlook.slack_ns, outlook.tightest = sum(first) - now, promised.alike[first]
        if len(decoding) > promised.count:
            self._leave_out(decoding, promised.count, promised.context, outlook, now)
        outlook.slack_ns = (outlook.slack_ns - self.between_steps_ns) / self.margin
        return outlook

    def drafts_within(self, decodes: StepWork, slack_ns: float) -> int:
        """How many drafts a step with these decodes has time for, each about as long as one of them.

        What promised tokens leave of a step's time is for promised prompts, if there are any.
        """
        if math.isinf(slack_ns):
            return self.step_tokens
        if self.are_prompts_promised:
            return 0
        took_ns = self._step_time.predict_ns(decodes)
        each_ns = (took_ns - self._step_time.predict_ns(StepWork())) / max(1, decodes.decode_tokens)
        return max(0, int(min(self.step_tokens, (slack_ns - took_ns) / max(each_ns, 1.0))))

    def _leave_out(self, decoding: list[Sequence], count: int, context: int, outlook: Outlook, now: int) -> None:
        """Leave out sequences that decode without a promise, where the step would take too long with all of them.

        Those that have waited longest for a token are kept first. One that has starved stays. For an urgent prompt,
        all others are left out.
        """
        if math.isinf(outlook.slack_ns) and outlook.urgent is None:
            return
        others = [sequence for sequence in decoding if not is_promised(sequence)]
        others.sort(key=lambda sequence: (not sequence.has_starved, sequence.last_token_ns))
        stay = sum([sequence.has_starved for sequence in others])
        if len(others) > stay and now - others[stay].last_token_ns >= MOST_LEFT_OUT_NS:
            stay += 1
        kept, rest = others[:stay], others[stay:]
        if outlook.urgent is not None:
            rest = []
        count, context = count + stay, context + sum([sequence.num_computed for sequence in kept])
        for sequence in rest:
            count, context = count + 1, context + sequence.num_computed
            if self.step_ns(count, context) > outlook.slack_ns:
                break
            kept.append(sequence)
        staying = {sequence.seq_id for sequence in kept}
        outlook.left_out = [sequence for sequence in others if sequence.seq_id not in staying]

    def begins(self, sequence: Sequence) -> None:
        """Note that a sequence runs now."""
        if is_promised(sequence):
            self._promised_running.add(sequence)

    def has_room_for(self, newcomer: Sequence) -> bool:
        """Whether all promised tokens can be in time when a newcomer decodes beside the running sequences."""
        promised = self._promised_running
        if not promised.count or not is_promised(newcomer) or not self._step_time.is_trained:
            return True
        tightest = promised.tpot_ns
        if newcomer.tpot_ns >= promised.least_tpot_ns:
            tightest = min(tightest, newcomer.tpot_ns)
        return self.step_ns(promised.count + 1, promised.context + len(newcomer.tokens)) <= DECODE_SHARE * tightest


def _give_up(kept: list[_Kept], current: Sequence, done: float, backlog_ns: float, gone: dict[int, Yield]) -> float:
    """Move prompts of the heap `kept` to `gone` until `current` is in time or has been given up itself.

    Returns when the others are done.
    """
    last_first = list[_Kept]()
    while kept and done > current.planned_ns and not (last_first and last_first[-1][3] is current):
        last_first.append(heapq.heappop(kept))
        done += last_first[-1][1]
    last = last_first.pop()
    gone[last[3].seq_id] = Yield(last[3], "overload", backlog_ns)
    for each in reversed(last_first):
        if last[3] is current or done - each[1] <= current.planned_ns:  # giving up the last one was enough
            done -= each[1]
            heapq.heappush(kept, each)
        else:
            gone[each[3].seq_id] = Yield(each[3], "overload", backlog_ns)
    return done


def _give_up_in_turn(
    fair: FairSequences, kept: list[_Kept], current: Sequence, done: float, backlog_ns: float, gone: dict[int, Yield]
) -> float:
    """Do what _give_up() does, where tenants take turns.

    Of the last class, those of the tenant yield that would be served most.
    """
    given = list[_Kept]()
    while done > current.planned_ns and kept:
        rank = min(kept)[0]
        last = [each for each in kept if each[0] == rank]
        served: dict[str, float] = {}
        for *_, sequence in last:
            if sequence.tenant not in served:
                served[sequence.tenant] = fair.served(sequence)
            served[sequence.tenant] += fair.cost(sequence)
        most = max(served, key=lambda tenant: served[tenant])
        given.append(min(each for each in last if each[3].tenant == most))
        kept.remove(given[-1])
        done += given[-1][1]
        if given[-1][3] is current:
            break
    for each in reversed(given[:-1]):
        if given[-1][3] is current or done - each[1] <= current.planned_ns:  # the last one was enough
            given.remove(each)
            kept.append(each)
            done -= each[1]
    heapq.heapify(kept)
    gone |= {each[3].seq_id: Yield(each[3], "overload", backlog_ns) for each in given}
    return done


def is_promised(sequence: Sequence) -> bool:
    """Whether a sequence has an objective and does not wait for a first token for which it has yielded."""
    return (sequence.due_ns != NEVER or sequence.tpot_ns != NEVER) and not sequence.has_yielded
