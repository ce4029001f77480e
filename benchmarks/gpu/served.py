"""Llama-3.1-8B's shape with random weights behind `headway serve`, loaded by `headway bench`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.checkpoint import write_checkpoint
from benchmarks.clients import HEADWAY, Load, measure
from benchmarks.gpu.part import Machine, Row, Tasks
from headway.bench.profile.local_server import LocalServer

LOADS = (
    Load("1 stream", 512, 128, 4, streams=1, warmups=1),
    Load("16 streams", 512, 128, 48, streams=16, warmups=2),
    Load("64 streams", 512, 128, 128, streams=64, warmups=2),
)
SMALL = (Load("1 stream", 8, 4, 2, streams=1),)
_MEASURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms")
_START_S = 110.0


def tasks(machine: Machine) -> Tasks:
    return {"serve and bench": partial(_loads, machine)}


def _loads(machine: Machine) -> Iterable[Row]:
    """The server's start, then a row for each load."""
    shape = "tiny" if machine.small else "llama-3.1-8b"
    folder = write_checkpoint(shape, machine.folder)
    flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--device", machine.device, "--max-model-len", "2048"]
    flags += ["--served-model-name", "model", "--no-enable-prefix-caching"]
    if machine.small:
        flags += ["--threads", "1", "--kv-cache-memory", "16M"]
    with _serving([str(folder), *flags]) as server:
        yield {"ready_s": server.startup.seconds, "kv_blocks": server.startup.num_blocks}
        for load in SMALL if machine.small else LOADS:
            result = measure(HEADWAY, server.startup.url, "model", folder, load, 0)
            yield {"load": load.label, "failed": result["failed"], **{name: result.get(name) for name in _MEASURES}}


@contextmanager
def _serving(arguments: list[str]) -> Any:
    """A server that is ready, on a loop that runs only while it starts and ends: the client has the process's time."""
    with asyncio.Runner() as runner:
        server = LocalServer(arguments, _START_S, lambda line: print(line, file=sys.stderr))
        runner.run(server.__aenter__())
        try:
            yield server
        finally:
            runner.run(server.stop())
