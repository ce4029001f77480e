"""Rank 0 of an engine of several processes: it starts the others, and has them run its plans.

Each rank has a part of every layer and of the KV cache. Rank 0 also has the scheduler, the sampler and all else, and is
the only one that others know. A plan goes to the other ranks as it is, and all run it; within a step they add up what
each has computed (`kernels.cpu.ranks`). Nothing comes back: rank 0 sees the same sums, and all of the logits.

With context parallelism, each rank has the whole model, and computes some rows of a step into one KV cache of all.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import chain

import msgspec
import torch

from headway.engine.config import EngineConfig
from headway.engine.executor import EngineFault
from headway.engine.host import Core, physical_cores, shared_out, usable_threads
from headway.engine.memory import Groups, bytes_per_block
from headway.engine.watchdog import STOPPED, WANTS_TO_RUN, main_thread
from headway.kernels.cpu.context import ContextKernels
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.memory import SharedPages
from headway.kernels.cpu.rank_board import MOST_RANKS, RankBoard
from headway.kernels.cpu.ranks import CpuRanks, board_bytes
from headway.kernels.interface import Kernels
from headway.kernels.ranks import Share
from headway.models.config import ModelConfig, ModelError
from headway.models.sharding import part_of
from headway.policy.step.plan import ScheduledSequence, StepPlan

_LOOKS_EVERY_S, _LOOKS_IN_LIMIT = 1.0, 8
_PAUSE_S = 0.0005
_ROOM_BYTES = 1 << 20  # beside the blocks of a KV pool that ranks share: each tensor begins where a cache line does
_encoder = msgspec.msgpack.Encoder()


def share_of(config: EngineConfig, number: int) -> Share:
    """What the rank of this number has of the model."""
    number %= config.ranks
    return Share.of(number, config.tensor_parallel_size, config.enable_expert_parallel, config.pipeline_parallel_size)


class Assignment(msgspec.Struct, array_like=True):
    """What a rank reads from its standard input: which part of which model is its own.

    Args:
        threads: that it may use.
        processors: that it is bound to; empty for none.
        max_model_len: see load_model().
    """

    config: EngineConfig
    number: int
    count: int
    threads: int
    processors: list[int]
    max_model_len: int


class Pool(msgspec.Struct, array_like=True, tag=True):
    """The sizes of the KV pool, which are the same for all ranks; see Runner.

    Args:
        shared_bytes: of the memory that all ranks have for it; 0: each has a pool of its own.
    """

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    host_blocks: int
    checkpoints: int
    groups: list[list[tuple[int, ...]]]
    shared_bytes: int = 0


class Step(msgspec.Struct, array_like=True, tag=True):
    """A plan to run.

    Args:
        begins: it is a step, or the first micro-batch of one; the others go on with it.
        forgotten: sequences that have finished or were preempted before it.
        recovers: the step before it has failed.
        parts: what each rank behind the first computes of the plan; empty where all compute all of it.
    """

    plan: StepPlan
    begins: bool = False
    forgotten: list[int] = []
    recovers: bool = False
    parts: list[list[ScheduledSequence]] = []


class Fill(msgspec.Struct, array_like=True, tag=True):
    """An adapter to bring into a slot, beside the steps. The first step with it waits for that."""

    digest: str
    path: str
    slot: int


ToRank = Pool | Step | Fill


class Followers:
    """The processes of all ranks but this one, and the thread that watches them.

    The thread also starts them: a rank ends with the thread that started it, which lives as long as this process.

    Args:
        config: of the engine, which says how many ranks there are.
        model: of the whole model.

    Attributes:
        threads: of each rank in a step that all run.
        fault: why steps cannot be run any more; empty while they can.
        processors: those that each rank is bound to; empty where they are bound to none. Rank 0 is this thread, and
            those that it starts from now on. Where each rank has the whole model, it may be on those of all.
        serves: the engine has started, so that a rank must end its part of a step within the limit.

    Raises:
        ModelError: so many ranks cannot share the model.
        OSError: a process cannot be started.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self.count, shares_rows = config.processes, config.context_parallel_size > 1
        if self.count > MOST_RANKS:
            sizes = "context_parallel_size" if shares_rows else "tensor_parallel_size times pipeline_parallel_size"
            raise ModelError(f"{sizes} is {self.count}; there can be {MOST_RANKS} ranks")
        self._parts = [part_of(model, share_of(config, number)) for number in range(config.ranks)]
        self.threads = max(1, torch.get_num_threads() // config.context_parallel_size)
        self._config, self._timeout_s = config, config.rank_timeout
        self.fault, self.serves = "", False
        self._is_over = False
        memory = os.memfd_create("headway-ranks")
        self._board_bytes = board_bytes(self.count, model.shape.hidden, model.shape.vocab)
        os.ftruncate(memory, self._board_bytes)
        self._bells = [os.eventfd(0) for _ in range(1, self.count)]
        self._descriptors = [memory, *self._bells]
        self.board = RankBoard(memory, 0, self.count, self._bells)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._claims: list[socket.socket] = []
        self._failed_start: OSError | None = None
        started = threading.Event()
        threading.Thread(target=self._watch, args=(memory, started), daemon=True, name="headway-ranks").start()
        started.wait()
        if self._failed_start is not None:
            self.end()
            raise self._failed_start
        self.processors = self._claim_cores() if config.bind_ranks else []
        if self.processors:
            os.sched_setaffinity(0, chain(*self.processors) if shares_rows else self.processors[0])

    def _claim_cores(self) -> list[list[int]]:
        """The processors of each rank, whose cores no other engine has claimed for its ranks; empty if too few.

        And where a quota allows less than all cores: others that have one may be bound to the same, and all see them.
        """
        cores = physical_cores()
        if usable_threads() < len(cores):
            return []
        claims = {core: claim for core in cores if (claim := _claim(core)) is not None}
        shares = shared_out(claims, self.count, self.threads)
        self._claims = [claims.pop(core) for share in shares for core in share]
        for claim in claims.values():
            claim.close()
        return [[core.processor for core in share] for share in shares]

    def assign(self, max_model_len: int) -> None:
        """Have the other ranks load their parts. See load_model()."""
        for number, process in enumerate(self._processes, 1):
            bound = self.processors[number] if self.processors else []
            assignment = Assignment(self._config, number, self.count, self.threads, bound, max_model_len)
            with contextlib.suppress(OSError):  # the watching thread says that it has died
                assert process.stdin is not None
                process.stdin.write(_encoder.encode(assignment))
                process.stdin.close()

    def kernels(self, memory: mmap.mmap | None) -> ContextKernels:
        """This process's kernels, where each rank has the whole model. See CpuKernels."""
        return ContextKernels(self.board, self._config.block_size, memory)

    def of(self, kernels: Kernels, model: ModelConfig) -> CpuRanks | None:
        """What layers of this process say to the others; None where they are whole."""
        if self._config.ranks == 1:
            return None
        assert isinstance(kernels, CpuKernels)
        return kernels.ranks(self.board, share_of(self._config, 0), model.shape.hidden, model.shape.vocab)

    def bytes_per_block(self, dtype: torch.dtype, groups: Groups) -> int:
        """Bytes of a block of the KV cache in all ranks. See bytes_per_block()."""
        return sum(bytes_per_block(part.caches, self._config.block_size, dtype, groups) for part in self._parts)

    def shared_bytes(self, num_blocks: int, block_bytes: int) -> int:
        """Bytes of a KV pool that all ranks have together, see Pool; 0 where each has its own."""
        return (num_blocks + 1) * block_bytes + _ROOM_BYTES if self._config.context_parallel_size > 1 else 0

    def pages(self, shared_bytes: int) -> SharedPages | None:
        """The memory of that pool."""
        return SharedPages(self._descriptors[0], self._board_bytes, shared_bytes) if shared_bytes else None

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
        self.board.send(_encoder.encode(message), self._wait)

    def fill(self, digest: str, path: str, slot: int) -> None:
        """Have the other ranks bring an adapter into a slot."""
        self.send(Fill(digest, path, slot))

    def check(self) -> None:
        """Raise EngineFault where a rank is gone, RuntimeError where one has raised in this step."""
        if self.fault:
            raise EngineFault(self.fault)
        if self.board.is_stopped:
            raise RuntimeError(f"rank {', '.join(map(str, self.board.failed()))} raised; its traceback is above")

    def settle(self) -> None:
        """End a step that was left in its middle, in all ranks. Raises EngineFault where one is gone."""
        self.board.stop()
        self.board.await_done(self._wait)
        if self.fault:
            raise EngineFault(self.fault)
        self.board.reset()

    def _wait(self) -> None:
        if self.fault:
            raise EngineFault(self.fault)
        time.sleep(_PAUSE_S)

    def end(self) -> None:
        """End the other ranks."""
        self._is_over = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        while self._descriptors:
            os.close(self._descriptors.pop())
        for claim in self._claims:
            claim.close()

    # --- the thread ---------------------------------------------------------------------------------

    def _watch(self, memory: int, started: threading.Event) -> None:
        """Start the ranks, and then look whether they are there and get on, until one is not."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            for bell in self._bells:
                command = [sys.executable, "-m", "headway.engine", *map(str, (memory, bell, os.getpid()))]
                pipe, given = subprocess.PIPE, (memory, bell)
                self._processes.append(subprocess.Popen(command, stdin=pipe, env=environment, pass_fds=given))
        except OSError as error:
            self._failed_start = error
            return
        finally:
            started.set()
        poll = select.poll()
        ended = [os.pidfd_open(process.pid) for process in self._processes]
        for descriptor in ended:
            poll.register(descriptor, select.POLLIN)
        pause = min(_LOOKS_EVERY_S, self._timeout_s / _LOOKS_IN_LIMIT)
        progress = _Progress(self.board, [process.pid for process in self._processes])
        while not poll.poll(pause * 1000) and not self._is_over:
            late = progress.late(self._timeout_s, 2 * pause, self.serves)
            if late:
                return self._give_up(f"{late} and did not end its part of a step for {self._timeout_s:g} s")
        for number, process in enumerate(self._processes, 1):
            if not self._is_over and process.poll() is not None:
                return self._give_up(f"rank {number} (pid {process.pid}) died: {_how(process.returncode)}")

    def _give_up(self, why: str) -> None:
        self.fault = why
        self.board.stop()


def _claim(core: Core) -> socket.socket | None:
    """A name of the core that nobody else on this machine has while it is open; None where somebody has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0headway-core-{core.siblings}")
    except OSError:
        claim.close()
        return None
    return claim


class _Progress:
    """How long ranks have been late, by what the board says and what Linux says of their main threads.

    A rank is late while the others wait for it. As the watchdog does, it counts only processor time while it wants to
    run.
    """

    def __init__(self, board: RankBoard, pids: list[int]) -> None:
        self._board, self._pids = board, pids
        self._looked = time.monotonic()
        self._seen = [(0, 0.0)] * len(pids)  # how far each rank had got, and its processor time
        self._late_s = [0.0] * len(pids)

    def late(self, limit_s: float, most_s: float, serves: bool) -> str:
        """Which rank has been late for longer, and how; empty for none.

        Args:
            most_s: how much may have passed since the last look; what is above is time in which this process stood.
            serves: else a rank may take any time, unless it is stopped.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, most_s), now
        for index, pid in enumerate(self._pids):
            rank = index + 1
            (state, had_s), (got, before_s) = main_thread(pid), self._seen[index]
            self._seen[index] = self._board.progress(rank), had_s
            holds_up = self._board.is_awaited(rank) or not serves
            is_late = holds_up and (state in STOPPED or (serves and not self._board.awaits(rank)))
            if not is_late or self._seen[index][0] != got:
                self._late_s[index] = 0.0
            else:
                self._late_s[index] += min(passed, had_s - before_s) if state in WANTS_TO_RUN else passed
            if self._late_s[index] > limit_s:
                return f"rank {rank} (pid {pid}) {'is stopped' if state in STOPPED else 'hangs'}"
        return ""


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
