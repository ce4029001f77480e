"""Ranks get the same sums to the bit, meet, and hand over messages of any size; nobody waits for ever."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.rank_board import HEADER_BYTES, MOST_RANKS, RankBoard
from headway.kernels.cpu.ranks import CpuRanks, board_bytes, part_of_vocabulary
from headway.kernels.ranks import Connection, Share
from headway.kernels.weights import Weight
from tests.models.ranks import in_ranks

HIDDEN, INPUTS, VOCAB = 72, 96, 131


def parts_of(x: Tensor, count: int) -> list[Tensor]:
    return list(x.chunk(count, 1))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_sums_are_alike_in_all_ranks_and_exact(dtype: torch.dtype, count: int, threads: int, apart: bool) -> None:
    """Also in more rows than a place holds, and twice in a row in the same program of jobs."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(HIDDEN, INPUTS, generator=draw).to(dtype), torch.randn(HIDDEN, generator=draw).to(dtype)
    inputs = [torch.randn(rows, INPUTS, generator=draw).to(dtype) for rows in (1, 7, 130)]

    def run(kernels: CpuKernels, ranks: CpuRanks) -> list[Tensor]:
        ranks.rows_at_once = 64
        own = parts_of(weight, count)[ranks.number].contiguous()
        layer = ranks.summed(kernels.linear(Weight(own), bias if ranks.number == 0 else None), 0)
        other = ranks.summed_layer(lambda x: x[:, :HIDDEN] * (ranks.number + 1), 1)
        results = []
        for x in inputs:
            results.append(layer(parts_of(x, count)[ranks.number].contiguous()))
            results.append(other(x))
        x = parts_of(inputs[1], count)[ranks.number].contiguous()
        program = kernels._team.record(lambda: layer(x))
        results += [program.result.clone(), kernels._team.replay(program).clone()]
        return results

    first, *others = in_ranks(count, HIDDEN, VOCAB, run, machines=count if apart else 1)
    for each in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, each, strict=True))
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for x, summed, other in zip(inputs, first[::2], first[1::2], strict=False):
        expected = x.float() @ weight.float().T + bias.float()
        torch.testing.assert_close(summed.float(), expected, rtol=tolerance, atol=tolerance * 10)
        times = count * (count + 1) / 2
        torch.testing.assert_close(other.float(), x[:, :HIDDEN].float() * times, rtol=tolerance, atol=tolerance)
    assert torch.equal(first[-1], first[-2]) and torch.equal(first[-1], first[2])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_joined_with_the_residual_stream_and_normed(
    dtype: torch.dtype, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all ranks or by each some rows, with the same bits; of more rows than a place holds, too."""
    count, draw = 3, torch.Generator().manual_seed(3)
    monkeypatch.setattr("headway.kernels.cpu.ranks._DIVIDED", 8 * HIDDEN)
    rows = torch.randn(70, HIDDEN, generator=draw).to(dtype)
    residual, norm = torch.randn(70, HIDDEN, generator=draw).to(dtype), torch.rand(HIDDEN, generator=draw).to(dtype)

    def run(kernels: CpuKernels, ranks: CpuRanks) -> list[Tensor]:
        layer = ranks.part_of_layer(lambda x: x * (ranks.number + 1), 0)
        join = ranks.joined(kernels.add_rms_norm)
        results = []
        for size, most in ((70, 70), (7, 70), (1, 70), (70, 64)):
            ranks.rows_at_once = most
            normed, _ = join(layer(rows[:size]), residual[:size].clone(), norm, 1e-5)
            results.append(normed.clone())
            ranks.meet()
        return results

    first, *others = in_ranks(count, HIDDEN, VOCAB, run, machines=count if apart else 1)
    for each in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, each, strict=True))
    assert torch.equal(first[1], first[0][:7]) and torch.equal(first[2], first[0][:1])
    total = 6 * rows.float() + residual.float()
    expected = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.float()
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    for each in (first[0], first[3]):
        torch.testing.assert_close(each.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("apart", [False, True])
def test_an_embedding_and_a_head_of_several_ranks(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are unequal: 131 tokens in 3 ranks. Only rank 0 gets logits."""
    monkeypatch.setattr("headway.kernels.cpu.ranks._LOGITS_BYTES", 4096)  # of seven rows
    count, draw = 3, torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, HIDDEN, generator=draw)
    ids = torch.randint(VOCAB, (150,), generator=draw)
    hidden = torch.randn(20, HIDDEN, generator=draw)

    def run(kernels: CpuKernels, ranks: CpuRanks) -> tuple[Tensor, Tensor, Tensor]:
        ranks.rows_at_once = 64
        start, end = part_of_vocabulary(VOCAB, ranks.number, count)
        linear = kernels.linear(Weight(table[start:end].clone()), None, wide=True)
        embedding, head = ranks.embedding(linear.rows), ranks.head(linear)
        return embedding(ids), head(hidden), head(hidden[:1]).clone()

    results = in_ranks(count, HIDDEN, VOCAB, run, machines=count if apart else 1)
    assert all(torch.equal(embedded, table[ids]) for embedded, *_ in results)
    _, logits, one = results[0]
    torch.testing.assert_close(logits, hidden @ table.T, rtol=1e-5, atol=1e-4)
    assert torch.equal(one, logits[:1])


def test_of_several_ranks_on_each_machine_one_takes_what_comes() -> None:
    """Sums go on while others of its machine are already at the next one, and use the same places again."""

    def run(kernels: CpuKernels, ranks: CpuRanks) -> list[Tensor]:
        layers = [ranks.summed_layer(lambda x, place=place: x * (ranks.number + place), place) for place in range(2)]
        return [layers[number % 2](torch.full((40, HIDDEN), float(number))).clone() for number in range(200)]

    for each in in_ranks(4, HIDDEN, VOCAB, run, machines=2):
        for number, found in enumerate(each):
            assert torch.equal(found, torch.full((40, HIDDEN), float(number * (6 + 4 * (number % 2)))))


@pytest.fixture
def boards() -> Iterator[list[RankBoard]]:
    memory, bells = os.memfd_create("board-of-a-test"), {1: os.eventfd(0), 2: os.eventfd(0)}
    os.ftruncate(memory, HEADER_BYTES)
    yield [RankBoard(memory, number, 3, bells) for number in range(3)]
    for descriptor in (memory, *bells.values()):
        os.close(descriptor)


def test_messages_of_any_size_reach_all_and_wake_who_sleeps(boards: list[RankBoard]) -> None:
    draw = np.random.default_rng(1)
    messages = [draw.bytes(size) for size in (1, 5000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 20, 3)]
    received: dict[int, list[bytes]] = {1: [], 2: []}

    def listen(number: int) -> None:
        for _ in messages:
            received[number].append(boards[number].receive(lambda: False))
            boards[number].done()

    listeners = [threading.Thread(target=listen, args=(number,)) for number in received]
    for listener in listeners:
        listener.start()
    waits = lambda: time.sleep(0.0005)  # noqa: E731
    for number, message in enumerate(messages):
        if number in (1, 6):
            time.sleep(0.3)  # all have fallen asleep
        boards[0].send(message, waits)
    boards[0].await_done(waits)
    for listener in listeners:
        listener.join()
    assert received == {1: messages, 2: messages}
    assert not boards[0].is_awaited(1) and not boards[0].is_stopped


def test_who_waits_for_a_message_takes_no_processor_time(boards: list[RankBoard]) -> None:
    used = 0.0

    def listen() -> None:
        nonlocal used
        began = time.thread_time()
        boards[1].receive(lambda: False)
        used = time.thread_time() - began

    listener = threading.Thread(target=listen)
    listener.start()
    time.sleep(1.0)
    boards[2]._taken = 1  # which does not listen
    boards[0].send(b"x", lambda: None)
    listener.join()
    assert used < 0.2


def test_a_rank_whose_first_one_is_gone_hears_nothing(boards: list[RankBoard]) -> None:
    assert boards[1].receive(lambda: True) == b""


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    """Waiting ends for all, and after a reset sums are right again."""
    x = torch.ones(3, HIDDEN)

    def run(kernels: CpuKernels, ranks: CpuRanks) -> Tensor:
        layer, board = ranks.summed_layer(lambda x: x, 0), ranks._board
        if ranks.number == 1:
            board.fail()
        else:
            layer(x)
        assert board.is_stopped and board.failed() == [1]
        if ranks.number == 0:
            time.sleep(0.05)
            board.reset()
        else:
            while board.is_stopped:
                time.sleep(0.001)
        return layer(x)

    assert all(torch.equal(each, 3 * x) for each in in_ranks(3, HIDDEN, VOCAB, run))


@pytest.mark.parametrize("sent", [b"", struct.pack("<5q", 0, -1, 0, 1 << 40, 8), struct.pack("<5q", 0, 999, 9, 0, 0)])
def test_a_connection_that_ends_or_makes_no_sense_ends_all_waiting(sent: bytes) -> None:
    memory = os.memfd_create("board-of-a-test")
    os.ftruncate(memory, board_bytes(2, HIDDEN, VOCAB))
    board, (ours, theirs) = RankBoard(memory, 0, 2, {}), socket.socketpair()
    os.close(memory)
    ranks = CpuKernels().ranks(board, Share.of(0, 2, False, 1), HIDDEN, VOCAB, {1: Connection(ours.fileno(), True)})
    assert ranks.lost == []
    if sent:
        theirs.sendall(sent)
    else:
        theirs.close()
    ranks.summed_layer(lambda x: x, 0)(torch.ones(1, HIDDEN))
    assert ranks.lost == [1] and board.is_stopped


def test_a_board_has_room_for_all_ranks() -> None:
    memory = os.memfd_create("board-of-a-test")
    os.ftruncate(memory, HEADER_BYTES)
    board = RankBoard(memory, MOST_RANKS - 1, MOST_RANKS, {})
    os.close(memory)
    board.fail()
    assert board.failed() == [MOST_RANKS - 1]
    assert not board._bytes[HEADER_BYTES - (1 << 20) :].any(), "lines of ranks reach into messages"
