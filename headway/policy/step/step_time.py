"""How long a step takes, learnt from the steps that were run.

The time of a step is taken to be linear in what it does: a fixed part (reading the weights), tokens of prompts, tokens
of decoding sequences, the query-key pairs and the context that attention reads, and the rows of logits that
prompt_logprobs wants. The coefficients follow the machine by recursive least squares with forgetting (Ljung, System
Identification, 1999, section 11.2). A step makes the model forget only of what the step had.

They follow within hundreds of steps. A machine that others use too changes within a few, so predictions are multiplied
with its pace: the median, over the last steps, of the measured time to what the coefficients say.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from operator import mul

import msgspec

_FORGETTING = 0.995
_GROWTH = _FORGETTING**-0.5  # growth of the standard deviations of coefficients, in a step
# Attention's parts are known to be small beside their tokens', from which few steps tell them apart.
_PRIOR_VARIANCE = (1e3, 1e3, 1e3, 30.0, 30.0, 1e3)
_PRIOR = tuple([own * (row == at) for row, own in enumerate(_PRIOR_VARIANCE) for at in range(row, 6)])
_MIN_STEPS = 16
_MIN_STEPS_WITH_LOGITS = 4
_MAX_VARIANCE = 1e6
_PREFILL_TOKENS, _DECODE_TOKENS, _PREFILL_PAIRS, _DECODE_CONTEXT = 256.0, 16.0, 65536.0, 8192.0
_LOGIT_ROWS = 64.0
_UNBOUNDED = 2**31
_STEPS_OF_PACE = 7
_QUANTILE_GAIN, _ERROR_GAIN, _MOST_OVERRUN = 0.02, 0.02, 3.0


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What a step does. A sequence that computes its newest output, and drafts after it, counts as decoding."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_pairs: int = 0  # query-key pairs of the prefill tokens
    decode_context: int = 0  # keys read by the decode tokens
    logit_rows: int = 0  # rows of logits of prompt tokens, for prompt_logprobs
    drafts: int = 0  # how many of the decode tokens are drafts
    repeated_context: int = 0  # keys of which another sequence of the step reads the same blocks; see KVBlocks.repeated

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.prefill_tokens + other.prefill_tokens,
            self.decode_tokens + other.decode_tokens,
            self.prefill_pairs + other.prefill_pairs,
            self.decode_context + other.decode_context,
            self.logit_rows + other.logit_rows,
            self.drafts + other.drafts,
            self.repeated_context + other.repeated_context,
        )

    def features(self) -> tuple[float, ...]:
        """The parts of the work, scaled to the order of one so that the regression is well conditioned."""
        return (
            1.0,
            self.prefill_tokens / _PREFILL_TOKENS,
            self.decode_tokens / _DECODE_TOKENS,
            self.prefill_pairs / _PREFILL_PAIRS,
            self.decode_context / _DECODE_CONTEXT,
            self.logit_rows / _LOGIT_ROWS,
        )


class StepTimeModel:
    """Predicts how long steps take, to divide a step among its sequences and to bound the prompts in it.

    Attributes:
        is_trained: enough steps have been measured to predict one.
        overrun: how much longer than predicted a step may take: 99 of 100 measured ones took at most this multiple.
        error: mean difference between a step's measured time and the predicted one, of late, as a share of the latter.
    """

    def __init__(self) -> None:
        self._milliseconds = [0.0] * len(_PRIOR_VARIANCE)
        self._covariance: tuple[float, ...] = _PRIOR
        self.steps_seen, self.is_trained = 0, False
        self.overrun, self.error = 1.0, 0.0
        self._pace, self._ratios = 1.0, deque[float](maxlen=_STEPS_OF_PACE)
        self._steps_with_logits = 0

    @property
    def knows_logits(self) -> bool:
        """Whether the cost of a row of logits has been measured."""
        return self._steps_with_logits >= _MIN_STEPS_WITH_LOGITS

    def observe(self, work: StepWork, duration_ns: int) -> None:
        """Learn from one measured step."""
        x = a, b, c, d, e, f = work.features()
        ga, gb, gc, gd, ge, gf = [_GROWTH if value else 1.0 for value in x]
        # The covariance is symmetric. It is kept row by row from the diagonal on, and spelt out, as loops take thrice
        # as long.
        aa, ab, ac, ad, ae, af, bb, bc, bd, be, bf, cc, cd, ce, cf, dd, de, df, ee, ef, ff = self._covariance
        aa, ab, ac = aa * (ga * ga), ab * (ga * gb), ac * (ga * gc)
        ad, ae, af = ad * (ga * gd), ae * (ga * ge), af * (ga * gf)
        bb, bc, bd, be, bf = bb * (gb * gb), bc * (gb * gc), bd * (gb * gd), be * (gb * ge), bf * (gb * gf)
        cc, cd, ce, cf = cc * (gc * gc), cd * (gc * gd), ce * (gc * ge), cf * (gc * gf)
        dd, de, df = dd * (gd * gd), de * (gd * ge), df * (gd * gf)
        ee, ef, ff = ee * (ge * ge), ef * (ge * gf), ff * (gf * gf)
        px = pa, pb, pc, pd, pe, pf = (
            aa * a + ab * b + ac * c + ad * d + ae * e + af * f,
            ab * a + bb * b + bc * c + bd * d + be * e + bf * f,
            ac * a + bc * b + cc * c + cd * d + ce * e + cf * f,
            ad * a + bd * b + cd * c + dd * d + de * e + df * f,
            ae * a + be * b + ce * c + de * d + ee * e + ef * f,
            af * a + bf * b + cf * c + df * d + ef * e + ff * f,
        )
        scale = 1.0 + sum(map(mul, x, px))
        predicted = sum(map(mul, self._milliseconds, x))
        error = duration_ns / 1e6 - predicted
        if self.is_trained and predicted > 0.0 and duration_ns > 0:
            ratio = duration_ns / 1e6 / predicted
            self._judge(ratio / self._pace)
            self._ratios.append(ratio)
            self._pace = sorted(self._ratios)[len(self._ratios) // 2]
        self._milliseconds = [each + own / scale * error for each, own in zip(self._milliseconds, px, strict=True)]
        aa, bb, cc = aa - pa * pa / scale, bb - pb * pb / scale, cc - pc * pc / scale
        dd, ee, ff = dd - pd * pd / scale, ee - pe * pe / scale, ff - pf * pf / scale
        ab, ac, ad = ab - pa * pb / scale, ac - pa * pc / scale, ad - pa * pd / scale
        ae, af, bc = ae - pa * pe / scale, af - pa * pf / scale, bc - pb * pc / scale
        bd, be, bf = bd - pb * pd / scale, be - pb * pe / scale, bf - pb * pf / scale
        cd, ce, cf = cd - pc * pd / scale, ce - pc * pe / scale, cf - pc * pf / scale
        de, df, ef = de - pd * pe / scale, df - pd * pf / scale, ef - pe * pf / scale
        self._covariance = aa, ab, ac, ad, ae, af, bb, bc, bd, be, bf, cc, cd, ce, cf, dd, de, df, ee, ef, ff
        # Without excitation in some direction forgetting lets its variance grow without bound.
        if max(aa, bb, cc, dd, ee, ff) > _MAX_VARIANCE:
            self._covariance = _PRIOR
        self.steps_seen += 1
        self.is_trained = self.steps_seen >= _MIN_STEPS
        self._steps_with_logits += work.logit_rows > 0

    def _judge(self, ratio: float) -> None:
        """Follow the 99th percentile of measured to predicted time (Robbins and Monro 1951), and the mean error."""
        self.overrun += _QUANTILE_GAIN * ((ratio > self.overrun) - 0.01)
        self.overrun = min(max(self.overrun, 1.0), _MOST_OVERRUN)
        self.error += _ERROR_GAIN * (abs(ratio - 1.0) - self.error)

    def predict_ns(self, work: StepWork) -> float:
        """The expected nanoseconds. Where parts always come together, each may be wrong while their sum is right."""
        fixed, token, decode, pair, context, row = self._milliseconds
        milliseconds = (
            fixed
            + token * (work.prefill_tokens / _PREFILL_TOKENS)
            + decode * (work.decode_tokens / _DECODE_TOKENS)
            + pair * (work.prefill_pairs / _PREFILL_PAIRS)
            + context * (work.decode_context / _DECODE_CONTEXT)
            + row * (work.logit_rows / _LOGIT_ROWS)
        )
        return 1e6 * self._pace * max(0.0, milliseconds)

    def most_ns(self, work: StepWork) -> float:
        """The expected nanoseconds of much more work than was ever measured, where no part may seem to save time.

        Costs that few steps tell apart are noise around zero. So far beyond what was measured, a negative one would
        outweigh all others.
        """
        costs = zip(self._milliseconds, work.features(), strict=True)
        return 1e6 * self._pace * sum([max(0.0, cost) * size for cost, size in costs])

    def prefill_costs(self, with_logits: bool = False) -> tuple[float, float]:
        """Nanoseconds of a prompt's token, with its row of logits or without, and of a query-key pair."""
        _, token, _, pair, _, row = self._milliseconds
        nanoseconds = 1e6 * self._pace
        token_ns = nanoseconds * max(0.0, token) / _PREFILL_TOKENS
        if with_logits:
            token_ns += nanoseconds * max(0.0, row) / _LOGIT_ROWS
        return token_ns, nanoseconds * max(0.0, pair) / _PREFILL_PAIRS

    def prefill_ns(self, count: int, start: int, with_logits: bool = False) -> float:
        """The nanoseconds that `count` tokens of a prompt, after its first `start`, add to a step."""
        token, pair = self.prefill_costs(with_logits)
        return count * token + pairs(start, count) * pair

    def prefill_tokens_within(self, duration_ns: float, start: int, with_logits: bool = False) -> int:
        """The most tokens of a prompt, after its first `start`, that add no more than `duration_ns` to a step."""
        token, pair = self.prefill_costs(with_logits)
        # n tokens cost n * slope + n**2 * pair / 2; this form of the root is good for a pair that costs nothing.
        slope = token + pair * (start + 0.5)
        steepest = slope + sqrt(slope * slope + 2.0 * pair * duration_ns)
        return int(min(2.0 * duration_ns / steepest, _UNBOUNDED)) if steepest else _UNBOUNDED

    def share_without(self, work: StepWork, without: StepWork) -> float:
        """Fraction of a step with `work` that a step with only `without` of it would have taken, 0 to 1.

        Until enough steps have been seen, this is the share of tokens. So it is where the prediction for the whole or
        the part is not positive: every step takes time, so the steps that were seen do not tell the costs of its parts
        apart. They may all have been equally full, and some of them slow for another reason.
        """
        whole, part = self.predict_ns(work), self.predict_ns(without)
        if not self.is_trained or whole <= 0.0 or part <= 0.0:
            return without.tokens / work.tokens if work.tokens else 1.0
        return min(1.0, part / whole)


def pairs(start: int, count: int) -> int:
    """Query-key pairs of `count` tokens of a sequence after its first `start`."""
    return count * start + count * (count + 1) // 2
