"""The engine in this process with a model of random weights: steps of any batch and context, without computing it.

Contexts are not computed token by token: the cache is filled with random numbers once, and the prefix index is told
that a context is there, each sequence with blocks of its own.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint import SHAPES
from headway.bundled import STORY
from headway.cost.config import read_shape
from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.engine.node import run_node
from headway.engine.ranked import ContextExecutor, StagedExecutor
from headway.policy.step.context_shares import ContextShares
from headway.policy.step.micro_batches import MicroBatches
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.step_time import StepTimeModel, StepWork

DTYPE = "bfloat16"
BLOCK = 16
UNTIMED = 2  # steps of a point that bring everything into place
MOST_ADMITTING = 16  # most steps until all sequences of a point decode
MOST_STEPS = 40  # most steps of a point at a time


def engine_of(shape: str, **settings: Any) -> EngineCore:
    """An engine with a shape in bfloat16: the bundled model, or any other of SHAPES with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        named: dict[str, Any] = {"model": str(STORY)}
        if shape != "story":
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
            named = {"model": folder, "load_format": "dummy"}
        return build_engine(EngineConfig(**named, dtype=DTYPE, **settings)).core


class _Always(ContextShares):
    """Shares every step that can be."""

    def _choice(self, whole: StepWork, part: StepWork) -> tuple[StepTimeModel, StepWork]:
        return self._shared, part


class LiveEngine:
    """The engine with a model of random weights, whose cache is full of random numbers.

    Args:
        batch, context, prompt: the most that will be asked of it.
        device: cpu or cuda.
        cache_tokens: of the pool; None: for so many sequences with such a context or prompt.
        ranks: processes that share each layer, and with those of all `stages` the threads.
        bind_ranks: to cores; this thread is bound while it is `bound`.
        whole_experts: these processes have whole experts.
        context_ranks: processes that share the rows of all prompts that can be divided, whether that is quicker or not.
        nodes: machines that the ranks are on, which are all this one: they talk over the loopback.
    """

    def __init__(
        self,
        config: dict[str, object],
        batch: int,
        context: int,
        prompt: int,
        threads: int | None,
        device: str = "cpu",
        cache_tokens: int | None = None,
        ranks: int = 1,
        stages: int = 1,
        whole_experts: bool = False,
        bind_ranks: bool = True,
        context_ranks: int = 1,
        nodes: int = 1,
    ) -> None:
        self._ids = count()
        longest = max(context, prompt) + MOST_ADMITTING + UNTIMED + MOST_STEPS + 2 * BLOCK
        elements = read_shape(config, "config").kv_elements_per_token
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            settings = EngineConfig(
                folder,
                dtype=DTYPE,
                load_format="dummy",
                device=device,
                max_model_len=longest,
                block_size=BLOCK,
                kv_cache_memory=(cache_tokens or (batch + 1) * (longest + BLOCK)) * elements * 2,
                max_num_seqs=batch,
                max_num_batched_tokens=max(prompt, batch),
                max_prefill_stall_ms=math.inf,
                num_threads=threads,
                tensor_parallel_size=ranks,
                pipeline_parallel_size=stages,
                enable_expert_parallel=whole_experts,
                bind_ranks=bind_ranks,
                context_parallel_size=context_ranks,
                nnodes=nodes,
            )
            for number in range(1, nodes):
                threading.Thread(target=run_node, args=(settings, number, print, False), daemon=True).start()
            before = os.sched_getaffinity(0)
            engine = build_engine(settings)
        self._processors = os.sched_getaffinity(0)
        os.sched_setaffinity(0, before)
        self._core, self.runner, self.startup_ns = engine.core, engine.runner, engine.ready.startup_ns
        if isinstance(engine.core.executor, ContextExecutor):
            engine.core.executor.shares = _Always(context_ranks, BLOCK)
        for cache in self.runner.caches:
            for blocks in cache.tensors:
                blocks.copy_(torch.randn(blocks.shape[1:]).to(blocks))

    def decode(self, context: int, batch: int, budget_s: float) -> tuple[list[float], int]:
        """Seconds of some steps, for about so long, and the context of the one in their middle."""
        with self.decoding(context, batch) as step:
            once = step()
            steps = max(3, min(MOST_STEPS, int(budget_s / once)))
            seconds = [step() for _ in range(steps)]
        return seconds, context + UNTIMED + 1 + steps // 2

    @contextmanager
    def decoding(self, context: int, batch: int) -> Iterator[Callable[[], float]]:
        """Yield a function that runs a decode step and returns its seconds. It may be called MOST_STEPS + 1 times."""
        names = [self._remembered(context) for _ in range(batch)]
        for name in names:
            self._add(name, context + 1, MOST_ADMITTING + UNTIMED + MOST_STEPS + 2)
        try:
            for _ in range(MOST_ADMITTING):  # a policy need not admit all at once
                if len(self._core.step().outputs) == batch:
                    break
            for _ in range(UNTIMED - 1):
                self._step(batch)
            yield partial(self._step, batch)
        finally:
            self._end(names)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Launch no step as a graph, until the context ends."""
        decodes, self.runner.decodes = self.runner.decodes, None
        try:
            yield
        finally:
            self.runner.decodes = decodes

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Submit no step while another runs, until the context ends."""
        steps, self._core.steps = self._core.steps, None
        try:
            yield
        finally:
            self._core.steps = steps

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind this thread as the engine has bound it, until the context ends."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._processors)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the stages take turns, until the context ends: steps are not divided into micro-batches."""
        executor = self._staged()
        divides, executor.micro_batches = executor.micro_batches, MicroBatches(stages=1)
        try:
            yield
        finally:
            executor.micro_batches = divides

    @property
    def divided_into(self) -> tuple[int, int]:
        """See StagedExecutor."""
        return self._staged().divided_into

    def _staged(self) -> StagedExecutor:
        executor = self._core.executor
        assert isinstance(executor, StagedExecutor)
        return executor

    def prefill(self, tokens: int, budget_s: float) -> list[float]:
        """Seconds of steps with one prompt each, for about so long."""
        seconds: list[float] = []
        while not seconds or (sum(seconds) + min(seconds) < budget_s and len(seconds) < MOST_STEPS):
            name = str(next(self._ids))
            self._add(name, tokens, 1)
            seconds.append(self._step(1))
            self._end([name])
        return seconds

    def _remembered(self, context: int) -> str:
        """A name, below which the prefix index holds so many tokens in blocks of its own."""
        name = str(next(self._ids))
        pool = self._core.scheduler.blocks
        table = pool.allocate(context // BLOCK)
        pool.register(table, name, [1] * (BLOCK * len(table)))
        pool.release(table)
        return name

    def _add(self, name: str, prompt: int, answer: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._core.add(AddRequest(name, [1] * prompt, params, [], cache_salt=name))

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.abort(name)
        self._core.scheduler.blocks.reset_prefix_cache()

    def _step(self, batch: int) -> float:
        began = time.perf_counter()
        outputs = self._core.step().outputs
        taken = time.perf_counter() - began
        problems = [each.error for each in outputs if each.error is not None]
        if problems or len(outputs) != batch:
            raise RuntimeError(f"a step of {batch} sequences brought {len(outputs)} outputs: {problems or 'no error'}")
        return taken
