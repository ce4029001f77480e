"""The answer: what a model on hardware takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.capacity import Capacity, Settings
from headway.cost.loading import Loading
from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment, TimeBreakdown
from headway.cost.work import Operation, Work
from headway.planner.engines import EngineProfile
from headway.planner.request import PlanRequest
from headway.simulator.serving import Served


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction with its 80 % error bar: four in five measurements of such deployments lie inside."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """All three times `factor`."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Bars:
    """Factors on a prediction between which four in five measurements lie.

    Args:
        ttft: of a request alone, or of a batch.
        ttft_arrivals: of requests that arrive at random times.
        ttft_clients: of the requests of several clients.
    """

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    ttft_arrivals: tuple[float, float]
    ttft_clients: tuple[float, float]

    def of_ttft(self, load: str, value: float) -> tuple[float, float]:
        """Under a load, as Plan has it."""
        if load == "rate":
            return self.ttft_arrivals
        return self.ttft_clients if load == "concurrency" and value > 1 else self.ttft


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a replica: the whole prompt of one request, or one token of each sequence of the batch.

    Work is counted as documents 001 and 002 count it: of the whole model in one pass, each weight once, however many
    devices hold a part or a copy of it. Time is that of a device, and of all the steps that a prompt takes which is
    longer than a step's budget of tokens.

    Args:
        work: by operation.
        flops: their sum.
        bytes: of weights and cache: what must come from memory.
        activation_bytes: what operations hand to each other on top; some of it stays in caches.
        time: predicted, part by part, of one device.
        floor_s: the same at the data sheet's rates, without any loss.
        floors_s: of each part of `time`, by its name.
        bound: compute, memory, network or overhead: what most of the time goes to.
    """

    work: dict[Operation, Work]
    flops: int
    bytes: int
    activation_bytes: int
    time: TimeBreakdown
    floor_s: float
    floors_s: dict[str, float]
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights and cache (document 001, chapter 8)."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculative decoding makes of it.

    Args:
        accepted: expected tokens of a step.
        tpot_s: with it.
        speedup: of TPOT without it to TPOT with it.
        best_tokens: k with the lowest TPOT at this acceptance.
        break_even: acceptance from which on it is faster; None where it never is.
    """

    accepted: float
    tpot_s: float
    speedup: float
    best_tokens: int
    break_even: float | None


@dataclass(frozen=True, slots=True)
class Costs:
    """Money and energy. None where no price or no power is known, or no tokens come.

    Args:
        per_million_output_tokens: the whole price on output tokens (document 003, section 13).
        split_input, split_output: of a million tokens each, where prompts pay for the time that they take alone, which
            is `prompt_share` of the whole.
        tokens_per_s_per_watt, kwh_per_million: at the data sheet's power of all devices.
    """

    per_million_output_tokens: float | None = None
    split_input: float | None = None
    split_output: float | None = None
    prompt_share: float = 0.0
    tokens_per_s_per_watt: float | None = None
    kwh_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said of one deployment. Times in seconds, sizes in bytes.

    Args:
        model: its name as shown.
        dtype, quantization, kv_cache_dtype: what "auto" came to.
        replicas: of the deployment, on `devices` devices in all.
        engine: whose scheduling and efficiency it has.
        lanes: engines that go on beside each other: of each data-parallel group of each replica.
        load: "batch", "concurrency" or "rate", of `load_value`.
        batch: sequences in the decode step that `decode` describes: what was asked for, or as many as run on average
            under the load, for each replica; `lane_batch` those of one stage of a lane, whose step `decode.time` is.
        settings: of the engine, for its memory.
        capacity: what fits into memory.
        served: under a concurrency or a rate, by one lane; None for a batch.
        bubble: share of the time in which the stages of a pipeline idle.
        bars: of TTFT and TPOT.
        ttft, tpot, ttlt: seconds; None where it does not fit or, under a rate, where the queue has no end.
        output_tokens_per_s: of all replicas; None where it does not fit.
        saturation_rate: requests a second, of all replicas, that can be served at most; 0 where it does not fit.
        compute_bound_batch: from which on arithmetic takes most of a decode step; None: never, because of the cache.
        compute_bound_weights: from which on the products with weights take longer than reading them.
        price_per_hour: of all devices; None where none is known. The same holds for what follows from it.
        slo_met: by name of the objective, whether the estimate meets it.
        assumptions: sentences, each one thing that the figures rest on.
        warnings: sentences, each one thing that may well make it worse than is said.
        problem: why it cannot work (it does not fit) and what would help; None where it can.
    """

    request: PlanRequest
    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    deployment: Deployment
    replicas: int
    devices: int
    engine: EngineProfile
    lanes: int
    workload: RequestShape
    limits: Limits
    load: str
    load_value: float
    batch: int
    lane_batch: int
    settings: Settings
    capacity: Capacity
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    prefill: PlannedStep
    decode: PlannedStep
    ridge_flops_per_byte: float
    served: Served | None
    bubble: float
    bars: Bars
    ttft: Estimate | None
    tpot: Estimate | None
    ttlt: Estimate | None
    output_tokens_per_s: Estimate | None
    saturation_rate: float
    compute_bound_batch: int | None
    compute_bound_weights: int | None
    loading: Loading
    price_per_hour: float | None
    price_source: str
    costs: Costs
    slo_met: dict[str, bool]
    speculated: Speculated | None
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def hardware_key(self) -> str:
        return self.deployment.hardware.key

    @property
    def max_batch(self) -> int:
        """Sequences that fit in a replica."""
        return self.capacity.max_batch * self.deployment.parallelism.data

    @property
    def storage_bytes_per_s(self) -> float:
        """At which the checkpoint is read."""
        return self.request.storage_gb_per_s * 1e9

    @property
    def fits(self) -> bool:
        """The load does: every sequence of a batch, at least one sequence of a concurrency or a rate."""
        return self.capacity.fits and (self.load != "batch" or self.batch <= self.max_batch)
