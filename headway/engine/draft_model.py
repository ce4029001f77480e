"""Drafts of a smaller model with the same tokenizer, which has a KV cache and block tables of its own.

What the model has computed of a sequence is a function of its tokens alone. So nothing of it is swapped, copied or
carried over: what it lacks of a sequence that was admitted, preempted or refused some drafts is computed when drafts of
it are next wanted, as far as the prefix index of its own pool does not have it. Sequences without drafts cost nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.engine.layout import ModelInput
from headway.engine.runner import Runner
from headway.kernels.interface import Chain, Kernels
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model
from headway.policy.cache.block_manager import BlockManager
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.draft_measures import Confidences
from headway.policy.step.drafting import BESIDE, Drafting
from headway.policy.step.plan import ScheduledSequence, SequenceState, StepPlan, state_of
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.speculation import Proposal

_PARAMS = SamplingParams(temperature=0.0)
# At the start, passes of so many sequences are measured, so often, behind prompts of so many tokens.
_MEASURED, _MEASURED_PASSES, MEASURED_TOKENS = (1, 4, 16), 4, 16


class DraftModel:
    """Makes drafts with a model of its own.

    Its pool has as many blocks as that of the sequences. Where it is out of blocks, those are given up first of which
    no drafts are wanted now, and then sequences have no drafts.

    Args:
        runner: has the model and its caches. Its plans are made here.
        blocks: the pool of its KV cache.
        max_model_len: most tokens of a sequence; longer ones have no drafts.
        vocab_size: token ids are below this in the model that is drafted for.

    Attributes:
        kind: what its drafts are called in metrics.
        computing_ns: what it has taken to compute until now, beside looking at sequences.
    """

    kind = "draft_model"
    _makes_chains = True  # several drafts may be made in one go
    _skipped = 0  # first tokens of a sequence that its copy does not have

    def __init__(
        self,
        runner: Runner,
        blocks: KVBlocks,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._runner, self._blocks, self._clock = runner, blocks, clock
        self._manager = BlockManager(blocks)
        self._max_len = max_model_len
        self._vocab_size = self._num_drawn = min(vocab_size, runner.vocab_size)  # tokens that may come, and in drafts
        self._known: dict[int, Sequence] = {}  # copies of sequences, with drafts behind their tokens
        self._lengths: dict[int, int] = {}  # how many of a copy's tokens are the sequence's
        self._states: dict[int, SequenceState] = {}  # of those that have blocks
        self._foreign = set[int]()  # sequences with tokens that the model does not know
        self._has_chains = self._makes_chains and runner.device.type == "cpu"
        self.computing_ns = 0

    # --- drafts -------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], drafting: Drafting) -> dict[int, Proposal]:
        """Drafts for sequences that decode, as far as that is decided to pay."""
        copies = {each.seq_id: copy for each in sequences if (copy := self._followed(each)) is not None}
        if not copies:
            return {}
        lacks = {seq_id: self._lacks(copy) for seq_id, copy in copies.items()}
        advance, chosen = drafting.begin(lacks, {each.seq_id: each.output_len for each in sequences})
        wanted = copies.keys() if advance or chosen else ()
        self._compute(advance, drafting, wanted)
        tokens: dict[int, list[int]] = {}
        confidences: dict[int, list[float]] = {}
        while chosen:
            among = [copies[seq_id] for seq_id in chosen]
            drafts = self._chained(among, drafting, wanted) or self._pass(among, drafting, wanted)
            for seq_id, made in drafts.items():
                for token, confidence in made:
                    tokens.setdefault(seq_id, []).append(token)
                    confidences.setdefault(seq_id, []).append(confidence)
                    copies[seq_id].tokens.append(token)
            chosen = drafting.goes_on({seq_id: made[-1][1] for seq_id, made in drafts.items()}) if drafts else []
            chosen = [seq_id for seq_id in chosen if len(copies[seq_id].tokens) < self._max_len]
        return {seq_id: Proposal(each, 0, confidences[seq_id]) for seq_id, each in tokens.items()}

    def tokens_of(self, seq_id: int) -> list[int]:
        """The tokens of a sequence that is known, with the drafts behind them."""
        return self._known[seq_id].tokens

    def forget(self, seq_id: int) -> None:
        """A sequence has ended; does nothing for an unknown one."""
        self._foreign.discard(seq_id)
        copy = self._known.pop(seq_id, None)
        if copy is not None:
            del self._lengths[seq_id]
            self._give_up(copy)

    def _followed(self, sequence: Sequence) -> Sequence | None:
        """The copy of a sequence, with its newest tokens and without drafts; None where there can be no drafts."""
        seq_id, known, skipped = sequence.seq_id, self._lengths.get(sequence.seq_id, 0), self._skipped
        length = len(sequence.tokens) - skipped
        if not 0 < length < self._max_len or seq_id in self._foreign:
            return None
        new = sequence.tokens[skipped + known :]
        if max(new, default=0) >= self._vocab_size:
            self._foreign.add(seq_id)
            return None
        copy = self._known.get(seq_id)
        if copy is None:
            copy = Sequence(
                "", 0, _PARAMS, new, length, self._max_len, frozenset(), 0,
                cache_salt=sequence.cache_salt, seq_id=seq_id,
            )  # fmt: skip
            self._known[seq_id] = copy
        else:
            agreed = known + self._agreed(copy.tokens[known:], new)
            copy.num_computed = min(copy.num_computed, agreed, length - 1)
            copy.tokens[known:] = new
            if copy.tables:
                self._manager.trim(copy)
                if self._blocks.enable_prefix_caching:
                    self._manager.register_full(copy)
        self._lengths[seq_id] = length
        return copy

    def _agreed(self, drafts: list[int], new: list[int]) -> int:
        """How many drafts became tokens, so that what was computed of them holds."""
        pairs = zip(drafts, new, strict=False)
        return next((at for at, (draft, token) in enumerate(pairs) if draft != token), min(len(drafts), len(new)))

    def _lacks(self, copy: Sequence) -> int:
        return len(copy.tokens) - (copy.num_computed if copy.tables else self._manager.known_tokens(copy))

    # --- passes -------------------------------------------------------------------------------------

    def _compute(self, advance: Mapping[int, int], drafting: Drafting, wanted: Collection[int]) -> None:
        """Compute so many tokens of what copies lack."""
        plan, began, tokens = StepPlan(), self._clock(), 0
        for seq_id, count in advance.items():
            copy = self._known[seq_id]
            if self._has_room(copy, count, plan, wanted):
                start = copy.num_computed
                part = copy.tokens[start : min(start + count, len(copy.tokens) - 1)]
                if part:
                    plan.scheduled.append(ScheduledSequence(seq_id, start, part, False, 0))
                    tokens += len(part)
        if tokens:
            self.run(plan)
            drafting.caught_up(tokens, self._took(began))

    def _chained(
        self, copies: list[Sequence], drafting: Drafting, wanted: Collection[int]
    ) -> dict[int, list[tuple[int, float]]]:
        """The next drafts of all copies; none where a pass must be made alone."""
        if not self._has_chains or any(copy.num_to_compute != 1 for copy in copies):
            return {}
        began = self._clock()
        made = self._chain(copies, drafting.chain([copy.seq_id for copy in copies]), drafting.hits, wanted)
        drafts = {copy.seq_id: each for copy, each in zip(copies, made, strict=bool(made))}
        if drafts:
            given = {seq_id: [confidence for _, confidence in each] for seq_id, each in drafts.items()}
            drafting.chained(given, self._took(began))
        return drafts

    def _chain(
        self,
        copies: list[Sequence],
        limits: tuple[int, float, float, list[float]],
        hits: Confidences,
        wanted: Collection[int],
    ) -> list[list[tuple[int, float]]]:
        """Drafts of copies that lack one token, as far as the blocks of all have room; none where not two fit.

        Args:
            limits: see Drafting.chain().
        """
        plan, runner, size = StepPlan(), self._runner, self._blocks.block_size
        most, cost, each, worths = limits
        for copy in copies:
            start = copy.num_computed
            most = min(most, size - start % size, self._max_len - len(copy.tokens))
            plan.scheduled.append(ScheduledSequence(copy.seq_id, start, copy.tokens[start:], True, 1))
        if most < 2:
            return []
        have_room = [self._has_room(copy, 1, plan, wanted) for copy in copies]
        self._change_tables(plan)
        if not all(have_room):
            return []
        step = self._laid_out(plan)
        chain = Chain(most, cost, each, worths, self._num_drawn, *hits.by_confidence)
        with torch.inference_mode():
            made = runner.model.chain(step.token_ids, step.geometry, runner.caches, chain)
        for copy, drafts in zip(copies, made, strict=bool(made)):
            copy.num_computed += len(drafts)
        return made

    def _pass(
        self, copies: list[Sequence], drafting: Drafting, wanted: Collection[int]
    ) -> dict[int, list[tuple[int, float]]]:
        """The next draft of each copy that there is room for, and the probability that the model gives it."""
        plan, began = StepPlan(), self._clock()
        for copy in copies:
            if self._has_room(copy, len(copy.tokens), plan, wanted) and copy.num_to_compute <= BESIDE:
                lacks = copy.tokens[copy.num_computed :]
                plan.scheduled.append(ScheduledSequence(copy.seq_id, copy.num_computed, lacks, True, 1))
        if not plan.scheduled:
            return {}
        best, chosen = self.run(plan)
        drafting.passed(sum([len(item.token_ids) for item in plan.scheduled]), self._took(began))
        return {
            item.seq_id: [(token, confidence)]
            for item, token, confidence in zip(plan.scheduled, chosen, best, strict=True)
        }

    def _took(self, began: int) -> int:
        """The time since then, in which the model has computed."""
        took_ns = self._clock() - began
        self.computing_ns += took_ns
        return took_ns

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[list[float], list[int]]:
        """Run a pass; the probabilities of the likeliest tokens of the items that sample, and these tokens."""
        hidden, runner = self._forward(plan), self._runner
        return runner.kernels.likeliest(runner.model.logits(hidden), self._num_drawn) if len(hidden) else ([], [])

    def _forward(self, plan: StepPlan) -> Tensor:
        """The model's results [R, hidden] for the last tokens of the items that sample."""
        self._change_tables(plan)
        runner, items, step = self._runner, plan.scheduled, self._laid_out(plan)
        hidden = runner.model.forward(step.token_ids, step.geometry, runner.caches)
        for item in items:
            self._known[item.seq_id].num_computed += len(item.token_ids)
        if not len(step.last_rows):
            return hidden[:0]
        return hidden if len(step.last_rows) == len(hidden) else runner.kernels.take(hidden, step.last_rows)

    def _change_tables(self, plan: StepPlan) -> None:
        for change in plan.tables:
            self._states[change.seq_id].change_table(change)
            self._runner.layout.tables.write(change)

    def _laid_out(self, plan: StepPlan) -> ModelInput:
        runner, items = self._runner, plan.scheduled
        states = [self._states[item.seq_id] for item in items]
        step = None if runner.decodes is None else runner.decodes.lay_out(items, states)
        return step or runner.layout.lay_out(items, states)

    # --- blocks -------------------------------------------------------------------------------------

    def _has_room(self, copy: Sequence, count: int, plan: StepPlan, wanted: Collection[int]) -> bool:
        """Find blocks for up to so many next tokens of a copy, at the cost of copies that are not wanted now."""
        if not copy.tables and len(self._states) >= len(self._runner.layout.tables.array):
            self._give_up_unwanted(wanted)
        if not (copy.tables or self._manager.admit(copy, 0)):
            self._give_up_unwanted(wanted)
            if not self._manager.admit(copy, 0):
                return False
        count = min(count, copy.num_to_compute)
        if copy.in_executor and copy.num_computed + count <= copy.room:
            return True
        if not self._manager.extend(copy, count, plan):
            self._give_up_unwanted(wanted)
            if not self._manager.extend(copy, count, plan):
                return False
        if not copy.in_executor:
            copy.in_executor = True
            self._states[copy.seq_id] = state_of(copy)
        return True

    def _give_up_unwanted(self, wanted: Collection[int]) -> None:
        for seq_id in self._states.keys() - wanted:
            self._give_up(self._known[seq_id])

    def _give_up(self, copy: Sequence) -> None:
        """Give back the blocks of a copy. Full ones stay in the prefix index until others need them."""
        if copy.tables:
            self._manager.release(copy)
        if self._states.pop(copy.seq_id, None) is not None:
            self._runner.layout.tables.forget(copy.seq_id)
        copy.prefix_match = None

    def reset(self) -> None:
        """Give everything back, and forget what a pass that raised may have half written."""
        for seq_id in list(self._known):
            self.forget(seq_id)
        self._runner.recover()

    def check_by_parts(self) -> Iterator[None]:
        """Check the pool as KVBlocks.check_by_parts() does, with its pauses."""
        yield from self._blocks.check_by_parts(copy.held_blocks for copy in self._known.values())

    # --- the start ----------------------------------------------------------------------------------

    def measure(self, drafting: Drafting) -> None:
        """Run short prompts and some passes, so that their times are known before the first draft."""
        seats = min(_MEASURED[-1], len(self._runner.layout.tables.array))
        if self._max_len <= MEASURED_TOKENS + len(_MEASURED) * _MEASURED_PASSES:
            return
        for number in range(-seats, 0):
            tokens = [1] * (MEASURED_TOKENS + 1)
            copy = Sequence("", 0, _PARAMS, tokens, len(tokens), self._max_len, frozenset(), 0, seq_id=number)
            copy.cache_salt = str(number)
            self._known[number], self._lengths[number] = copy, len(tokens)
        copies = list(self._known.values())
        self._compute({-seats: MEASURED_TOKENS}, Drafting(1), self._known.keys())
        self._compute(dict.fromkeys(range(1 - seats, 0), MEASURED_TOKENS), drafting, self._known.keys())
        for size in _MEASURED:
            for _ in range(_MEASURED_PASSES if size <= seats else 0):
                drafts = self._pass(copies[:size], drafting, self._known.keys())
                for seq_id, ((token, _),) in drafts.items():
                    self._known[seq_id].tokens.append(token)
        if self._has_chains:  # there are none of models with windows
            limits = 2, -1.0, -1.0, [1.0]
            self._has_chains = bool(self._chain(copies[:1], limits, drafting.hits, self._known.keys()))
        for copy in copies:
            self.forget(copy.seq_id)
        drafting.take_passes_ns()


def load_draft(
    folder: Path,
    model: Path,
    vocab_size: int,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    load_format: str,
    seed: int,
) -> Decoder:
    """Load the draft model of a folder, for the model of another folder.

    Args:
        vocab_size: of the other model.
        dtype, kernels: of both.
        load_format, seed: see load_model.

    Raises:
        ValueError: it cannot be loaded, or does not fit to the model; one line.
    """
    config = ModelConfig.from_folder(folder)
    if config.shape.recurrent or config.headless:
        has = "recurrent layers" if config.shape.recurrent else "no output layer"
        raise ValueError(f"it has {has}; give a draft model that has attention alone and generates text")
    check_vocabularies(folder, model, (config.shape.vocab, vocab_size))
    kernels.choose(dtype, "none" if config.packed is None else config.packed.scheme)
    return load_model(folder, dtype, kernels, device, load_format, seed)


def check_vocabularies(draft: Path, model: Path, sizes: tuple[int, int]) -> None:
    """Check that token ids mean the same in both models.

    Args:
        draft, model: their folders. Without a tokenizer.json in one of them, only sizes are compared.
        sizes: of both vocabularies.

    Raises:
        ValueError: what differs; one line.
    """
    of_draft, of_model = _vocabulary(draft / "tokenizer.json"), _vocabulary(model / "tokenizer.json")
    advice = "give a draft model that was trained with the same tokenizer"
    if of_draft is None or of_model is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"it has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}, and not both have a "
                f"tokenizer.json; {advice}"
            )
        return
    for token in of_model.keys() | of_draft.keys():
        if of_model.get(token) != of_draft.get(token):
            there, here = (f"token {each[token]}" if token in each else "no token" for each in (of_draft, of_model))
            raise ValueError(f"it has another tokenizer: {token!r} is {there} in it, and {here} in the model; {advice}")


def _vocabulary(path: Path) -> dict[str, int] | None:
    """The token ids of a tokenizer.json by their texts; None where there is none that can be read."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        found = dict(listed) if isinstance(listed, dict) else {piece: at for at, (piece, _) in enumerate(listed)}
        return found | {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
