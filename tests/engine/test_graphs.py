"""Decode steps at fixed addresses, against the definition of their geometry; and graphs, with one that only records."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway import LLM, SamplingParams
from headway.engine import build
from headway.engine.config import EngineConfig
from headway.engine.graphs import DecodeBuffers, graph_sizes
from headway.engine.launched import Drawn
from headway.engine.layout import BlockTables, StepLayout
from headway.engine.memory import zero_caches
from headway.engine.messages import AddRequest
from headway.engine.prepare import EngineError
from headway.engine.runner import Runner
from headway.kernels.cuda.experts import Seen
from headway.kernels.cuda.graphs import Graphs
from headway.kernels.cuda.kernels import CudaKernels
from headway.kernels.interface import LayerCache, RoutingCounts
from headway.models.loading import load_model
from headway.policy.step.plan import UNKNOWN, ScheduledSequence, SequenceState, TableChange
from tests.engine.models import TINY_GPT_OSS, TINY_LLAMA, TINY_MIXTURE, write_config
from tests.engine.test_layout import BLOCK, CPU, MOST_SEQUENCES, MOST_TOKENS, part, sequence

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_BLOCKS = -(-MOST_TOKENS // BLOCK)


def test_sizes_are_close_to_each_other_where_steps_cannot_be_padded() -> None:
    assert graph_sizes(70, padded=True) == SIZES
    assert graph_sizes(3, padded=True) == [1, 2, 3]
    assert graph_sizes(20, padded=False) == [*range(1, 17), 20]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(1,), (1, 1), (2, 1)]))
def test_steps_of_sequences_that_live(seed: int, shares: tuple[int, ...]) -> None:
    """Rows are those of the sequences, in their order; the others have neither query nor slot; places stay."""
    draw = random.Random(seed)
    tables = BlockTables(MOST_SEQUENCES, MAX_BLOCKS, shares)
    buffers = DecodeBuffers(CPU, SIZES, True, tables, BLOCK, MOST_TOKENS)
    live = [_in_groups(sequence(draw, draw.randint(2, 40)), len(shares)) for _ in range(draw.randint(1, 20))]
    places: dict[int, tuple[int, ...]] = {}
    for _ in range(6):
        chosen = draw.sample(live, draw.randint(1, len(live)))
        scheduled = [part(each, 1, 1) for each in chosen]
        laid_out = buffers.lay_out(scheduled, chosen)
        assert laid_out is not None
        step, count = laid_out.geometry, len(chosen)
        size = len(laid_out.token_ids)
        assert size == step.num_sequences == min(each for each in SIZES if each >= count) and step.repeatable
        assert laid_out.token_ids[:count].tolist() == [each.tokens[-1] for each in chosen]
        assert laid_out.last_rows.tolist() == list(range(count))
        assert step.positions[:count].tolist() == [len(each.tokens) - 1 for each in chosen]
        assert step.context_lens.tolist() == [len(each.tokens) for each in chosen] + [0] * (size - count)
        assert step.query_start.tolist() == [min(row, count) for row in range(size + 1)]
        for group, share in enumerate(shares):
            of_group = step.groups[group] if step.groups else step
            assert (of_group.slots[count:] == -1).all()
            for row, each in enumerate(chosen):
                table, last = [block * share for block in each.block_tables[group]], len(each.tokens) - 1
                assert of_group.slots[row] == table[last // BLOCK] * BLOCK + last % BLOCK
                assert of_group.block_tables[row, : last // BLOCK + 1].tolist() == table[: last // BLOCK + 1]
        tensors = laid_out.token_ids, step.positions, step.slots, step.block_tables, step.query_start, step.context_lens
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        assert places.setdefault(size, addresses) == addresses
        for each in chosen:
            each.tokens.append(draw.randrange(1000))
            if len(each.tokens) > BLOCK * len(each.block_table):
                for group, table in enumerate(each.block_tables):
                    table.append(draw.randrange(10_000))
                    tables.write(TableChange(each.seq_id, len(table) - 1, table[-1:], group))
        tables.forget(live.pop(draw.randrange(len(live))).seq_id)
        live.append(_in_groups(sequence(draw, draw.randint(2, 40)), len(shares)))


def _in_groups(each: SequenceState, count: int) -> SequenceState:
    each.further_tables = [[block + group for block in each.block_table] for group in range(1, count)]
    return each


def test_a_step_is_laid_out_while_the_numbers_of_the_one_before_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device copies them late here: when the next step is laid out already, with tokens that it then has drawn."""
    draw, late = random.Random(0), list[tuple[Tensor, Tensor]]()
    live, tables = [sequence(draw, length) for length in (5, 9, 14)], BlockTables(MOST_SEQUENCES, MAX_BLOCKS)
    buffers = DecodeBuffers(CPU, [3], True, tables, BLOCK, MOST_TOKENS)
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda to, source, non_blocking: late.append((to, source)))
    scheduled = [part(each, 1, 1) for each in live]
    buffers.lay_out(scheduled, live)
    first, late = late, []
    ahead = [ScheduledSequence(item.seq_id, item.start + 1, [UNKNOWN], True, 1) for item in scheduled]
    step = buffers.lay_out(ahead, live)
    assert step is not None
    for to, source in first:
        copy(to, source)
    assert step.token_ids.tolist() == [each.tokens[-1] for each in live]
    assert step.geometry.positions.tolist() == [len(each.tokens) - 1 for each in live]
    assert step.geometry.block_tables[0, 0] == live[0].block_table[0]
    for to, source in late:
        copy(to, source)
    monkeypatch.undo()
    Drawn(torch.tensor([7, -1, 8, 9]), [live[2].seq_id, live[1].seq_id, 99, live[0].seq_id]).fill(step.token_ids, ahead)
    assert step.token_ids.tolist() == [9, 0, 7], "each its own; any token where there is none"
    assert step.geometry.positions.tolist() == [len(each.tokens) for each in live]


def test_other_steps_are_not_laid_out() -> None:
    draw = random.Random(0)
    tables = BlockTables(MOST_SEQUENCES, MAX_BLOCKS)
    padded, exact = (DecodeBuffers(CPU, [1, 4], each, tables, BLOCK, MOST_TOKENS) for each in (True, False))
    live = [sequence(draw, 9) for _ in range(5)]
    decodes = [part(each, 1, 1) for each in live]
    for buffers, fitting in ((padded, {1, 2, 3, 4}), (exact, {1, 4})):
        found = {count for count in range(1, 6) if buffers.lay_out(decodes[:count], live[:count]) is not None}
        assert found == fitting
    assert padded.lay_out([part(live[0], 2, 1)], live[:1]) is None  # a chunk
    assert padded.lay_out([part(live[0], 1, 0)], live[:1]) is None  # a token within a prompt


@pytest.mark.parametrize(
    "config", [TINY_LLAMA, pytest.param(TINY_GPT_OSS, marks=pytest.mark.slow)], ids=["llama", "gpt-oss"]
)
def test_rows_of_no_sequence_change_nothing(tmp_path: Path, config: dict[str, object]) -> None:
    """Three sequences in four rows: the same results, and the same caches but for the slots of the three."""
    model = load_model(Path(write_config(tmp_path, **config)), torch.float32, CudaKernels(), DEVICE, "dummy")
    draw = random.Random(1)
    live = [sequence(draw, length) for length in (5, 9, 14)]
    for number, each in enumerate(live):
        each.tokens[:] = [token % 100 for token in each.tokens]
        each.block_table[:] = [4 * number + at for at in range(len(each.block_table))]
    layout = StepLayout(DEVICE, BLOCK, 8, 64)
    buffers = DecodeBuffers(DEVICE, [4], True, layout.tables, BLOCK, 64)
    scheduled = [part(each, 1, 1) for each in live]
    results = []
    for lay_out in (layout.lay_out, buffers.lay_out):
        caches = zero_caches(model.config.caches, 13, BLOCK, torch.float32, DEVICE)
        kept = [cache for cache in caches if isinstance(cache, LayerCache)]
        for at, tensor in enumerate(tensor for cache in kept for tensor in cache.tensors):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(at)))
        with torch.inference_mode():
            step = lay_out(scheduled, live)
            assert step is not None
            step.geometry.repeatable = False  # nothing is captured here
            results.append((model.forward(step.token_ids, step.geometry, caches)[:3], kept))
    (plain, plain_caches), (padded, padded_caches) = results
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(padded_caches, plain_caches, strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_step_is_run_then_captured_then_only_replayed() -> None:
    seen, calls = Seen(), []
    kept = torch.zeros(1)

    def run() -> Tensor:
        calls.append("run")
        seen.add(3, 2, CPU)
        return kept

    def capture(captured: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        calls.append("capture")
        result = captured()
        return lambda: calls.append("replay"), result

    graphs = Graphs(seen, capture)
    results = [graphs.repeat("step", run) for _ in range(4)]
    assert calls == ["run", "capture", "run", "replay", "replay", "replay"]
    assert all(result is kept for result in results)
    assert seen.known == RoutingCounts(mixtures=4, pairs=24)
    graphs.repeat("another", run)
    assert calls[6:] == ["run"]


@pytest.mark.parametrize("eager", [True, False])
def test_enforce_eager_reaches_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    asked: list[bool] = []

    def runner(*given: object, graphs: bool, **named: object) -> Runner:
        asked.append(graphs)
        return Runner(*given, graphs=graphs, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "Runner", runner)
    settings = EngineConfig(model=write_config(tmp_path), load_format="dummy", device="cpu", enforce_eager=eager)
    engine = build.build_engine(replace(settings, kv_cache_memory=1 << 20, max_model_len=64, num_threads=1))
    assert asked == [not eager]
    assert engine.runner.decodes is None, "a CPU has no graphs"


def test_a_device_that_refuses_graphs_ends_the_start_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Runner) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(Runner, "capture", refuse)
    settings = EngineConfig(model=write_config(tmp_path), load_format="dummy", device="cpu", kv_cache_memory=1 << 20)
    with pytest.raises(EngineError, match=r"graphs: operation not permitted; start with --enforce-eager$"):
        build.build_engine(replace(settings, max_model_len=64, num_threads=1))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_MIXTURE, TINY_GPT_OSS], ids=["llama", "experts", "gpt-oss"])
def test_on_a_gpu_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, config: dict[str, object]) -> None:
    """Requests of many lengths, so that steps of every size come, with prompts among them."""
    folder = write_config(tmp_path, **config)
    prompts = [[(7 * i + 3 * j) % 500 + 5 for j in range(5 + 3 * i)] for i in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(12)]
    answers = []
    for eager in (True, False):
        sizes = {"max_num_seqs": 9, "max_num_batched_tokens": 64, "kv_cache_memory": 4 << 20}
        settings = {"load_format": "dummy", "dtype": "float32", "device": "cuda", "enforce_eager": eager}
        llm = LLM(folder, skip_tokenizer_init=True, **sizes, **settings)
        answers.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_kernels_of_graphs_are_timed_on_the_clock_of_the_host(tmp_path: Path) -> None:
    sizes = {"max_num_seqs": 2, "kv_cache_memory": 4 << 20}
    config = EngineConfig(
        str(write_config(tmp_path, **TINY_LLAMA)), load_format="dummy", dtype="float32", device="cuda", **sizes
    )
    core = build.build_engine(config).core
    core.add(AddRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), []))
    for _ in range(10):
        core.step()
    assert core.executor.timed(None) == []
    core.executor.timed(True)
    began_ns = time.monotonic_ns()
    for _ in range(5):
        core.step()
    ended_ns = time.monotonic_ns()
    core.step()
    kernels = core.executor.timed(None)
    assert core.executor.timed(False) == []
    layers = TINY_LLAMA["num_hidden_layers"]
    assert sum(name == "attend _attention_kernel" for name, *_ in kernels) == 6 * layers
    assert sum(name.startswith("product") for name, *_ in kernels) >= 6 * 4 * layers
    within = [name for name, began, ended in kernels if began_ns < began < ended < ended_ns]
    assert abs(len(within) - len(kernels) * 5 / 6) <= len(kernels) / 20
    core.step()
