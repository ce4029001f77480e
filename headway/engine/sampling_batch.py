"""What a list of sequences asks of the sampler, as tensors; made once for as long as the list stays the same."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine import draws
from headway.policy.plan import SequenceState
from headway.policy.step_memory import padded_size

GREEDY_BELOW = 1e-5  # temperature; vLLM's limit

# How many of the likeliest tokens to look at before looking at all. Looking at more costs time on a CPU;
# finding them too few costs a second wait for the device on a GPU.
WIDTHS = (64, 128, 2048)
SPARE = 14  # candidates beyond top_k, so that ties at the cut seldom matter; with it top_k = 50 fits 64
FIRST_WIDTH = {"cpu": 128}
FIRST_WIDTH_ELSEWHERE = 2048

PART_BYTES = 8 << 20


@dataclass(slots=True)
class Group:
    """Rows of a batch that are drawn in the same way."""

    members: list[int]
    rows: draws.Index  # the same
    cut: draws.Cut
    width: int  # candidates to look at; 0 when nothing is cut by rank
    bounded: bool  # every member has a top_k of at most width


@dataclass(slots=True)
class TokenValues:
    """A value for some (row, token) pairs of the batch; tensors are [N]."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(slots=True)
class _TokenArrays:
    token_ids: NDArray[np.int64]
    values: NDArray[np.float64]


class EditTable:
    """logit_bias and stop tokens of each sequence as arrays, made once: their lists can be long."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[SequenceState, _TokenArrays] = {}
        self._stops: dict[SequenceState, _TokenArrays] = {}

    def __len__(self) -> int:
        return len(self._biases) + len(self._stops)

    def forget(self, sequence: SequenceState) -> None:
        self._biases.pop(sequence, None)
        self._stops.pop(sequence, None)

    def bias(self, sequence: SequenceState) -> _TokenArrays:
        """Its logit_bias."""
        found = self._biases.get(sequence)
        if found is None:
            given = sequence.params.logit_bias
            found = _TokenArrays(np.array(list(given), np.int64), np.array(list(given.values()), np.float64))
            self._biases[sequence] = found
        return found

    def stops(self, sequence: SequenceState) -> _TokenArrays:
        """Its stop tokens, with the first position at which they are allowed."""
        found = self._stops.get(sequence)
        if found is None:
            ids = np.array([token for token in sequence.stop_ids if token < self._vocab_size], np.int64)
            found = _TokenArrays(ids, np.full(len(ids), _allowed_from(sequence), np.float64))
            self._stops[sequence] = found
        return found


def _allowed_from(sequence: SequenceState) -> int:
    return sequence.prompt_len + sequence.params.min_tokens


@dataclass(slots=True)
class SamplingBatch:
    sequences: list[SequenceState]
    streams: NDArray[np.uint64]
    greedy: draws.Index | None = None  # rows; None for none
    groups: list[Group] = field(default_factory=list)  # the other rows
    bias: TokenValues | None = None
    stops: TokenValues | None = None  # value: first position at which the token is allowed, float64
    penalised: list[int] = field(default_factory=list)  # rows
    asking: list[int] = field(default_factory=list)  # rows that want log-probabilities
    asking_rows: draws.Index = field(default_factory=lambda: slice(0))  # the same
    top_logprobs: int = 0  # most alternatives that any row wants

    @property
    def edits_logits(self) -> bool:
        return self.bias is not None or self.stops is not None or bool(self.penalised)


def wider(width: int, size: int) -> int:
    """The number of candidates to look at after `width` were too few, of a vocabulary padded to size."""
    return next((w for w in WIDTHS if width < w < size), size)


def describe(sequences: list[SequenceState], vocab_size: int, edits: EditTable, device: torch.device) -> SamplingBatch:
    """Read the parameters of sequences, and enter those with edits into their table."""
    batch = SamplingBatch(list(sequences), draws.streams([s.seed for s in sequences]))
    greedy: list[int] = []
    members: dict[tuple[int, bool], list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature < GREEDY_BELOW:
            greedy.append(row)
        else:
            members.setdefault(_width_for(sequence, vocab_size, device), []).append(row)
    if greedy:
        batch.greedy = _index(greedy, device)
    batch.groups = [
        _group(sequences, part, *width, vocab_size, device)
        for width, rows in members.items()
        for part in _parts(rows, vocab_size, device)
    ]
    _describe_edits(batch, edits, device)
    batch.asking = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    batch.asking_rows = _index(batch.asking, device)
    most = max((sequences[row].params.logprobs or 0 for row in batch.asking), default=0)
    batch.top_logprobs = min(most, vocab_size)
    return batch


def _index(rows: list[int], device: torch.device) -> draws.Index:
    """rows, which rise, as an index."""
    if not rows:
        return slice(0)
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _parts(rows: list[int], vocab_size: int, device: torch.device) -> list[list[int]]:
    """rows in groups whose intermediate results fit a CPU's cache and come from memory it has already mapped."""
    size = len(rows) if device.type != "cpu" else max(1, PART_BYTES // (4 * vocab_size))
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _width_for(sequence: SequenceState, vocab_size: int, device: torch.device) -> tuple[int, bool]:
    """(width, bounded) of the row's group: from its own parameters alone, or the batch would matter."""
    params = sequence.params
    size = padded_size(vocab_size)
    if 0 < params.top_k < vocab_size:
        needed = params.top_k + SPARE
        return next((w for w in WIDTHS if needed <= w < size), size), True
    if params.top_p < 1.0:
        return min(FIRST_WIDTH.get(device.type, FIRST_WIDTH_ELSEWHERE), size), False
    return 0, False


def _group(
    sequences: list[SequenceState], rows: list[int], width: int, bounded: bool, vocab_size: int, device: torch.device
) -> Group:
    params = [sequences[row].params for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    logs = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    cut = draws.Cut(
        inverse_temperature=column([1.0 / p.temperature for p in params], torch.float32),
        log_min_p=column(logs, torch.float32) if any(p.min_p > 0.0 for p in params) else None,
        top_k=column([p.top_k if 0 < p.top_k < vocab_size else padded_size(vocab_size) for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
    )
    return Group(rows, _index(rows, device), cut, width, bounded)


def _describe_edits(batch: SamplingBatch, edits: EditTable, device: torch.device) -> None:
    biases: dict[int, _TokenArrays] = {}
    stops: dict[int, _TokenArrays] = {}
    rows_of = Counter(batch.sequences)
    for row, sequence in enumerate(batch.sequences):
        if sequence.params.logit_bias:
            biases[row] = edits.bias(sequence)
        first = len(sequence.tokens) - rows_of[sequence] + 1  # position that is sampled; later steps have later ones
        if sequence.params.min_tokens and first < _allowed_from(sequence):
            stops[row] = edits.stops(sequence)
        if sequence.params.penalises:
            batch.penalised.append(row)
    batch.bias = _token_values(biases, torch.float32, device)
    batch.stops = _token_values(stops, torch.float64, device)


def _token_values(arrays: dict[int, _TokenArrays], dtype: torch.dtype, device: torch.device) -> TokenValues | None:
    """The arrays of some rows of a batch, end to end; None where they have no entry."""
    lengths = [len(each.token_ids) for each in arrays.values()]
    if not any(lengths):
        return None
    rows = np.repeat(np.array(list(arrays), np.int64), lengths)
    ids = np.concatenate([each.token_ids for each in arrays.values()])
    values = np.concatenate([each.values for each in arrays.values()])
    return TokenValues(
        torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device), torch.from_numpy(values).to(device, dtype)
    )
