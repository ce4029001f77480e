"""`headway bench`: measure any OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from headway.cli.bench_values import as_json_object, as_percentiles, fold_lists, key_values
from headway.cli.profile import profile
from headway.cli.values import fail

if TYPE_CHECKING:
    from headway.bench.options import Target
    from headway.bench.workload.spec import WorkloadSpec


class BenchGroup(TyperGroup):
    """Takes `--goodput ttft:200 tpot:50` as vLLM does: an option with as many values as follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        folded: list[str] = super().parse_args(ctx, fold_lists(args, {"--goodput"}))
        return folded


app = typer.Typer(
    name="bench",
    cls=BenchGroup,
    help="Measure an OpenAI-compatible endpoint, and show where the time goes.",
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
)


def _flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


ENDPOINT, LOAD, WORKLOAD, NUMBERS, RESULTS = "Endpoint", "Load", "Workload", "Numbers", "Results"
Arrivals = Literal["poisson", "gamma", "constant", "on-off", "ramp", "all-at-once", "trace"]
RATED = ("poisson", "gamma", "constant")


@app.callback()
def bench(
    context: typer.Context,
    base_url: Annotated[str | None, _flag(ENDPOINT, "Of the server, as http://localhost:8000.")] = None,
    host: Annotated[str, _flag(ENDPOINT, "Of the server, where there is no --base-url.")] = "127.0.0.1",
    port: Annotated[int, _flag(ENDPOINT, "Of the server, where there is no --base-url.", min=1, max=65535)] = 8000,
    backend: Annotated[
        Literal["openai", "openai-chat", "vllm", "headway"],
        _flag(ENDPOINT, "openai-chat asks /v1/chat/completions, the others /v1/completions."),
    ] = "openai",
    endpoint: Annotated[str | None, _flag(ENDPOINT, "Route to ask instead of the backend's own.")] = None,
    model: Annotated[str | None, _flag(ENDPOINT, "Name that requests give. Default: the one that is served.")] = None,
    served_model_name: Annotated[
        str | None, _flag(ENDPOINT, "Name that requests give, where --model names the tokenizer, as for vLLM.")
    ] = None,
    tokenizer: Annotated[
        str | None, _flag(ENDPOINT, "Folder or Hugging Face id of the tokenizer. Default: found, or done without.")
    ] = None,
    prompts: Annotated[
        Literal["text", "token-ids"], _flag(ENDPOINT, "How /v1/completions is given random prompts.")
    ] = "text",
    api_key: Annotated[
        str | None, _flag(ENDPOINT, "Bearer token.", envvar=["HEADWAY_API_KEY", "OPENAI_API_KEY"])
    ] = None,
    header: Annotated[list[str] | None, _flag(ENDPOINT, "KEY=VALUE sent with every request; may be repeated.")] = None,
    insecure: Annotated[bool, _flag(ENDPOINT, "Accept any TLS certificate.", "--insecure")] = False,
    ready_check_timeout_sec: Annotated[
        float, _flag(ENDPOINT, "Seconds to wait for a server that is not up yet.", min=0)
    ] = 0.0,
    request_timeout: Annotated[float, _flag(ENDPOINT, "Seconds after which a request has failed.", min=0.001)] = 3600.0,
    ignore_eos: Annotated[
        bool | None,
        _flag(ENDPOINT, "Generate all the tokens asked for. Default: for made-up prompts, where the server can do it."),
    ] = None,
    temperature: Annotated[float | None, _flag(ENDPOINT, "Default: the server's.", min=0)] = None,
    top_p: Annotated[float | None, _flag(ENDPOINT, "Default: the server's.")] = None,
    top_k: Annotated[int | None, _flag(ENDPOINT, "Default: the server's.")] = None,
    extra_body: Annotated[str | None, _flag(ENDPOINT, "JSON object of further fields of every request.")] = None,
    num_prompts: Annotated[
        int | None, _flag(LOAD, "Requests. Default: 1000, or a whole trace, or what --duration holds.", min=1)
    ] = None,
    duration: Annotated[float | None, _flag(LOAD, "Seconds in which requests are sent.", min=0.001)] = None,
    request_rate: Annotated[
        float | None, _flag(LOAD, "Requests per second, or inf: all at once. Poisson unless told otherwise.", min=0)
    ] = None,
    arrival: Annotated[Arrivals | None, _flag(LOAD, "Arrival process. Default: what the other flags say.")] = None,
    burstiness: Annotated[float | None, _flag(LOAD, "Shape of gamma gaps; 1 is Poisson, less is burstier.")] = None,
    on_seconds: Annotated[float | None, _flag(LOAD, "Length of a burst of on-off arrivals.")] = None,
    off_seconds: Annotated[float | None, _flag(LOAD, "Length of the silence between bursts.")] = None,
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, _flag(LOAD, "How a ramp goes from its first rate to its last.")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, _flag(LOAD, "Requests per second at the start of a ramp.")] = None,
    ramp_up_end_rps: Annotated[float | None, _flag(LOAD, "Requests per second at its end.")] = None,
    max_concurrency: Annotated[
        int | None, _flag(LOAD, "Without a rate: users of a closed loop. With one: most requests under way.", min=1)
    ] = None,
    time_scale: Annotated[float, _flag(LOAD, "Replay a trace so many times as fast.")] = 1.0,
    num_warmups: Annotated[int, _flag(LOAD, "Requests that are sent first and not measured.", min=0)] = 3,
    drain_timeout: Annotated[
        float,
        _flag(LOAD, "When all is sent and no request has ended for so many seconds, the rest has failed.", min=0.001),
    ] = 600.0,
    seed: Annotated[int, _flag(LOAD, "Of arrivals, lengths and prompts.", min=0)] = 0,
    find_max_rate: Annotated[
        bool, _flag(LOAD, "Look for the highest rate at which --goodput still holds.", "--find-max-rate")
    ] = False,
    sweep: Annotated[
        str | None, _flag(LOAD, "Measure at each of rate:1,2,4 (requests/s) or concurrency:1,8,64.")
    ] = None,
    max_search_seconds: Annotated[
        float, _flag(LOAD, "No probe of --find-max-rate begins later than this.", min=1)
    ] = 3600.0,
    stall_seconds: Annotated[
        float,
        _flag(LOAD, "The claim of --find-max-rate must survive stalls of this length; longer takes longer.", min=0),
    ] = 1.0,
    dataset_name: Annotated[
        str,
        _flag(
            WORKLOAD,
            "random, sharegpt, azure, mooncake, burstgpt, prefix_repetition, multi_turn or custom.",
        ),
    ] = "random",
    dataset_path: Annotated[Path | None, _flag(WORKLOAD, "Of a dataset that is a file.")] = None,
    mix: Annotated[
        str | None, _flag(WORKLOAD, "Classes of requests, in place of a dataset: a TOML file, or a bundled mix.")
    ] = None,
    input_len: Annotated[
        str | None, _flag(WORKLOAD, "Tokens of a prompt: a number, or as lognormal:mean=200,cv=0.8,max=4000.")
    ] = None,
    output_len: Annotated[str | None, _flag(WORKLOAD, "Tokens of an answer, likewise.")] = None,
    random_input_len: Annotated[int, _flag(WORKLOAD, "Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, _flag(WORKLOAD, "Tokens of its answer.")] = 128,
    random_range_ratio: Annotated[
        str | None, _flag(WORKLOAD, "Random lengths lie between LEN * (1 - RATIO) and LEN * (1 + RATIO). Default: 0.")
    ] = None,
    random_prefix_len: Annotated[int, _flag(WORKLOAD, "Tokens that all random prompts begin with.")] = 0,
    prefix_repetition_prefix_len: Annotated[int, _flag(WORKLOAD, "Tokens of a shared prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[int, _flag(WORKLOAD, "Tokens of each prompt after it.")] = 256,
    prefix_repetition_num_prefixes: Annotated[int, _flag(WORKLOAD, "Shared prefixes.")] = 10,
    prefix_repetition_output_len: Annotated[int, _flag(WORKLOAD, "Tokens of an answer.")] = 128,
    sharegpt_output_len: Annotated[int | None, _flag(WORKLOAD, "Default: as long as the answer in the file.")] = None,
    custom_output_len: Annotated[int | None, _flag(WORKLOAD, "Default: what each row says.")] = None,
    multi_turn_turns: Annotated[
        str | None, _flag(WORKLOAD, "Requests of a conversation. Default: uniform:min=2,max=8.")
    ] = None,
    multi_turn_prefix_len: Annotated[int, _flag(WORKLOAD, "Tokens that all conversations begin with.")] = 0,
    multi_turn_think_s: Annotated[
        str | None, _flag(WORKLOAD, "Seconds between an answer and the next turn. Default: exponential:mean=5.")
    ] = None,
    burstgpt_model: Annotated[str | None, _flag(WORKLOAD, "Only the requests to this model.")] = None,
    trace_block_size: Annotated[int, _flag(WORKLOAD, "Tokens of a Mooncake trace's hash id.")] = 512,
    max_input_len: Annotated[int | None, _flag(WORKLOAD, "Longer prompts are clipped, longer texts left out.")] = None,
    max_output_len: Annotated[int | None, _flag(WORKLOAD, "Longer answers are clipped.")] = None,
    disable_shuffle: Annotated[
        bool, _flag(WORKLOAD, "Take texts in the order of their file.", "--disable-shuffle")
    ] = False,
    no_oversample: Annotated[
        bool, _flag(WORKLOAD, "A dataset with fewer rows than --num-prompts gives what it has.", "--no-oversample")
    ] = False,
    goodput: Annotated[
        list[str] | None, _flag(NUMBERS, "Objectives in ms, as ttft:200 tpot:50 e2el:5000.", metavar="KEY:MS ...")
    ] = None,
    metric_percentiles: Annotated[str, _flag(NUMBERS, "Which to report.")] = "50,90,95,99,99.9",
    price_per_hour: Annotated[float | None, _flag(NUMBERS, "Of the hardware, for a cost per token.", min=0)] = None,
    slo_attainment: Annotated[
        float, _flag(NUMBERS, "Share of requests that must meet --goodput in --find-max-rate.", min=0.5, max=0.9999)
    ] = 0.99,
    max_failed_share: Annotated[
        float, _flag(NUMBERS, "A run is not valid when a larger share of its requests failed.", min=0, max=1)
    ] = 0.01,
    save_result: Annotated[bool, _flag(RESULTS, "Write the result as JSON.")] = True,
    save_detailed: Annotated[
        bool, _flag(RESULTS, "With the lists of `vllm bench serve --save-detailed`.", "--save-detailed")
    ] = False,
    result_dir: Annotated[Path, _flag(RESULTS, "Folder for what is written.")] = Path("bench-results"),
    result_filename: Annotated[str | None, _flag(RESULTS, "Default: from the backend, rate, model and time.")] = None,
    csv: Annotated[bool, _flag(RESULTS, "Write a row for each request, too.", "--csv")] = False,
    report: Annotated[
        Path | None, _flag(RESULTS, "Write an HTML report here, with its figures as PNGs beside.")
    ] = None,
    label: Annotated[str | None, _flag(RESULTS, "Name of the run in its file and report.")] = None,
    metadata: Annotated[list[str] | None, _flag(RESULTS, "KEY=VALUE kept in the result; may be repeated.")] = None,
    compare: Annotated[
        tuple[str, str] | None,
        _flag(
            RESULTS,
            "Which differences between two results are real; several runs a side are joined by commas.",
            metavar="A.json B.json",
        ),
    ] = None,
) -> None:
    """Measure an OpenAI-compatible endpoint, and show where the time goes."""
    flags = dict(locals())
    given = [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if context.invoked_subcommand is not None:
        _only(given, set(), f"headway bench {context.invoked_subcommand}")
        return
    from headway.bench.errors import BenchError
    from headway.report.page import ReportError

    try:
        if compare is not None:
            _only(given, {"compare", "report"}, "--compare")
            from headway.bench.comparing import compare_files

            a, b = ([Path(path) for path in side.split(",")] for side in compare)
            compare_files(a, b, report)
            code = 0
        else:
            _needs(given, flags)
            code = _measure(flags)
    except (BenchError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(code)


def _only(given: list[str], allowed: set[str], where: str) -> None:
    for name in given:
        if name not in allowed:
            fail(f"--{name.replace('_', '-')} has no meaning for {where}; leave it out")


def _needs(given: list[str], flags: dict[str, Any]) -> None:
    """Refuse flags that say something about another one that was not given."""
    for name, other, there in (
        ("max_search_seconds", "--find-max-rate", flags["find_max_rate"]),
        ("stall_seconds", "--find-max-rate", flags["find_max_rate"]),
        ("slo_attainment", "--goodput or --mix", flags["goodput"] or flags["mix"]),
        ("save_detailed", "--save-result", flags["save_result"]),
        ("csv", "--save-result", flags["save_result"]),
        ("result_dir", "--save-result", flags["save_result"]),
        ("label", "--save-result or --report", flags["save_result"] or flags["report"]),
        ("metadata", "--save-result", flags["save_result"]),
        ("insecure", "an https:// address", str(flags["base_url"]).startswith("https://")),
        ("result_filename", "--save-result", flags["save_result"]),
        ("host", "an address without --base-url", not flags["base_url"]),
        ("port", "an address without --base-url", not flags["base_url"]),
    ):
        if name in given and not there:
            fail(f"--{name.replace('_', '-')} has a meaning only with {other}")
    if "request_rate" in given and (flags["sweep"] or "").startswith("rate:"):
        fail("--sweep rate says the request rates; leave out --request-rate")


def _measure(flags: dict[str, Any]) -> int:
    from headway.bench.jobs import run_job
    from headway.bench.measures.slo import parse_goodput
    from headway.bench.options import BenchOptions, Claims, Output, Sweep

    sweep = None if flags["sweep"] is None else Sweep.parse(flags["sweep"])
    if sweep is not None and sweep.over == "rate" and (flags["arrival"] in RATED or flags["burstiness"] is not None):
        flags["request_rate"] = sweep.values[0]  # the arrival process is made with it, and then for each
    goodput = [value for group in flags["goodput"] or [] for value in group.replace(",", " ").split()]
    options = BenchOptions(
        target=_target(flags),
        workload=_workload(flags),
        max_concurrency=flags["max_concurrency"],
        num_warmups=flags["num_warmups"],
        drain_timeout_s=flags["drain_timeout"],
        find_max_rate=flags["find_max_rate"],
        max_search_seconds=flags["max_search_seconds"],
        stall_s=flags["stall_seconds"],
        sweep=sweep,
        claims=Claims(
            percentiles=as_percentiles(flags["metric_percentiles"]),
            objectives=parse_goodput(goodput),
            price_per_hour=flags["price_per_hour"],
            max_failed_share=flags["max_failed_share"],
            attainment=flags["slo_attainment"],
        ),
        output=Output(
            save=flags["save_result"],
            detailed=flags["save_detailed"],
            result_dir=flags["result_dir"],
            result_filename=flags["result_filename"],
            report=flags["report"],
            csv=flags["csv"],
            label=flags["label"],
            metadata=key_values("--metadata", flags["metadata"] or []),
        ),
    )
    return run_job(options)


def _target(flags: dict[str, Any]) -> Target:
    from headway.bench.options import Target

    sampling = {name: flags[name] for name in ("temperature", "top_p", "top_k") if flags[name] is not None}
    named = flags["served_model_name"]
    return Target(
        base_url=flags["base_url"] or f"http://{flags['host']}:{flags['port']}",
        backend=flags["backend"],
        path=flags["endpoint"],
        model=named or flags["model"],
        tokenizer=flags["tokenizer"] or (flags["model"] if named else None),
        token_ids=flags["prompts"] == "token-ids",
        api_key=flags["api_key"],
        headers=key_values("--header", flags["header"] or []),
        insecure=flags["insecure"],
        ready_timeout_s=flags["ready_check_timeout_sec"],
        request_timeout_s=flags["request_timeout"],
        ignore_eos=flags["ignore_eos"],
        extra_body=sampling | as_json_object("--extra-body", flags["extra_body"]),
    )


def _workload(flags: dict[str, Any]) -> WorkloadSpec:
    from headway.bench.workload.arrival_flags import make_arrival
    from headway.bench.workload.spec import DATASET_FIELDS, DISTRIBUTIONS, WorkloadSpec

    arrival = make_arrival(
        flags["arrival"],
        request_rate=flags["request_rate"],
        burstiness=flags["burstiness"],
        on_s=flags["on_seconds"],
        off_s=flags["off_seconds"],
        ramp_up_strategy=flags["ramp_up_strategy"],
        ramp_up_start_rps=flags["ramp_up_start_rps"],
        ramp_up_end_rps=flags["ramp_up_end_rps"],
        dataset_name=None if flags["mix"] else flags["dataset_name"],
    )
    dataset = {name: flags[name] for name in DATASET_FIELDS if flags[name] is not None}
    for name in DISTRIBUTIONS.keys() & dataset.keys():
        dataset[name] = DISTRIBUTIONS[name](dataset[name])
    return WorkloadSpec(
        **dataset,
        num_prompts=flags["num_prompts"],
        duration_s=flags["duration"],
        seed=flags["seed"],
        arrival=arrival,
        time_scale=flags["time_scale"],
        mix=flags["mix"],
        no_oversample=flags["no_oversample"],
    )


app.command()(profile)
