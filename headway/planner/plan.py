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
    """Factors on a prediction between which four in five measurements lie."""

    ttft: tuple[float, float]  # factors for a request alone, or for a batch
    tpot: tuple[float, float]
    ttft_arrivals: tuple[float, float]  # factors for requests that arrive at random times
    ttft_clients: tuple[float, float]  # factors for the requests of several clients

    def of_ttft(self, load: str, value: float) -> tuple[float, float]:
        """The bar of TTFT under a load, which is given as Plan has it."""
        if load == "rate":
            return self.ttft_arrivals
        return self.ttft_clients if load == "concurrency" and value > 1 else self.ttft


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a replica: the whole prompt of one request, or one token of each sequence of the batch.

    Work is counted as documents 001 and 002 count it: of the whole model in one pass, each weight once, however many
    devices hold a part or a copy of it. Time is that of a device, and of all the steps that a prompt takes which is
    longer than a step's budget of tokens.
    """

    work: dict[Operation, Work]  # the work of each operation
    flops: int  # FLOPs of all operations
    bytes: int  # bytes of weights and cache, which must come from memory
    activation_bytes: int  # bytes that operations hand to each other on top; some of them stay in caches
    time: TimeBreakdown  # predicted time of one device, part by part
    floor_s: float  # seconds that it takes at the data sheet's rates, without any loss
    floors_s: dict[str, float]  # seconds that each part of `time` takes at these rates, by its name
    bound: str  # compute, memory, network or overhead: what most of the time goes to

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights and cache (document 001, chapter 8)."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculative decoding makes of decoding."""

    accepted: float  # expected tokens of a step
    tpot_s: float  # TPOT with speculative decoding
    speedup: float  # TPOT without it, divided by TPOT with it
    best_tokens: int  # number of proposed tokens (k) with the lowest TPOT at this acceptance
    break_even: float | None  # the acceptance above which it is faster; None where it never is


@dataclass(frozen=True, slots=True)
class Costs:
    """Money and energy. None where no price or no power is known, or no tokens come."""

    # Price of a million output tokens that pay for everything (document 003, section 13).
    per_million_output_tokens: float | None = None
    # split_input, split_output: prices of a million tokens each, where prompts pay for the time that they take alone,
    # which is `prompt_share` of the whole.
    split_input: float | None = None
    split_output: float | None = None
    prompt_share: float = 0.0
    # tokens_per_s_per_watt, kwh_per_million: output tokens, and energy of a million of them, at the data sheet's power
    # of all devices.
    tokens_per_s_per_watt: float | None = None
    kwh_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said of one deployment. Times in seconds, sizes in bytes."""

    request: PlanRequest
    model: str  # its name as shown
    # dtype, quantization, kv_cache_dtype: what "auto" came to.
    dtype: str
    quantization: str
    kv_cache_dtype: str
    deployment: Deployment
    replicas: int  # how often the deployment is there, on `devices` devices in all
    devices: int
    engine: EngineProfile  # the server whose scheduling and efficiency it has
    lanes: int  # engines that work beside each other: one for each data-parallel group of each replica
    workload: RequestShape
    limits: Limits
    load: str  # "batch", "concurrency" or "rate"; `load_value` is its size
    load_value: float
    # Sequences of a replica in the decode step that `decode` describes: as many as were asked for, or as run on average
    # under the load. `lane_batch` is those of one stage of a lane, whose step `decode.time` is.
    batch: int
    lane_batch: int
    settings: Settings  # the engine's settings that decide about memory
    capacity: Capacity  # what fits into memory
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    prefill: PlannedStep
    decode: PlannedStep
    ridge_flops_per_byte: float
    served: Served | None  # what one lane serves under a concurrency or a rate; None for a batch
    bubble: float  # share of the time in which the stages of a pipeline idle
    bars: Bars  # error bars of TTFT and TPOT
    # ttft, tpot, ttlt: seconds; None where it does not fit or, under a rate, where the queue has no end.
    ttft: Estimate | None
    tpot: Estimate | None
    ttlt: Estimate | None
    output_tokens_per_s: Estimate | None  # output tokens of all replicas; None where it does not fit
    saturation_rate: float  # requests a second that all replicas can serve at most; 0 where it does not fit
    # The smallest batch in whose decode step arithmetic takes most of the time; None where the cache takes more in any.
    compute_bound_batch: int | None
    compute_bound_weights: int | None  # the smallest batch whose products with weights take longer than reading them
    loading: Loading
    # US dollars for all devices; None where no price is known. The same holds for what follows.
    price_per_hour: float | None
    price_source: str
    costs: Costs
    slo_met: dict[str, bool]  # whether the estimate meets an objective, by the objective's name
    speculated: Speculated | None
    assumptions: tuple[str, ...] = ()  # sentences, each one thing that the figures rest on
    warnings: tuple[str, ...] = ()  # sentences, each one thing that may well make it worse than is said
    problem: str | None = None  # why it cannot work (it does not fit) and what would help; None where it can

    @property
    def hardware_key(self) -> str:
        return self.deployment.hardware.key

    @property
    def max_batch(self) -> int:
        """Sequences that fit in a replica."""
        return self.capacity.max_batch * self.deployment.parallelism.data

    @property
    def storage_bytes_per_s(self) -> float:
        """The rate at which the checkpoint is read."""
        return self.request.storage_gb_per_s * 1e9

    @property
    def fits(self) -> bool:
        """Whether the load fits: every sequence of a batch, or at least one sequence of a concurrency or a rate."""
        return self.capacity.fits and (self.load != "batch" or self.batch <= self.max_batch)
