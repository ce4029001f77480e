"""A server that tunes itself: the process that decides, what it has changed, and what is shown of it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.engine.client import EngineClient
from headway.policy.objectives.service_class import SHARES, ClassTable
from headway.policy.step.bounds import Begin, Bounds, Told, line_of, told_in
from headway.policy.step.scheduler_config import StepLimits
from headway.server.metrics.families import Families

DECIDES = "headway.advisor.online.process"
KINDS = ("tried", "kept", "rolled back", "went back", "recommended")
MOST_KEPT = 100  # of what was done
_MOST_LINE = 1 << 24
logger = logging.getLogger("headway.server")


def record_traffic() -> str:
    """Memory for an engine's records, as a file that processes of this user can open while this one lives."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('headway-traffic')}"


class AutoTune:
    """Has another process decide, and does what it says.

    Args:
        engine: its config says where traffic is recorded.

    Attributes:
        done: what was done, the newest last.
    """

    def __init__(self, engine: EngineClient, bounds: Bounds, families: Families) -> None:
        self._engine, self._bounds, self._families = engine, bounds, families
        self._start = engine.config.limits or StepLimits()
        self._classes = engine.config.classes
        self._process: asyncio.subprocess.Process | None = None
        self._counts: Counter[str] = Counter()
        self._told = Told(doing="waiting for the engine")
        self.done: deque[dict[str, str]] = deque(maxlen=MOST_KEPT)

    async def run(self) -> None:
        """Let it decide until this is cancelled. If it fails, the server goes back to what it began with."""
        path = os.pathsep.join(each for each in sys.path if each)
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", DECIDES),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            limit=_MOST_LINE,
        )
        assert process.stdout is not None
        self._begin()
        try:
            async for line in process.stdout:
                self._take(told_in(line))
            code = await process.wait()
            words = f"the process that tunes ended (code {code}); the settings are those of the start, and stay"
            logger.warning("auto-tune: %s", words)
            self._note("went back", words)
            self._told = Told(doing="nothing: its process has ended")
            self._set(self._built(), self._classes)
        finally:
            with suppress(ProcessLookupError):
                process.kill()

    def reload(self, classes: ClassTable) -> None:
        """The operator has other classes."""
        self._classes = classes
        if self._process is not None and self._process.returncode is None:
            self._begin()

    def _begin(self) -> None:
        config, process = self._engine.config, self._process
        assert config.record_traffic is not None and process is not None and process.stdin is not None
        begin = Begin(config.record_traffic, self._bounds, self._start, self._classes, config.weights)
        process.stdin.write(line_of(begin))

    def _take(self, told: Told) -> None:
        self._told = told
        if told.kind:
            logger.info("auto-tune: %s", told.words)
            self._note(told.kind, told.words)
        if told.limits is not None and told.classes is not None:
            self._set(told.limits, told.classes)

    def _note(self, kind: str, words: str) -> None:
        self._counts[kind] += 1
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.done.append({"time": now, "kind": kind, "words": words})

    def _set(self, limits: StepLimits, classes: ClassTable) -> None:
        self._engine.set_classes(classes, self._engine.config.weights, limits)

    def _built(self) -> StepLimits:
        """The limits of the start, none of them left open."""
        config, ready = self._engine.config, self._engine.ready
        assert ready is not None
        start, tokens = self._start, config.batched_tokens("cpu" if ready.device == "cpu" else "cuda")
        return StepLimits(
            start.max_num_seqs or config.max_num_seqs,
            start.max_num_batched_tokens or tokens,
            config.max_prefill_stall_ms,
            config.most_drafts,
        )

    # --- what is shown ------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, float]:
        """What may be changed, as it is: the limits, and of each class its longest window and its shares."""
        config = self._engine.config
        limits = (config.limits or StepLimits()).changed
        if self._engine.ready is not None:
            limits = self._built().changed | limits
        if config.speculative_config is None:
            limits.pop("most_drafts", None)
        found = {name: float(value) for name, value in limits.items()}
        for each in config.classes:
            found[f"{each.name}.window_ms"] = each.window_ms[1]
            found |= {f"{each.name}.{key}": getattr(each, key) for key in SHARES}
        return found

    @property
    def words(self) -> str:
        """What it does and what was done last, as one line for people."""
        last = f"; last: {self.done[-1]['words']}" if self.done else ""
        return f"Tunes itself: {self._told.doing}{last}"

    def look(self) -> dict[str, Any]:
        """What /debug/auto-tune says."""
        return {
            "doing": self._told.doing,
            "settings": self.settings,
            "cpu_seconds": self._told.cpu_s,
            "done": list(self.done),
        }

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Metrics, for a registry of Prometheus."""
        made = self._families
        settings = {(name,): value for name, value in self.settings.items()}
        yield made.gauge("auto_tune_setting", "A setting that the server may change, as it is.", settings, "setting")
        counts = {(kind.replace(" ", "_"),): float(self._counts[kind]) for kind in KINDS}
        yield made.counter("auto_tune_changes", "What was done with changes of settings.", counts, "outcome")
        text = "Seconds of a processor that tuning has taken."
        yield made.counter("auto_tune_cpu_seconds", text, self._told.cpu_s)
