"""Runs a StepPlan on a device: one forward pass, and a draw for each sequence that samples."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headway.engine.drafts import try_drafts
from headway.engine.draws import UNDECIDED
from headway.engine.executor import EngineFault, StepOutcome
from headway.engine.graphs import DecodeBuffers, graph_sizes
from headway.engine.launched import ComputedStep, DeviceTimer, Drawn
from headway.engine.layout import ModelInput, StepLayout
from headway.engine.logprobs import logprobs_of_prompts
from headway.engine.memory import Groups, caches_in, zero_caches, zero_places
from headway.engine.pooling import pooled_parts
from headway.engine.sampler import BAD_TOKEN, Mask, Sampler
from headway.engine.states import StateSlots
from headway.engine.swap import HostBlocks
from headway.kernels.interface import Kernels, KernelTime, LayerCache
from headway.models.decoder import Decoder
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import UNKNOWN, ScheduledSequence, SequenceState, StepPlan

if TYPE_CHECKING:
    from headway.engine.adapters import Adapters
    from headway.engine.grammars import Grammars
    from headway.engine.model_results import ModelResults
    from headway.kernels.cpu.memory import SharedPages

_CAUGHT_UP = 256  # how many tokens at a time are computed again for their states


class Runner:
    """The Executor of one device: owns the model, the KV caches and the sampler.

    Args:
        cache_dtype: the dtype of keys and values in the KV pool; the model's, or int8.
        num_blocks, block_size: shape of the KV pool.
        max_num_seqs, max_model_len: bounds of the block table array.
        host_blocks: how many blocks in host memory preempted sequences may be swapped out to.
        checkpoints: states of recurrent layers that may be kept beside those of running sequences.
        draft_states: those before drafts: so many drafts may be in a step.
        groups: KV cache groups; empty where one block table is for all.
        graphs: on a GPU, launch decode steps as CUDA graphs.
        folder: the checkpoint's, whose tokenizer.json grammars need.
        pages: memory of the KV pool that other processes have, too; None for this process's own.

    Attributes:
        grammars: what sequences are held to; None until one is.
        results: keeps the results of steps for a head that makes drafts; None for none.
        adapters: those that sequences may have; None where there are none.
        host: the blocks in host memory; None without any.
        decodes: lays out the steps that are launched as graphs; None where none are.
        runs_ahead: a step may be submitted while another runs, as the host waits for nothing but its tokens.
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
        host_blocks: int = 0,
        checkpoints: int = 0,
        groups: Groups = (),
        graphs: bool = False,
        folder: Path | None = None,
        draft_states: int = 0,
        pages: SharedPages | None = None,
    ) -> None:
        config = model.config
        self.grammars: Grammars | None = None
        self.results: ModelResults | None = None
        self.adapters: Adapters | None = None
        self._folder = folder
        self.model = model
        self.vocab_size = config.shape.vocab
        self.generates = not config.headless
        self.kernels = kernels
        self.device = device
        pool = config.caches, num_blocks, block_size, cache_dtype, device
        if groups:
            self._paged = zero_places(*pool, groups, pages)
            self.caches = caches_in(self._paged, config.caches, groups)
            of_groups = [self.caches[group[0][0]].tensors[0] for group in groups]
            shares = [self._paged[0].keys[0].numel() // tensor[0].numel() for tensor in of_groups]
        else:
            shares = [1]
            self.caches = zero_caches(*pool, max_num_seqs + checkpoints + draft_states, pages)
            caches = {cache.keys.data_ptr(): cache for cache in self.caches if isinstance(cache, LayerCache)}
            self._paged = list(caches.values())  # some layers have one together
        self.host = HostBlocks(self._paged, host_blocks) if host_blocks else None
        slots = max_num_seqs, checkpoints, draft_states
        self._states = StateSlots(*slots, device) if config.shape.state is not None else None
        self._takes_drafts = self._states is None or draft_states > 0
        self.sampler = Sampler(config.shape.vocab, device, kernels.draw, kernels.forbid)
        self.layout = StepLayout(device, block_size, max_num_seqs, max_model_len, shares, num_blocks)
        self._has_experts = config.routing is not None  # the host reads what the device counts of them
        self.runs_ahead = device.type == "cuda" and self._states is None and not self._has_experts
        self.decodes: DecodeBuffers | None = None
        if graphs and device.type == "cuda" and self._states is None:
            # Rows of no sequence would go to experts too, whose weights are then read for nothing.
            sizes = graph_sizes(max_num_seqs, padded := not self._has_experts)
            of_tables = self.layout.tables, block_size, max_model_len
            self.decodes = DecodeBuffers(device, sizes, padded, *of_tables)
        self._known: dict[int, SequenceState] = {}
        self._drawn: Drawn | None = None  # of the last step that was submitted
        self._ended_ns = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of decode steps, if there are to be any."""
        for step in () if self.decodes is None else self.decodes.empty_steps():
            for _ in ("compiled", "captured"):
                self.model.forward(step.token_ids, step.geometry, self.caches)
                if self.adapters is not None:
                    self.adapters.empty_decoder(step).forward(step.token_ids, step.geometry, self.caches)

    def look(self) -> None:
        """Do nothing: a device that is lost shows itself in the next step."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step and read its tokens back: here the host waits for the device, and again for prompt_logprobs."""
        step = self._compute(plan)
        outcome, grammars = step.outcome, step.grammars
        if step.logits is not None:
            masks = {} if grammars is None else grammars.masks(plan.scheduled, self._states is not None)
            self._sample(step.logits, plan.scheduled, step.sequences, outcome, masks)
        for seq_id, part in outcome.pooled.items():
            if not np.isfinite(part).all():
                outcome.tokens[seq_id] = None
        self._note_times(step)
        if step.routed is not None:
            outcome.routing = self.kernels.routing_counts().since(step.routed)
        if grammars is not None and self._takes_drafts:
            outcome.drafts = grammars.foresee(plan.scheduled, step.sequences, outcome.tokens)
        return outcome

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> ComputedStep:
        follows = plan.scheduled[0].token_ids[0] == UNKNOWN
        step = self._compute(plan, self._drawn if follows else None)
        assert step.logits is not None
        ids = self.sampler.begin(step.logits, step.sequences)
        step.drawn = self._drawn = Drawn(ids, [item.seq_id for item in plan.scheduled])
        if step.timer is not None:
            step.timer.end()
        step.sampled_ns = time.monotonic_ns()
        return step

    def collect(self, submitted: ComputedStep) -> StepOutcome | None:
        outcome, drawn = submitted.outcome, submitted.drawn
        assert drawn is not None
        self._note_times(submitted)
        tokens = drawn.read()
        if UNDECIDED in tokens:
            return None
        for item, sequence, token in zip(submitted.scheduled, submitted.sequences, tokens, strict=True):
            outcome.tokens[item.seq_id] = [token] if token != BAD_TOKEN else None
            if len(sequence.tokens) > item.start + 1:  # the step behind has left a place for it
                sequence.tokens[item.start + 1] = token
        return outcome

    def _compute(self, plan: StepPlan, drawn: Drawn | None = None) -> ComputedStep:
        """Compute a step up to its logits. Where the plan does not know its tokens, `drawn` has them."""
        if plan.swaps or plan.copies:
            self.copy_blocks(plan)
        sequences = self.apply(plan)
        grammars = self.grammars if self.grammars is not None and self.grammars.states else None
        if grammars is not None:
            grammars.begin(plan.scheduled, sequences)
        if self._states is not None:
            self._catch_up(plan.scheduled, sequences, self._states)
        step = None if self.decodes is None else self.decodes.lay_out(plan.scheduled, sequences)
        step = step or self.layout.lay_out(plan.scheduled, sequences)
        if drawn is not None:
            drawn.fill(step.token_ids, plan.scheduled)
        routed = self.kernels.routing_counts() if self._has_experts else None
        launched = time.monotonic_ns()
        hidden = self._forward(step, plan.scheduled, sequences)
        if self.results is not None:
            self.results.heed(plan.scheduled, hidden)
        outcome = StepOutcome(StepTimes(launched, launched, launched))
        if plan.work.logit_rows:
            outcome.prompt_logprobs = logprobs_of_prompts(self.model, hidden, plan.scheduled, sequences)
        if plan.pools:
            outcome.pooled = pooled_parts(self.model, hidden, plan.scheduled, sequences)
        logits = None
        if len(step.last_rows):
            everyone = len(step.last_rows) == len(hidden)
            logits = self.model.logits(hidden if everyone else self.kernels.take(hidden, step.last_rows))
        timer, computed_ns = DeviceTimer() if self.device.type == "cuda" else None, time.monotonic_ns()
        return ComputedStep(plan.scheduled, sequences, outcome, logits, grammars, routed, timer, computed_ns)

    def _note_times(self, step: ComputedStep) -> None:
        """Note when a step began and ended. One that was submitted early begins when the one before has ended."""
        computed_ns, sampled_ns = step.computed_ns, step.sampled_ns or time.monotonic_ns()
        if step.timer is not None:
            computed_ns, sampled_ns = step.timer.stop()
        launched_ns = max(step.outcome.times.launched_ns, self._ended_ns)
        self._ended_ns = max(launched_ns, sampled_ns)
        step.outcome.times = StepTimes(launched_ns, max(launched_ns, computed_ns), self._ended_ns)

    def _forward(self, step: ModelInput, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> Tensor:
        states = self._states
        if states is not None:
            step.geometry.spans = states.lay_out(scheduled, sequences)
        adapters, model = self.adapters, self.model
        if adapters is not None and adapters.slots:
            model = adapters.decoder_for(step, scheduled) or model
        hidden = model.forward(step.token_ids, step.geometry, self.caches)
        if states is not None:
            states.advance(scheduled)
        return hidden

    def _catch_up(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState], states: StateSlots) -> None:
        """Compute the states of sequences again, from the first token on, where they are not those before this step.

        This happens after a step that failed. Keys and values are written again with the same numbers.
        """
        for item, sequence in zip(scheduled, sequences, strict=True):
            if states.has(item, sequence):
                continue
            for start in range(0, item.start, _CAUGHT_UP):
                tokens = sequence.tokens[start : min(start + _CAUGHT_UP, item.start)]
                part = [ScheduledSequence(item.seq_id, start, tokens, False, 0)]
                self._forward(self.layout.lay_out(part, [sequence]), part, [sequence])

    def prepare(self, grammar: str, eos_token_ids: Collection[int]) -> Future[None] | None:
        """Begin to compile a grammar, as Grammars.prepare() does."""
        return self.grammars_of_model().prepare(grammar, eos_token_ids)

    def grammars_of_model(self) -> Grammars:
        """What holds sequences to grammars, which is made when it is first needed: importing it takes time."""
        if self.grammars is None:
            from headway.engine.grammars import Grammars

            self.grammars = Grammars(self._folder or Path(), self.vocab_size)
        return self.grammars

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        return self.kernels.timed(wanted)

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has finished or was preempted."""
        sequence = self._known.pop(seq_id, None)
        if sequence is not None:
            for part in (self.grammars, self._states, self.results, self.adapters, self.layout.tables):
                if part is not None:
                    part.forget(seq_id)
            self.sampler.forget(sequence)

    def begin_together(self) -> None:
        """A step begins that other ranks run, too."""
        if self._states is not None:
            self._states.begin()

    def recover_together(self) -> None:
        """Recover as all other ranks do, which may have come further in the step that failed, or less far."""
        self.recover()
        if self._states is not None:
            self._states.doubt()

    def recover(self) -> None:
        """Forget all that a failed step may have half written. It is made again from the sequences' tokens."""
        for part in (self.layout, self.sampler, self._states, self.grammars):
            if part is not None:
                part.reset()

    def copy_blocks(self, plan: StepPlan) -> None:
        """Make the copies that come before a step. Raises EngineFault where one fails."""
        try:
            if self.host is not None:
                self.host.run(plan.swaps)
            if plan.copies:
                sources, targets = zip(*plan.copies, strict=True)
                self.kernels.copy_blocks(self._paged, list(sources), list(targets))
        except Exception as error:
            raise EngineFault(f"the KV blocks of a step could not be copied: {error!r}") from error

    def apply(self, plan: StepPlan) -> list[SequenceState]:
        """Apply the plan to the known sequences, and return its own. The same plan changes nothing a second time."""
        known = self._known
        for new in plan.new:
            known.setdefault(new.seq_id, new)
            if self.adapters is not None and new.slot >= 0:
                self.adapters.slots[new.seq_id] = new.slot
            if new.params.structured_outputs is not None:
                self.grammars_of_model().join(new)
        for change in plan.tables:
            known[change.seq_id].change_table(change)
            self.layout.tables.write(change)
        sequences: list[SequenceState] = []
        for item in plan.scheduled:
            sequence = known[item.seq_id]
            if item.decoding:  # also takes refused drafts away
                sequence.tokens[item.start :] = item.token_ids
            sequences.append(sequence)
        return sequences

    def _sample(
        self,
        logits: Tensor,
        scheduled: list[ScheduledSequence],
        sequences: list[SequenceState],
        outcome: StepOutcome,
        masks: dict[int, Mask | str | None],
    ) -> None:
        """Draw what the step samples. `masks` has an entry for each sequence with a grammar: see Grammars.masks()."""
        rows = [item.samples for item in scheduled]
        by_row = _by_row(masks, scheduled) if masks else None
        if max(rows) > 1:
            sampling = [(s, item) for s, item in zip(sequences, scheduled, strict=True) if item.samples]
            outcome.tokens, outcome.logprobs = try_drafts(self.sampler, logits, sampling, by_row)
        else:
            if len(logits) < len(rows):
                sequences = list(compress(sequences, rows))
            sampled = self.sampler.sample(logits, sequences, None, by_row)
            outcome.tokens = {
                s.seq_id: [token] if token != BAD_TOKEN else None
                for s, token in zip(sequences, sampled.token_ids, strict=True)
            }
            if any(sampled.logprobs):
                outcome.logprobs = {
                    s.seq_id: [e] for s, e in zip(sequences, sampled.logprobs, strict=True) if e is not None
                }
        for seq_id, mask in masks.items():
            if mask is None or isinstance(mask, str):
                outcome.tokens[seq_id] = None if mask else []
                outcome.logprobs.pop(seq_id, None)
                if mask:
                    outcome.reasons[seq_id] = mask
        if self._states is not None and max(rows) > 1:
            self._states.accept(scheduled, outcome.tokens)


def _by_row(masks: dict[int, Mask | str | None], scheduled: list[ScheduledSequence]) -> list[Mask | None]:
    """The mask of each row of logits; None where all tokens are allowed, or nothing will come of the draw."""
    rows: list[Mask | None] = []
    for item in scheduled:
        mask = masks.get(item.seq_id)
        rows += [None] * item.samples if mask is None or isinstance(mask, str) else list(mask)
    return rows
