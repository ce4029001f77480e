"""Chooses the next token of every sequence of a batch, as tensor work on the model's device.

In order, as vLLM does: logit_bias, min_tokens (no stop token while the output is shorter), repetition,
presence and frequency penalties, temperature, min_p, top_k, top_p, and one draw. A temperature below
GREEDY_BELOW takes the likeliest token, the lowest id among equals. Cuts keep the likeliest tokens in the
same order, so top_k = 1 is greedy too.

A draw is a function of the row's own logits, the sequence's seed and the token's position. So the same seed
gives the same tokens in whatever batch, order or chunking, and after a preemption.

A row is bad when its logits, biases and penalties applied, hold NaN or +inf or nothing above -inf. Bad rows
are reported and do not disturb the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.engine import draws
from headway.engine.logprobs import logprob_table, prompt_logprobs, token_logprobs
from headway.engine.messages import TokenLogprobs
from headway.engine.penalties import PenaltyTable
from headway.engine.sampling_batch import GREEDY_BELOW, EditTable, Group, SamplingBatch, describe, wider
from headway.kernels.threads import one_thread
from headway.policy.plan import SequenceState
from headway.policy.step_memory import padded_size

__all__ = ["BAD_TOKEN", "GREEDY_BELOW", "Sampled", "Sampler", "prompt_logprobs"]

BAD_TOKEN = -1
OK, BAD, UNDECIDED = 0, 1, 2
_ALONE_BELOW = 2**21  # elements
# Memory for logits is given back when so many steps in a row used a quarter of it or less, or none is sampled any more.
_STEPS_BEFORE_SHRINKING = 256
_KEPT_BYTES = 4 << 20  # even then


MostLikely = Callable[[Tensor], tuple[list[int], list[float]]]


@dataclass(slots=True)
class Sampled:
    """The outcome of a step, by row.

    token_ids holds BAD_TOKEN, and logprobs None, for the rows in bad_rows, whose logits were not numbers.
    logprobs is None also for rows that did not ask.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    bad_rows: list[int]


class Sampler:
    """Samples for one model. Not thread-safe: it belongs to the step loop.

    Args:
        vocab_size: tokens in the vocabulary; ids in logit_bias and in sequences must be below it.
        device: where the logits are.
        most_likely: Kernels.most_likely of that device; without it, greedy batches are sampled as all others are.
    """

    def __init__(self, vocab_size: int, device: torch.device, most_likely: MostLikely | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._most_likely = most_likely
        self._penalties = PenaltyTable(device)
        self._edits = EditTable(vocab_size)
        self._batch: SamplingBatch | None = None
        self._known: set[SequenceState] = set()
        self._memory = torch.empty(0, 0, device=device)
        self._steps_with_little = 0

    def sample(self, logits: Tensor, sequences: list[SequenceState], positions: list[int] | None = None) -> Sampled:
        """Choose one token for each row, at its position; where none are given, at the end of the sequence's tokens.

        logits [R, V] in any float dtype, left unchanged; row r belongs to sequences[r]. A sequence may have several
        rows, each with its position, unless it has penalties. Waits for the device once, to read the result, and once
        more only when a nucleus (top_p) was wider than expected.

        Raises:
            ValueError: when the logits' shape is not [len(sequences), vocab_size].
        """
        if tuple(logits.shape) != (len(sequences), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; expected {(len(sequences), self.vocab_size)}")
        if not sequences:
            return Sampled([], [], [])
        if self._batch is None or self._batch.sequences != sequences:
            with torch.inference_mode():
                self._batch = describe(sequences, self.vocab_size, self._edits, self.device)
            self._known.update(sequences)
        batch = self._batch
        if self._most_likely is not None and not (batch.groups or batch.edits_logits or batch.asking):
            return _greedy(*self._most_likely(logits))
        with torch.inference_mode(), _threads_for(logits):
            return self._sample(logits, batch, positions)

    def _sample(self, logits: Tensor, batch: SamplingBatch, positions: list[int] | None) -> Sampled:
        raw = draws.padded(logits, self._room(len(batch.sequences)))
        rows = self._prepare(raw, raw is logits, batch, positions)
        ids, state = self._choose(rows, batch)
        return self._read(raw, rows, batch, ids, state)

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is kept for a sequence that is finished or preempted; does nothing for an unknown one."""
        self._penalties.forget(sequence)
        self._edits.forget(sequence)
        self._known.discard(sequence)
        self._batch = None
        if not self._known and self._memory.nbytes > _KEPT_BYTES:
            self._memory = torch.empty(0, 0, device=self.device)

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept between steps."""
        return self._memory.nbytes + self._penalties.nbytes

    def reset(self) -> None:
        """Forget every sequence; what is kept of one is made again from its tokens."""
        self._penalties = PenaltyTable(self.device)
        self._edits = EditTable(self.vocab_size)
        self._known.clear()
        self._batch = None

    def _room(self, rows: int) -> Tensor:
        """Memory for the logits of a step in float32, the same at every step: mapping new memory costs milliseconds."""
        height = len(self._memory)
        self._steps_with_little = self._steps_with_little + 1 if 4 * rows <= height else 0
        if height < rows or self._steps_with_little == _STEPS_BEFORE_SHRINKING:
            self._memory = torch.empty(rows, padded_size(self.vocab_size), device=self.device)
            self._steps_with_little = 0
        return self._memory[:rows]

    def _prepare(self, raw: Tensor, borrowed: bool, batch: SamplingBatch, given: list[int] | None) -> draws.Rows:
        """Logits with bias, min_tokens and penalties, and this step's uniform numbers, for the given positions.

        raw itself is changed unless it is the caller's (borrowed) or wanted again for log-probabilities.
        """
        positions = uniform = draws.NONE
        if batch.groups or batch.stops is not None:
            where = np.array(given or [len(sequence.tokens) for sequence in batch.sequences], np.int64)
            numbers = np.stack((where, draws.uniforms(batch.streams, where)))
            positions, uniform = torch.from_numpy(numbers).to(self.device, non_blocking=True)
        x = raw
        if batch.edits_logits:
            x = raw.clone() if borrowed or batch.asking else raw
            self._edit(x, batch, positions)
        peaks = draws.block_peaks(x)
        return draws.Rows(x, peaks, peaks.amax(-1, keepdim=True), uniform)

    def _edit(self, x: Tensor, batch: SamplingBatch, positions: Tensor) -> None:
        """Apply logit_bias, min_tokens and penalties in place."""
        if (bias := batch.bias) is not None:
            x[bias.rows, bias.token_ids] += bias.values
        if (stops := batch.stops) is not None:
            banned = positions[stops.rows] < stops.values
            x[stops.rows, stops.token_ids] = x[stops.rows, stops.token_ids].masked_fill_(banned, -torch.inf)
        if batch.penalised:
            self._penalties.apply(x, batch.penalised, [batch.sequences[row] for row in batch.penalised])

    def _choose(self, rows: draws.Rows, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Token ids [R] and their state [R]: OK, BAD or UNDECIDED."""
        state = torch.where(rows.best.isfinite(), OK, BAD).squeeze(1)
        if not batch.groups:
            return draws.most_likely(rows.x, rows.peaks), state
        ids = torch.empty_like(state)
        if batch.greedy is not None:
            ids[batch.greedy] = draws.most_likely(rows.x[batch.greedy], rows.peaks[batch.greedy])
        for group in batch.groups:
            drawn, unsure = self._draw(rows.take(group.rows), group.cut, group)
            ids[group.rows] = drawn
            if unsure is not None:
                state[group.rows] = torch.where(unsure & (state[group.rows] == OK), UNDECIDED, state[group.rows])
        return ids, state

    def _draw(
        self, rows: draws.Rows, cut: draws.Cut, group: Group, width: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids of rows of a group, and which of them too few candidates leave open, if any can be."""
        width = group.width if width is None else width
        if width == 0:
            return draws.draw_from_all(rows, cut), None
        if width >= rows.x.shape[1]:
            return draws.draw_from_sorted(rows, cut), None
        return draws.draw_from_top(rows, cut, width, group.bounded)

    def _decide(self, rows: draws.Rows, batch: SamplingBatch, undecided: list[int]) -> dict[int, int]:
        """Token ids of the rows for which too few candidates were looked at, by looking at more and more."""
        decided: dict[int, int] = {}
        wanted = set(undecided)
        for group in batch.groups:
            places = [place for place, row in enumerate(group.members) if row in wanted]
            width = group.width
            while places:
                width = wider(width, rows.x.shape[1])
                members = [group.members[place] for place in places]
                part = rows.take(torch.tensor(members, device=self.device))
                cut = group.cut.take(torch.tensor(places, device=self.device))
                drawn, unsure = self._draw(part, cut, group, width)
                decided.update(zip(members, drawn.tolist(), strict=True))
                places = [] if unsure is None else [p for p, more in zip(places, unsure.tolist(), strict=True) if more]
        return decided

    def _read(self, raw: Tensor, rows: draws.Rows, batch: SamplingBatch, ids: Tensor, state: Tensor) -> Sampled:
        """Bring the outcome to the host in one transfer, then settle what it leaves undecided."""
        count, top = len(batch.sequences), batch.top_logprobs
        parts = [ids.double(), state.double()]
        if batch.asking:
            parts.append(logprob_table(raw[batch.asking_rows], ids[batch.asking_rows], top).flatten())
        numbers = torch.cat(parts).tolist()
        token_ids = [int(token) for token in numbers[:count]]
        states = numbers[count : 2 * count]
        table = numbers[2 * count :]
        width = len(table) // len(batch.asking) if batch.asking else 0
        entries = {row: table[i * width : (i + 1) * width] for i, row in enumerate(batch.asking)}
        bad: list[int] = []
        if any(states):
            bad = [row for row, value in enumerate(states) if value == BAD]
            undecided = [row for row, value in enumerate(states) if value == UNDECIDED]
            decided = self._decide(rows, batch, undecided)
            self._late_logprobs(raw, decided, entries, top)
            for row, token in decided.items():
                token_ids[row] = token
            for row in bad:
                token_ids[row] = BAD_TOKEN
                entries.pop(row, None)
        logprobs: list[TokenLogprobs | None] = [None] * count
        for row, entry in entries.items():
            logprobs[row] = token_logprobs(entry, batch.sequences[row].params.logprobs or 0)
        return Sampled(token_ids, logprobs, bad)

    def _late_logprobs(self, raw: Tensor, decided: dict[int, int], entries: dict[int, list[float]], top: int) -> None:
        """Replace the log-probabilities of rows whose token was decided late."""
        late = [row for row in decided if row in entries]
        if late:
            ids = torch.tensor([decided[row] for row in late], device=self.device)
            table = logprob_table(raw[torch.tensor(late, device=self.device)], ids, top)
            entries.update(zip(late, table.tolist(), strict=True))


def _threads_for(logits: Tensor) -> AbstractContextManager[None]:
    """Small tensor operations on a CPU on this thread alone."""
    alone = logits.device.type == "cpu" and logits.numel() <= _ALONE_BELOW
    return one_thread() if alone else nullcontext()


def _greedy(token_ids: list[int], best: list[float]) -> Sampled:
    bad = [row for row, logit in enumerate(best) if not math.isfinite(logit)]
    for row in bad:
        token_ids[row] = BAD_TOKEN
    return Sampled(token_ids, [None] * len(token_ids), bad)
