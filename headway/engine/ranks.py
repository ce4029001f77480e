"""Rank 0 of an engine of several processes: it starts the others, and has them run its plans.

Each rank has a part of every layer and of the KV cache. Rank 0 also has the scheduler, the sampler and all else, and is
the only one that others know. A plan goes to the other ranks as it is, and all run it; within a step they add up what
each has computed (`kernels.cpu.ranks`). Nothing comes back: rank 0 sees the same sums, and all of the logits. Ranks may
be on several machines (`nodes`).

With context parallelism, each rank has the whole model, and computes some rows of a step into one KV cache of all.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections.abc import Callable
from itertools import chain

import msgspec
import torch

from headway.engine.config import EngineConfig
from headway.engine.executor import EngineFault
from headway.engine.local_ranks import LocalRanks, Look
from headway.engine.memory import Groups, bytes_per_block
from headway.engine.nodes import OneMachine
from headway.engine.watchdog import STOPPED, WANTS_TO_RUN
from headway.kernels.cpu.context import ContextKernels
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.memory import SharedPages
from headway.kernels.cpu.rank_board import MOST_RANKS, RankBoard
from headway.kernels.cpu.ranks import CpuRanks
from headway.kernels.interface import Kernels
from headway.kernels.ranks import Share
from headway.models.config import ModelConfig, ModelError
from headway.models.sharding import part_of
from headway.policy.step.plan import ScheduledSequence, StepPlan

_LOOKS_EVERY_S, _LOOKS_IN_LIMIT = 1.0, 8
_PAUSE_S, _REASON_S = 0.0005, 1.0
_ROOM_BYTES = 1 << 20  # beside the blocks of a KV pool that ranks share: each tensor begins where a cache line does
_encoder = msgspec.msgpack.Encoder()


def share_of(config: EngineConfig, number: int) -> Share:
    """What the rank of this number has of the model."""
    number %= config.ranks
    return Share.of(number, config.tensor_parallel_size, config.enable_expert_parallel, config.pipeline_parallel_size)


def sizes_of(model: ModelConfig) -> tuple[int, int]:
    """What the memory of ranks is measured by: hidden and vocab."""
    return model.shape.hidden, model.shape.vocab


class Pool(msgspec.Struct, array_like=True, tag=True):
    """The sizes of the KV pool, which are the same for all ranks; see Runner."""

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    host_blocks: int
    checkpoints: int
    groups: list[list[tuple[int, ...]]]
    shared_bytes: int = 0  # of the memory that all ranks have for it; 0: each has a pool of its own


class Step(msgspec.Struct, array_like=True, tag=True):
    """A plan to run."""

    plan: StepPlan
    begins: bool = False  # it is a step, or the first micro-batch of one; the others go on with it
    forgotten: list[int] = []  # sequences that have finished or were preempted before it
    recovers: bool = False  # the step before it has failed
    # What each rank behind the first computes of the plan; empty where all compute all of it.
    parts: list[list[ScheduledSequence]] = []


class Fill(msgspec.Struct, array_like=True, tag=True):
    """An adapter to bring into a slot, beside the steps. The first step with it waits for that."""

    digest: str
    path: str
    slot: int


ToRank = Pool | Step | Fill


class Followers:
    """All ranks but this one, and the thread that watches them.

    The thread also starts those of this machine: a rank ends with the thread that started it, which lives as long as
    this process.

    Args:
        config: of the engine, which says how many ranks there are.
        model: of the whole model.
        join: waits for the machines that they are on.
        threads: of each rank that has a part of the model, or of all together where each has the whole model.

    Attributes:
        threads: of each rank in a step that all run.
        fault: why steps cannot be run any more; empty while they can.
        processors: those that each rank of this machine is bound to; empty where they are bound to none. Rank 0 is this
            thread, and those that it starts from now on. Where each has the whole model, it may be on those of all.
        serves: the engine has started, so that a rank must end its part of a step within the limit.

    Raises:
        ModelError: so many ranks cannot share the model.
        ValueError: see `join`.
        OSError: a process cannot be started.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, join: Callable[[], OneMachine], threads: int) -> None:
        shares_rows = config.context_parallel_size > 1
        if config.processes > MOST_RANKS:
            sizes = "context_parallel_size" if shares_rows else "tensor_parallel_size times pipeline_parallel_size"
            raise ModelError(f"{sizes} is {config.processes}; there can be {MOST_RANKS} ranks")
        self._parts = [part_of(model, share_of(config, number)) for number in range(config.ranks)]
        self.threads = max(1, threads // config.context_parallel_size)
        self._config, self._timeout_s = config, config.rank_timeout
        self.fault, self.serves = "", False
        self._is_over = False
        self._ranks: CpuRanks | None = None
        self._nodes = join()
        self._here = LocalRanks(config, sizes_of(model), self._nodes.numbers, self._nodes.connections)
        self.board = self._here.board
        self._failed_start: OSError | None = None
        started = threading.Event()
        threading.Thread(target=self._watch, args=(started,), daemon=True, name="headway-ranks").start()
        started.wait()
        if self._failed_start is not None:
            self.end()
            raise self._failed_start
        if config.bind_ranks:
            self._here.bind(self.threads)
        self.processors = self._here.processors
        if self.processors:
            os.sched_setaffinity(0, chain(*self.processors) if shares_rows else self.processors[0])

    def assign(self, max_model_len: int) -> None:
        """Have the other ranks load their parts. See load_model()."""
        self._nodes.assign(max_model_len)
        self._here.assign(self._config, self.threads, max_model_len)

    def kernels(self, memory: mmap.mmap | None) -> ContextKernels:
        """This process's kernels, where each rank has the whole model. See CpuKernels."""
        return ContextKernels(self.board, self._config.block_size, memory)

    def of(self, kernels: Kernels, model: ModelConfig) -> CpuRanks | None:
        """What layers of this process say to the others; None where they are whole."""
        if self._config.ranks == 1:
            return None
        assert isinstance(kernels, CpuKernels)
        connections = dict(self._nodes.connections.get(0, {}))
        self._ranks = kernels.ranks(self.board, share_of(self._config, 0), *sizes_of(model), connections)
        return self._ranks

    def bytes_per_block(self, dtype: torch.dtype, groups: Groups) -> int:
        """Bytes of a block of the KV cache in all ranks. See bytes_per_block()."""
        return sum(bytes_per_block(part.caches, self._config.block_size, dtype, groups) for part in self._parts)

    def shared_bytes(self, num_blocks: int, block_bytes: int) -> int:
        """Bytes of a KV pool that all ranks have together, see Pool; 0 where each has its own."""
        return (num_blocks + 1) * block_bytes + _ROOM_BYTES if self._config.context_parallel_size > 1 else 0

    def pages(self, shared_bytes: int) -> SharedPages | None:
        """The memory of that pool."""
        return self._here.pages(shared_bytes) if shared_bytes else None

    def allocate(self, pool: Pool) -> None:
        """Have the other ranks allocate their parts of the KV pool, which have loaded then.

        Raises:
            ValueError: another rank could not load its part, or is gone.
        """
        try:
            self.send(pool)
            self.board.await_done(self._wait)
            self.check()
        except RuntimeError as fault:
            raise ValueError(f"{fault}, while it loaded its part of the model") from fault

    def send(self, message: ToRank) -> None:
        """Have the other ranks do something, up to MOST_AHEAD steps ahead. Raises EngineFault where one is gone."""
        encoded = _encoder.encode(message)
        self._nodes.send(encoded)
        self.board.send(encoded, self._wait)

    def fill(self, digest: str, path: str, slot: int) -> None:
        """Have the other ranks bring an adapter into a slot."""
        self.send(Fill(digest, path, slot))

    def check(self) -> None:
        """Raise EngineFault where a rank is gone, RuntimeError where one has raised in this step."""
        self._look()
        if self.board.is_stopped:
            raise RuntimeError(f"rank {', '.join(map(str, self.board.failed()))} raised; its traceback is above")

    def settle(self) -> None:
        """End a step that was left in its middle, in all ranks. Raises EngineFault where one is gone."""
        self._look()
        self.board.stop()
        self._nodes.stop()
        self.board.await_done(self._wait)
        if self.fault:
            raise EngineFault(self.fault)
        self.board.reset()
        self._nodes.reset()

    def _look(self) -> None:
        """Raise EngineFault where a rank is gone, or cannot be reached; nodes mostly say first why that is."""
        lost = [] if self._ranks is None else self._ranks.lost
        until = time.monotonic() + _REASON_S
        while lost and not self.fault and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        if lost or self.fault:
            raise EngineFault(self.fault or f"the connection with rank {lost[0]} is gone")

    def _wait(self) -> None:
        if self.fault:
            raise EngineFault(self.fault)
        time.sleep(_PAUSE_S)

    def end(self) -> None:
        """End the other ranks."""
        self._is_over = True
        self._nodes.end()
        self._here.end()

    # --- the thread ---------------------------------------------------------------------------------

    def _watch(self, started: threading.Event) -> None:
        """Start the ranks, and then look whether they are there and get on, until one is not."""
        try:
            self._here.start()
        except OSError as error:
            self._failed_start = error
            return
        finally:
            started.set()
        poll = select.poll()
        for descriptor in [*self._here.ending(), *self._nodes.descriptors()]:
            poll.register(descriptor, select.POLLIN)
        pause = min(_LOOKS_EVERY_S, self._timeout_s / _LOOKS_IN_LIMIT)
        progress = _Progress(self.board, 2 * pause)
        while not self._is_over:
            has_news = poll.poll(max(0.0, progress.looked + pause - time.monotonic()) * 1000)
            if self._is_over:
                return
            why = (self._here.ended() or self._nodes.heard(self.board.note)) if has_news else ""
            if not why and time.monotonic() >= progress.looked + pause:
                looks = [("", look) for look in self._here.look()] + self._nodes.looks()
                why = progress.late(looks, self._timeout_s, self.serves)
                why = why or self._nodes.silent(progress.passed, self._timeout_s)
            if why:
                return self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.fault = why
        self.board.stop()
        self._nodes.leave()


class _Progress:
    """How long ranks have been late, by what the board says and what Linux says of their main threads.

    A rank is late while the others wait for it. As the watchdog does, it counts only processor time while it wants to
    run.

    Args:
        most_s: how much may have passed since the last look; what is above is time in which this process stood.

    Attributes:
        looked: when that was.
        passed: the seconds before it that count.
    """

    def __init__(self, board: RankBoard, most_s: float) -> None:
        self._board, self._most_s = board, most_s
        self.looked, self.passed = time.monotonic(), 0.0
        self._seen = dict[int, Look]()
        self._late_s = dict[int, float]()

    def late(self, looks: list[tuple[str, Look]], limit_s: float, serves: bool) -> str:
        """Which rank has been late for longer, and how; empty for none.

        Args:
            looks: what is seen of each rank but this one, and where it is, for people.
            serves: else a rank may take any time, unless it is stopped.
        """
        now = time.monotonic()
        self.passed, self.looked = min(now - self.looked, self._most_s), now
        for where, look in looks:
            rank, before = look.rank, self._seen.get(look.rank, look)
            self._seen[rank] = look
            is_stopped = look.state in STOPPED
            holds_up = self._board.is_awaited(rank) or not serves
            is_late = holds_up and (is_stopped or (serves and not self._board.awaits(rank)))
            if not is_late or look.got != before.got:
                self._late_s[rank] = 0.0
            else:
                passed = min(self.passed, look.had_s - before.had_s) if look.state in WANTS_TO_RUN else self.passed
                self._late_s[rank] = self._late_s.get(rank, 0.0) + passed
            if self._late_s[rank] > limit_s:
                how = "is stopped" if is_stopped else "hangs"
                return f"{where}rank {rank} (pid {look.pid}) {how} and did not end its part of a step for {limit_s:g} s"
        return ""
