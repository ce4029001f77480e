"""Runs a StepPlan: host lists become device tensors, tensors become tokens."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.engine.memory import zero_caches
from headway.engine.messages import TokenLogprobs
from headway.engine.sampler import Sampler, prompt_logprobs
from headway.kernels.interface import Kernels, StepGeometry
from headway.kernels.threads import one_thread
from headway.models.decoder import Decoder
from headway.policy.accounting import ScheduledSequence, StepTimes
from headway.policy.request import Sequence
from headway.policy.scheduler import StepPlan

_PROMPT_LOGPROB_ROWS = 256
_ALONE_BELOW = 2**21
# Steps of up to so many tokens have their tensors at the same addresses, so that kernels can repeat them.
_MOST_REPEATED = 64


@dataclass(slots=True)
class StepResult:
    """What a step produced, by the identity of its sequences."""

    times: StepTimes
    tokens: dict[int, int | None] = field(default_factory=dict)  # id(sequence) -> new token; None: no valid logits
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of this chunk

    def token_of(self, item: ScheduledSequence) -> int | None:
        return self.tokens[id(item.sequence)]


class BlockTables:
    """Block tables of the running sequences as one array, updated only where they changed."""

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self.array = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self._rows: dict[int, tuple[int, list[int], int]] = {}  # id(sequence) -> row, its table, entries written
        self._free = list(range(max_sequences - 1, -1, -1))

    def row(self, sequence: Sequence) -> int:
        table = sequence.block_table
        known = self._rows.get(id(sequence))
        if known is not None and known[1] is table and known[2] == len(table):
            return known[0]
        row = known[0] if known is not None else self._free.pop()
        written = known[2] if known is not None and known[1] is table else 0
        self.array[row, written : len(table)] = table[written:]
        self._rows[id(sequence)] = (row, table, len(table))
        return row

    def rewrite(self, sequence: Sequence) -> None:
        """An entry of the table was exchanged."""
        known = self._rows.get(id(sequence))
        if known is not None:
            self._rows[id(sequence)] = (known[0], known[1], 0)

    def forget(self, sequence: Sequence) -> None:
        known = self._rows.pop(id(sequence), None)
        if known is not None:
            self._free.append(known[0])


class Runner:
    """Owns the model, the KV caches and the sampler.

    Args:
        cache_dtype: of keys and values in the KV pool; the model's, or int8.
        num_blocks, block_size: shape of the KV pool.
        max_num_seqs, max_model_len: bounds of the block table array.
    """

    def __init__(
        self,
        model: Decoder,
        kernels: Kernels,
        device: torch.device,
        cache_dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        config = model.config
        shape = config.kv_cache_shape(num_blocks, block_size)
        self.model = model
        self.vocab_size = config.vocab_size
        self.kernels = kernels
        self.device = device
        self.block_size = block_size
        self.caches = zero_caches(config.num_layers, shape, cache_dtype, device)
        self.sampler = Sampler(config.vocab_size, device, kernels.most_likely if device.type == "cpu" else None)
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // block_size))
        fixed = _MOST_REPEATED if device.type == "cpu" else 0
        self._fixed = torch.zeros(4, fixed, dtype=torch.int64)
        self._fixed_tables = torch.zeros(fixed, self.tables.array.shape[1], dtype=torch.int32)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute a step and read its tokens back, the one point where the host waits for the device."""
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            self.kernels.copy_blocks(self.caches, list(sources), list(targets))
            for item in plan.scheduled:
                self.tables.rewrite(item.sequence)
        token_ids, geometry, last_rows = self._lay_out(plan.scheduled)
        launched = time.monotonic_ns()
        hidden = self.model.forward(token_ids, geometry, self.caches)
        sampling = [item for item in plan.scheduled if item.samples]
        logits = None
        if sampling:
            everyone = len(last_rows) == len(hidden)
            logits = self.model.logits(hidden if everyone else self.kernels.take(hidden, last_rows))
        timer = _DeviceTimer(self.device)
        result = StepResult(StepTimes(launched, launched, launched))
        if logits is not None:
            self._sample(logits, sampling, result)
        if any(item.sequence.params.prompt_logprobs is not None for item in plan.scheduled):
            self._prompt_logprobs(hidden, plan.scheduled, result)
        computed, sampled = timer.stop()
        result.times = StepTimes(launched, max(launched, computed), max(launched, sampled))
        return result

    def forget(self, sequence: Sequence) -> None:
        """The sequence finished or was preempted."""
        self.tables.forget(sequence)
        self.sampler.forget(sequence)

    def _lay_out(self, scheduled: list[ScheduledSequence]) -> tuple[Tensor, StepGeometry, Tensor]:
        """One int64 array to the device, cut into the tensors of the step there.

        Returns the token ids [T], the geometry, and the rows [R] whose logits are wanted.
        """
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts, contexts, lengths, last = [0], [], [], []
        for item in scheduled:
            sequence, start, count = item.sequence, item.start, item.num_tokens
            table = sequence.block_table
            if count == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                slots.append(table[start // size] * size + start % size)
            else:
                span = range(start, start + count)
                tokens.extend(sequence.tokens[start : start + count])
                positions.extend(span)
                slots.extend([table[p // size] * size + p % size for p in span])
            starts.append(len(tokens))
            lengths.append(count)
            contexts.append(start + count)
            rows.append(self.tables.row(sequence))
            if item.samples:
                last.append(len(tokens) - 1)
        most = -(-max(contexts) // size)
        repeatable = len(tokens) <= self._fixed.shape[1]
        if repeatable:
            token_row, position_row, slot_row, last_row = self._fixed.numpy()
            n = len(tokens)
            token_row[:n], position_row[:n], slot_row[:n], last_row[: len(last)] = tokens, positions, slots, last
            wide = [self._fixed[0, :n], self._fixed[1, :n], self._fixed[2, :n], self._fixed[3, : len(last)]]
            np.take(self.tables.array[:, :most], rows, axis=0, out=self._fixed_tables.numpy()[: len(rows), :most])
            tables = self._fixed_tables[: len(rows)]
        else:
            lengths_of = [len(tokens)] * 3 + [len(last)]
            wide = list(self._to_device(np.array(tokens + positions + slots + last, dtype=np.int64)).split(lengths_of))
            tables = self._to_device(self.tables.array[rows, :most])
        narrow = self._to_device(np.array(starts + contexts, dtype=np.int32))
        geometry = StepGeometry(
            query_start=narrow[: len(starts)],
            context_lens=narrow[len(starts) :],
            block_tables=tables,
            slots=wide[2],
            positions=wide[1],
            num_sequences=len(scheduled),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
            query_lens_host=lengths,
            context_lens_host=contexts,
            repeatable=repeatable,
        )
        return wide[0], geometry, wide[3]

    def _to_device(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _sample(self, logits: Tensor, items: list[ScheduledSequence], result: StepResult) -> None:
        with threads_for(logits):
            sampled = self.sampler.sample(logits, [item.sequence for item in items])
        bad = set(sampled.bad_rows)
        for row, item in enumerate(items):
            key = id(item.sequence)
            result.tokens[key] = None if row in bad else sampled.token_ids[row]
            logprobs = sampled.logprobs[row] if sampled.logprobs else None
            if logprobs is not None:
                result.logprobs[key] = logprobs

    def _prompt_logprobs(self, hidden: Tensor, scheduled: list[ScheduledSequence], result: StepResult) -> None:
        offset = 0
        for item in scheduled:
            sequence, first = item.sequence, offset
            offset += item.num_tokens
            top = sequence.params.prompt_logprobs
            end = min(item.start + item.num_tokens, sequence.prompt_len - 1)
            if top is None or sequence.output_len > 0 or item.start >= end:
                continue
            entries: list[TokenLogprobs] = []
            for at in range(item.start, end, _PROMPT_LOGPROB_ROWS):
                stop = min(end, at + _PROMPT_LOGPROB_ROWS)
                rows = hidden[first + at - item.start : first + stop - item.start]
                targets = torch.tensor(sequence.tokens[at + 1 : stop + 1], device=self.device)
                entries.extend(prompt_logprobs(self.model.logits(rows), targets, top))
            result.prompt_logprobs[id(sequence)] = entries


def threads_for(logits: Tensor) -> AbstractContextManager[None]:
    """Small tensor operations on a CPU on this thread alone."""
    alone = logits.device.type == "cpu" and logits.numel() <= _ALONE_BELOW
    return one_thread() if alone else nullcontext()


class _DeviceTimer:
    """Times the end of the forward pass and the end of sampling without an extra wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._computed_ns = time.monotonic_ns()
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def stop(self) -> tuple[int, int]:
        """(forward done, sampling done) on the host's clock, in nanoseconds."""
        if self._event is None:
            return self._computed_ns, time.monotonic_ns()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        now = time.monotonic_ns()
        return now - int(self._event.elapsed_time(end) * 1e6), now
