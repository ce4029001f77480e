"""A rank of an engine behind the first one, as `python -m headway.engine MEMORY BELL PARENT`.

It holds its part of the model and of the KV cache, and runs the plans of rank 0 with them, step by step. Nothing is
drawn here: tokens come with the next plan. It ends with rank 0, whatever that one ends by.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from torch import Tensor

from headway.engine.layout import ModelInput
from headway.engine.local_ranks import Assignment
from headway.engine.ranks import Fill, Pool, Step, ToRank, share_of, sizes_of
from headway.engine.runner import Runner
from headway.engine.weight_cache import WeightCache
from headway.kernels.cpu.context import ContextKernels
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.memory import SharedPages
from headway.kernels.cpu.rank_board import RankBoard
from headway.kernels.cpu.ranks import CpuRanks, board_bytes
from headway.kernels.interface import KV_CACHE_DTYPES
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model, resolve_dtype, resolve_model
from headway.models.quantization import rounds_to
from headway.policy.step.plan import ScheduledSequence, SequenceState

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG, of Linux
_REASON_S = 1.0  # in which rank 0 hears of a rank that is gone by whoever sees that


class Follower(Runner):
    """A Runner that asks for the same sums as that of rank 0, and leaves the rest of a step to it.

    Attributes:
        filling: the slots of adapters that may not be filled yet.
    """

    filling: dict[int, Future[None]]

    def _forward(self, step: ModelInput, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> Tensor:
        if self.adapters is not None and self.filling:
            for slot in {self.adapters.slots.get(item.seq_id, -1) for item in scheduled} & self.filling.keys():
                self.filling[slot].result()
                del self.filling[slot]
        return super()._forward(step, scheduled, sequences)

    def _sample(self, *_: Any) -> None:
        """Draw nothing: rank 0 has the logits."""


def main(memory: int, bell: int, parent: int) -> int:
    """Serve rank 0, the process `parent`, until it is gone; the exit code.

    Args:
        memory: the descriptor of a RankBoard.
        bell: its eventfd for this rank.
    """
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    assigned = sys.stdin.buffer.read()
    if os.getppid() != parent or not assigned:
        return 0
    own = msgspec.msgpack.decode(assigned, type=Assignment)
    torch.set_num_threads(own.threads)
    if own.processors:
        os.sched_setaffinity(0, own.processors)
    board = RankBoard(memory, own.number, own.count, {own.number: bell})
    try:
        model, ranks = _load(own, board)
    except ValueError as error:  # rank 0 meets most of these itself, and says so
        sys.stderr.write(f"rank {own.number}: {' '.join(str(error).split())}\n")
        return 1
    return _follow(own, model, board, ranks, parent, memory)


def _load(own: Assignment, board: RankBoard) -> tuple[Decoder, CpuRanks | None]:
    """This rank's part of the model, or all of it, and what it says to others. Raises what load_model() does."""
    config, folder, known, ranks = own.config, resolve_model(own.config.model), None, None
    model = ModelConfig.from_folder(folder)
    kernels = CpuKernels() if config.ranks > 1 else ContextKernels(board, config.block_size)
    if isinstance(kernels, ContextKernels):
        kernels.shares = True
        cache = WeightCache.of(config)
        known = None if cache is None else cache.mapped(kernels.named)
    else:
        ranks = kernels.ranks(board, share_of(config, own.number), *sizes_of(model), own.connections)
    loaded = load_model(
        folder,
        resolve_dtype(config.dtype, model),
        kernels,
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=own.max_model_len,
        quantization=rounds_to(config.quantization, model.packed),
        weights=known,
        attention_sinks=config.sinks(model.shape.max_positions, own.max_model_len),
        ranks=ranks,
    )
    return loaded, ranks


def _follow(own: Assignment, model: Decoder, board: RankBoard, ranks: CpuRanks | None, parent: int, memory: int) -> int:
    """Do what rank 0 says, until it is gone, or a rank on another machine cannot be reached; the exit code.

    Args:
        memory: see main().
    """
    decoder, runner = msgspec.msgpack.Decoder(ToRank), None
    while data := board.receive(lambda: os.getppid() != parent):
        message = decoder.decode(data)
        try:
            if isinstance(message, Pool):
                runner = _runner(own, message, model, memory)
                gc.freeze()
            elif isinstance(message, Fill):
                assert runner is not None and runner.adapters is not None
                runner.filling[message.slot] = runner.adapters.fill(message.digest, message.path, message.slot)
            elif runner is not None:
                if message.parts:
                    message.plan.scheduled = message.parts[own.number - 1]
                _step(runner, message)
        except Exception:
            traceback.print_exc()
            board.fail()
        board.done()
        if own.told >= 0:
            os.eventfd_write(own.told, 1)
        if ranks is not None and ranks.lost:
            time.sleep(_REASON_S)
            sys.stderr.write(f"rank {own.number}: the connection with rank {ranks.lost[0]} is gone\n")
            return 1
    return 0


def _runner(own: Assignment, pool: Pool, model: Decoder, memory: int) -> Follower:
    shape, pages = model.config.shape, None
    if pool.shared_bytes:
        pages = SharedPages(memory, board_bytes(own.count, shape.hidden, shape.vocab), pool.shared_bytes)
    cache_dtype = KV_CACHE_DTYPES[own.config.kv_cache_dtype] or model.dtype
    sizes = pool.num_blocks, own.config.block_size, pool.max_num_seqs, pool.max_model_len, pool.host_blocks
    more = pool.checkpoints, pool.groups
    runner = Follower(model, model.kernels, model.device, cache_dtype, *sizes, *more, pages=pages)
    runner.filling = {}
    if own.config.lora_slots:
        from headway.engine.adapters import adapters_of

        runner.adapters = adapters_of(own.config, model)
    return runner


def _step(runner: Follower, step: Step) -> None:
    if step.recovers:
        runner.recover_together()
    if step.begins:
        runner.begin_together()
    for seq_id in step.forgotten:
        runner.forget(seq_id)
    for new in step.plan.new:
        new.params.structured_outputs = None  # only the draw has to do with it
    runner.run(step.plan)
