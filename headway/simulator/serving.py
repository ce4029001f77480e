"""Requests that are alike on one deployment, in a closed loop or at given times: what their clients see.

The server is the simulator's, with the scheduler that the live engine has. Memory decides nothing here: `Limits` has as
many sequences as there is room for at their full length, so nobody is preempted.

A pipeline has a batch on its way for each of its stages, and each batch has clients and a scheduler of its own. The
batches follow each other through the slowest stage. Of very many clients each one that is followed stands for some that
are like it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from headway.cost.requests import USUAL, Limits, RequestShape
from headway.cost.timing import Deployment
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.request import NEVER
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator.answers import Answer
from headway.simulator.engine import Host
from headway.simulator.server import NO_LIMITS, Server
from headway.simulator.timing import Predicted, Staged
from headway.simulator.traffic import Arrival, arrival

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

PERCENTILES = (50, 90, 99)
MOST_FOLLOWED = 256  # clients; of more, each stands for several
MOST_SEATS = 128  # of a saturated server, whose rate is all that is asked for


@dataclass(frozen=True, slots=True)
class Served:
    """What clients of one replica see, over the requests that were counted. Times in seconds.

    Args:
        ttft_s, tpot_s, e2e_s: means. TPOT is 0 where only one token is asked for.
        ttft_p50_s and the like: percentiles.
        running: sequences in an average step, or in a round of a pipeline's steps.
        requests_per_s: that end.
        bubble: share of the time in which a stage of a pipeline waits for another one, or has no batch; 0 without.
    """

    ttft_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    e2e_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    requests_per_s: float
    running: float
    bubble: float = 0.0


def closed_loop(
    deployment: Deployment,
    workload: RequestShape,
    clients: int,
    prompts: int,
    limits: Limits = USUAL,
    ramp_s: float = 0.0,
    stands_for: int = 1,
) -> Served:
    """`clients` who begin at once, each of whom sends its next request when the last is answered; `prompts` in all.

    Args:
        ramp_s: some let clients begin one after the other, over so long, and do not count what ends in that time.
        stands_for: prompts but the first and the last of each client count so many times, as if there were more.
    """
    import numpy as np  # not at the top: `--help` reads the planner's limits, and does without

    alike = -(-clients // MOST_FOLLOWED)
    clients, prompts = -(-clients // alike), -(-prompts // alike)
    first = min(clients, prompts)
    run = _Run(deployment, workload, limits, alike)
    run.send([ramp_s * number / clients for number in range(first)], prompts - first)
    run.follow()
    times = np.full(prompts, stands_for)
    times[:clients] = times[-clients:] = 1
    return run.served(sum(each.ended_ns < ramp_s * 1e9 for each in run.ended[:-1]), times)


def open_loop(
    deployment: Deployment, workload: RequestShape, arrivals: Sequence[float], limits: Limits = USUAL, skip: int = 0
) -> Served:
    """Requests sent at these times, in seconds, ascending; the first `skip` that end are not counted."""
    run = _Run(deployment, workload, limits)
    run.send(arrivals)
    run.follow()
    return run.served(skip)


def saturated(deployment: Deployment, workload: RequestShape, limits: Limits = USUAL) -> Served:
    """The most that can be served: there is always a sequence that waits for room.

    The first answers are of every length, so that from then on one ends after the other. When these have ended, one
    answer of each sequence is counted. There is no first token in time: its figures are infinite. TPOT is by Little's
    law: sequences that run, by those that end in a second, are how long one runs.
    """
    stages = deployment.parallelism.pipeline
    alike = -(-limits.sequences // MOST_SEATS)
    room = max(1, limits.sequences // alike // stages) * stages
    run = _Run(deployment, replace(workload, spread=0.0), limits, alike, partly=room)
    run.send([0.0] * (room + max(stages, room // 8)), again=4 * room)
    run.follow(lambda: len(run.ended) >= room)
    skip = len(run.ended)
    run.follow(lambda: len(run.ended) >= skip + room)
    served, output = run.served(skip), workload.output
    tpot_s = served.running / served.requests_per_s / output if output > 1 else 0.0
    names = [name for name in asdict(served) if name.startswith(("ttft", "e2e", "tpot"))]
    return replace(served, **{name: tpot_s if name.startswith("tpot") else math.inf for name in names})


class _Run:
    """A lane for each stage of a pipeline, or one, and the answers of all in the order in which they have ended.

    Args:
        alike: requests that each one that is followed stands for: they come, go and take part in steps together.
        partly: so many of the first requests have only a part of an answer, evenly from none to all of it.
    """

    def __init__(
        self, deployment: Deployment, workload: RequestShape, limits: Limits, alike: int = 1, partly: int = 0
    ) -> None:
        e, stages = deployment.efficiency, deployment.parallelism.pipeline
        self.ended: list[Answer] = []
        self._workload, self._alike, self._partly = workload, alike, partly
        self._again, self._numbers = 0, itertools.count()
        self._computed = workload.prompt - workload.cached
        self._timing = (Staged if stages > 1 else Predicted)(deployment, workload.cached, alike)
        tokens_ns = e.token_s * 1e9 * alike * workload.prompt / self._computed
        output_ns = round(e.output_s * 1e9) * alike
        host = Host(round(e.request_s * 1e9), tokens_ns, output_ns=output_ns, ahead=limits.ahead)
        self._lanes = [
            Server(self._scheduler(limits, stages), self._timing, NO_LIMITS, host, self._after, None)
            for _ in range(stages)
        ]
        self._lives = [lane.life() for lane in self._lanes]
        self._due = [next(life) for life in self._lives]

    def _scheduler(self, limits: Limits, stages: int) -> Scheduler:
        """The scheduler of a lane; blocks are as large as a sequence unless their size bounds a chunk's tokens."""
        longest = self._computed + math.ceil(self._workload.output * (1 + self._workload.spread)) + 1
        tokens = max(1, limits.batched_tokens // self._alike)
        room = max(1, min(limits.sequences // self._alike // stages, tokens))
        block = limits.least_tokens if math.isfinite(limits.prefill_stall_s) else longest
        config = SchedulerConfig(
            room,
            tokens,
            longest,
            enable_chunked_prefill=not limits.whole_prompts or longest > tokens,
            lookahead=0,
            max_prefill_stall_ms=limits.prefill_stall_s * 1e3,
            watermark=0.0,
            sharing=limits.sharing,
        )
        num_blocks = room * -(-longest // block) + config.kept_free(1)
        return Scheduler(config, KVBlocks(num_blocks, block, enable_prefix_caching=False))

    def _arrival(self, now: int) -> Arrival:
        number = next(self._numbers)
        output = self._workload.output_of(number)
        if number < self._partly:
            output = 1 + output * number // self._partly
        return arrival(number, now, self._computed, output)

    def _after(self, answers: list[Answer]) -> Iterator[Arrival]:
        self.ended += answers
        if self._again:
            self._again -= 1
            yield self._arrival(answers[0].ended_ns)

    def send(self, times: Sequence[float], again: int = 0) -> None:
        """Requests are sent at these times, ascending; `again` times the next one is when one has ended."""
        self._again = again
        arrivals = [self._arrival(round(at * 1e9)) for at in times]
        for number, lane in enumerate(self._lanes):
            lane.expect(iter(arrivals[number :: len(self._lanes)]))

    def follow(self, until: Callable[[], bool] = lambda: False) -> None:
        """Go on until then, or until nothing is left to do."""
        while not until() and (now := min(self._due)) < NEVER:
            at = self._due.index(now)
            self._lanes[at].receive(now)
            self._due[at] = self._lives[at].send(now)

    def served(self, skip: int, times: Ints | None = None) -> Served:
        """What those saw who ended after the first `skip`; their rate is the whole run's where all ended at once.

        Args:
            times: that each one counts, of all that have ended; of shape [ended].
        """
        import numpy as np

        counted, now = self.ended[skip:], self.ended[-1].ended_ns
        since_ns = self.ended[skip - 1].ended_ns if skip else 0
        rate = len(counted) / (now - since_ns) if now > since_ns else len(self.ended) / now
        ttft = np.array([each.ttft_ns for each in counted]) / 1e9
        e2e = np.array([each.ended_ns - each.arrived_ns for each in counted]) / 1e9
        gaps = np.array([max(1, len(each.token_ns) - 1) for each in counted])
        figures: dict[str, float] = {}
        for name, values in (("ttft", ttft), ("tpot", (e2e - ttft) / gaps), ("e2e", e2e)):
            repeated = values if times is None else np.repeat(values, times[skip:])
            figures[f"{name}_s"] = float(repeated.mean())
            for percent, value in zip(PERCENTILES, np.percentile(repeated, PERCENTILES).tolist(), strict=True):
                figures[f"{name}_p{percent}_s"] = value
        running = self._busy(since_ns if now > since_ns else 0)[0]
        bubble = 0.0
        if isinstance(self._timing, Staged):
            bubble = max(0.0, 1.0 - self._timing.stages_ns / (len(self._lanes) * self._busy(0)[1]))
        alike = self._alike
        return Served(**figures, requests_per_s=1e9 * alike * rate, running=alike * running, bubble=bubble)

    def _busy(self, since_ns: int) -> tuple[float, int]:
        """Sequences in an average step of all lanes together since then, and for how long some lane had one."""
        import numpy as np

        logs = [lane.steps for lane in self._lanes]
        began, ended, took_part, held = (
            np.concatenate([np.array(getattr(log, name)) for log in logs])
            for name in ("planned_ns", "sampled_ns", "sequences", "running")
        )
        order = np.argsort(began, kind="stable")
        order = order[began[order] >= since_ns]
        began, ended = began[order], ended[order]
        last = np.maximum.accumulate(ended)
        busy_ns = max(1, int(last[-1] - began[0] - np.maximum(0, began[1:] - last[:-1]).sum()))
        sequences = np.maximum(took_part, held)[order]
        return float((sequences * (ended - began)).sum() / busy_ns), busy_ns
