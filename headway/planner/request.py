"""What is asked of a plan, as on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.cost.loading import STORAGE_BYTES_PER_S
from headway.policy.objectives import checked_objectives, parse_objectives

MOST_SPECULATIVE_TOKENS = 16
# Above these no figure means anything, and following so many requests step by step would take minutes.
MOST = {
    "count": 100_000,
    "tensor_parallel_size": 100_000,
    "pipeline_parallel_size": 100_000,
    "data_parallel_size": 100_000,
    "prompt_tokens": 10_000_000,
    "output_tokens": 10_000_000,
    "batch_size": 8_192,
    "concurrency": 1_000_000,
    "max_num_batched_tokens": 1_000_000,
    "max_num_seqs": 8_192,
    "max_model_len": 100_000_000,
    "block_size": 65_536,
}
RATES = (1e-4, 1e6)  # requests a second
PRICES = (1e-4, 1e6)  # US dollars an hour
GB_PER_S = (1e-3, 1e5)


class PlanError(ValueError):
    """What cannot be planned: one line that names the value, the limit and what to do."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding.

    Args:
        tokens: k that are proposed in each step.
        acceptance: probability that a proposed token is accepted, given that those before it were.
        draft: model that proposes; None for one whose time does not count (n-grams).

    Raises:
        PlanError: a number is out of its range.
    """

    tokens: int
    acceptance: float
    draft: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_SPECULATIVE_TOKENS:
            raise PlanError(
                f"num_speculative_tokens is {self.tokens}; it must be between 1 and {MOST_SPECULATIVE_TOKENS}"
            )
        if not 0.0 <= self.acceptance <= 1.0:
            raise PlanError(f"acceptance_rate is {self.acceptance}; it is a probability, so give 0 to 1")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, hardware and load. Names of fields are those of the flags; "auto" and None leave the choice to the plan.

    Names of engines and precisions are kept in lower case.

    Args:
        model: of the catalogue, a folder with a config.json, or a config.json.
        hardware: of the catalogue, or a calibrated machine.
        engine: the serving program whose efficiency counts (`cost.catalogue.engines`).
        count: devices in all; more than one replica needs are further replicas.
        quantization: none, fp8, int8, ... (`cost.precision.QUANTIZATIONS`); auto: as the checkpoint is published.
        prompt_tokens, output_tokens: of each request; `cached_tokens` of the prompt are found in the prefix cache,
            the same ones for all requests.
        batch_size, concurrency, request_rate: the load: one batch of so many sequences for each replica; so many
            clients in all that each wait for their answer; Poisson arrivals each second, in all. One of them at most;
            none means batch_size 1.
        output_spread: answers are evenly spread between output_tokens * (1 - spread) and output_tokens * (1 + spread).
        max_num_batched_tokens, max_num_seqs: of the engine.
        max_model_len: tokens of a sequence that the engine allows; None: the model's max_position_embeddings.
        max_prefill_stall_ms: by which prompts may hold up others in a step, where these do not take longer themselves;
            None: as `headway serve` on a calibrated machine, else no bound.
        gpu_memory_utilization: share of the memory that the engine takes; None: the engine's own.
        slo: objectives in ms, by ttft, tpot, e2el.
        price_per_hour: of one device, in US dollars; None: the catalogue's list price, where it has one.

        storage_gb_per_s: 10^9 bytes a second at which the checkpoint is read.
        network_gb_per_s: the same, of a device to other machines; None: the catalogue's, or that of 100 Gb/s.

    Raises:
        PlanError: a number is out of its range, or two loads are given.
    """

    model: str
    hardware: str
    engine: str = "vllm"
    count: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    sequence_parallel: bool = False
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    prompt_tokens: int = 1024
    output_tokens: int = 256
    cached_tokens: int = 0
    output_spread: float = 0.1
    batch_size: int | None = None
    concurrency: int | None = None
    request_rate: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_prefill_stall_ms: float | None = None
    gpu_memory_utilization: float | None = None
    block_size: int = 16
    flash_attention: bool = True
    slo: dict[str, float] = field(default_factory=dict)
    price_per_hour: float | None = None
    storage_gb_per_s: float = STORAGE_BYTES_PER_S / 1e9
    network_gb_per_s: float | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        for name in ("engine", "dtype", "quantization", "kv_cache_dtype"):
            object.__setattr__(self, name, getattr(self, name).strip().lower())
        self._check_sizes()
        self._check_load()
        if self.gpu_memory_utilization is not None and not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise PlanError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it is a share of the memory: above 0, at "
                "most 1"
            )
        if self.price_per_hour is not None:
            _check_range("price_per_hour", self.price_per_hour, PRICES, "US dollars for a device")
        _check_range("storage_gb_per_s", self.storage_gb_per_s, GB_PER_S, "10^9 bytes a second")
        if self.network_gb_per_s is not None:
            _check_range("network_gb_per_s", self.network_gb_per_s, GB_PER_S, "10^9 bytes a second of a device")
        try:
            checked_objectives(self.slo, "slo")
        except ValueError as error:
            raise PlanError(str(error)) from None

    def _check_sizes(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; it must be at least 1")
            if value is not None and value > most:
                raise PlanError(f"{name} is {value:,}; it must be at most {most:,}")
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise PlanError(
                f"cached_tokens is {self.cached_tokens}; it must be at least 0 and less than prompt_tokens, "
                f"{self.prompt_tokens}: the last token of a prompt is always computed"
            )
        if not 0.0 <= self.output_spread <= 1.0:
            raise PlanError(f"output_spread is {self.output_spread}; it is a share of output_tokens, so give 0 to 1")

    def _check_load(self) -> None:
        if self.request_rate is not None:
            _check_range("request_rate", self.request_rate, RATES, "requests a second")
        loads = [n for n in ("batch_size", "concurrency", "request_rate") if getattr(self, n) is not None]
        if len(loads) > 1:
            raise PlanError(f"{' and '.join(loads)} are given; they are different loads, so leave all but one out")
        if (stall := self.max_prefill_stall_ms) is not None:
            if not stall >= 0:
                raise PlanError(f"max_prefill_stall_ms is {stall}; it must be 0 or more")
            if self.concurrency is None and self.request_rate is None:
                raise PlanError(
                    "max_prefill_stall_ms has a meaning only with --concurrency or --request-rate: in a batch nobody "
                    "decodes while prompts are computed"
                )


def parse_slo(text: str) -> dict[str, float]:
    """Objectives in ms, from `ttft:200,tpot:50`. Raises PlanError where `parse_objectives` fails or there is none."""
    try:
        found = parse_objectives(text.replace(",", " ").split(), "slo")
    except ValueError as error:
        raise PlanError(str(error)) from None
    if not found:
        raise PlanError("slo is empty; write for example ttft:200,tpot:50")
    return found


def _check_range(name: str, value: float, ends: tuple[float, float], what: str) -> None:
    low, high = ends
    if not low <= value <= high:
        raise PlanError(f"{name} is {value:g}; give {what} from {low:g} to {high:,.0f}")
