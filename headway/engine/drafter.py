"""Proposes drafts, which the next step tries: tokens that may follow those of a sequence."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from headway.engine.draft_model import DraftModel
from headway.engine.hooks import StepHooks
from headway.engine.messages import EngineStats, SequenceOutput
from headway.policy.step.drafting import Drafting
from headway.policy.step.plan import StepPlan, accepted_drafts
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.speculation import Proposal, Speculation
from headway.policy.step.speculative_config import SpeculativeConfig

# Tokens that are entered in the index between two steps, so that long prompts delay nobody: less than a millisecond.
# They are fewer where drafts may lose less than that, so that texts which are hardly looked at are hardly indexed.
INDEXED_AT_ONCE, _LEAST_INDEXED, _INDEXING_NS = 1024, 32, 400
_MOST_PLACES = 8  # places that are compared
logger = logging.getLogger("headway.engine")


class Drafter(Protocol):
    """Makes drafts for sequences that decode."""

    def propose(self, sequences: list[Sequence], most: int, most_ns: float = math.inf) -> dict[int, Proposal]:
        """Up to `most` drafts for each sequence, by its seq_id; nothing for those of which nothing is known.

        Args:
            most_ns: about how long it may take, as far as that suffices for some.
        """

    def forget(self, seq_id: int) -> None:
        """A sequence has ended; does nothing for an unknown one."""


class Repeats:
    """A text that grows, and where its last tokens have stood in it before.

    Each place of `least` tokens is found by these tokens, the latest first; each names the one before it, as in the
    hash chains of LZ77 coders (Deutsch 1996, RFC 1951, section 4). A token costs one look-up. While what followed the
    last match goes on, the same place stays the longest match, and nothing is looked up.

    Args:
        least: shortest match.
        most: tokens that are compared at most.
        offset: how many of the tokens are put before a sequence's own.
    """

    __slots__ = ("_before", "_latest", "_least", "_most", "_place", "match", "offset", "tokens")

    def __init__(self, tokens: list[int], least: int, most: int, offset: int = 0) -> None:
        self.tokens = tokens
        self.offset = offset
        self.match = 0
        self._least, self._most = least, most
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # for each token the last place before it that ends with the same tokens
        self._place = -1  # what the last tokens match ends here

    def index(self, most: int) -> int:
        """Enter up to `most` tokens in the index; returns how many were. Those before the last one are found then."""
        tokens, least, before, latest = self.tokens, self._least, self._before, self._latest
        start = len(before)
        end = min(start + most, len(tokens) - 1)
        if start < least - 1 and start < end:  # so few tokens are no match
            before += [-1] * (min(end, least - 1) - start)
        first = len(before)
        if end - first == 1:
            before.append(latest.get(key := tuple(tokens[end - least : end]), -1))
            latest[key] = first
        elif first < end:
            parts = [tokens[first - back : end - back] for back in range(least - 1, -1, -1)]
            for at, key in enumerate(zip(*parts, strict=True), first):
                before.append(latest.get(key, -1))
                latest[key] = at
        return end - start

    @property
    def is_indexed(self) -> bool:
        return len(self._before) + 1 >= len(self.tokens)

    def add(self, new: list[int]) -> None:
        """Append tokens, and find the longest match of the last ones. All before them must be in the index."""
        tokens, place, count = self.tokens, self._place, len(new)
        tokens += new
        self.index(count)
        if place >= 0 and count and tokens[place + 1 : place + 1 + count] == new:
            self._place, self.match = place + count, min(self._most, self.match + count)
        else:
            self._find()

    def put_off(self, new: list[int]) -> None:
        """Append tokens that are not in the index yet. A match is looked for when they are, by add()."""
        self.tokens += new
        self._place, self.match = -1, 0

    def _find(self) -> None:
        tokens, most = self.tokens, self._most
        last = len(tokens) - 1
        place = self._latest.get(tuple(tokens[max(0, last + 1 - self._least) : last + 1]), -1)
        self._place, self.match = -1, 0
        for _ in range(_MOST_PLACES):
            if place < 0:
                return
            length, longest = self._least, min(most, place + 1)
            while length < longest and tokens[place - length] == tokens[last - length]:
                length += 1
            if length > self.match:
                self._place, self.match = place, length
            if length >= most:
                return
            place = self._before[place]

    def following(self, count: int) -> list[int]:
        """What followed the longest match, up to `count` tokens; where it runs into the end, it repeats itself."""
        if self._place < 0:
            return []
        found = self.tokens[self._place + 1 : self._place + 1 + count]
        period = len(found)
        return (found * -(-count // period))[:count] if 0 < period < count else found


class NgramDrafter:
    """Proposes what followed when the last tokens stood in the prompt or the output before, or in a prediction.

    A prediction of the output is searched as if it had followed the prompt before.

    Args:
        config: how long matches must be.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._known: dict[int, Repeats] = {}

    def propose(self, sequences: list[Sequence], most: int, most_ns: float = math.inf) -> dict[int, Proposal]:
        """See Drafter. Where there is no time for all, the first ones have drafts."""
        found: dict[int, Proposal] = {}
        # Long prompts do not take the time of those whose last tokens alone are new.
        new_ones = behind = max(_LEAST_INDEXED, int(min(INDEXED_AT_ONCE, most_ns / _INDEXING_NS)))
        for sequence in sequences:
            text = self._known.get(sequence.seq_id)
            if text is None:
                text = self._known[sequence.seq_id] = self._begun(sequence)
            new = sequence.tokens[len(text.tokens) - text.offset :]
            if not text.is_indexed or len(new) > new_ones:
                if not behind:
                    continue
                text.put_off(new)
                behind -= text.index(behind)
                if not text.is_indexed:
                    continue
                new = []
            new_ones -= len(new)
            text.add(new)
            if text.match and (drafts := text.following(most)):
                found[sequence.seq_id] = Proposal(drafts, text.match)
        return found

    def _begun(self, sequence: Sequence) -> Repeats:
        least, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        tokens, end = sequence.tokens, sequence.prompt_len
        before = [*tokens[max(0, end - most) : end], *sequence.prediction] if sequence.prediction else []
        return Repeats(before + tokens, least, most, len(before))

    def forget(self, seq_id: int) -> None:
        self._known.pop(seq_id, None)


class Speculator(StepHooks):
    """Has the scheduler try drafts: asks drafters for them before each step, and the policy how many pay.

    Args:
        drafter: finds drafts in next to no time.
        most: most drafts behind a token.
        model: makes drafts where those that are found are likelier wrong; None for none.
        drafting: decides about the model, whose times it knows.

    Attributes:
        model: the model; None also once it has failed.
    """

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        scheduler: Scheduler,
        clock: Callable[[], int] = time.monotonic_ns,
        model: DraftModel | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._scheduler = scheduler
        self.model = model
        self._policy = Speculation(most, scheduler.accounting.step_time, drafting)
        self._is_due = self._was_poor = False
        self._learning_ns = 0
        self._kinds: dict[int, str] = {}  # of the drafts that the next step is to try, by seq_id

    def after(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        """Learn from a step."""
        if not plan.scheduled:
            return outputs
        policy = self._policy
        self._is_due = not policy.rests()
        if not policy.is_timed:
            return outputs
        began = self._clock()
        if plan.work.decode_tokens == plan.num_tokens:
            new_tokens = sum([len(new) for _, new in changed])
            took_ns = began - self._scheduler.decisions[-1].planned_ns
            policy.took(len(plan.scheduled), plan.num_tokens, new_tokens, took_ns)
        if self._is_due:
            for sequence, new in changed:
                policy.heed(sequence.seq_id, new)
            self._learning_ns = self._clock() - began
        return outputs

    def before(self) -> None:
        """Propose drafts for the next step, where they pay. The time is accounted to all sequences that run."""
        policy, scheduler = self._policy, self._scheduler
        self._kinds = {}
        if not self._is_due:
            return
        self._is_due = False
        most = policy.limit(scheduler.config.most_drafts)
        if not policy.asks() or not most:
            return
        began = self._clock()
        running = scheduler.running
        decoding = [sequence for sequence in running if sequence.is_decoding]
        free = [each for each in decoding if not each.params.without_drafts]
        proposals = self._drafter.propose(free, most, policy.credit_ns)
        has_seats = len(running) < scheduler.config.max_num_seqs
        with_prompts = len(decoding) < len(running) or (len(scheduler.waiting) > 0 and has_seats)
        computing_ns = 0
        if (model := self.model) is not None and free:
            before_ns = model.computing_ns
            proposals |= self._of_model(model, free, proposals, len(decoding), with_prompts)
            computing_ns = model.computing_ns - before_ns
        for seq_id, drafts in policy.choose(proposals, len(decoding), with_prompts).items():
            scheduler.propose(seq_id, drafts)
            by_model = self.model if proposals[seq_id].confidences else None
            self._kinds[seq_id] = "ngram" if by_model is None else by_model.kind
        ended = self._clock()
        policy.spent(self._learning_ns + ended - began - computing_ns)
        scheduler.accounting.record_drafting(running, began, ended)

    def _of_model(
        self, model: DraftModel, free: list[Sequence], found: dict[int, Proposal], decoding: int, with_prompts: bool
    ) -> dict[int, Proposal]:
        """Drafts of the model for the sequences whose drafts that were found are less likely right."""
        policy, slack_ns = self._policy, self._scheduler.decisions[-1].slack_ns
        lacking = [s for s in free if s.seq_id not in found or not policy.is_likelier(s.seq_id, found[s.seq_id])]
        drafting = policy.opens(decoding, with_prompts, slack_ns) if lacking else None
        if drafting is None:
            return {}
        try:
            drafts = model.propose(lacking, drafting)
        except Exception:
            logger.exception("the draft model failed, and is used no more; answers go on without it")
            self.model = None
            model.reset()
            return {}
        if drafting.is_poor != self._was_poor:
            self._was_poor = drafting.is_poor
            right = f"{drafting.hits.mean:.0%} of its drafts are right"
            if drafting.is_poor:
                logger.warning("the draft model is switched off: %s, which wins no time; it is tried rarely", right)
            else:
                logger.warning("the draft model is used again: %s", right)
        return drafts

    def count(self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], stats: EngineStats) -> None:
        """Add to the counters of a step what became of its drafts."""
        if not plan.work.drafts:
            return
        new_of = {sequence.seq_id: new for sequence, new in changed}
        for item in plan.scheduled:
            if item.samples > 1 and item.seq_id in new_of:
                accepted, tried = accepted_drafts(item, new_of[item.seq_id]), item.samples - 1
                stats.spec_decode_num_drafts += 1
                stats.spec_decode_num_draft_tokens += tried
                stats.spec_decode_num_accepted_tokens += accepted
                of_kind = stats.drafts_of_kind.setdefault(self._kinds.get(item.seq_id, "grammar"), [0, 0])
                of_kind[0] += tried
                of_kind[1] += accepted
                stats.accepted_at += [0] * (accepted - len(stats.accepted_at))
                for at in range(accepted):
                    stats.accepted_at[at] += 1

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence.seq_id)
        self._policy.forget(sequence.seq_id, sequence.output_len)
        if self.model is not None:
            self.model.forget(sequence.seq_id)

    def check_by_parts(self) -> Iterator[None]:
        """Check the draft model's pool, as KVBlocks.check_by_parts() does."""
        if self.model is not None:
            yield from self.model.check_by_parts()
