"""How many drafts a step tries: as many as make tokens come faster, and none where that is not known to pay.

A step computes a row of logits for each newest token and each draft behind one. A draft that is refused has cost its
row alone, so three things decide, and all of them are measured:

* how likely a draft is right (`HitRates`). Drafts that are not tried are compared with what is drawn, too: so this is
  known of every sequence at no cost, and changes where the text does.
* how long a step of so many rows takes (`RowTimes`). On a processor whose products take 16 rows at a time, 15 drafts
  behind one token cost a few per cent; behind 16 tokens, each costs as much as a token.
* what was won and lost until now. A small share of the time may be lost to drafts, whatever was estimated.

The number of rows with the most expected tokens per second is taken. The policy reads no clock, and its answers are
proposals to the scheduler, so a recording of the scheduler has all that came of them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from headway.policy.step.step_time import StepTimeModel

_LIMITS = {"num_speculative_tokens": 64, "prompt_lookup_min": 64, "prompt_lookup_max": 64}
# Rows that steps with drafts have. As they are few, the times of all of them are soon known.
ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BY_MATCH = (3, 4, 6, 9, 16)  # lengths of a match from which drafts are counted apart
_FORGETTING, _OWN_FORGETTING = 0.99, 0.95
_PRIOR = 3.0  # a sequence's own hits count as much as those of all after so many drafts
_LEAST_CHANCE = 0.05
_GAIN, _FURTHER_GAIN = 1.1, 1.03  # least gains in tokens per second: for drafts at all, and for more rows of them
_GROWTH = 2  # most multiple of the rows that were measured
_LOSS = 0.004  # share of the time that drafts may lose as far as that is seen: what they leave in caches costs more
_CREDIT_AT_START, _MOST_CREDIT = 2.0, 5.0  # in steps without drafts
_STEPS_KEPT = 1024
_PLAIN_EVERY = 64  # after so many steps some have no drafts, so that the time without drafts stays known


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, by the keys of vLLM's `--speculative-config`.

    Args:
        method: `ngram`: what followed the last tokens when they stood in the prompt or the output before.
        num_speculative_tokens: most drafts behind a token.
        prompt_lookup_min: least tokens that must have stood there before.
        prompt_lookup_max: tokens that are compared; of several places the one with the longest match is taken.

    Raises:
        ValueError: a value is beyond its limits; the message names both.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 15
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ValueError(f"method is {self.method!r}; the only one is 'ngram'")
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max "
                f"({self.prompt_lookup_max}); lower the first or raise the second"
            )

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig:
        """What a JSON object says, as a text or already read.

        Raises:
            ValueError: it is none, or has a key or a value that is not known; one line.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(f"{given!r} is not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f'{given!r} is not a JSON object, such as {{"method": "ngram"}}')
        said: dict[str, Any] = dict(given)
        model = said.pop("model", None)
        if said.get("method") == "draft_model" or model not in (None, "ngram", "[ngram]"):
            raise ValueError(f"model is {model!r}; drafts of a model are not supported yet, only method 'ngram'")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in said if name not in known]:
            raise ValueError(f"{unknown[0]!r} is not known; its keys are {', '.join(known)}")
        return cls(**said)


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """Drafts that may follow a sequence's tokens.

    Args:
        token_ids: the drafts, in order; at least one.
        match: how many of the sequence's last tokens they have followed before.
    """

    token_ids: list[int]
    match: int


class RowTimes:
    """How long steps take that only decode, by their rows of logits.

    Times follow the machine within some steps, and those that were not measured for long are forgotten. So a time that
    was wrong once, as the machine was held up, does not keep its size from being tried for good.
    """

    def __init__(self) -> None:
        self._ns: dict[int, float] = {}
        self._rows: list[int] = []  # that are known, in order
        self._begun: set[int] = set()
        self._recent: set[int] = set()
        self._steps = 0

    def observe(self, rows: int, took_ns: int) -> float:
        """Note the time of a step. The first of its size prepares others, and does not count.

        Returns:
            the nanoseconds that count: a step that was held up counts as twice as long as expected at most.
        """
        if rows not in self._begun:
            self._begun.add(rows)
            return 0.0
        self._steps += 1
        if self._steps % _STEPS_KEPT == 0:
            self._ns = {each: ns for each, ns in self._ns.items() if each in self._recent}
            self._rows = sorted(self._ns)
            self._recent.clear()
        self._recent.add(rows)
        known = self._ns.get(rows)
        counted = max(1.0, float(took_ns) if known is None else min(float(took_ns), 2.0 * known))
        self._ns[rows] = now = counted if known is None else known + (counted - known) / 8
        if known is None:
            self._rows = sorted(self._ns)
        for smaller in reversed(self._rows[: bisect_right(self._rows, rows) - 1]):
            if self._ns[smaller] <= now:
                break
            self._ns[smaller] = now  # it cannot take longer
        return counted

    def known_ns(self, rows: int) -> float | None:
        """The nanoseconds of a step of so many rows; None where none was measured."""
        return self._ns.get(rows)

    @property
    def largest(self) -> int:
        """The most rows that were measured."""
        return self._rows[-1]

    def expected_ns(self, rows: int, row_ns: float) -> float:
        """The nanoseconds of a step of more rows than the smallest that is known.

        Between two known sizes they are interpolated. Beyond all of them, a row is taken to cost as much as between the
        two largest, but at most `row_ns`.
        """
        above = bisect_right(self._rows, rows)
        low = self._rows[above - 1]
        if above == len(self._rows):
            return self._ns[low] + (rows - low) * (min(row_ns, self._slope(above - 1)) if above > 1 else row_ns)
        return self._ns[low] + (rows - low) * self._slope(above)

    def _slope(self, at: int) -> float:
        """Nanoseconds of a row between a known size and the one before it."""
        low, high = self._rows[at - 1], self._rows[at]
        return (self._ns[high] - self._ns[low]) / (high - low)


class HitRates:
    """How often a draft was right where those before it were, by the length of the match before it."""

    def __init__(self) -> None:
        kinds = len(_BY_MATCH) + 1
        self._hits, self._drafts = [0.5] * kinds, [1.0] * kinds
        self._own: dict[int, tuple[float, float]] = {}

    def note(self, seq_id: int, match: int, is_hit: bool) -> None:
        """A draft behind a match of this length was the token that was drawn, or was not."""
        kind, hit = bisect_right(_BY_MATCH, match), float(is_hit)
        self._hits[kind] = self._hits[kind] * _FORGETTING + hit
        self._drafts[kind] = self._drafts[kind] * _FORGETTING + 1.0
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        self._own[seq_id] = hits * _OWN_FORGETTING + hit, drafts * _OWN_FORGETTING + 1.0

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    def chances(self, seq_id: int, match: int, count: int) -> list[float]:
        """The chance that each of the next drafts and all before it are right, as far as that is worth a row."""
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        found: list[float] = []
        chance = 1.0
        for length in range(match, match + count):
            kind = bisect_right(_BY_MATCH, length)
            chance *= (hits + _PRIOR * self._hits[kind] / self._drafts[kind]) / (drafts + _PRIOR)
            if chance < _LEAST_CHANCE:
                break
            found.append(chance)
        return found


class Speculation:
    """Decides for each step which sequences try how many drafts.

    It keeps account of the time that drafts have won and lost, the time to make them included. They may lose a small
    share of all time. Where that is used up, steps pass without any until it is earned again.

    Args:
        most: most drafts behind a token.
        step_time: says what a row costs in steps of a size that has not been measured.
    """

    def __init__(self, most: int, step_time: StepTimeModel) -> None:
        self._most = most
        self._step_time = step_time
        self._times, self._rates = RowTimes(), HitRates()
        self._standing: Mapping[int, Proposal] = {}
        self._credit_ns = 0.0  # what may be lost
        self._plain_ns = 0.0  # what a step without drafts takes; 0 while that is not known
        self._usual_ns = 0.0  # what it takes to make drafts
        self._resting = self._since_plain = 0
        self._has_drafted = False

    # --- after a step -------------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether a step is not looked at, and the next one tries no drafts."""
        if not self._resting:
            return False
        self._resting -= 1
        return True

    def heed(self, seq_id: int, new: list[int]) -> None:
        """Tokens of a sequence were drawn: compare them with what was proposed, whether it was tried or not."""
        proposal = self._standing.get(seq_id)
        if proposal is None:
            return
        for match, (draft, token) in enumerate(zip(proposal.token_ids, new, strict=False), proposal.match):
            self._rates.note(seq_id, match, draft == token)
            if draft != token:
                break

    def took(self, sequences: int, rows: int, new_tokens: int, took_ns: int) -> None:
        """A step in which all sequences decoded took so long, and gave so many tokens.

        One without drafts behind one with some finds the caches full of other numbers, and its time says little.
        """
        drafted, had_drafted = rows > sequences, self._has_drafted
        self._has_drafted = drafted
        self._since_plain = self._since_plain + 1 if drafted or had_drafted else 0
        if had_drafted and not drafted:
            return
        counted = self._times.observe(rows, took_ns)
        plain = self._times.known_ns(sequences)
        if not counted or plain is None:
            return
        if not self._plain_ns:
            self._credit_ns += _CREDIT_AT_START * plain
        self._plain_ns = plain
        self._credit_ns += _LOSS * counted
        if drafted:
            self._credit_ns += plain * new_tokens / sequences - counted

    def spent(self, took_ns: int) -> None:
        """So long it took to make drafts, or to find none; it counts as twice as long as usual at most."""
        counted = min(float(took_ns), 2.0 * self._usual_ns) if self._usual_ns else float(took_ns)
        self._usual_ns += (counted - self._usual_ns) / 8 if self._usual_ns else counted
        if self._plain_ns:
            self._credit_ns = min(self._credit_ns - counted, _MOST_CREDIT * self._plain_ns)

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._rates.forget(seq_id)

    # --- before the next one ------------------------------------------------------------------------

    def asks(self) -> bool:
        """Whether drafts are wanted for the next step. If not, they rest until what they have lost is earned again."""
        self._standing = {}
        if not self._plain_ns or self._credit_ns >= 0.0:
            return self._plain_ns > 0.0
        earned = _LOSS * self._plain_ns
        self._resting = int(-self._credit_ns / earned) + 1
        self._credit_ns += self._resting * earned
        return False

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
        plain = self._times.known_ns(decoding)
        if plain is None or self._since_plain >= _PLAIN_EVERY:
            return {}
        gains: list[tuple[float, int]] = []
        for seq_id, proposal in proposals.items():
            count = min(self._most, len(proposal.token_ids))
            gains += [(chance, seq_id) for chance in self._rates.chances(seq_id, proposal.match, count)]
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
            if tokens > least * took_ns:
                least, drafts = _FURTHER_GAIN * tokens / took_ns, extra
        counts = Counter([seq_id for _, seq_id in gains[:drafts]])
        return {seq_id: proposals[seq_id].token_ids[:count] for seq_id, count in counts.items()}

    def _row_ns(self, token_ns: float) -> float:
        """What a row adds to a step: a prompt's token, or at first a quarter of what a token takes by itself."""
        learnt = self._step_time.prefill_ns(1, 0) if self._step_time.is_trained else 0.0
        return learnt or token_ns / 4


def _chance(gain: tuple[float, int]) -> float:
    return gain[0]
