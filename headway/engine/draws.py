"""Choosing one token from each row of logits: the arithmetic of the sampler.

Every function treats its rows independently, with operations whose result for a row does not depend on
how many rows there are, so that a sequence gets the same token alone and in any batch.

Tokens are ranked by logit, equal logits by token id. A row is drawn from by inverting its cumulative
distribution at one uniform number. Rows come padded with -inf to a multiple of LOGIT_BLOCK tokens: the padding
has no weight, and sums, maxima and searches then go in two short levels instead of one of V elements.

Shapes: R rows, V tokens (padded), K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.policy.cache.sizing import LOGIT_BLOCK, padded_size

ALMOST_ONE = 1.0 - 2.0**-52
BAD_TOKEN = -1  # in place of a token id, where a row is bad
UNDECIDED = -2  # in place of a token id, where too few candidates were looked at to tell
Index = Tensor | slice  # selects rows; a slice costs no copy
NONE = torch.empty(0)  # in place of numbers that no row of a batch needs


@dataclass(slots=True)
class Cut:
    """How to cut and scale the distributions of R rows; every tensor is [R, 1]."""

    inverse_temperature: Tensor  # float32
    log_min_p: Tensor | None  # float32, natural logarithm, -inf keeps all; None when no row uses it
    top_k: Tensor  # int64, V or more keeps all
    top_p: Tensor  # float64
    width: int  # how many of the likeliest tokens to look at; 0 where nothing is cut by rank
    bounded: bool  # every row has a top_k of at most width. Otherwise none has one.

    def take(self, index: Index, width: int) -> Cut:
        """The cut of some of the rows, with so many candidates."""
        return Cut(
            self.inverse_temperature[index],
            None if self.log_min_p is None else self.log_min_p[index],
            self.top_k[index],
            self.top_p[index],
            width,
            self.bounded,
        )


@dataclass(slots=True)
class Rows:
    """Logits to draw from, and what is known of them."""

    x: Tensor  # [R, V] float32, as made by `padded`
    peaks: Tensor  # [R, V / LOGIT_BLOCK], as made by `block_peaks`
    best: Tensor  # [R, 1] the greatest logit
    uniform: Tensor  # [R] float64, in [0, 1)

    def take(self, index: Index) -> Rows:
        """What is known of some of the rows."""
        return Rows(self.x[index], self.peaks[index], self.best[index], self.uniform[index])


def padded(logits: Tensor, result: Tensor | None = None) -> Tensor:
    """The logits in float32, padded with -inf to a multiple of LOGIT_BLOCK tokens; the same tensor if it is so already.

    result: float32 [R, padded_size(V)] to fill, in place of a new tensor.
    """
    rows, size = logits.shape
    whole = padded_size(size)
    if whole == size and logits.dtype == torch.float32 and logits.is_contiguous():
        return logits
    if result is None:
        result = torch.empty(rows, whole, dtype=torch.float32, device=logits.device)
    result[:, :size] = logits
    result[:, size:] = -torch.inf
    return result


def block_peaks(x: Tensor) -> Tensor:
    """The greatest logit of each block [R, V / LOGIT_BLOCK]; NaN where a block contains one."""
    return x.unflatten(1, (-1, LOGIT_BLOCK)).amax(-1)


def _members(blocks: Tensor) -> Tensor:
    """Token ids [R, n * LOGIT_BLOCK] of the blocks [R, n]."""
    ids = blocks.unsqueeze(-1) * LOGIT_BLOCK + torch.arange(LOGIT_BLOCK, device=blocks.device)
    return ids.flatten(1)


def as_float(comparison: Callable[..., Tensor], x: Tensor, limit: Tensor) -> Tensor:
    """1.0 where the comparison of x with limit holds, else 0.0; on a CPU several times as fast as a boolean mask."""
    return comparison(x, limit, out=torch.empty_like(x))


def block_sums(x: Tensor) -> Tensor:
    """The sum of each block [R, V / LOGIT_BLOCK], as float64."""
    return x.unflatten(1, (-1, LOGIT_BLOCK)).sum(-1).double()


def most_likely(x: Tensor, peaks: Tensor) -> Tensor:
    """The id [R] of the greatest logit, the lowest id among equals."""
    block = peaks.argmax(-1, keepdim=True)
    return block.squeeze(1) * LOGIT_BLOCK + x.gather(1, _members(block)).argmax(-1)


def likeliest(x: Tensor, peaks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest logits in falling order and their ids, each [R, count].

    Which ids are returned among logits equal to the last one is not defined. For few of many, only the `count` blocks
    with the greatest peaks are looked into: they hold the greatest logits.
    """
    if count * LOGIT_BLOCK * 4 > x.shape[1]:
        values, ids = x.topk(count, -1)
        return values, ids
    pool = _members(peaks.topk(count, -1, sorted=False).indices)
    values, places = x.gather(1, pool).topk(count, -1)
    return values, pool.gather(1, places)


def _likelihoods(x: Tensor, rows: Rows, cut: Cut) -> Tensor:
    """Probabilities of the logits x relative to the likeliest token's, 0 where min_p cuts."""
    scaled = (x - rows.best).mul_(cut.inverse_temperature)  # the likeliest has 0: nothing overflows upwards
    if cut.log_min_p is None:
        return scaled.exp_()
    kept = as_float(torch.ge, scaled, cut.log_min_p)
    return scaled.exp_().mul_(kept)


def locate(weights: Tensor, share: Tensor) -> Tensor:
    """The first index [R] at which the cumulative weights exceed share [R], in [0, 1), of their total."""
    sums = block_sums(weights)
    ends = sums.cumsum(-1)
    target = share.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=sums.shape[1] - 1)
    size = sums.gather(1, block)
    # Relative to the block, so that rounding in its sum cannot carry the search past its end.
    rest = ((target - ends.gather(1, block) + size) / size).clamp_(0.0, ALMOST_ONE)
    cumulative = weights.gather(1, _members(block)).double().cumsum(-1)
    index = torch.searchsorted(cumulative, rest * cumulative[:, -1:], right=True).clamp_(max=LOGIT_BLOCK - 1)
    return (block * LOGIT_BLOCK + index).squeeze(1)


def draw(rows: Rows, cut: Cut | None) -> Tensor:
    """A token id [R] for each row: the likeliest where there is no cut, else one that it keeps, or UNDECIDED."""
    if cut is None:
        return most_likely(rows.x, rows.peaks)
    if cut.width == 0:
        return locate(_likelihoods(rows.x, rows, cut), rows.uniform)
    return _draw_by_rank(rows, cut)


def _draw_by_rank(rows: Rows, cut: Cut) -> Tensor:
    """A token id [R] from what min_p, then top_k, then top_p keep, looking at the cut.width likeliest only.

    top_p is a share of the mass that min_p and top_k left, as in vLLM. Where the cut is bounded, this mass lies within
    the candidates; otherwise it is that of the whole row.
    """
    everything = cut.width >= rows.x.shape[1]
    values, ids = (
        (rows.x.sort(-1, descending=True).values, None) if everything else likeliest(rows.x, rows.peaks, cut.width)
    )
    weights = _likelihoods(values, rows, cut)
    weights *= torch.arange(values.shape[1], device=values.device) < cut.top_k
    if everything or cut.bounded:
        mass = weights.sum(-1, keepdim=True, dtype=torch.float64)
    else:
        mass = block_sums(_likelihoods(rows.x, rows, cut)).sum(-1, keepdim=True)
    before = weights.cumsum(-1, dtype=torch.float64) - weights
    weights *= before < cut.top_p * mass
    ends = weights.cumsum(-1, dtype=torch.float64)
    target = rows.uniform.unsqueeze(1) * ends[:, -1:]
    place = torch.searchsorted(ends, target, right=True).clamp_(max=values.shape[1] - 1)
    drawn = values.gather(1, place)
    nth = (place - (values > drawn).sum(-1, keepdim=True)).clamp_(min=0)  # among the tokens with this very logit
    if ids is None:
        count = (values == drawn).sum(-1, keepdim=True)
        return locate(as_float(torch.eq, rows.x, drawn), ((nth + 0.5) / count).squeeze(1))
    tied = torch.where(values == drawn, ids, rows.x.shape[1] - 1).sort(-1).values
    unsure = drawn == values[:, -1:]  # tokens with the same logit may be left outside
    if not cut.bounded:
        unsure |= weights[:, -1:] > 0.0  # the kept tokens may go on outside
    return tied.gather(1, nth).masked_fill_(unsure, UNDECIDED).squeeze(1)
