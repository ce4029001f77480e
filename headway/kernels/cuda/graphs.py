"""CUDA graphs: the kernels that a step launches, captured once and launched again together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headway.kernels.cuda.experts import Seen
from headway.kernels.interface import RoutingCounts

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class GraphMemory:
    """Captures graphs that share their memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture the kernels of run() without running them.

        Returns:
            A function that launches them all, and the tensors in which their result then is.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    result: Tensor
    routed: RoutingCounts  # what the host counts of a replay


class Graphs:
    """The graphs of a CudaKernels, one for each key.

    Args:
        seen: counts mixtures of experts, which a replay must count again.
        capture: makes a graph, as GraphMemory does.
    """

    def __init__(self, seen: Seen, capture: Capture) -> None:
        self._seen, self._capture = seen, capture
        self._ran: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}

    def repeat(self, key: Hashable, run: Callable[[], Tensor]) -> Tensor:
        """Return the result of run(). The first call runs it and compiles kernels; the second makes the graph."""
        if key not in self._ran:
            self._ran.add(key)
            return run()
        graph = self._graphs.get(key)
        if graph is None:
            before = self._seen.known
            replay, result = self._capture(run)
            graph = self._graphs[key] = _Graph(replay, result, RoutingCounts(*self._seen.known.since(before)))
        else:
            self._seen.repeat(graph.routed)
        graph.replay()
        return graph.result
