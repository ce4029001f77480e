"""Runs a StepPlan: its tensors become tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.engine.layout import StepLayout
from headway.engine.memory import PROMPT_LOGPROB_ROWS, zero_caches
from headway.engine.messages import PromptLogprobs, TokenLogprobs
from headway.engine.sampler import Sampler, prompt_logprobs
from headway.kernels.interface import Kernels
from headway.models.decoder import Decoder
from headway.policy.accounting import ScheduledSequence, StepTimes
from headway.policy.request import Sequence
from headway.policy.scheduler import StepPlan


@dataclass(slots=True)
class StepResult:
    """What a step produced, by the identity of its sequences.

    Where the step failed and was run again in parts: since when, and by request what was raised on it alone.
    """

    times: StepTimes
    tokens: dict[int, int | None] = field(default_factory=dict)  # id(sequence) -> new token; None: no valid logits
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PromptLogprobs]] = field(default_factory=dict)  # of this chunk
    failed_since_ns: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def token_of(self, item: ScheduledSequence) -> int | None:
        return self.tokens[id(item.sequence)]

    def take(self, part: StepResult) -> None:
        """Add what some of the step's sequences got."""
        self.tokens |= part.tokens
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs


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
        self.vocab_size = config.shape.vocab
        self.kernels = kernels
        self.device = device
        self.caches = zero_caches(config.shape.layers, shape, cache_dtype, device)
        self.sampler = Sampler(config.shape.vocab, device, kernels.most_likely if device.type == "cpu" else None)
        self.layout = StepLayout(device, block_size, max_num_seqs, max_model_len)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute a step and read its tokens back, the one point where the host waits for the device."""
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            self.kernels.copy_blocks(self.caches, list(sources), list(targets))
            plan.copies.clear()  # once is enough, should the step be run again
            for item in plan.scheduled:
                self.layout.tables.rewrite(item.sequence)
        step = self.layout.lay_out(plan.scheduled)
        launched = time.monotonic_ns()
        hidden = self.model.forward(step.token_ids, step.geometry, self.caches)
        result = StepResult(StepTimes(launched, launched, launched))
        if any(item.sequence.params.prompt_logprobs is not None for item in plan.scheduled):
            self._prompt_logprobs(hidden, plan.scheduled, result)
        sampling = [item for item in plan.scheduled if item.samples]
        logits = None
        if sampling:
            everyone = len(step.last_rows) == len(hidden)
            logits = self.model.logits(hidden if everyone else self.kernels.take(hidden, step.last_rows))
        timer = _DeviceTimer(self.device)
        if logits is not None:
            self._sample(logits, sampling, result)
        computed, sampled = timer.stop()
        result.times = StepTimes(launched, max(launched, computed), max(launched, sampled))
        return result

    def forget(self, sequence: Sequence) -> None:
        """The sequence finished or was preempted."""
        self.layout.tables.forget(sequence)
        self.sampler.forget(sequence)

    def recover(self) -> None:
        """A step raised: forget what it may have half written, all of which is made again from the sequences."""
        self.layout.reset()
        self.sampler.reset()

    def _sample(self, logits: Tensor, items: list[ScheduledSequence], result: StepResult) -> None:
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
            end = item.start + sequence.logit_rows(item.start, item.num_tokens)
            parts = result.prompt_logprobs.setdefault(id(sequence), []) if end > item.start else []
            for at in range(item.start, end, PROMPT_LOGPROB_ROWS):
                stop = min(end, at + PROMPT_LOGPROB_ROWS)
                rows = hidden[first + at - item.start : first + stop - item.start]
                targets = torch.tensor(sequence.tokens[at + 1 : stop + 1], device=self.device)
                parts.append(prompt_logprobs(self.model.logits(rows), targets, sequence.params.prompt_logprobs or 0))


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
