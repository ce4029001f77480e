"""Chooses the next token of every sequence of a batch, on the model's device: by a kernel, or as tensor work.

In order, as vLLM does: logit_bias, min_tokens (no stop token while the output is shorter), repetition,
presence and frequency penalties, the mask of allowed tokens or of a grammar, temperature, min_p, top_k, top_p, and one
draw. A temperature below GREEDY_BELOW takes the likeliest token, the lowest id among equals. Cuts keep the likeliest
tokens in the same order, so top_k = 1 is greedy too.

A draw is a function of the row's own logits, the sequence's seed and the token's position. So the same seed
gives the same tokens in whatever batch, order or chunking, and after a preemption.

A row is bad when its logits, biases and penalties applied, hold NaN or +inf or nothing above -inf. Bad rows
are reported and do not disturb the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine import draws
from headway.engine.logprobs import logprob_table, token_logprobs
from headway.engine.messages import TokenLogprobs
from headway.engine.penalties import PenaltyTable
from headway.engine.sampling_batch import Mask, SamplingBatch, TokenEdits, describe, undecided, uniforms
from headway.kernels.host import one_thread, to_device
from headway.kernels.interface import Draw
from headway.policy.cache.sizing import padded_size
from headway.policy.step.plan import SequenceState

BAD_TOKEN = -1
_ALONE_BELOW = 2**21  # with fewer elements, operations are run on one thread alone
# Memory for logits is given back after this many steps in a row that used a quarter of it or less, or when no sequence
# is left. _KEPT_BYTES stay even then.
_STEPS_BEFORE_SHRINKING = 256
_KEPT_BYTES = 4 << 20


@dataclass(slots=True)
class Sampled:
    """The outcome of a step, row by row.

    Where logits are bad, the token is BAD_TOKEN. Log-probabilities are None there, and where nobody asked for them.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples for one model. Not thread-safe: it belongs to the step loop.

    Args:
        vocab_size: tokens in the vocabulary; ids in logit_bias and in sequences must be below it.
        device: where the logits are.
        draw: Kernels.draw of this device.
    """

    def __init__(self, vocab_size: int, device: torch.device, draw: Draw | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._draw = draw
        self._penalties = PenaltyTable(device)
        self._edits: dict[SequenceState, TokenEdits] = {}
        self._masks: dict[SequenceState, Mask] = {}
        self._batch: SamplingBatch | None = None
        self._known: set[SequenceState] = set()
        self._memory = torch.empty(0, 0, device=device)
        self._steps_with_little = 0

    def sample(
        self,
        logits: Tensor,
        sequences: list[SequenceState],
        positions: list[int] | None = None,
        masks: list[Mask | None] | None = None,
    ) -> Sampled:
        """Choose one token for each row, at its position; where none are given, at the end of the sequence's tokens.

        logits [R, V] in any float dtype, left unchanged; row r belongs to sequences[r]. A sequence may have several
        rows, each with its position, unless it has penalties. masks: for each row the Mask of the tokens that are
        allowed, or None for all. Log-probabilities are those of the model, whatever is allowed.

        Waits for the device once, to read the result, and once more only when a nucleus (top_p) was wider than
        expected.

        Raises:
            ValueError: when the logits' shape is not [len(sequences), vocab_size].
        """
        if tuple(logits.shape) != (len(sequences), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; expected {(len(sequences), self.vocab_size)}")
        if not sequences:
            return Sampled([], [])
        if self._batch is None or self._batch.sequences != sequences:
            with torch.inference_mode():
                self._batch = describe(
                    sequences,
                    positions or _ends(sequences),
                    self._edits,
                    self._masks,
                    self.vocab_size,
                    self.device,
                    self._draw is not None,
                )
            self._known.update(sequences)
        batch = self._batch
        if batch.allowed is not None:  # a sequence has these or a grammar
            given = masks or [None] * len(sequences)
            masks = [own if mask is None else mask for mask, own in zip(given, batch.allowed, strict=True)]
        if self._draw is not None and batch.table is not None:
            if masks is not None:
                batch.table["mask"] = [0 if mask is None else mask.ctypes.data for mask in masks]
            return self._sample_by_kernel(logits, batch, batch.table, self._draw, positions or _ends(sequences))
        with torch.inference_mode(), _threads_for(logits):
            return self._sample(logits, batch, positions or _ends(sequences), masks)

    def _sample_by_kernel(
        self, logits: Tensor, batch: SamplingBatch, table: NDArray[np.void], draw: Draw, positions: list[int]
    ) -> Sampled:
        table["position"] = positions
        for row in batch.penalised:
            table["seen"][row], table["counts"][row], table["num_seen"][row] = self._penalties.seen(
                batch.sequences[row]
            )
        token_ids = draw(logits, table)
        if not batch.wants_logprobs:
            return Sampled(token_ids, [None] * len(token_ids))
        with torch.inference_mode(), _threads_for(logits):
            raw = draws.padded(logits[batch.logprob_rows], self._room(len(batch.wants_logprobs)))
            wanted = torch.tensor(token_ids)[batch.logprob_rows]
            numbers = logprob_table(raw, wanted.clamp_(min=0), batch.top_logprobs)
        return Sampled(token_ids, _entries(token_ids, numbers.tolist(), batch))

    def _sample(
        self, logits: Tensor, batch: SamplingBatch, positions: list[int], masks: list[Mask | None] | None
    ) -> Sampled:
        raw = draws.padded(logits, self._room(len(batch.sequences)))
        rows = self._prepare(raw, raw is logits, batch, positions, masks)
        bad = ~rows.best.isfinite().squeeze(1)
        ids = torch.empty(len(raw), dtype=torch.int64, device=self.device)
        groups = batch.groups
        while True:
            for group in groups:
                part = rows if len(group.members) == len(ids) else rows.take(group.rows)
                ids[group.rows] = draws.draw(part, group.cut)
            sampled = self._read(raw, ids.masked_fill_(bad, BAD_TOKEN), batch)
            groups = undecided(groups, sampled.token_ids, raw.shape[1], self.device)
            if not groups:
                return sampled

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that is finished or preempted. Does nothing for an unknown one."""
        if sequence.params.penalises:
            self._penalties.forget(sequence)
        self._edits.pop(sequence, None)
        self._masks.pop(sequence, None)
        self._known.discard(sequence)
        self._batch = None
        if not self._known and self._memory.nbytes > _KEPT_BYTES:
            self._memory = torch.empty(0, 0, device=self.device)

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept between steps."""
        return self._memory.nbytes + self._penalties.nbytes

    def reset(self) -> None:
        """Forget every sequence. What is kept of each is made again from its tokens."""
        self._penalties = PenaltyTable(self.device)
        self._edits.clear()
        self._masks.clear()
        self._known.clear()
        self._batch = None

    def _room(self, rows: int) -> Tensor:
        """Memory for a step's logits in float32. Each step gets the same, as mapping new memory costs milliseconds."""
        height = len(self._memory)
        self._steps_with_little = self._steps_with_little + 1 if 4 * rows <= height else 0
        if height < rows or self._steps_with_little == _STEPS_BEFORE_SHRINKING:
            self._memory = torch.empty(rows, padded_size(self.vocab_size), device=self.device)
            self._steps_with_little = 0
        return self._memory[:rows]

    def _prepare(
        self,
        raw: Tensor,
        borrowed: bool,
        batch: SamplingBatch,
        positions: list[int],
        masks: list[Mask | None] | None,
    ) -> draws.Rows:
        """Logits with bias, min_tokens, penalties and masks applied, and a uniform number for each row's position.

        `raw` itself is changed, unless it is the caller's (borrowed) or needed again for log-probabilities.
        """
        at = uniform = draws.NONE
        if batch.edits is not None or not batch.is_greedy:
            where = np.array(positions, np.int64)
            at, uniform = to_device(np.stack((where, uniforms(batch.streams, where))), self.device)
        x = raw
        if batch.edits_logits or masks is not None:
            x = raw.clone() if borrowed or batch.wants_logprobs else raw
        if (edits := batch.edits) is not None:
            pairs = edits.rows, edits.token_ids
            x[pairs] = (x[pairs] + edits.bias).masked_fill_(at[edits.rows] < edits.allowed_from, -torch.inf)
        if batch.penalised:
            self._penalties.apply(x, batch.penalised, [batch.sequences[row] for row in batch.penalised])
        if masks is not None:
            held = [row for row, mask in enumerate(masks) if mask is not None]
            bits = to_device(np.array([masks[row] for row in held]), self.device)
            draws.forbid(x, torch.tensor(held, device=self.device), bits)
        peaks = draws.block_peaks(x)
        return draws.Rows(x, peaks, peaks.amax(-1, keepdim=True), uniform)

    def _read(self, raw: Tensor, ids: Tensor, batch: SamplingBatch) -> Sampled:
        """Bring token ids and log-probabilities to the host in one transfer."""
        count = len(ids)
        if not batch.wants_logprobs:
            return Sampled(ids.tolist(), [None] * count)
        wanted = ids[batch.logprob_rows].clamp(min=0)
        table = logprob_table(raw[batch.logprob_rows], wanted, batch.top_logprobs)
        numbers = torch.cat([ids.double(), table.flatten()]).tolist()
        token_ids = [int(token) for token in numbers[:count]]
        width = table.shape[1]
        rows = [numbers[start : start + width] for start in range(count, len(numbers), width)]
        return Sampled(token_ids, _entries(token_ids, rows, batch))


def _entries(token_ids: list[int], rows: list[list[float]], batch: SamplingBatch) -> list[TokenLogprobs | None]:
    """The log-probabilities of each row, from `rows` of logprob_table(); None for rows that want none or are bad."""
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    for row, numbers in zip(batch.wants_logprobs, rows, strict=True):
        if token_ids[row] != BAD_TOKEN:
            entries[row] = token_logprobs(numbers, batch.sequences[row].params.logprobs or 0)
    return entries


def _ends(sequences: list[SequenceState]) -> list[int]:
    return [len(sequence.tokens) for sequence in sequences]


def _threads_for(logits: Tensor) -> AbstractContextManager[None]:
    """A context in which small tensor operations on a CPU run on this thread alone."""
    alone = logits.device.type == "cpu" and logits.numel() <= _ALONE_BELOW
    return one_thread() if alone else nullcontext()
