"""Samples as tensor work over all sequences of a step, where no kernel draws; and log-probabilities in any case.

`sampler` says what is done to a row, and in which order.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine import draws
from headway.engine.draws import BAD_TOKEN
from headway.engine.logprobs import logprob_table, token_logprobs
from headway.engine.messages import TokenLogprobs
from headway.engine.penalties import PenaltyTable
from headway.kernels.host import one_thread, to_device
from headway.kernels.interface import Forbid
from headway.policy.cache.sizing import padded_size
from headway.policy.step.plan import SequenceState

GREEDY_BELOW = 1e-5  # a lower temperature is greedy; vLLM's limit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# How many of the likeliest tokens are looked at before all are. Too few cost a second wait for the device.
WIDTHS = (64, 128, 2048)
SPARE = 14  # candidates beyond top_k, so that ties at the cut seldom matter; with it top_k = 50 fits 64
FIRST_WIDTH = 2048

_ALONE_BELOW = 2**21  # with fewer elements, operations are run on one thread alone
# Memory for logits is given back after this many steps in a row that used a quarter of it or less, or when no sequence
# is left. KEPT_BYTES stay even then.
_STEPS_BEFORE_SHRINKING = 256
KEPT_BYTES = 4 << 20

# A bit for each token, in whole blocks of the padded vocabulary: set where it is allowed, the first in the lowest bit.
Mask = NDArray[np.int32]
Masks = list[Mask | None] | None  # of each row of logits; None where all tokens are allowed
TokenEdits = NDArray[np.float64]  # [3, N]: token ids, bias and allowed_from of one sequence


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


@dataclass(slots=True)
class TensorBatch:
    """How rows are drawn without a kernel."""

    streams: NDArray[np.uint64]  # starts of their random streams
    groups: list[Group]
    edits: Edits | None  # changes of their logits; None for none
    wants_logprobs: draws.Index  # the rows that want log-probabilities


@dataclass(slots=True)
class SamplingBatch:
    """What a list of sequences asks of the sampler, row by row. It is made once for as long as the list is the same."""

    sequences: list[SequenceState]
    edits: dict[int, TokenEdits] = field(default_factory=dict)  # changes of the logits of some rows
    allowed: dict[int, Mask] = field(default_factory=dict)  # the tokens that may come at all in some rows
    penalised: list[int] = field(default_factory=list)  # rows with penalties
    wants_logprobs: list[int] = field(default_factory=list)  # rows that want log-probabilities
    tensors: TensorBatch | None = None  # how they are drawn; None where a kernel draws


class TensorSampler:
    """Draws and computes log-probabilities on a device.

    Args:
        forbid: Kernels.forbid of the device.

    Attributes:
        memory: that of a step's logits in float32, kept for the next step.
    """

    def __init__(self, vocab_size: int, device: torch.device, forbid: Forbid, penalties: PenaltyTable) -> None:
        self.device = device
        self._forbid, self._penalties = forbid, penalties
        self.memory = torch.empty(0, 0, device=device)
        self._vocab_size = vocab_size
        self._steps_with_little = 0

    def sample(
        self, logits: Tensor, batch: SamplingBatch, positions: list[int], masks: Masks
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The token and the log-probabilities of each row, as Sampler.sample() gives them."""
        with torch.inference_mode(), _threads_for(logits):
            raw, rows, tensors = self._rows(logits, batch, positions, masks)
            ids = torch.empty(len(raw), dtype=torch.int64, device=self.device)
            groups = tensors.groups
            while True:
                sampled = self._read(raw, _draw(rows, groups, ids), batch, tensors)
                groups = undecided(groups, sampled[0], raw.shape[1], self.device)
                if not groups:
                    return sampled

    def begin(self, logits: Tensor, batch: SamplingBatch, positions: list[int], masks: Masks) -> Tensor:
        """The token of each row on the device, or UNDECIDED, as Sampler.begin() gives them."""
        with torch.inference_mode(), _threads_for(logits):
            _, rows, tensors = self._rows(logits, batch, positions, masks)
            return _draw(rows, tensors.groups, torch.empty(len(logits), dtype=torch.int64, device=self.device))

    def logprobs(self, logits: Tensor, token_ids: list[int], batch: SamplingBatch) -> list[TokenLogprobs | None]:
        """The log-probabilities of tokens that a kernel has drawn from logits, row by row."""
        with torch.inference_mode(), _threads_for(logits):
            wanted = _index(batch.wants_logprobs, self.device)
            raw = draws.padded(logits[wanted], self._room(len(batch.wants_logprobs)))
            numbers = logprob_table(raw, torch.tensor(token_ids)[wanted].clamp_(min=0), self._most_alternatives(batch))
        return _entries(token_ids, numbers.tolist(), batch)

    def release(self) -> None:
        """Give the memory for logits back."""
        self.memory = torch.empty(0, 0, device=self.device)

    def _describe(self, batch: SamplingBatch) -> TensorBatch:
        streams = streams_of([sequence.seed for sequence in batch.sequences])
        groups = _groups(batch.sequences, self._vocab_size, self.device)
        edits, wanted = _edits(batch.edits, self.device), _index(batch.wants_logprobs, self.device)
        return TensorBatch(streams, groups, edits, wanted)

    def _most_alternatives(self, batch: SamplingBatch) -> int:
        wanted = [batch.sequences[row].params.logprobs or 0 for row in batch.wants_logprobs]
        return min(self._vocab_size, max(wanted))

    def _room(self, rows: int) -> Tensor:
        """Memory for a step's logits in float32. Each step gets the same, as mapping new memory costs milliseconds."""
        height = len(self.memory)
        self._steps_with_little = self._steps_with_little + 1 if 4 * rows <= height else 0
        if height < rows or self._steps_with_little == _STEPS_BEFORE_SHRINKING:
            self.memory = torch.empty(rows, padded_size(self._vocab_size), device=self.device)
            self._steps_with_little = 0
        return self.memory[:rows]

    def _rows(
        self, logits: Tensor, batch: SamplingBatch, positions: list[int], masks: Masks
    ) -> tuple[Tensor, draws.Rows, TensorBatch]:
        """The logits in float32; what is drawn from, a uniform number for each row's position with it; and how.

        Bias, min_tokens, penalties and masks are applied to what is drawn from. That is the same memory, unless it is
        the caller's or is needed again for log-probabilities.
        """
        tensors = batch.tensors = batch.tensors or self._describe(batch)
        raw = x = draws.padded(logits, self._room(len(batch.sequences)))
        at = uniform = draws.NONE
        if tensors.edits is not None or any(group.cut is not None for group in tensors.groups):
            where = np.array(positions, np.int64)
            at, uniform = to_device(np.stack((where, uniforms(tensors.streams, where))), self.device)
        masked = [row for row, mask in enumerate(masks or ()) if mask is not None]
        if tensors.edits is not None or batch.penalised or masked:
            x = raw.clone() if raw is logits or batch.wants_logprobs else raw
        if (edits := tensors.edits) is not None:
            pairs = edits.rows, edits.token_ids
            x[pairs] = (x[pairs] + edits.bias).masked_fill_(at[edits.rows] < edits.allowed_from, -torch.inf)
        if batch.penalised:
            self._penalties.apply(x, batch.penalised, [batch.sequences[row] for row in batch.penalised])
        if masks is not None and masked:
            words = np.array([masks[row] for row in masked])
            self._forbid(x, to_device(np.column_stack((np.array(masked, np.int32), words)), self.device))
        peaks = draws.block_peaks(x)
        return raw, draws.Rows(x, peaks, peaks.amax(-1, keepdim=True), uniform), tensors

    def _read(
        self, raw: Tensor, ids: Tensor, batch: SamplingBatch, tensors: TensorBatch
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Bring token ids and log-probabilities to the host in one transfer."""
        count = len(ids)
        if not batch.wants_logprobs:
            return ids.tolist(), [None] * count
        wanted = tensors.wants_logprobs
        table = logprob_table(raw[wanted], ids[wanted].clamp(min=0), self._most_alternatives(batch))
        numbers = torch.cat([ids.double(), table.flatten()]).tolist()
        token_ids = [int(token) for token in numbers[:count]]
        width = table.shape[1]
        rows = [numbers[start : start + width] for start in range(count, len(numbers), width)]
        return token_ids, _entries(token_ids, rows, batch)


def _draw(rows: draws.Rows, groups: list[Group], ids: Tensor) -> Tensor:
    """Draw the tokens of these groups into `ids`, which has all rows. Bad rows have BAD_TOKEN then."""
    for group in groups:
        part = rows if len(group.members) == len(ids) else rows.take(group.rows)
        ids[group.rows] = draws.draw(part, group.cut)
    return ids.masked_fill_(~rows.best.isfinite().squeeze(1), BAD_TOKEN)


def _entries(token_ids: list[int], rows: list[list[float]], batch: SamplingBatch) -> list[TokenLogprobs | None]:
    """The log-probabilities of each row, from `rows` of logprob_table(); None for rows that want none or are bad."""
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    for row, numbers in zip(batch.wants_logprobs, rows, strict=True):
        if token_ids[row] != BAD_TOKEN:
            entries[row] = token_logprobs(numbers, batch.sequences[row].params.logprobs or 0)
    return entries


def _threads_for(logits: Tensor) -> AbstractContextManager[None]:
    """A context in which small tensor operations on a CPU run on this thread alone."""
    alone = logits.device.type == "cpu" and logits.numel() <= _ALONE_BELOW
    return one_thread() if alone else nullcontext()


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


def is_held_open(sequence: SequenceState) -> bool:
    """Whether min_tokens is kept by edits.

    A structured output is held open by its mask, as its end may be all that is left. Where only end tokens are allowed,
    they come, and do not end it.
    """
    params, allowed = sequence.params, sequence.params.allowed_token_ids
    if not params.min_tokens or params.structured_outputs is not None:
        return False
    return allowed is None or not sequence.stop_ids.issuperset(allowed)


def mask_of(token_ids: list[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens."""
    bits = np.zeros(padded_size(vocab_size), bool)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def token_edits(sequence: SequenceState, vocab_size: int) -> TokenEdits:
    """What a sequence wants changed of its logits: its biases, and no end before min_tokens."""
    params = sequence.params
    bias = params.logit_bias
    stops = sequence.stop_ids if is_held_open(sequence) else frozenset()
    tokens = [*bias, *(token for token in stops if token < vocab_size and token not in bias)]
    allowed_from = sequence.prompt_len + params.min_tokens  # the first position at which a stop token may come
    from_where = [allowed_from if token in stops else 0 for token in tokens]
    return np.array([tokens, [bias.get(token, 0.0) for token in tokens], from_where], np.float64)


def _edits(edits: dict[int, TokenEdits], device: torch.device) -> Edits | None:
    """The edits of some rows of a batch, end to end; None where they change nothing."""
    lengths = [each.shape[1] for each in edits.values()]
    if not any(lengths):
        return None
    rows = np.repeat(np.array(list(edits), np.float64), lengths)
    numbers = torch.from_numpy(np.vstack((rows, np.hstack(list(edits.values()))))).to(device)
    return Edits(numbers[0].long(), numbers[1].long(), numbers[2].float(), numbers[3])
