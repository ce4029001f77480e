"""How many drafts a step tries: as many as make tokens come faster, and none where that is not known to pay.

A step computes a row of logits for each newest token and each draft behind one. A draft that is refused has cost its
row alone, so three things decide, and all of them are measured:

* how likely a draft is right (`HitRates`, `Confidences`). Drafts that are not tried are compared with what is drawn,
  too: so this is known of every sequence at no cost, and changes where the text does.
* how long a step of so many rows takes (`RowTimes`). On a processor whose products take 16 rows at a time, 15 drafts
  behind one token cost a few per cent; behind 16 tokens, each costs as much as a token.
* what was won and lost until now. A small share of the time may be lost to drafts, whatever was estimated.

The number of rows with the most expected tokens per second is taken. Drafts of a model take time before they can be
tried, and `Drafting` decides about that. The policy reads no clock, and its answers are
proposals to the scheduler, so a recording of the scheduler has all that came of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping

import msgspec

from headway.policy.step.draft_measures import HitRates, Pace, RowTimes
from headway.policy.step.drafting import Drafting
from headway.policy.step.step_time import StepTimeModel

# Rows that steps with drafts have. As they are few, the times of all of them are soon known.
ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_GAIN, _FURTHER_GAIN = 1.1, 1.03  # least gains in tokens per second: for drafts at all, and for more rows of them
_GROWTH = 2  # most multiple of the rows that were measured
_LOSS = 0.004  # share of the time that drafts may lose as far as that is seen: what they leave in caches costs more
_CREDIT_AT_START, _MOST_CREDIT = 1.8, 5.0  # in steps without drafts
_CREDIT_OF_MODELS = 6.0  # the same more, as passes of a draft model have to be paid before anything is known of it
_LEAST_SHARE, _OF_MANY = 0.4, 2.4  # of the most: so much, and this by the number of sequences
# After so many steps some are left alone, so that it stays known what they take then. The first of these still find the
# caches full of other numbers. Where more are, as too much was lost, few of those are timed: that takes a per cent of a
# short step.
_PLAIN_EVERY, _PLAIN_STEPS, _SETTLING = 192, 6, 2
_UNKNOWN_EVERY, _FIRST_AFTER = 48, 16  # the same where that is not known of so many sequences, or of any
_TIMED, _SELDOM = 8, 32
_MEMORY_ALONE = 32
# How much longer steps without drafts may take than those that were left alone, as a share, so that it counts no
# further: more comes from others who use the machine. They do not take less. Right behind drafts, one may differ more.
_EXCESS, _BEHIND_DRAFTS = 0.06, 0.5
_BELIEVED = 4  # steps that merely have no drafts, before they are taken to take longer than those that are left alone


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """Drafts that may follow a sequence's tokens.

    Args:
        token_ids: the drafts, in order; at least one.
        match: how many of the sequence's last tokens they have followed before.
        confidences: the probability of each by a draft model; empty for drafts that come from elsewhere.
    """

    token_ids: list[int]
    match: int = 0
    confidences: list[float] = []


class Speculation:
    """Decides for each step which sequences try how many drafts.

    It keeps account of the time that drafts have won and lost, beside steps that were left alone: without drafts, and
    without anything that looks for them. Drafts may lose a small share of all time. Where that is used up, steps pass
    without any until it is earned again.

    Args:
        most: most drafts behind a token.
        step_time: says what a row costs in steps of a size that has not been measured.
        drafting: decides about the drafts of a model; None where there is none.

    Attributes:
        is_timed: took() wants the time of the step that has ended.
        credit_ns: what may be lost, until more is earned; below 0 if more was lost.
    """

    def __init__(self, most: int, step_time: StepTimeModel, drafting: Drafting | None = None) -> None:
        self.drafting = drafting
        self._built = self._most = most
        self._step_time = step_time
        self._pace, self._changes = Pace(), 0
        self._times, self._rates = RowTimes(pace=self._pace, leads=True), HitRates()
        self._alone = RowTimes(_MEMORY_ALONE)  # the times of steps that were left alone
        self._looking = RowTimes(_MEMORY_ALONE)  # those of others without drafts
        self._left_alone: set[int] = set()  # of how many sequences some were
        if drafting is not None:
            drafting.follow(self._pace)
        self._standing: Mapping[int, Proposal] = {}
        self.credit_ns = 0.0
        self._plain_ns = 0.0  # what a step without drafts takes; 0 while that is not known
        self._usual_ns = 0.0  # what it takes to make drafts
        self._further_credit = 0.0 if drafting is None else _CREDIT_OF_MODELS
        self._passes_ns = 0.0  # of the step that comes
        self._resting = self._rested = self._busy = 0  # steps: that are left alone yet, that were, that were not
        self._all_rested, self.is_timed = 0, True
        self._has_drafted, self._sequences = False, 0

    # --- after a step -------------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether a step is left alone, and the next one tries no drafts."""
        if not self._resting:
            self._rested, self.is_timed = 0, True
            return False
        self._resting -= 1
        self._rested += 1
        self._all_rested += 1
        self._busy = 0
        self.is_timed = self._rested <= _TIMED or self._all_rested % _SELDOM == 0
        return True

    def heed(self, seq_id: int, new: list[int]) -> None:
        """Tokens of a sequence were drawn: compare them with what was proposed, whether it was tried or not."""
        proposal = self._standing.get(seq_id)
        if proposal is None:
            return
        for at, (draft, token) in enumerate(zip(proposal.token_ids, new, strict=False)):
            if not proposal.confidences:
                self._rates.note(seq_id, proposal.match + at, draft == token)
            elif self.drafting is not None:
                self.drafting.hits.note(seq_id, proposal.confidences[at], draft == token)
            if draft != token:
                break

    def took(self, sequences: int, rows: int, new_tokens: int, took_ns: int) -> None:
        """A step in which all sequences decoded took so long, and gave so many tokens.

        One without drafts behind one with some finds the caches full of other numbers. Its time counts in the account,
        but says little of other steps.
        """
        if not self.is_timed:
            return
        self._sequences = sequences
        rested, drafted, had_drafted = self._rested, rows > sequences, self._has_drafted
        self._has_drafted = drafted
        if self._changes != self._pace.changes:  # only times of one pace can be compared
            self._changes = self._pace.changes
            self._alone, self._looking = RowTimes(_MEMORY_ALONE), RowTimes(_MEMORY_ALONE)
        if rested > _SETTLING:
            if not drafted:
                self._was_alone(sequences, took_ns)
            return
        self._busy += not rested
        behind_drafts = had_drafted and not drafted
        counted = 0.0 if rested or behind_drafts else self._times.observe(rows, took_ns)
        if counted and not drafted:
            self._looking.observe(sequences, took_ns)
        plain = self._known_plain_ns(sequences)
        if plain is None:
            return
        if behind_drafts:
            counted = _near(float(took_ns), plain, _BEHIND_DRAFTS)
        elif rested or (counted and not drafted):
            looking = self._looking.known_ns(sequences) if self._looking.times(sequences) >= _BELIEVED else plain
            counted = max(plain, _near(looking or plain, plain, _EXCESS))
        elif not counted:
            self.credit_ns += self._passes_ns  # what such a step wins is not known, so it was no loss
            return
        if drafted:
            plain = self._plain_now_ns(sequences) or plain
        if not self._plain_ns:
            self.credit_ns += (_CREDIT_AT_START + self._further_credit) * plain
        self._plain_ns = plain
        self.credit_ns += _LOSS * counted * (not rested) + plain * new_tokens / sequences - counted

    def _was_alone(self, sequences: int, took_ns: int) -> None:
        """A step that was left alone took so long."""
        self._left_alone.add(sequences)
        if plain := self._plain_now_ns(sequences):
            self._pace.note(took_ns / plain)
        self._alone.observe(sequences, took_ns)

    def _known_plain_ns(self, sequences: int) -> float | None:
        """What a step of so many sequences takes that is left alone; at first, that merely has no drafts."""
        plain, alone = self._times.known_ns(sequences), self._alone.known_ns(sequences)
        return plain if plain is None or alone is None else alone

    def _plain_now_ns(self, sequences: int) -> float | None:
        """The same at the machine's pace of late, which steps with drafts and their passes are compared with."""
        plain, alone = self._times.known_ns(sequences), self._alone.known_ns(sequences)
        looking = self._looking.known_ns(sequences)
        return plain if plain is None or alone is None or looking is None else plain * min(1.0, alone / looking)

    def spent(self, took_ns: int) -> None:
        """So long it took to find drafts, or none, without the passes of a model.

        It counts as twice as long as usual at most, or as a step: then the machine was held up.
        """
        most = max(2.0 * self._usual_ns, self._plain_ns)
        counted = min(float(took_ns), most) if self._usual_ns else float(took_ns)
        self._usual_ns += (counted - self._usual_ns) / 8 if self._usual_ns else counted
        self._passes_ns = 0.0 if self.drafting is None else self.drafting.take_passes_ns()
        if self._plain_ns:
            left = self.credit_ns - counted - self._passes_ns
            # Where many decode there is less to win with drafts, and as much to lose.
            share = min(1.0, _LEAST_SHARE + _OF_MANY / max(1, self._sequences))
            self.credit_ns = min(left, share * (_MOST_CREDIT + self._further_credit) * self._plain_ns)

    def forget(self, seq_id: int, output_len: int = 0) -> None:
        """A sequence has ended with so many tokens of output."""
        self._rates.forget(seq_id)
        if self.drafting is not None:
            self.drafting.hits.forget(seq_id)
            self.drafting.ended(output_len)

    # --- before the next one ------------------------------------------------------------------------

    def limit(self, most: int) -> int:
        """Try no more than so many drafts behind a token from now on; how many these may be."""
        self._most = min(self._built, most)
        if self.drafting is not None:
            self.drafting.most = self._most
        return self._most

    def asks(self) -> bool:
        """Whether drafts are wanted for the next step. If not, they rest until what they have lost is earned again."""
        self._standing = {}
        if self._busy >= self._most_busy:
            self._resting = _PLAIN_STEPS
            return False
        if not self._plain_ns or self.credit_ns >= 0.0:
            return self._plain_ns > 0.0
        earned = _LOSS * self._plain_ns
        self._resting = int(-self.credit_ns / earned) + 1
        self.credit_ns += self._resting * earned
        return False

    def opens(self, decoding: int, with_prompts: bool, slack_ns: float = math.inf) -> Drafting | None:
        """What decides about the drafts of a model for the next step; None where it is to have none.

        Args:
            slack_ns: the time within which that step must have ended.
        """
        plain, drafting = self._plain_now_ns(decoding), self.drafting
        if drafting is None or plain is None:
            return None
        row_ns = self._row_ns(plain / decoding)

        def step_ns(rows: int) -> float:
            return plain + (rows - decoding) * row_ns if with_prompts else self._times.expected_ns(rows, row_ns)

        drafting.open(decoding, step_ns, _GROWTH * self._times.largest, slack_ns - plain)
        return drafting

    def is_likelier(self, seq_id: int, proposal: Proposal) -> bool:
        """Whether drafts that were found are at least as likely right as those that a model would make."""
        found = self._rates.chances(seq_id, proposal.match, 1)
        return self.drafting is None or (found != [] and found[0] >= self.drafting.hits.usual(seq_id))

    @property
    def _most_busy(self) -> int:
        """After how many steps some are left alone."""
        if not self._left_alone:
            return _FIRST_AFTER
        return _PLAIN_EVERY if self._sequences in self._left_alone else _UNKNOWN_EVERY

    def choose(
        self, proposals: Mapping[int, Proposal], decoding: int, with_prompts: bool = False
    ) -> dict[int, list[int]]:
        """The drafts that the next step is to try, by the seq_id of their sequences.

        Args:
            proposals: of each sequence that has any.
            decoding: how many sequences decode in that step.
            with_prompts: it may compute prompts, too. They leave no time unused, so each row costs all of its own.
        """
        self._standing = proposals
        return self._best(proposals, decoding, with_prompts) if proposals else {}

    def _best(self, proposals: Mapping[int, Proposal], decoding: int, with_prompts: bool) -> dict[int, list[int]]:
        plain = self._plain_now_ns(decoding)
        if plain is None:
            return {}
        gains: list[tuple[float, int]] = []
        for seq_id, proposal in proposals.items():
            gains += [(chance, seq_id) for chance in self._chances(seq_id, proposal)]
        gains.sort(key=_chance, reverse=True)
        row_ns = self._row_ns(plain / decoding)
        tokens, least, drafts, added = float(decoding), _GAIN * decoding / plain, 0, 0
        for rows in ROWS[bisect_right(ROWS, decoding) :]:
            extra = rows - decoding
            if extra > len(gains) or rows > _GROWTH * self._times.largest:
                break
            tokens += sum([chance for chance, _ in gains[added:extra]])
            added = extra
            took_ns = plain + extra * row_ns if with_prompts else self._times.expected_ns(rows, row_ns)
            if self._times.feared_ns(rows, row_ns) - plain * tokens / decoding > self.credit_ns:
                break  # if it takes as long as it may, more is lost than may be
            if tokens > least * took_ns:
                least, drafts = _FURTHER_GAIN * tokens / took_ns, extra
        counts = Counter([seq_id for _, seq_id in gains[:drafts]])
        return {seq_id: proposals[seq_id].token_ids[:count] for seq_id, count in counts.items()}

    def _chances(self, seq_id: int, proposal: Proposal) -> list[float]:
        """The chance that each draft and all before it are right, as far as that is worth a row."""
        if proposal.confidences and self.drafting is not None:
            return self.drafting.hits.chances(proposal.confidences[: self._most])
        return self._rates.chances(seq_id, proposal.match, min(self._most, len(proposal.token_ids)))

    def _row_ns(self, token_ns: float) -> float:
        """What a row adds to a step: a prompt's token, or at first a quarter of what a token takes by itself."""
        learnt = self._step_time.prefill_ns(1, 0) if self._step_time.is_trained else 0.0
        return learnt or token_ns / 4


def _near(took_ns: float, plain_ns: float, share: float) -> float:
    """A time within so much of another."""
    return min(max(took_ns, (1.0 - share) * plain_ns), (1.0 + share) * plain_ns)


def _chance(gain: tuple[float, int]) -> float:
    return gain[0]
