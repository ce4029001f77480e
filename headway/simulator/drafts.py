"""Drafts on a virtual clock: the policy of a live engine, drafts that are right by given chances, and what they cost.

Drafts of n-grams cost nothing and are there for every token. A draft model takes passes as long as the cost model says,
and has to compute what it lacks of a sequence, as in a live engine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment
from headway.policy.step.accounting import StepTimes
from headway.policy.step.drafting import Drafting
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.speculation import Proposal, Speculation
from headway.simulator.answers import Choice
from headway.simulator.traffic import EOS

_MATCH = 4  # of drafts that n-grams are supposed to have found
_MEASURED = (1, 4, 16)  # sequences of the passes that an engine measures at its start
_WRONG = EOS + 1  # a draft that nothing draws
_CONTEXT = 64  # contexts of passes are rounded, as most are then alike to one before


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How drafts are made and how often they are right."""

    most: int  # most drafts behind a token
    # The chance that a draft is right where those before it are, by its place; the last one goes on.
    acceptance: tuple[float, ...]
    model: Deployment | None = None  # the draft model on its hardware; None for n-grams
    found: float = 1.0  # the chance that n-grams find any

    def chance(self, at: int) -> float:
        return self.acceptance[min(at, len(self.acceptance) - 1)]


@dataclass(slots=True)
class Drafts:
    """Has the scheduler of a simulated engine try drafts, and says what is drawn behind them."""

    plan: DraftPlan
    scheduler: Scheduler
    # tried, accepted: how many drafts, since the beginning.
    tried: int = 0
    accepted: int = 0
    _policy: Speculation = field(init=False)
    _drafting: Drafting | None = field(init=False)
    _rng: random.Random = field(init=False, default_factory=lambda: random.Random(0))
    _computed: dict[int, int] = field(init=False, default_factory=dict)  # tokens of sequences in the draft model
    _passes: dict[tuple[int, int, int], int] = field(init=False, default_factory=dict)
    _is_due: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._drafting = None if self.plan.model is None else Drafting(self.plan.most)
        self._policy = Speculation(self.plan.most, self.scheduler.accounting.step_time, self._drafting)
        if self._drafting is not None:
            for size in _MEASURED:
                for _ in range(2):
                    self._drafting.passed(size, self._pass_ns(1, size, 1))
            self._drafting.caught_up(_CONTEXT, self._pass_ns(_CONTEXT, 1, 0))
            self._drafting.take_passes_ns()

    def _pass_ns(self, tokens: int, sequences: int, context: int) -> int:
        """The time of a pass of so many tokens for each sequence, after about so many."""
        assert self.plan.model is not None
        alike = tokens, sequences, round(context / _CONTEXT) * _CONTEXT
        if alike not in self._passes:
            chunk = Chunk(tokens, max(1, alike[2]), 1, sequences)
            self._passes[alike] = round(self.plan.model.step([chunk]).device_s * 1e9)
        return self._passes[alike]

    def propose(self, choices: Mapping[int, Choice], now: int) -> int:
        """Propose drafts for the next step; returns the time when they are made."""
        policy, scheduler = self._policy, self.scheduler
        if not self._is_due:
            return now
        self._is_due = False
        most = policy.limit(scheduler.config.most_drafts)
        if not policy.asks() or not most:
            return now
        running = scheduler.running
        decoding = [sequence for sequence in running if sequence.is_decoding]
        has_seats = len(running) < scheduler.config.max_num_seqs
        with_prompts = len(decoding) < len(running) or (len(scheduler.waiting) > 0 and has_seats)
        ended = now
        if self._drafting is None:
            found = [each for each in decoding if self.plan.found >= 1.0 or self._rng.random() < self.plan.found]
            drafts = {each.seq_id: self._drafts(choices[each.seq_id], most) for each in found}
            proposals = {seq_id: Proposal(each, _MATCH) for seq_id, each in drafts.items()}
        else:
            slack_ns = scheduler.decisions[-1].slack_ns
            drafting = policy.opens(len(decoding), with_prompts, slack_ns) if decoding else None
            proposals = {}
            if drafting is not None:
                proposals, took_ns = self._model_drafts(drafting, decoding, choices)
                ended += took_ns
        for seq_id, tokens in policy.choose(proposals, len(decoding), with_prompts).items():
            scheduler.propose(seq_id, tokens)
        policy.spent(0)
        scheduler.accounting.record_drafting(running, now, ended)
        return ended

    def _drafts(self, choice: Choice, count: int) -> list[int]:
        answer, plan, rng = choice.of.arrival.answer, self.plan, self._rng
        return [answer if rng.random() < plan.chance(at) else _WRONG for at in range(count)]

    def _model_drafts(
        self, drafting: Drafting, decoding: list[Sequence], choices: Mapping[int, Choice]
    ) -> tuple[dict[int, Proposal], int]:
        """Drafts of the model, and the nanoseconds that they take."""
        computed, took_ns = self._computed, 0
        lacks = {s.seq_id: len(s.tokens) - computed.get(s.seq_id, s.cached_tokens) for s in decoding}
        context = sum([len(sequence.tokens) for sequence in decoding]) // len(decoding)
        advance, chosen = drafting.begin(lacks, {s.seq_id: s.output_len for s in decoding})
        if count := sum(advance.values()):
            took_ns = self._pass_ns(count, 1, context // 2)
            drafting.caught_up(count, took_ns)
        for sequence in decoding:
            if sequence.seq_id in advance:
                part = advance[sequence.seq_id]
                computed[sequence.seq_id] = len(sequence.tokens) - lacks[sequence.seq_id] + part
        made = {seq_id: self._drafts(choices[seq_id], self.plan.most) for seq_id in chosen}
        counts = dict.fromkeys(chosen, 0)
        while chosen:
            pass_ns = self._pass_ns(1, len(chosen), context)
            drafting.passed(len(chosen), pass_ns)
            took_ns += pass_ns
            confidences = {seq_id: self.plan.chance(counts[seq_id]) for seq_id in chosen}
            for seq_id in chosen:
                counts[seq_id] += 1
            chosen = drafting.goes_on(confidences)
        for sequence in decoding:
            if sequence.seq_id in counts:
                computed[sequence.seq_id] = len(sequence.tokens)
        confidences_of = {seq_id: [self.plan.chance(at) for at in range(count)] for seq_id, count in counts.items()}
        return {n: Proposal(made[n][: counts[n]], 0, each) for n, each in confidences_of.items()}, took_ns

    def drawn(
        self, plan: StepPlan, choices: Mapping[int, Choice], next_of: Mapping[int, list[int]]
    ) -> dict[int, list[int]]:
        """What is drawn of each sequence: the drafts that are right, and a token behind them.

        Args:
            next_of: what is drawn of each without drafts.
        """
        found = dict(next_of)
        for item in plan.scheduled:
            if item.samples < 2:
                continue
            choice, drafts = choices[item.seq_id], item.token_ids[item.num_tokens - item.samples + 1 :]
            answer, left = choice.of.arrival.answer, choice.until_last - len(choice.answer.token_ns)
            right = next((at for at, draft in enumerate(drafts) if draft != answer), len(drafts))
            count = max(0, min(right + 1, left))
            found[item.seq_id] = [answer] * count + [EOS] * (right + 1 > count)
            self.tried += len(drafts)
            self.accepted += min(right, len(found[item.seq_id]) - 1)
        return found

    def step_ended(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], planned: int, times: StepTimes
    ) -> None:
        """Learn from a step that was planned at this time."""
        policy = self._policy
        self._is_due = not policy.rests()
        if plan.work.decode_tokens == plan.num_tokens:
            new_tokens = sum([len(new) for _, new in changed])
            policy.took(len(plan.scheduled), plan.num_tokens, new_tokens, times.sampled_ns - planned)
        for sequence, new in changed:
            if self._is_due:
                policy.heed(sequence.seq_id, new)
            if sequence.finish_reason is not None:
                self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._policy.forget(sequence.seq_id, sequence.output_len)
        self._computed.pop(sequence.seq_id, None)
