"""Holds sequences to grammars: which tokens may come next, as bits, found in threads while a step runs.

The state of a sequence is a function of its tokens. It is made from them when the sequence comes to the executor, and
again after a step that failed. A mask that is not there when tokens are drawn delays its own sequence alone.
"""

from __future__ import annotations

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
from llguidance import LLMatcher, LLTokenizer

from headway.engine.sampler import Mask
from headway.grammars.compile import GrammarError, matcher, said
from headway.grammars.vocabulary import load_vocabulary
from headway.policy.cache.sizing import padded_size
from headway.policy.step.plan import ScheduledSequence, SequenceState

KEPT = 64  # compiled grammars
THREADS, COMPILERS = 4, 2
STACK_BYTES = 2**23  # twice as much as where grammars are tried
TOGETHER = 16  # states that one thread moves on, one after the other
SLOW_S = 0.002  # a state that took longer has a thread for itself the next time
# How long a draw waits for masks. Where all its rows have grammars, there is nobody to delay.
LATE_S, LATE_ALONE_S = 0.004, 0.1
FORESEEN_S = 0.004  # how long a step waits to know what has to follow its tokens
SELDOM = 8  # after so many steps that foresaw nothing, only one in so many looks
MOST_FORCED = 16  # tokens of one sequence that are drafts in one step
MOST_S = 5.0  # a mask that takes longer ends its answer
_NICENESS = 10


@dataclass(slots=True)
class _State:
    """Where a sequence is in its grammar."""

    grammar: str
    matcher: LLMatcher | None = None
    consumed: int = 0  # tokens of its output that the matcher has taken
    drafts: list[int] = field(default_factory=list)  # tokens behind which masks are wanted, too
    # [1 + drafts, words], behind the newest known token and behind each draft; a text says why there are none.
    found: Mask | str | None = None
    is_awaited: bool = False  # a thread is to find them, or has found them and nobody has taken them
    began_s: float = 0.0  # since when
    is_slow: bool = True  # the last ones took long, or there were none
    forced: list[int] = field(default_factory=list)  # tokens that have to come next
    moving: Future[None] | None = None  # moves the matcher on, to find these
    unforced: int = 0  # steps in a row after which there were none


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

    Attributes:
        states: by seq_id; empty where no sequence has a grammar.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.states: dict[int, _State] = {}
        self._folder = folder
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)  # that the library fills
        self._vocabulary: tuple[frozenset[int], LLTokenizer] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()  # of what is compiled, and of the vocabulary
        threading.stack_size(STACK_BYTES)
        self._jobs: list[Future[None]] = []  # of this step
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
        if grammar in self._compiled:  # by who asked for the same just before
            return
        # Not in this thread: one that gives way would keep the interpreter's lock for longer.
        vocabulary = self._stepping.submit(self.load_vocabulary, ends).result()
        self._keep(grammar, matcher(grammar, vocabulary))

    def _keep(self, grammar: str, made: LLMatcher) -> None:
        with self._lock:
            self._compiled.setdefault(grammar, made)
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
                self._jobs.append(self._stepping.submit(self._find_all, [task]))
            else:
                tasks.append(task)
        for at in range(0, len(tasks), TOGETHER):
            self._jobs.append(self._stepping.submit(self._find_all, tasks[at : at + TOGETHER]))

    def masks(self, scheduled: list[ScheduledSequence], patient: bool = False) -> dict[int, Mask | str | None]:
        """The masks of a step's draws, by seq_id: [samples, words] each.

        None where it is not there in time, and nothing may be drawn; a text says why there will be none.

        Args:
            patient: to compute a token again costs more than to wait for its mask.
        """
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

    def _find_all(self, tasks: list[_Task]) -> None:
        for task in tasks:
            state, began_s = task.state, time.monotonic()
            try:
                found: Mask | str = self._find(state, task)
            except GrammarError as error:
                found = str(error)
            except BaseException as error:  # a panic of the library is no Exception
                found = f"its grammar failed: {error!r:.200}"
            state.is_slow = time.monotonic() - began_s > SLOW_S
            state.found = found

    def _find(self, state: _State, task: _Task) -> Mask:
        """Find the masks behind the known tokens of a sequence, and behind its drafts."""
        if state.moving is not None:
            wait([state.moving])
            state.moving = None
        sequence, made = task.sequence, state.matcher
        if made is None:
            made = state.matcher = self._copy(state.grammar, sequence.stop_ids)
        new = task.tokens[state.consumed - task.start :]
        if new and not made.consume_tokens(new):
            raise GrammarError(f"its grammar does not allow its tokens: {said(made)}")
        state.consumed += len(new)
        masks, taken = np.full((1 + len(state.drafts), padded_size(self._vocab_size) // 32), -1, np.int32), 0
        for row, mask in enumerate(masks[:, : self._words]):
            made.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if made.is_error():
                raise GrammarError(f"its grammar cannot go on: {said(made)}")
            _hold_open(mask, sequence, task.known + row)
            # Nothing is kept behind a draft that is not allowed, so the other rows may stay as they are.
            if row == len(state.drafts) or not made.try_consume_tokens([state.drafts[row]]):
                break
            taken += 1
        if taken:
            made.rollback(taken)
        return masks

    def _copy(self, grammar: str, stop_ids: frozenset[int]) -> LLMatcher:
        """The state before the first token; the grammar is compiled again where it was dropped meanwhile."""
        with self._lock:
            made = self._compiled.get(grammar)
        if made is None:
            vocabulary = self.load_vocabulary(stop_ids if self._vocabulary is None else self._vocabulary[0])
            self._keep(grammar, matcher(grammar, vocabulary))
            return self._copy(grammar, stop_ids)
        return made.deep_copy()


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
