"""How far a draft model drafts: on, as long as the next draft is expected to win more time than it takes.

A pass of the draft model gives one draft to each sequence that takes part. Before the first pass of a step, all is
measured that says whether any pays: how often drafts are right (`Confidences`), what a pass takes, what a step takes by
its rows. The time of a token at the best number of drafts is the price that a right draft is worth. As in Dinkelbach's
method (1967) for the best ratio of tokens and time, a pass is made while what it wins at this price is more than it
takes. The probability that the model gives a draft says how likely the next one is of use, so texts that are easy to
foresee are drafted far, and others are not.

What the model lacks of a sequence's tokens is computed first, in parts, where the rest of the answer is expected to
earn that twice. Where drafts do not pay, one is made now and then, for a small share of the time, so that it is noticed
when this changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.policy.step.draft_measures import Confidences, Pace, RowTimes

# Tokens of sequences that are computed between two steps, so that long prompts delay nobody.
CAUGHT_UP_AT_ONCE = 256
BESIDE = 4  # so many lacking tokens are computed in the pass that makes the first draft
_GAIN, _GAIN_AGAIN = 1.1, 1.2  # least gains in tokens per second, the second for a model that was poor before
_SURE = 2.0  # what a sequence lacks is computed if that is earned so many times
_TRUSTED = 32  # drafts that were judged, before what several sequences lack is computed at once
_PROBED = 0.002  # share of the time for drafts that are not expected to pay
_JUDGED_POOR = 64  # drafts that were judged, before the model is called poor
_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LENGTH, _LENGTHS_SEEN = 128.0, 8  # the mean length of outputs at first, and over how many the mean is


@dataclass(slots=True)
class _Step:
    """The step that drafts are made for."""

    decoding: int  # sequences that decode in it
    step_ns: Callable[[int], float]  # the time of a step of so many rows, at least `decoding`
    most_rows: int  # most rows that it may have
    most_ns: float  # most time for all passes
    value_ns: float = 0.0  # what a right draft is worth
    reach: dict[int, float] = field(default_factory=dict)  # the chance that all drafts of a sequence so far are right
    passes: int = 0
    drafts: int = 0


class Drafting:
    """Decides which sequences a draft model drafts for in a step, and when it stops.

    Args:
        most: most drafts behind a token.

    Attributes:
        hits: how often its drafts are right.
        is_poor: drafts are right so rarely that they win nothing, even where the fewest sequences decode.
    """

    def __init__(self, most: int) -> None:
        self.hits = Confidences()
        self.is_poor = False
        self.most = most
        self._passes = RowTimes()
        self._token_ns = 0.0  # of a token of what sequences lack
        self._length, self._ended = _LENGTH, 0
        self._saved_ns = 0.0  # for drafts that are not expected to pay
        self._took_ns = 0.0
        self._fewest = 0  # sequences of the smallest step
        self._step = _Step(0, float, 0, 0.0)

    # --- what is measured ---------------------------------------------------------------------------

    def follow(self, pace: Pace) -> None:
        """Have passes keep pace with steps."""
        self._passes.pace = pace

    def passed(self, tokens: int, took_ns: int) -> None:
        """A pass of so many tokens has given drafts."""
        self._took_ns += self._passes.observe(tokens, took_ns)

    def caught_up(self, tokens: int, took_ns: int) -> None:
        """So many tokens of what sequences lacked were computed."""
        each_ns = took_ns / tokens
        known = self._token_ns
        self._token_ns += (min(each_ns, 2.0 * known) - known) / 4 if known else each_ns

    def ended(self, output_len: int) -> None:
        """A sequence has ended with so many tokens of output."""
        self._ended = min(self._ended + 1, _LENGTHS_SEEN)
        self._length += (output_len - self._length) / self._ended

    def take_passes_ns(self) -> float:
        """What passes took since this was last asked."""
        taken, self._took_ns = self._took_ns, 0.0
        return taken

    # --- before a step ------------------------------------------------------------------------------

    def open(self, decoding: int, step_ns: Callable[[int], float], most_rows: int, most_ns: float = math.inf) -> None:
        """Drafts may be made for a step in which so many sequences decode; see _Step."""
        self._step = _Step(decoding, step_ns, most_rows, most_ns)
        self._fewest = min(self._fewest or decoding, decoding)

    def begin(self, lacks: Mapping[int, int], output_lens: Mapping[int, int]) -> tuple[dict[int, int], list[int]]:
        """What is computed for a step.

        Args:
            lacks: how many tokens of each sequence the model has not computed; at least one.
            output_lens: how many tokens of output each has.

        Returns:
            how many tokens are computed of which sequences in advance, and which sequences have drafts then.
        """
        step = self._step
        chances = {seq_id: self.hits.usual(seq_id) for seq_id in lacks}
        mean = sum(chances.values()) / len(chances)
        ratio = self._ratio(mean, len(lacks), step.decoding)
        if step.decoding == self._fewest and self.hits.judged >= _JUDGED_POOR:
            least = _GAIN_AGAIN if self.is_poor else _GAIN
            self.is_poor = self._ratio(self.hits.mean, len(lacks), step.decoding) > 1.0 / least
        plain_ns = step.step_ns(step.decoding)
        if ratio > 1.0 / _GAIN or self._pass_ns(1) > step.most_ns:
            return self._probe(lacks, plain_ns)
        step.value_ns = plain_ns / step.decoding * ratio
        saved_ns = plain_ns / step.decoding * (1.0 - ratio)
        ready = [seq_id for seq_id, count in lacks.items() if count <= BESIDE]
        behind = sorted((count, seq_id) for seq_id, count in lacks.items() if count > BESIDE)
        most = self._at_once(min(plain_ns, step.most_ns))
        advance: dict[int, int] = {}
        for count, seq_id in behind if self.hits.judged >= _TRUSTED else behind[:1]:
            if most <= 0:
                break
            if self._left(output_lens[seq_id]) * saved_ns < _SURE * count * self._token_ns:
                continue
            advance[seq_id] = part = min(most, count - 1)
            most -= part
            step.most_ns -= part * self._token_ns
            if part == count - 1:
                ready.append(seq_id)
        step.reach = dict.fromkeys(ready, 1.0)
        return advance, ready

    def goes_on(self, confidences: Mapping[int, float]) -> list[int]:
        """Which sequences have another draft, after one was made of each of these with this probability."""
        step, hits = self._step, self.hits
        step.passes += 1
        step.drafts += len(confidences)
        rows, count = step.decoding + step.drafts, len(confidences)
        if step.passes >= self.most or not step.value_ns or rows + count > step.most_rows:
            return []
        worth: dict[int, float] = {}
        for seq_id, confidence in confidences.items():
            step.reach[seq_id] *= hits.chance(confidence)
            worth[seq_id] = step.reach[seq_id] * hits.usual(seq_id) * step.value_ns
        row_ns = (step.step_ns(rows + count) - step.step_ns(rows)) / count
        pass_ns = self._pass_ns(count)
        each_ns = row_ns + (pass_ns - self._pass_ns(1)) / count
        going = [seq_id for seq_id, ns in worth.items() if ns > each_ns]
        step.most_ns -= pass_ns
        wins_ns = sum([worth[seq_id] for seq_id in going])
        takes_ns = self._pass_ns(max(1, len(going))) + len(going) * row_ns
        return going if wins_ns > takes_ns and takes_ns <= step.most_ns else []

    def chain(self, seq_ids: Sequence[int]) -> tuple[int, float, float, list[float]]:
        """How far sequences, which have another draft, are drafted for without a decision after each pass.

        Returns:
            how many passes there may be; how much a pass must win with all, and with each of them; and what a right
            draft of each wins, times the chance that all so far are right. Rows cost what they do on average.
        """
        step, count = self._step, len(seq_ids)
        pass_ns, rows = self._pass_ns(count), step.decoding + step.drafts
        most = min(self.most - step.passes, (step.most_rows - rows) // count)
        if pass_ns and math.isfinite(step.most_ns):
            most = min(most, int(step.most_ns / pass_ns))
        if not step.value_ns or most < 1:
            return 0, 0.0, 0.0, []
        row_ns = (step.step_ns(rows + most * count) - step.step_ns(rows)) / (most * count)
        each_ns = row_ns + (pass_ns - self._pass_ns(1)) / count
        worths = [step.reach[seq_id] * self.hits.usual(seq_id) * step.value_ns for seq_id in seq_ids]
        return most, pass_ns + count * row_ns, each_ns, worths

    def chained(self, confidences: Mapping[int, Sequence[float]], took_ns: int) -> None:
        """A chain has given sequences drafts of these probabilities. goes_on() is still to be told of the last ones."""
        step, count = self._step, len(confidences)
        passes = len(next(iter(confidences.values())))
        for _ in range(passes):
            self.passed(count, took_ns // passes)
        step.passes += passes - 1
        step.drafts += (passes - 1) * count
        step.most_ns -= (passes - 1) * self._pass_ns(count)
        for seq_id, given in confidences.items():
            for confidence in given[:-1]:
                step.reach[seq_id] *= self.hits.chance(confidence)

    def _probe(self, lacks: Mapping[int, int], plain_ns: float) -> tuple[dict[int, int], list[int]]:
        """A draft for the sequence that lacks least, once enough time was saved for it."""
        count, seq_id = min((count, seq_id) for seq_id, count in lacks.items())
        part = min(count - 1, self._at_once(self._step.most_ns)) if count > BESIDE else 0
        cost_ns = part * self._token_ns + self._pass_ns(1)
        self._saved_ns = min(self._saved_ns + _PROBED * plain_ns, cost_ns)
        if self._saved_ns < cost_ns or cost_ns > self._step.most_ns:
            return {}, []
        self._saved_ns = 0.0
        return ({seq_id: part} if part else {}), ([seq_id] if count - part <= BESIDE else [])

    # --- what is expected ---------------------------------------------------------------------------

    def _at_once(self, most_ns: float) -> int:
        """How many tokens may be computed in advance within a time."""
        if not self._token_ns or math.isinf(most_ns):
            return CAUGHT_UP_AT_ONCE
        return min(CAUGHT_UP_AT_ONCE, int(most_ns / self._token_ns))

    def _left(self, output_len: int) -> float:
        """How many tokens an output is expected to get yet."""
        return max(self._length - output_len, self._length / 4)

    def _pass_ns(self, tokens: int) -> float:
        """The time of a pass; before any was measured, as if it cost nothing."""
        if not (fewest := self._passes.smallest):
            return 0.0
        return self._passes.expected_ns(max(tokens, fewest), self._passes.expected_ns(fewest, 0.0) / fewest / 4)

    def _ratio(self, chance: float, drafted: int, decoding: int) -> float:
        """The time of a token with as many drafts as are best, as a share of that without; at most 1.

        Args:
            chance: that a draft is right where those before it are.
            drafted: how many of the decoding sequences have drafts.
        """
        step_ns, pass_ns = self._step.step_ns, self._pass_ns(drafted)
        best, plain_ns = 1.0, step_ns(decoding)
        for passes in _TRIED:
            if passes > self.most:
                break
            won = drafted * chance * (1.0 - chance**passes) / (1.0 - chance) if chance < 1.0 else drafted * passes
            took_ns = step_ns(decoding + drafted * passes) + passes * pass_ns
            best = min(best, took_ns / plain_ns * decoding / (decoding + won))
        return best
