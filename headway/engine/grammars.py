"""Holds sequences to grammars: which tokens may come next, as bits, found in threads.

The state of a sequence is a function of its tokens. It is made from them when the sequence comes to the executor, and
again after a step that failed. A mask that is not there when tokens are drawn delays its own sequence alone.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from headway.engine.host import usable_threads
from headway.engine.sampler import Mask
from headway.grammars.compile import GrammarError, matcher, said
from headway.grammars.vocabulary import load_vocabulary
from headway.policy.cache.sizing import padded_size
from headway.policy.step.plan import ScheduledSequence, SequenceState

KEPT = 64  # compiled grammars
THREADS, COMPILERS, MOST_THREADS = 4, 2, 16  # of masks that take long, of compilation, of masks found together
STACK_BYTES = 2**23  # twice as much as where grammars are tried
TOGETHER = 16  # states that one thread moves on, one after the other
SLOW_S = 0.002  # a state that took longer has a thread for itself the next time
# Masks that take no longer together are found when the step has computed its logits: before, on a processor all of
# whose cores compute, they would take one from it in the middle of a job, for which the others wait.
BRIEF_S = 0.002
# How long a draw waits for masks. Where all its rows have grammars, there is nobody to delay.
LATE_S, LATE_ALONE_S = 0.004, 0.1
FORESEEN_S = 0.004  # how long a step waits to know what has to follow its tokens
SELDOM = 8  # after so many steps that foresaw nothing, only one in so many looks
MOST_FORCED = 16  # tokens of one sequence that are drafts in one step
MOST_S = 5.0  # a mask that takes longer ends its answer
_NICENESS = 10


@dataclass(slots=True)
class _State:
    """Where a sequence is in its grammar.

    Args:
        consumed: tokens of its output that the matcher has taken.
        drafts: tokens behind which masks are wanted, too.
        found: [1 + drafts, words], behind the newest known token and behind each draft; a text says why there are none.
        is_awaited: a thread is to find them, or has found them and nobody has taken them.
        began_s: since when.
        took_s: how long the last ones took; infinite where nobody knows, as it was one of several that took longer
            than they should.
        forced: tokens that have to come next.
        moving: moves the matcher on, to find these.
        unforced: steps in a row after which there were none.
    """

    grammar: str
    matcher: LLMatcher | None = None
    consumed: int = 0
    drafts: list[int] = field(default_factory=list)
    found: Mask | str | None = None
    is_awaited: bool = False
    began_s: float = 0.0
    took_s: float = math.inf
    forced: list[int] = field(default_factory=list)
    moving: Future[None] | None = None
    unforced: int = 0

    @property
    def is_slow(self) -> bool:
        return self.took_s > SLOW_S


@dataclass(slots=True)
class _Task:
    """A state and its sequence, of whose output `tokens` stand behind the first `start`; `known` are there in all."""

    state: _State
    sequence: SequenceState
    start: int
    tokens: list[int]
    known: int


class Grammars:
    """Grammars of one model, and the states of the sequences that are held to them.

    Args:
        folder: the checkpoint, for its tokenizer.json.
        vocab_size: tokens that have logits.
        is_crowded: a step computes on all cores, so that threads beside it slow it down.

    Attributes:
        states: by seq_id; empty where no sequence has a grammar.
    """

    def __init__(self, folder: Path, vocab_size: int, is_crowded: bool = False) -> None:
        self.states: dict[int, _State] = {}
        self._folder = folder
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)  # that the library fills
        self._vocabulary: tuple[frozenset[int], LLTokenizer] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()  # of what is compiled, and of the vocabulary
        threading.stack_size(STACK_BYTES)
        self._is_crowded = is_crowded
        self._jobs: list[Future[None]] = []  # of this step
        self._put_off: list[_Task] = []  # masks of this step that are to be found at its end
        self._executor = LLExecutor(min(MOST_THREADS, usable_threads()))
        self._stepping = ThreadPoolExecutor(THREADS, "grammar-masks")
        self._compiling = ThreadPoolExecutor(COMPILERS, "grammar-compilers", _give_way)

    # --- grammars -----------------------------------------------------------------------------------

    def prepare(self, grammar: str, eos_token_ids: Collection[int]) -> Future[None] | None:
        """Begin to compile a grammar; None where that was done before. The future raises GrammarError."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return None
        return self._compiling.submit(self._compile, grammar, frozenset(eos_token_ids))

    def load_vocabulary(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """What compiling needs of the checkpoint. Making it holds the interpreter's lock for up to a second."""
        ends = frozenset(eos_token_ids)
        with self._loading:
            if self._vocabulary is None or self._vocabulary[0] != ends:
                self._vocabulary = ends, load_vocabulary(self._folder, self._vocab_size, ends)
            return self._vocabulary[1]

    def _compile(self, grammar: str, ends: frozenset[int]) -> None:
        # Not in this thread: one that gives way would keep the interpreter's lock for longer.
        vocabulary = self._stepping.submit(self.load_vocabulary, ends).result()
        self._keep(grammar, matcher(grammar, vocabulary))

    def _keep(self, grammar: str, made: LLMatcher) -> None:
        with self._lock:
            self._compiled[grammar] = made
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)

    # --- a step -------------------------------------------------------------------------------------

    def join(self, sequence: SequenceState) -> None:
        """Take in a sequence that the executor is told of."""
        asked = sequence.params.structured_outputs
        if asked is not None:
            self.states.setdefault(sequence.seq_id, _State(asked.text))

    def forget(self, seq_id: int) -> None:
        self.states.pop(seq_id, None)

    def reset(self) -> None:
        """Forget how far each sequence is. Threads that are at it go on with what nobody looks at any more."""
        self.states = {seq_id: _State(state.grammar) for seq_id, state in self.states.items()}

    def begin(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> None:
        """Begin to find the masks of a step's draws; the sequences have the step's tokens."""
        tasks: list[_Task] = []
        self._jobs = []
        now = time.monotonic()
        for item, sequence in zip(scheduled, sequences, strict=True):
            state = self.states.get(item.seq_id) if item.samples else None
            if state is None or state.is_awaited:  # or it is still at what an earlier step could not wait for
                continue
            state.is_awaited, state.began_s, state.drafts = True, now, _drafts_of(item)
            known, start = len(sequence.tokens) - len(state.drafts), state.consumed
            task = _Task(state, sequence, start, sequence.tokens[sequence.prompt_len + start : known], known)
            if state.is_slow:
                self._jobs.append(self._stepping.submit(self._find_together, [task]))
            else:
                tasks.append(task)
        self._put_off = []
        if self._is_crowded and sum(task.state.took_s for task in tasks) <= BRIEF_S:
            self._put_off = tasks
        elif tasks:
            self._jobs.append(self._stepping.submit(self._find_together, tasks))

    def masks(self, scheduled: list[ScheduledSequence], patient: bool = False) -> dict[int, Mask | str | None]:
        """The masks of a step's draws, by seq_id: [samples, words] each.

        None where it is not there in time, and nothing may be drawn; a text says why there will be none.

        Args:
            patient: to compute a token again costs more than to wait for its mask.
        """
        if self._put_off:
            self._jobs.append(self._stepping.submit(self._find_together, self._put_off))
        draws = [item for item in scheduled if item.samples]
        held = [(item, state) for item in draws if (state := self.states.get(item.seq_id)) is not None]
        wait(self._jobs, LATE_S if len(held) < len(draws) and not patient else LATE_ALONE_S)
        return {item.seq_id: _taken(state, _drafts_of(item)) for item, state in held}

    def foresee(
        self, scheduled: list[ScheduledSequence], sequences: list[SequenceState], drawn: dict[int, list[int] | None]
    ) -> dict[int, list[int]]:
        """Tokens that have to follow those that a step has drawn, by seq_id; only where its draws are all held.

        As drafts they save steps, but make the next one longer, which a sequence without a grammar would pay for.
        """
        tasks: list[tuple[_State, int, list[int]]] = []
        for item, sequence in zip(scheduled, sequences, strict=True):
            if item.samples:
                state = self.states.get(item.seq_id)
                if state is None:
                    return {}
                new = drawn.get(item.seq_id)
                state.unforced += 1
                is_due = state.unforced < SELDOM or state.unforced % SELDOM == 0
                is_free = state.matcher is not None and not state.is_awaited and not state.is_slow
                if new and is_due and is_free and not sequence.params.penalises:
                    tasks.append((state, item.seq_id, new))
        jobs = list[Future[None]]()
        for at in range(0, len(tasks), TOGETHER):
            part = tasks[at : at + TOGETHER]
            jobs.append(self._stepping.submit(_move_on, part))
            for state, _, _ in part:
                state.moving = jobs[-1]
        wait(jobs, FORESEEN_S)
        moved = [(seq_id, state) for state, seq_id, _ in tasks if state.moving is not None and state.moving.done()]
        return {seq_id: state.forced[:MOST_FORCED] for seq_id, state in moved if state.forced}

    def _find_together(self, tasks: list[_Task]) -> None:
        """Find the masks behind the known tokens of some sequences, and behind their drafts."""
        began_s = time.monotonic()
        ready: list[tuple[_Task, LLMatcher, int]] = []
        rows = 0
        for task in tasks:
            try:
                ready.append((task, self._advanced(task), rows))
                rows += 1 + len(task.state.drafts)
            except BaseException as error:
                task.state.found = _reason(error)
        if not ready:
            return
        # Nothing is written behind a draft that is not allowed, so those rows stay as they are.
        found = np.full((rows, self._words), -1, np.int32)
        where = found.ctypes.data, 4 * self._words, rows
        drafted = [(made, first, task.state.drafts) for task, made, first in ready if task.state.drafts]
        plain = [(made, first) for task, made, first in ready if not task.state.drafts]
        try:
            if drafted:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
            if plain:
                self._executor.unsafe_compute_mask_ptr(plain, *where)
        except BaseException as error:
            if len(ready) == 1:
                ready[0][0].state.found = _reason(error)
            else:  # whose fault it is shows when each is alone
                for task, _, _ in ready:
                    self._find_together([task])
            return
        masks = np.full((rows, padded_size(self._vocab_size) // 32), -1, np.int32)
        masks[:, : self._words] = found
        took_s = time.monotonic() - began_s
        if len(tasks) > 1:
            expected_s = sum(task.state.took_s for task in tasks)
            took_s = math.inf if took_s > max(SLOW_S, 2 * expected_s) else took_s / len(tasks)
        for task, made, first in ready:
            state, own = task.state, masks[first : first + 1 + len(task.state.drafts)]
            state.took_s = took_s
            try:
                if made.is_error():
                    raise GrammarError(f"its grammar cannot go on: {said(made)}")
                for row, mask in enumerate(own):
                    _hold_open(mask[: self._words], task.sequence, task.known + row)
                state.found = own
            except GrammarError as error:
                state.found = str(error)

    def _advanced(self, task: _Task) -> LLMatcher:
        """The state behind the known tokens of a sequence. Raises GrammarError where its grammar forbids them."""
        state, sequence = task.state, task.sequence
        if state.moving is not None:
            wait([state.moving])
            state.moving = None
        made = state.matcher
        if made is None:
            made = state.matcher = self._copy(state.grammar, sequence.stop_ids)
        new = task.tokens[state.consumed - task.start :]
        if new and not made.consume_tokens(new):
            raise GrammarError(f"its grammar does not allow its tokens: {said(made)}")
        state.consumed += len(new)
        return made

    def _copy(self, grammar: str, stop_ids: frozenset[int]) -> LLMatcher:
        """The state before the first token; the grammar is compiled again where it was dropped meanwhile."""
        with self._lock:
            made = self._compiled.get(grammar)
        if made is None:
            vocabulary = self.load_vocabulary(stop_ids if self._vocabulary is None else self._vocabulary[0])
            self._keep(grammar, matcher(grammar, vocabulary))
            return self._copy(grammar, stop_ids)
        return made.deep_copy()


def _reason(error: BaseException) -> str:
    """Why there are no masks; a panic of the library is no Exception."""
    return str(error) if isinstance(error, GrammarError) else f"its grammar failed: {error!r:.200}"


def _taken(state: _State, drafts: list[int]) -> Mask | str | None:
    """What was found for a state, which may then be moved on."""
    found = state.found
    if found is None:
        is_endless = time.monotonic() - state.began_s > MOST_S
        return f"a token of its grammar takes more than {MOST_S:g} s to decide" if is_endless else None
    state.found, state.is_awaited = None, False
    return found if isinstance(found, str) or drafts == state.drafts else None


def _move_on(tasks: list[tuple[_State, int, list[int]]]) -> None:
    """Move states on by their new tokens, and see which have to follow."""
    for state, _, new in tasks:
        state.forced = []
        if state.matcher is not None and state.matcher.consume_tokens(new):
            state.consumed += len(new)
            state.forced = state.matcher.compute_ff_tokens()
            if state.forced:
                state.unforced = 0


def _drafts_of(item: ScheduledSequence) -> list[int]:
    return item.token_ids[item.num_tokens - item.samples + 1 :]


def _hold_open(mask: Mask, sequence: SequenceState, position: int) -> None:
    """Take out tokens that end the sequence while it shall go on, unless nothing else is left.

    Raises:
        GrammarError: nothing is allowed at all.
    """
    params = sequence.params
    if params.ignore_eos or position < sequence.prompt_len + params.min_tokens:
        before = mask.copy()
        for token in sequence.stop_ids:
            if token < 32 * len(mask):
                mask.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        if not mask.any():
            mask[:] = before
    if not mask.any():
        raise GrammarError("no token of the model can go on with its grammar")


def _give_way() -> None:
    """Let the other threads of the process go first, where each thread has its own priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
