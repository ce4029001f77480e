"""`headway plan`: what to expect of a model on hardware before either is there."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headway.cli.commands import fail

if TYPE_CHECKING:
    from headway.planner.plan import Plan
    from headway.planner.request import PlanRequest, Speculation


class PlanGroup(TyperGroup):
    """`headway plan MODEL ...`: what is not the name of another command is of the command that plans one model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["model", *(args or ["--help"])]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == "model" else name), command, rest


app = typer.Typer(
    name="plan",
    cls=PlanGroup,
    help="What a model on hardware takes and gives: memory, TTFT, TPOT, throughput, cost, and what limits them.",
)


def flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """An option, listed under `panel`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


DEPLOYMENT, LOAD, ENGINE, MONEY, OUTPUT = "Deployment", "Load", "Engine", "Objectives and price", "Output"

# The flags that say what to plan for, the same for every command of this group.
Hardware = Annotated[str, flag(DEPLOYMENT, "Such as A100-80GB-SXM, H100-SXM, H200, or a calibrated machine.")]
Count = Annotated[int | None, flag(DEPLOYMENT, "Devices in all. Default: as many as one replica takes.")]
TensorParallelSize = Annotated[
    int | None, flag(DEPLOYMENT, "Devices that share each layer. Default: --count, where the model can be divided so.")
]
PipelineParallelSize = Annotated[int, flag(DEPLOYMENT, "Stages that share the layers.")]
DataParallelSize = Annotated[int, flag(DEPLOYMENT, "Groups that share the experts; with --enable-expert-parallel.")]
EnableExpertParallel = Annotated[
    bool, flag(DEPLOYMENT, "Deal experts out whole instead of dividing each.", "--enable-expert-parallel")
]
SequenceParallel = Annotated[
    bool, flag(DEPLOYMENT, "Divide norms and residuals among the devices by token.", "--sequence-parallel")
]
Dtype = Annotated[str, flag(DEPLOYMENT, "auto, bfloat16, float16 or float32: of what is not quantised.")]
Quantization = Annotated[
    str,
    flag(
        DEPLOYMENT,
        "Of weights: auto (as published), none, fp8, fp8-weight-only, int8, int8-weight-only, int4, mxfp4, nvfp4, or "
        "of experts alone int4-experts or nvfp4-experts.",
    ),
]
KvCacheDtype = Annotated[str, flag(DEPLOYMENT, "auto, bf16, fp16, fp32, fp8 or int8.")]
PromptTokens = Annotated[int, flag(LOAD, "Of each request.")]
OutputTokens = Annotated[int, flag(LOAD, "Of each answer, on average.")]
CachedTokens = Annotated[int, flag(LOAD, "Of each prompt, that the prefix cache already has, the same for all.")]
OutputSpread = Annotated[
    float, flag(LOAD, "Answers are spread evenly by this share around --output-tokens: 0 to 1, 0 for all alike.")
]
BatchSize = Annotated[int | None, flag(LOAD, "One batch of so many sequences for each replica. Default: 1.")]
Concurrency = Annotated[int | None, flag(LOAD, "Clients in all, each of whom waits for an answer before asking again.")]
RequestRate = Annotated[float | None, flag(LOAD, "Requests a second in all, at random times (Poisson).")]
Engine = Annotated[str, flag(ENGINE, "The serving program whose efficiency counts.")]
MaxNumBatchedTokens = Annotated[
    int | None,
    flag(
        ENGINE,
        "Tokens of a step. Default: 8192 on GPUs of 70 GiB and more (A100s apart), else 2048; on a calibrated machine "
        "that of headway serve.",
    ),
]
MaxNumSeqs = Annotated[int | None, flag(ENGINE, "Sequences at once. Default: 1024 on the same GPUs, else 256.")]
MaxPrefillStallMs = Annotated[
    float | None,
    flag(
        ENGINE,
        "Longest that prompts may hold up others in a step. Default: that of headway serve on a calibrated machine, "
        "else no bound.",
    ),
]
MaxModelLen = Annotated[int | None, flag(ENGINE, "Tokens of a sequence at most. Default: the model's.")]
GpuMemoryUtilization = Annotated[
    float | None,
    flag(ENGINE, "Share of the memory that the engine takes. Default: 0.9; on a calibrated CPU half of what is free."),
]
BlockSize = Annotated[int, flag(ENGINE, "Tokens of a block of the cache.")]
FlashAttention = Annotated[
    bool, flag(ENGINE, "Whether attention keeps its scores on the chip.", "--flash-attention/--no-flash-attention")
]
NumSpeculativeTokens = Annotated[int | None, flag(ENGINE, "Tokens that speculative decoding proposes in each step.")]
AcceptanceRate = Annotated[float | None, flag(ENGINE, "Probability that a proposed token is accepted, 0 to 1.")]
DraftModel = Annotated[
    str | None, flag(ENGINE, "The model that proposes. Default: something that takes no time (n-grams).")
]
Slo = Annotated[str | None, flag(MONEY, "Objectives in ms: ttft, tpot, e2el.", metavar="ttft:200,tpot:50")]
StorageGbPerS = Annotated[float, flag(DEPLOYMENT, "10^9 bytes a second at which the checkpoint is read.")]
NetworkGbPerS = Annotated[
    float | None,
    flag(DEPLOYMENT, "10^9 bytes a second of a device to other machines. Default: the catalogue's, else 12.5."),
]
PricePerHour = Annotated[float | None, flag(MONEY, "US dollars for a device. Default: a list price, if known.")]


@app.command("model", hidden=True)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name such as llama-3.1-8b, a folder with a config.json, or a config.json."
        ),
    ],
    hardware: Hardware,
    count: Count = None,
    tensor_parallel_size: TensorParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = 1,
    data_parallel_size: DataParallelSize = 1,
    enable_expert_parallel: EnableExpertParallel = False,
    sequence_parallel: SequenceParallel = False,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    prompt_tokens: PromptTokens = 1024,
    output_tokens: OutputTokens = 256,
    cached_tokens: CachedTokens = 0,
    output_spread: OutputSpread = 0.1,
    batch_size: BatchSize = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    engine: Engine = "vllm",
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    max_prefill_stall_ms: MaxPrefillStallMs = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    block_size: BlockSize = 16,
    flash_attention: FlashAttention = True,
    num_speculative_tokens: NumSpeculativeTokens = None,
    acceptance_rate: AcceptanceRate = None,
    draft_model: DraftModel = None,
    slo: Slo = None,
    price_per_hour: PricePerHour = None,
    storage_gb_per_s: StorageGbPerS = 5.0,
    network_gb_per_s: NetworkGbPerS = None,
    as_json: Annotated[bool, flag(OUTPUT, "Print one JSON object and nothing else.", "--json")] = False,
    explain: Annotated[
        bool, flag(OUTPUT, "Print each formula with the numbers put in, and where it is from.", "--explain")
    ] = False,
    plot: Annotated[
        Path | None, flag(OUTPUT, "Also write plan.html and its pictures as PNG into a folder.", metavar="DIR")
    ] = None,
) -> None:
    """What a model on hardware takes and gives: memory, TTFT, TPOT, throughput, cost, and what limits them.

    Ends with exit code 1 when the model or the load does not fit. See also: plan compare, plan levers.
    """
    flags = dict(locals())
    from headway.planner.make import make_plan
    from headway.planner.request import PlanError

    if as_json and explain:
        fail("--json and --explain are two ways to print a plan; leave one out")
    try:
        made = make_plan(request_of(flags))
    except PlanError as error:
        fail(str(error))
    written = [] if plot is None else _write(made, plot)
    if as_json:
        from headway.planner.json import to_json

        print(to_json(made))
    else:
        from rich.console import Console

        from headway.planner.console import print_explained, print_plan

        (print_explained if explain else print_plan)(made, Console())
        if written:
            print(f"\nWrote {written[0]} and {len(written) - 1} pictures.")
    raise typer.Exit(1 if made.problem else 0)


def _write(made: Plan, folder: Path) -> list[Path]:
    """The page first. Nothing has been printed before, so that a folder that cannot be used is all that is said."""
    from headway.planner.page import write_plan
    from headway.report.page import ReportError

    try:
        return write_plan(folder.expanduser(), made)
    except ReportError as error:
        fail(str(error))


def request_of(flags: dict[str, Any]) -> PlanRequest:
    """What the flags of a command ask for. Raises PlanError when they cannot be used."""
    from dataclasses import fields

    from headway.planner.request import PlanRequest, parse_slo

    names = {field.name for field in fields(PlanRequest)} - {"slo", "speculation"}
    given = {name: value for name, value in flags.items() if name in names}
    slo = {} if flags.get("slo") is None else parse_slo(flags["slo"])
    return PlanRequest(**given, slo=slo, speculation=_speculation(flags))


def _speculation(flags: dict[str, Any]) -> Speculation | None:
    from headway.planner.request import PlanError, Speculation

    tokens, acceptance, draft = (
        flags.get(name) for name in ("num_speculative_tokens", "acceptance_rate", "draft_model")
    )
    if tokens is None:
        for name, value in (("--acceptance-rate", acceptance), ("--draft-model", draft)):
            if value is not None:
                raise PlanError(f"{name} has a meaning only with --num-speculative-tokens")
        return None
    if acceptance is None:
        raise PlanError("--num-speculative-tokens needs --acceptance-rate, which depends on draft, model and text")
    return Speculation(tokens, acceptance, draft)


Json = Annotated[bool, flag(OUTPUT, "Print JSON and nothing else.", "--json")]


def with_flags_of_plan(leave_out: set[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command that takes **flags: all flags of `headway plan` but those named."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(plan, include_extras=True)
        own = typing.get_type_hints(command, include_extras=True)
        parameters = {
            name: parameter.replace(annotation=own.get(name), kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for name, parameter in inspect.signature(plan).parameters.items():
            if name not in leave_out and name not in parameters:
                parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        return command

    return give


@app.command("compare")
@with_flags_of_plan(leave_out={"model", "hardware", "explain", "plot"})
def compare(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL@HARDWARE...",
            help="Such as llama-3.1-8b@H100-SXM @2xL40S:quantization=fp8,tp=2: what is left out is that of the first; "
            "a count goes before the hardware; flags of one plan go behind a colon.",
        ),
    ],
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Plans side by side. Flags are for all of them; each plan's own go before.

    The best of each figure is marked, and what is too close to it to tell apart.

    Ends with exit code 1 when none of the plans works.
    """
    from headway.planner.compare import comparison_json, count_hint, merged, parse_plans, print_comparison
    from headway.planner.make import make_plan
    from headway.planner.request import PlanError

    made = []
    try:
        wanted = parse_plans(plans)
        for each in wanted:
            try:
                made.append(make_plan(request_of(merged(flags, each))))
            except PlanError as error:
                fail(f"plan {each.text!r}: {error}{count_hint(each)}")
    except PlanError as error:
        fail(str(error))
    if as_json:
        print(comparison_json(wanted, made))
    else:
        from rich.console import Console

        print_comparison(made, Console())
    raise typer.Exit(1 if all(each.problem for each in made) else 0)


@app.command("levers")
@with_flags_of_plan(leave_out={"explain", "plot"})
def levers(
    objective: Annotated[
        str | None,
        flag(
            MONEY,
            "What to rank by: ttft, tpot, e2el, throughput (of a device) or cost. Default: the first of --slo that is "
            "missed, else throughput.",
        ),
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """What to change next, ranked by what it gains: precision, batch, speculation, prefixes, parallelism, hardware.

    Each is one change of the plan that the flags describe; then the best of them are put together.

    Ends with exit code 1 when the plan does not fit and no change makes it fit.
    """
    from rich.console import Console

    from headway.planner.levers import find_levers
    from headway.planner.request import PlanError

    try:
        with Console(stderr=True).status("trying changes") as status:
            found = find_levers(
                request_of(flags), objective, lambda made: status.update(f"trying changes: {made} plans made")
            )
    except PlanError as error:
        fail(str(error))
    from headway.planner.levers_report import print_levers, to_json

    if as_json:
        print(to_json(found))
    else:
        print_levers(found, Console())
    raise typer.Exit(0 if found.base.fits or found.ranked else 1)
