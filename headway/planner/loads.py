"""What clients see of a deployment under a load: a batch, a number of clients, or a rate of arrivals."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment, TimeBreakdown
from headway.planner.request import PlanError
from headway.planner.steps import decode_step, prompt_steps, steps_s
from headway.simulator.serving import MOST_FOLLOWED, Served, closed_loop, open_loop, saturated

SEED = 0
# With so many clients for each sequence that runs at once, or more, further clients only make the queue longer.
CROWDED = 2
# Prompts of a closed loop for each client, as load generators are run. Where these take longer to simulate than
# LONGEST_S, fewer are followed, and those between the first and the last of a client stand for so many.
PROMPTS_A_CLIENT, STANDS_FOR, LONGEST_S = 10, (1, 2, 4, 8), 0.5
# Rough seconds that it takes to simulate a step, a sequence that decodes in a step which must be scheduled, and a step
# of a prompt.
STEP_S, DECODE_S, PROMPT_S = 4e-5, 1e-6, 2e-4
# Steps with prompts that are followed: some seconds, and far more than usual settings need.
MOST_STEPS = 30_000
# So many arrivals at random times are followed, of which the first quarter is not counted. Near saturation it takes
# more of them, as a queue takes long to build up and to dissolve; for the ends of an error bar it takes fewer.
LEAST_REQUESTS, OF_A_BAR, MOST_REQUESTS = 300, 150, 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds; means over requests. None where they have no bound, or nothing is decoded."""

    ttft_s: float | None
    tpot_s: float | None
    ttlt_s: float | None
    requests_per_s: float  # requests a second that all lanes together answer
    running: float  # sequences in an average step of a lane
    prompt_share: float  # share of a lane's time that its prompts would take alone
    served: Served | None = None
    bubble: float = 0.0  # share of the time in which stages of a pipeline idle


@dataclass(frozen=True)
class Lanes:
    """Engines that work beside each other, alike and independent: one for each data-parallel group of each replica.

    A pipeline is one lane, with a batch for each of its stages.
    """

    deployment: Deployment
    workload: RequestShape
    replicas: int
    count: int  # lanes of all replicas
    limits: Limits  # limits of one lane

    def at_rate(self, rate: float) -> Outcome:
        """What clients see at a rate, found with fewer requests than `under` takes: for the ends of an error bar."""
        return _of_rate(self, rate, OF_A_BAR)

    def under(self, load: str, value: float) -> Outcome:
        """What clients see under a load; at a rate that is more than can be served, what `saturated` says.

        Args:
            load: "batch", "concurrency" or "rate".
            value: sequences for each replica, clients in all, or requests a second in all.

        Raises:
            PlanError: it takes too many steps to follow.
        """
        if load == "batch":
            return _of_batch(self, int(value))
        return _of_clients(self, int(value)) if load == "concurrency" else _of_rate(self, value)

    @cached_property
    def saturated(self) -> Outcome:
        """The most that can be served: as many requests run as there is room for, and others wait.

        There is no first token in time. Raises PlanError as `under` does.
        """
        _check_steps(self, 2 * self.limits.sequences)
        served = saturated(self.deployment, self.workload, self.limits)
        return _steady(self, served, served.requests_per_s * self.count, None)


def _of_batch(lanes: Lanes, sequences: int) -> Outcome:
    """The outcome of a batch for each replica: all prompts, then steps of a token each (static batching, document 001).

    The first token is there when the last prompt is done. In a pipeline the batches of its stages follow each other:
    the last one sets out when all others are on their way (GPipe, Huang et al., 2019).
    """
    d, workload, replicas = lanes.deployment, lanes.workload, lanes.replicas
    group = per_lane(sequences, lanes.count // replicas)
    batch = per_lane(group, d.parallelism.pipeline)
    batches, stages = min(group, d.parallelism.pipeline), d.parallelism.pipeline
    prompts = [d.step(step) for step in prompt_steps(workload, lanes.limits.batched_tokens, batch)]
    prompts_s = sum(round_s(d, step, batches) for step in prompts) + (batches - 1) * d.pace(prompts[0])
    ttft = intake_s(d, workload, batch) + prompts_s
    decode = decode_step(d, workload, batch, batch).time
    tpot = round_s(d, decode, batches)
    ttlt = ttft + (workload.output - 1) * tpot
    busy_s = batches * (sum(step.seconds for step in prompts) + (workload.output - 1) * decode.seconds)
    bubble = max(0.0, 1.0 - busy_s / (stages * (prompts_s + (workload.output - 1) * tpot))) if stages > 1 else 0.0
    return Outcome(ttft, tpot, ttlt, replicas * sequences / ttlt, group, prompts_s / ttlt, bubble=bubble)


def round_s(deployment: Deployment, step: TimeBreakdown, batches: int) -> float:
    """Seconds until each of so many batches of a pipeline has made this step; the batches are alike."""
    return max(step.seconds, batches * deployment.pace(step)) if deployment.parallelism.pipeline > 1 else step.seconds


def intake_s(deployment: Deployment, workload: RequestShape, prompts: int = 1) -> float:
    """Seconds until so many prompts are at the scheduler; they are tokenized one after the other."""
    return deployment.efficiency.request_s + deployment.efficiency.token_s * workload.prompt * prompts


def per_lane(sequences: float, lanes: int) -> int:
    """Sequences of the lane that has the most, where `sequences` are spread evenly; at least 1."""
    return max(1, math.ceil(sequences / lanes))


def _of_clients(lanes: Lanes, clients: int) -> Outcome:
    """The outcome of `clients` in all, as load generators run them.

    All begin at once, each sends its next prompt when the last is answered, and all PROMPTS_A_CLIENT prompts of each
    count. Only some clients of a crowd are followed: each other one makes the queue longer by the time between two
    answers (Little's law).
    """
    each = per_lane(clients, lanes.count)
    followed = min(each, CROWDED * lanes.limits.sequences)
    stands_for = next(
        (n for n in STANDS_FOR if _rounds(n) * _simulating_s(lanes, followed) <= LONGEST_S), STANDS_FOR[-1]
    )
    prompts = followed * _rounds(stands_for)
    _check_steps(lanes, prompts)
    served = closed_loop(lanes.deployment, lanes.workload, followed, prompts, lanes.limits, stands_for=stands_for)
    rate = served.requests_per_s
    if each > followed:
        rate = lanes.saturated.requests_per_s / lanes.count
        served = _delayed(served, (each - followed) / rate)
    return _steady(lanes, served, rate * clients / each, served.ttft_s)


def _rounds(stands_for: int) -> int:
    """Prompts that each client sends in the simulation.

    They are the first, the last, and some between these, each of which stands for `stands_for` prompts.
    """
    return 2 + (PROMPTS_A_CLIENT - 2) // stands_for


def _simulating_s(lanes: Lanes, clients: int) -> float:
    """About how long it takes to simulate a request of each client; steps in which nobody comes or goes are quick."""
    clients = min(clients, MOST_FOLLOWED)
    together, output = min(clients, lanes.limits.sequences), lanes.workload.output
    scheduled = min(1.0, 2.0 * together / output)
    decoding_s = output * clients / together * (STEP_S + together * scheduled * DECODE_S)
    return decoding_s + clients * max(1.0, _prompt_steps(lanes)) * PROMPT_S


def _delayed(served: Served, seconds: float) -> Served:
    later = {name: value + seconds for name, value in asdict(served).items() if name.startswith(("ttft", "e2e"))}
    return replace(served, **later)


def _prompt_steps(lanes: Lanes) -> float:
    return (lanes.workload.prompt - lanes.workload.cached) / lanes.limits.batched_tokens


def _check_steps(lanes: Lanes, requests: int) -> None:
    """Raises PlanError where the prompts of so many requests take too many steps to follow them one by one."""
    budget, steps = lanes.limits.batched_tokens, int(requests * _prompt_steps(lanes))
    if steps > MOST_STEPS:
        raise PlanError(
            f"{requests:,} prompts take {steps:,} steps of max_num_batched_tokens, {budget:,}, more than the "
            f"{MOST_STEPS:,} that are followed; raise --max-num-batched-tokens"
        )


def _of_rate(lanes: Lanes, rate: float, least: int = LEAST_REQUESTS) -> Outcome:
    """The outcome of Poisson arrivals, `rate` a second in all, which are spread over the lanes.

    At a rate that is no lower than what can be served the queue grows without end.
    """
    most = lanes.saturated
    if rate >= most.requests_per_s:
        return most
    each = rate / lanes.count
    free = 1.0 - rate / most.requests_per_s
    requests = min(MOST_REQUESTS, round(least / free))
    _check_steps(lanes, requests)
    arrivals = np.cumsum(np.random.default_rng(SEED).exponential(1.0 / each, requests))
    served = open_loop(lanes.deployment, lanes.workload, arrivals.tolist(), lanes.limits, skip=requests // 4)
    return _steady(lanes, served, rate, served.ttft_s)


def _steady(lanes: Lanes, served: Served, requests_per_s: float, ttft: float | None) -> Outcome:
    alone = steps_s(lanes.deployment, prompt_steps(lanes.workload, lanes.limits.batched_tokens))
    return Outcome(
        ttft_s=ttft,
        tpot_s=served.tpot_s or None,
        ttlt_s=None if ttft is None else ttft + (lanes.workload.output - 1) * served.tpot_s,
        requests_per_s=requests_per_s,
        running=served.running,
        prompt_share=min(1.0, requests_per_s / lanes.count * alone),
        served=served,
        bubble=served.bubble,
    )
