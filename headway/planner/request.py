"""What is asked of a plan, as on the command line."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from headway.cost.loading import STORAGE_BYTES_PER_S
from headway.engine.config import AttentionSinksFlag, AttentionWindowFlag
from headway.flags import Flag, Needs, tokens
from headway.load.workload.lengths import mean_tokens, parse_length
from headway.policy.objectives.objectives import checked_objectives, parse_objectives

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
    "kv_heads": 65_536,
}
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256  # unless the context has no room for them
RATES = (1e-4, 1e6)  # requests a second
PRICES = (1e-4, 1e6)  # US dollars an hour
GB_PER_S = (1e-3, 1e5)


class PlanError(ValueError):
    """A plan cannot be made; the message is one line that names the value, the limit and what to do."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding.

    Raises:
        PlanError: a number is out of its range.
    """

    tokens: int  # how many are proposed in each step (k)
    acceptance: float  # probability that a proposed token is accepted, given that those before it were
    draft: str | None = None  # model that proposes; None for one whose time does not count (n-grams)

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_SPECULATIVE_TOKENS:
            raise PlanError(
                f"num_speculative_tokens is {self.tokens}; it must be between 1 and {MOST_SPECULATIVE_TOKENS}"
            )
        if not 0.0 <= self.acceptance <= 1.0:
            raise PlanError(f"acceptance_rate is {self.acceptance}; it is a probability, so give 0 to 1")


_deployment, _load = (
    functools.partial(Flag, panel="Deployment"),
    functools.partial(Flag, panel="Load", needs=Needs.LOAD),
)
_hardware = functools.partial(_deployment, needs=Needs.HARDWARE)
_engine, _money = functools.partial(Flag, panel="Engine"), functools.partial(Flag, panel="Objectives and price")


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """Objectives in ms, from `ttft:200,tpot:50` or one of each text.

    Raises PlanError where `parse_objectives` fails or there is none.
    """
    try:
        found = parse_objectives(" ".join(texts).replace(",", " ").split(), "--slo")
    except ValueError as error:
        raise PlanError(str(error)) from None
    if not found:
        raise PlanError("--slo is empty; write for example ttft:200,tpot:50")
    return found


# Flags of a deployment, planned or simulated.
ModelName = Annotated[
    str,
    Flag(
        "A name such as llama-3.1-8b, a folder with a config.json, a config.json, or a GGUF file.",
        positional=True,
        metavar="MODEL",
    ),
]
HardwareName = Annotated[
    str, _hardware("Device such as H100-SXM, or a calibrated machine; see headway plan --list.", common=True)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """What the command line says of speculative decoding."""

    num_speculative_tokens: Annotated[int | None, _engine("Tokens that speculative decoding proposes per step.")] = None
    acceptance_rate: Annotated[float | None, _engine("Probability that a proposed token is accepted, 0 to 1.")] = None
    draft_model: Annotated[str | None, _engine("Draft model. Default: n-grams, which take no time.")] = None

    def speculation(self) -> Speculation | None:
        """Raises PlanError where the flags do not go together, or a number is out of its range."""
        if self.num_speculative_tokens is None:
            for name, value in (("--acceptance-rate", self.acceptance_rate), ("--draft-model", self.draft_model)):
                if value is not None:
                    raise PlanError(f"{name} works only with --num-speculative-tokens")
            return None
        if self.acceptance_rate is None:
            raise PlanError("--num-speculative-tokens needs --acceptance-rate, which depends on draft, model and text")
        return Speculation(self.num_speculative_tokens, self.acceptance_rate, self.draft_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """How a model is run, in a plan as in a simulation. "auto" and None leave the choice to that.

    Args:
        engine: see `planner.engines`.
        quantization: see `cost.precision.QUANTIZATIONS`.
    """

    enable_expert_parallel: Annotated[
        bool, _deployment("Place whole experts on devices instead of splitting each.", "--enable-expert-parallel")
    ] = False
    sequence_parallel: Annotated[
        bool, _deployment("Split norms and residuals among the devices by token.", "--sequence-parallel")
    ] = False
    dtype: Annotated[str, _deployment("Type of unquantised tensors: auto, bfloat16, float16 or float32.")] = "auto"
    quantization: Annotated[
        str,
        _deployment(
            "Format of weights: auto (as published), none, fp8, fp8-weight-only, fp8-block, int8, int8-weight-only, "
            "int4, w4a8, mxfp4, nvfp4, nf4; q4_k, q6_k or q8_0 of a GGUF file; or of a mixture's experts alone, "
            "int4-experts or nvfp4-experts.",
            common=True,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str, _deployment("Type of the KV cache: auto, bf16, fp16, fp32, fp8 or int8.", common=True)
    ] = "auto"
    network_gb_per_s: Annotated[
        float | None, _deployment("Network bandwidth per device in GB/s. Default: the catalogue's, else 12.5.")
    ] = None
    host_link_gb_per_s: Annotated[
        float | None,
        _deployment(
            "Bandwidth of each device's link to its host, one way, in GB/s: PCIe 4.0 x16 has 31.5, 5.0 has 63. "
            "Default: the catalogue's."
        ),
    ] = None
    engine: Annotated[
        str,
        _engine(
            "Whose scheduling, defaults and efficiency: vllm, headway, sglang or tensorrt-llm. Default: auto, which is "
            "headway on a calibrated machine and in simulations, else vllm."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, _engine("Context length in tokens. Default: the model's.", parse=tokens, metavar="N")
    ] = None
    attention_sinks: AttentionSinksFlag = None
    attention_window: AttentionWindowFlag = None
    gpu_memory_utilization: Annotated[
        float | None,
        _engine("Share of device memory that the engine uses. Default: 0.9. On a calibrated CPU it has no effect."),
    ] = None
    flash_attention: Annotated[bool, _engine("Attention keeps its scores on the chip (FlashAttention).")] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(DeploymentOptions):
    """What plans that are compared have in common: all options but the model and the hardware.

    "auto" and None leave the choice to the plan.

    Args:
        batch_size, concurrency, request_rate: one of them at most; none means batch_size 1.
        slo: objectives in ms, by ttft, tpot and e2el.
    """

    kv_heads: Annotated[
        int | None,
        _deployment(
            "Plan as if the model had so many KV heads: as many as query heads for MHA, 1 for MQA. Default: its own.",
            needs=Needs.MODEL,
        ),
    ] = None
    count: Annotated[
        int | None, _hardware("Number of devices. Default: as many as one replica needs.", common=True)
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        _deployment(
            "Tensor parallel size. Default: --count, if the model can be split that way; without it, or where that is "
            "more than one machine, the smallest that fits.",
            common=True,
        ),
    ] = None
    pipeline_parallel_size: Annotated[int, _deployment("Pipeline stages.")] = 1
    data_parallel_size: Annotated[
        int, _deployment("Data-parallel groups that share the experts, with --enable-expert-parallel.")
    ] = 1
    prompt_tokens: Annotated[
        int | None, _load("Tokens of each prompt. Default: 1024, or half of the context if that is less.", common=True)
    ] = None
    output_tokens: Annotated[
        int | None,
        _load(
            "Tokens of each answer, on average. Default: 256, or a quarter of the context if that is less.", common=True
        ),
    ] = None
    input_len: Annotated[
        str | None,
        _load(
            "Distribution of prompt lengths, such as lognormal:mean=200,cv=0.8,max=4000, instead of --prompt-tokens: "
            "its mean is planned, and --explain shows what static batching pads."
        ),
    ] = None
    output_len: Annotated[str | None, _load("Distribution of answer lengths, instead of --output-tokens.")] = None
    cached_tokens: Annotated[
        int, _load("Tokens of each prompt already in the prefix cache, the same for all prompts.")
    ] = 0
    output_spread: Annotated[float, _load("Spread of output lengths around --output-tokens: 0 (all equal) to 1.")] = 0.1
    batch_size: Annotated[int | None, _load("Sequences of one batch on each replica. Default: 1.", common=True)] = None
    concurrency: Annotated[
        int | None,
        _load("Closed loop: number of clients that each wait for an answer before the next request.", common=True),
    ] = None
    request_rate: Annotated[
        float | None, _load("Open loop: requests per second, with Poisson arrivals.", common=True)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _engine(
            "Token budget of a step. Default: 8192 on GPUs with at least 70 GiB (except A100), else 2048; on a "
            "calibrated machine that of headway serve.",
            parse=tokens,
            metavar="N",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None, _engine("Maximum number of sequences in a step. Default: 1024 on the same GPUs, else 256.")
    ] = None
    max_prefill_stall_ms: Annotated[
        float | None,
        _engine(
            "Milliseconds by which prefill may delay decodes in a step. Default: headway serve's on a calibrated "
            "machine, else no limit."
        ),
    ] = None
    block_size: Annotated[int, _engine("Tokens in a KV block.")] = 16
    max_loras: Annotated[
        int | None, _engine("Slots for adapters (LoRA) of all linear layers. Default: none.", min=1, max=1024)
    ] = None
    max_lora_rank: Annotated[int, _engine("Rank of these adapters.", min=1, max=256)] = 16
    slo: Annotated[
        dict[str, float],
        _money(
            "Objectives in ms, such as ttft:200 tpot:50 e2el:5000.",
            short="--goodput",
            parse=parse_slo,
            repeated=True,
            metavar="KEY:MS ...",
            common=True,
        ),
    ] = field(default_factory=dict)
    price_per_hour: Annotated[
        float | None, _money("US dollars per device and hour. Default: the list price, if known.")
    ] = None
    storage_gb_per_s: Annotated[float, _deployment("Bandwidth at which the checkpoint is read, in GB/s.")] = (
        STORAGE_BYTES_PER_S / 1e9
    )


@dataclass(frozen=True, slots=True)
class PlanRequest(PlanOptions):
    """A model, hardware and load. Names of engines and precisions are kept in lower case.

    Raises:
        PlanError: a number is out of its range, or two loads are given.
    """

    model: ModelName
    hardware: HardwareName
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
        if self.host_link_gb_per_s is not None:
            _check_range("host_link_gb_per_s", self.host_link_gb_per_s, GB_PER_S, "10^9 bytes a second, one way")
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
        self.lengths(None)
        if not 0.0 <= self.output_spread <= 1.0:
            raise PlanError(f"output_spread is {self.output_spread}; it is a share of output_tokens, so give 0 to 1")

    def lengths(self, context: int | None) -> tuple[int, int]:
        """Tokens of a prompt and of an answer, in a context of so many tokens (None: without end).

        Raises:
            PlanError: more of the prompt is cached than it has.
        """
        prompt = _mean(self.input_len, self.prompt_tokens)
        answer = _mean(self.output_len, self.output_tokens)
        prompt = min(PROMPT_TOKENS, max(1, (context or MOST["max_model_len"]) // 2)) if prompt is None else prompt
        answer = min(OUTPUT_TOKENS, max(1, (context or MOST["max_model_len"]) // 4)) if answer is None else answer
        if not 0 <= self.cached_tokens < prompt:
            raise PlanError(
                f"cached_tokens is {self.cached_tokens}; it must be at least 0 and less than prompt_tokens, "
                f"{prompt}: the last token of a prompt is always computed"
            )
        return prompt, answer

    def _check_load(self) -> None:
        for tokens_name, lengths_name in (("prompt_tokens", "input_len"), ("output_tokens", "output_len")):
            if getattr(self, tokens_name) is not None and getattr(self, lengths_name) is not None:
                raise PlanError(f"{tokens_name} and {lengths_name} both say how long it is; give one of them")
        if self.request_rate is not None:
            _check_range("request_rate", self.request_rate, RATES, "requests a second")
        loads = [n for n in ("concurrency", "batch_size", "request_rate") if getattr(self, n) is not None]
        if len(loads) > 1:
            raise PlanError(f"{' and '.join(loads)} are different loads; give only one")
        if (stall := self.max_prefill_stall_ms) is not None:
            if not stall >= 0:
                raise PlanError(f"max_prefill_stall_ms is {stall}; it must be 0 or more")
            if self.concurrency is None and self.request_rate is None:
                raise PlanError(
                    "max_prefill_stall_ms works only with --concurrency or --request-rate: in a batch nobody "
                    "decodes while prompts are computed"
                )


def _mean(lengths: str | None, given: int | None) -> int | None:
    """The mean of a distribution, or what is given instead. Raises PlanError where it is not understood."""
    if lengths is None:
        return given
    try:
        return mean_tokens(parse_length(lengths))
    except ValueError as error:
        raise PlanError(str(error)) from None


def _check_range(name: str, value: float, ends: tuple[float, float], what: str) -> None:
    low, high = ends
    if not low <= value <= high:
        raise PlanError(f"{name} is {value:g}; give {what} from {low:g} to {high:,.0f}")
