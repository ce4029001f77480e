"""What a list of sequences asks of the sampler. It is made once for as long as the list stays the same.

It is a table for the kernel that draws, where there is one, and tensors elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine import draws
from headway.kernels.interface import DRAW
from headway.policy.cache.sizing import padded_size
from headway.policy.step.plan import SequenceState

GREEDY_BELOW = 1e-5  # a lower temperature is greedy; vLLM's limit
# A top_p above this counts as 1: sums of weights in two orders differ by more, so that no tokens might reach it.
_WHOLE = 1.0 - 1e-9

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# How many of the likeliest tokens are looked at before all are. Too few cost a second wait for the device.
WIDTHS = (64, 128, 2048)
SPARE = 14  # candidates beyond top_k, so that ties at the cut seldom matter; with it top_k = 50 fits 64
FIRST_WIDTH = 2048


@dataclass(slots=True)
class Group:
    """Rows of a batch that are drawn alike: from what the cut keeps, or the likeliest token where there is none."""

    members: list[int]
    rows: draws.Index  # the same rows, as an index of tensors
    cut: draws.Cut | None


@dataclass(slots=True)
class Edits:
    """Changes of the logits of some (row, token) pairs; tensors are [N]."""

    rows: Tensor
    token_ids: Tensor
    bias: Tensor  # float32, added to the logit
    allowed_from: Tensor  # float64, the first position at which the token may come


# A bit for each token, in whole blocks of the padded vocabulary: set where it is allowed, the first in the lowest bit.
Mask = NDArray[np.int32]
TokenEdits = NDArray[np.float64]  # [3, N]: token ids, bias and allowed_from of one sequence


@dataclass(slots=True)
class SamplingBatch:
    """What the sequences of a step want, row by row.

    Args:
        table: rows of DRAW, without positions and seen tokens; None where no kernel draws.
        streams: starts of the random streams, row by row. They, groups and edits are for draws without a kernel.
        penalised: rows with penalties.
        allowed: for each row the tokens that may come at all, or None; None where no row has such.
        wants_logprobs, logprob_rows: rows that want log-probabilities.
        top_logprobs: most alternatives that any row wants.
    """

    sequences: list[SequenceState]
    table: NDArray[np.void] | None
    streams: NDArray[np.uint64]
    groups: list[Group]
    edits: Edits | None
    penalised: list[int]
    allowed: list[Mask | None] | None
    wants_logprobs: list[int]
    logprob_rows: draws.Index
    top_logprobs: int

    @property
    def is_greedy(self) -> bool:
        """Whether no row is drawn at random."""
        return all(group.cut is None for group in self.groups)

    @property
    def edits_logits(self) -> bool:
        return self.edits is not None or bool(self.penalised)


def describe(
    sequences: list[SequenceState],
    positions: list[int],
    known_edits: dict[SequenceState, TokenEdits],
    known_masks: dict[SequenceState, Mask],
    vocab_size: int,
    device: torch.device,
    by_kernel: bool,
) -> SamplingBatch:
    """Read the parameters of the sequences of the rows, whose positions can only grow as long as they stay the same.

    known_edits, known_masks: edits and allowed tokens that were read of sequences before, as their lists can be long.
    New ones are added to them; a kernel reads them there.
    """
    edits: dict[int, TokenEdits] = {}
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.allowed_token_ids is not None and sequence not in known_masks:
            known_masks[sequence] = _only(params.allowed_token_ids, vocab_size)
        if params.logit_bias or (_is_held_open(sequence) and positions[row] < _allowed_from(sequence)):
            if sequence not in known_edits:
                known_edits[sequence] = _token_edits(sequence, vocab_size)
            edits[row] = known_edits[sequence]
    wants_logprobs = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    streams = streams_of([sequence.seed for sequence in sequences])
    return SamplingBatch(
        sequences=list(sequences),
        table=_table(sequences, streams, edits, vocab_size) if by_kernel else None,
        streams=streams,
        groups=[] if by_kernel else _groups(sequences, vocab_size, device),
        edits=None if by_kernel else _edits(edits, device),
        penalised=[row for row, sequence in enumerate(sequences) if sequence.params.penalises],
        allowed=[known_masks.get(sequence) for sequence in sequences] if known_masks else None,
        wants_logprobs=wants_logprobs,
        logprob_rows=_index(wants_logprobs, device),
        top_logprobs=min(vocab_size, max((sequences[row].params.logprobs or 0 for row in wants_logprobs), default=0)),
    )


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def streams_of(seeds: list[int]) -> NDArray[np.uint64]:
    """Starting states of the random streams of these seeds; any Python integer is a seed."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + _GOLDEN)


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (stream, position), whatever was drawn before.

    SplitMix64 used as a counter-based generator (Steele, Lea and Flood, OOPSLA 2014): its state after p
    steps is the start plus p times the golden gamma. Multiples of 2**-52, so that u * total < total holds
    in float64.
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(starts + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _table(
    sequences: list[SequenceState], streams: NDArray[np.uint64], edits: dict[int, TokenEdits], vocab_size: int
) -> NDArray[np.void]:
    rows = []
    for row, sequence in enumerate(sequences):
        params, edit = sequence.params, edits.get(row)
        top_p = params.top_p if params.top_p < _WHOLE else 1.0
        rows.append(
            (
                1.0 / params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
                math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
                params.top_k if params.top_k < vocab_size else 0,
                top_p,
                math.log((1.0 - top_p) / (2 * vocab_size)) if top_p < 1.0 else 0.0,
                streams[row],
                0,
                0 if edit is None else edit.ctypes.data,
                0 if edit is None else edit.shape[1],
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                *(0, 0, 0, 0),
            )
        )
    return np.array(rows, DRAW)


def undecided(groups: list[Group], token_ids: list[int], size: int, device: torch.device) -> list[Group]:
    """The rows that have no token yet, to be drawn from more candidates. `size` is that of the padded vocabulary."""
    found = []
    for group in groups:
        places = [place for place, row in enumerate(group.members) if token_ids[row] == draws.UNDECIDED]
        if places and group.cut is not None:
            members = [group.members[place] for place in places]
            width = next((width for width in WIDTHS if group.cut.width < width < size), size)
            cut = group.cut.take(torch.tensor(places, device=device), width)
            found.append(Group(members, _index(members, device), cut))
    return found


def _index(rows: list[int], device: torch.device) -> draws.Index:
    """Rising rows as an index: a slice where there is no gap between them."""
    if not rows:
        return slice(0)
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _candidates(sequence: SequenceState, vocab_size: int) -> tuple[int, bool] | None:
    """(width, bounded) of a row's cut, or None if it is greedy; by its own parameters alone."""
    params = sequence.params
    size = padded_size(vocab_size)
    if params.temperature < GREEDY_BELOW:
        return None
    if 0 < params.top_k < vocab_size:
        needed = params.top_k + SPARE
        return next((width for width in WIDTHS if needed <= width < size), size), True
    if params.top_p < 1.0:
        return min(FIRST_WIDTH, size), False
    return 0, False


def _groups(sequences: list[SequenceState], vocab_size: int, device: torch.device) -> list[Group]:
    members: dict[tuple[int, bool] | None, list[int]] = {}
    for row, sequence in enumerate(sequences):
        members.setdefault(_candidates(sequence, vocab_size), []).append(row)
    return [_group(sequences, rows, candidates, vocab_size, device) for candidates, rows in members.items()]


def _group(
    sequences: list[SequenceState],
    rows: list[int],
    candidates: tuple[int, bool] | None,
    vocab_size: int,
    device: torch.device,
) -> Group:
    if candidates is None:
        return Group(rows, _index(rows, device), None)
    params = [sequences[row].params for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    logs = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    whole = padded_size(vocab_size)
    cut = draws.Cut(
        inverse_temperature=column([1.0 / p.temperature for p in params], torch.float32),
        log_min_p=column(logs, torch.float32) if any(p.min_p > 0.0 for p in params) else None,
        top_k=column([p.top_k if 0 < p.top_k < vocab_size else whole for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        width=candidates[0],
        bounded=candidates[1],
    )
    return Group(rows, _index(rows, device), cut)


def _allowed_from(sequence: SequenceState) -> int:
    """The first position at which a stop token may come."""
    return sequence.prompt_len + sequence.params.min_tokens


def _is_held_open(sequence: SequenceState) -> bool:
    """Whether min_tokens is kept by edits.

    A structured output is held open by its mask, as its end may be all that is left. Where only end tokens are allowed,
    they come, and do not end it.
    """
    params, allowed = sequence.params, sequence.params.allowed_token_ids
    if not params.min_tokens or params.structured_outputs is not None:
        return False
    return allowed is None or not sequence.stop_ids.issuperset(allowed)


def _only(token_ids: list[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens."""
    bits = np.zeros(padded_size(vocab_size), bool)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _token_edits(sequence: SequenceState, vocab_size: int) -> TokenEdits:
    params = sequence.params
    bias = params.logit_bias
    stops = sequence.stop_ids if _is_held_open(sequence) else frozenset()
    tokens = [*bias, *(token for token in stops if token < vocab_size and token not in bias)]
    from_where = [_allowed_from(sequence) if token in stops else 0 for token in tokens]
    return np.array([tokens, [bias.get(token, 0.0) for token in tokens], from_where], np.float64)


def _edits(edits: dict[int, TokenEdits], device: torch.device) -> Edits | None:
    """The edits of some rows of a batch, end to end; None where they change nothing."""
    lengths = [each.shape[1] for each in edits.values()]
    if not any(lengths):
        return None
    rows = np.repeat(np.array(list(edits), np.float64), lengths)
    numbers = torch.from_numpy(np.vstack((rows, np.hstack(list(edits.values()))))).to(device)
    return Edits(numbers[0].long(), numbers[1].long(), numbers[2].float(), numbers[3])
