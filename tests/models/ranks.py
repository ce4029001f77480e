"""Ranks of a model as threads of the test's own process, which a test can look into."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from headway.engine.local_ranks import connections_of, linked_ranks
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.rank_board import RankBoard
from headway.kernels.cpu.ranks import CpuRanks, board_bytes
from headway.kernels.ranks import Share
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model

T = TypeVar("T")


def in_ranks(
    count: int,
    hidden: int,
    vocab: int,
    run: Callable[[CpuKernels, CpuRanks], T],
    whole_experts: bool = False,
    stages: int = 1,
    machines: int = 1,
) -> list[T]:
    """What each rank returns, those of the last stage first. One that raises ends the waiting of the others.

    Args:
        machines: on which ranks that follow each other have one memory; others only have narrow connections.
    """
    ranks = count * stages
    on_each = ranks // machines
    memories = [os.memfd_create("ranks-of-a-test") for _ in range(machines)]
    for memory in memories:
        os.ftruncate(memory, board_bytes(ranks, hidden, vocab))
    boards = [RankBoard(memories[number // on_each], number, ranks, {}) for number in range(ranks)]
    for memory in memories:
        os.close(memory)
    threads = torch.get_num_threads()
    sockets: list[dict[int, socket.socket]] = [{} for _ in boards]
    parts = [range(first, first + on_each) for first in range(0, ranks, on_each)]
    for node in range(machines):
        for a, b in linked_ranks(parts, count, node):
            if a > b:
                continue
            sockets[a][b], sockets[b][a] = socket.socketpair()
            sockets[a][b].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)

    def one(board: RankBoard) -> T:
        torch.set_num_threads(threads)  # which each thread has of its own
        kernels = CpuKernels()
        try:
            share = Share.of(board.number, count, whole_experts, stages)
            made = {board.number: {other: each.fileno() for other, each in sockets[board.number].items()}}
            connections = connections_of(parts, count, made)
            return run(kernels, kernels.ranks(board, share, hidden, vocab, connections[board.number]))
        except BaseException:
            board.stop()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [each.result() for each in [pool.submit(one, board) for board in boards]]


def of_parts(
    folder: Path, count: int, run: Callable[[Decoder], T], whole_experts: bool = False, stages: int = 1, **options: Any
) -> list[T]:
    """What `run` makes of each rank's part of a model, `count` ranks a stage. `options` are for load_model()."""
    shape = ModelConfig.from_folder(folder).shape
    settings: dict[str, Any] = {"dtype": torch.float32} | options

    def load(kernels: CpuKernels, ranks: CpuRanks) -> T:
        decoder = load_model(folder, kernels=kernels, ranks=ranks, **settings)
        head = decoder.weights.lm_head
        decoder.weights.lm_head = lambda x: head(x).clone()  # type: ignore[assignment]  # they are good for one step
        return run(decoder)

    return in_ranks(count, shape.hidden, shape.vocab, load, whole_experts, stages)
