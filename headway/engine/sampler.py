"""Chooses the next token of every sequence of a batch: by a kernel, or as tensor work (`tensor_sampling`).

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

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine.draws import BAD_TOKEN
from headway.engine.messages import TokenLogprobs
from headway.engine.penalties import PenaltyTable
from headway.engine.tensor_sampling import (
    GREEDY_BELOW,
    KEPT_BYTES,
    Mask,
    Masks,
    SamplingBatch,
    TensorSampler,
    TokenEdits,
    is_held_open,
    mask_of,
    token_edits,
)
from headway.kernels.interface import DRAW, Draw, Forbid
from headway.kernels.reference import forbid
from headway.policy.step.plan import SequenceState

__all__ = ["BAD_TOKEN", "Mask", "Sampled", "Sampler"]

# A top_p above this counts as 1: sums of weights in two orders differ by more, so that no tokens might reach it.
_WHOLE = 1.0 - 1e-9
_SEEDS = 2**64


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
        forbid: Kernels.forbid of this device, which is used where there is no draw.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, draw: Draw | None = None, forbid: Forbid = forbid
    ) -> None:
        self.vocab_size = vocab_size
        self._draw = draw
        self._penalties = PenaltyTable(device)
        self._tensors = TensorSampler(vocab_size, device, forbid, self._penalties)
        self._edits: dict[SequenceState, TokenEdits] = {}
        self._masks: dict[SequenceState, Mask] = {}
        self._batch: SamplingBatch | None = None
        self._table: NDArray[np.void] = np.empty(0, DRAW)  # the batch as the kernel reads it
        self._known: set[SequenceState] = set()

    def sample(
        self,
        logits: Tensor,
        sequences: list[SequenceState],
        positions: list[int] | None = None,
        masks: Masks = None,
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
        if positions is None:
            positions = [len(sequence.tokens) for sequence in sequences]
        batch = self._batch_of(sequences, positions)
        if batch.allowed:  # a sequence has these or a grammar
            masks = [
                batch.allowed.get(row) if mask is None else mask
                for row, mask in enumerate(masks or [None] * len(sequences))
            ]
        if self._draw is None:
            return Sampled(*self._tensors.sample(logits, batch, positions, masks))
        table = self._table
        table["position"] = positions
        if masks is not None:
            table["mask"] = [0 if mask is None else mask.ctypes.data for mask in masks]
        for row in batch.penalised:
            table["seen"][row], table["counts"][row], table["num_seen"][row] = self._penalties.seen(sequences[row])
        token_ids = self._draw(logits, table)
        if batch.wants_logprobs:
            return Sampled(token_ids, self._tensors.logprobs(logits, token_ids, batch))
        return Sampled(token_ids, [None] * len(token_ids))

    def begin(self, logits: Tensor, sequences: list[SequenceState]) -> Tensor:
        """Choose tokens as sample() does, for sequences without penalties, grammars and log-probabilities.

        Returns:
            [R] int64 on the device, for which nobody waits. UNDECIDED stands for a token that only sample() finds.
        """
        if self._draw is not None:
            return torch.tensor(self.sample(logits, sequences).token_ids)
        positions = [len(sequence.tokens) for sequence in sequences]
        batch = self._batch_of(sequences, positions)
        masks = [batch.allowed.get(row) for row in range(len(sequences))] if batch.allowed else None
        return self._tensors.begin(logits, batch, positions, masks)

    def _batch_of(self, sequences: list[SequenceState], positions: list[int]) -> SamplingBatch:
        batch = self._batch
        if batch is None or batch.sequences != sequences:
            batch = self._batch = describe(sequences, positions, self._edits, self._masks, self.vocab_size)
            self._known.update(sequences)
            if self._draw is not None:
                self._table = _table(batch, self.vocab_size)
        return batch

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that is finished or preempted. Does nothing for an unknown one."""
        if sequence.params.penalises:
            self._penalties.forget(sequence)
        self._edits.pop(sequence, None)
        self._masks.pop(sequence, None)
        self._known.discard(sequence)
        self._batch = None
        if not self._known and self._tensors.memory.nbytes > KEPT_BYTES:
            self._tensors.release()

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept between steps."""
        return self._tensors.memory.nbytes + self._penalties.nbytes

    def reset(self) -> None:
        """Forget every sequence. What is kept of each is made again from its tokens."""
        self._penalties.clear()
        self._edits.clear()
        self._masks.clear()
        self._known.clear()
        self._batch = None


def describe(
    sequences: list[SequenceState],
    positions: list[int],
    known_edits: dict[SequenceState, TokenEdits],
    known_masks: dict[SequenceState, Mask],
    vocab_size: int,
) -> SamplingBatch:
    """Read the parameters of the sequences of the rows, whose positions can only grow as long as they stay the same.

    known_edits, known_masks: edits and allowed tokens that were read of sequences before, as their lists can be long.
    New ones are added to them.
    """
    batch = SamplingBatch(list(sequences))
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.allowed_token_ids is not None:
            if sequence not in known_masks:
                known_masks[sequence] = mask_of(params.allowed_token_ids, vocab_size)
            batch.allowed[row] = known_masks[sequence]
        is_before_end = positions[row] < sequence.prompt_len + params.min_tokens
        if params.logit_bias or (is_before_end and is_held_open(sequence)):
            if sequence not in known_edits:
                known_edits[sequence] = token_edits(sequence, vocab_size)
            batch.edits[row] = known_edits[sequence]
        if params.penalises:
            batch.penalised.append(row)
        if params.logprobs is not None:
            batch.wants_logprobs.append(row)
    return batch


def _table(batch: SamplingBatch, vocab_size: int) -> NDArray[np.void]:
    """A row of DRAW for each sequence, without positions and seen tokens; the kernel finds edits where they are.

    Rows of drafts follow that of their sequence, and are like it: edits say from which position on they hold.
    """
    rows: list[tuple[float, ...]] = []
    counts: list[int] = []
    last: SequenceState | None = None
    for row, sequence in enumerate(batch.sequences):
        if sequence is last:
            counts[-1] += 1
            continue
        last = sequence
        counts.append(1)
        params, edit = sequence.params, batch.edits.get(row)
        top_p = params.top_p if params.top_p < _WHOLE else 1.0
        rows.append(
            (
                1.0 / params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
                math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
                params.top_k if params.top_k < vocab_size else 0,
                top_p,
                math.log((1.0 - top_p) / (2 * vocab_size)) if top_p < 1.0 else 0.0,
                sequence.seed % _SEEDS,
                0,
                0 if edit is None else edit.ctypes.data,
                0 if edit is None else edit.shape[1],
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                *(0, 0, 0, 0),
            )
        )
    table = np.array(rows, DRAW)
    return table if len(rows) == len(batch.sequences) else np.repeat(table, counts)
