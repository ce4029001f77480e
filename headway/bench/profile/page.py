"""A profile as a page: key figures, verdicts, and sections with figures and tables."""

from __future__ import annotations

from datetime import datetime

from headway.bench.profile import figures, tables
from headway.bench.profile.result import ProfileResult, opportunities
from headway.bench.profile.stages import BY_KEY
from headway.bench.report.verdict import count
from headway.report.parts import Banner, Page, Picture, Section
from headway.report.style import number


def page_of(result: ProfileResult) -> Page:
    """The report of document 000: stages, memory requirements, optimisation opportunities, and what they rest on."""
    model, startup = result.model, result.startup
    return Page(
        title=f"Profile of {model.name}",
        subtitle=(
            f"One request at a time on {startup.device} ({result.peaks.name}), {model.kept_in}, "
            f"Headway {result.server_version}, {datetime.fromisoformat(result.began_at):%Y-%m-%d %H:%M}"
        ),
        verdict=banners(result),
        key_figures=key_figures(result),
        sections=(
            _latency(result),
            _stages(result),
            _opportunities(result),
            _achieved(result),
            _memory(result),
            _loading(result),
            _machine(result),
        ),
    )


def banners(result: ProfileResult) -> tuple[Banner, ...]:
    """What a reader must not miss, the gravest first."""
    found = []
    failed = {kind for each in result.lengths for kind in each.failures}
    if not result.measured:
        found.append(Banner("Nothing was measured", ("No request came back with the server's timings.",)))
    if failed:
        total = sum(sum(each.failures.values()) for each in result.lengths)
        found.append(Banner(f"{count(total, 'request')} failed", (f"Kinds: {', '.join(sorted(failed))}.",)))
    if result.interrupted:
        found.append(
            Banner(
                "Interrupted", ("Stopped before all requests were done; the figures are of those that were.",), "warn"
            )
        )
    if result.peaks.busy:
        found.append(Banner("Busy machine", (f"{result.peaks.busy[:1].upper()}{result.peaks.busy[1:]}.",), "warn"))
    if result.notes:
        found.append(Banner("Beware", tuple(f"{note[:1].upper()}{note[1:]}." for note in result.notes), "warn"))
    return tuple(found)


def key_figures(result: ProfileResult) -> tuple[tuple[str, str], ...]:
    """Numbers for the top, those of requests at the length in the middle."""
    model, each = result.model, result.typical
    about = [
        (f"{model.shape.num_parameters / 1e6:,.1f} M", "parameters"),
        (f"{number(result.startup.seconds)} s", "until ready"),
    ]
    if each is None:
        return tuple(about)
    of = f"prompt of {each.prompt_tokens:,}"
    about.insert(0, (f"{number(each.medians_ms['ttft_ms'])} ms", f"TTFT, {of}"))
    if "tpot_ms" in each.medians_ms:
        about.insert(1, (f"{number(each.medians_ms['tpot_ms'])} ms", "TPOT"))
    if each.decode:
        about.append((f"{100 * each.decode.bandwidth_share:.0f} %", "of bandwidth in decode"))
    if each.prefill:
        about.append((f"{100 * each.prefill.flops_share:.0f} %", f"of FLOP/s in prefill, {of}"))
    return tuple(about)


def _latency(result: ProfileResult) -> Section:
    text = (
        "Latency without load: no other request runs, so there is no queueing. The dashed line is the roofline of this "
        "machine: the least time for the prompt, or for a token."
    )
    return Section(
        "Latency by prompt length",
        (text,),
        tables=(tables.latency_table(result),),
        pictures=(
            Picture(
                "latency-by-length",
                "TTFT and TPOT",
                "Medians over prompt length, from the fastest to the slowest request, and the roofline.",
                figures.latency_by_length(result),
            ),
        ),
        anchor="latency",
    )


def _stages(result: ProfileResult) -> Section:
    text = (
        "From the send to the end of the response, divided into stages by the server's ledger and the client's clock."
    )
    return Section(
        "Where the time of a request goes",
        (text,),
        tables=(tables.stage_table(result),),
        pictures=(
            Picture(
                "stage-breakdown",
                "Stages by prompt length",
                "Milliseconds on the left, shares of the request on the right.",
                figures.stage_breakdown(result.measured),
            ),
        ),
        anchor="stages",
    )


def _opportunities(result: ProfileResult) -> Section:
    each = result.typical
    found = opportunities(each) if each else []
    says: tuple[str, ...] = ()
    if each is not None and found:
        first = found[0]
        text = (
            f"At a prompt of {each.prompt_tokens:,} tokens and an answer of {each.output_tokens:,}, the largest "
            f"possible gain is in {BY_KEY[first.stage].label}: {number(first.winnable_ms)} of {number(each.total_ms)} "
            f"ms."
        )
        says = (text,)
    return Section(
        "Optimisation opportunities",
        says,
        tables=tuple(tables.opportunity_table(length) for length in ([each] if each else [])),
        pictures=(
            Picture(
                "optimisation-opportunities",
                "Largest possible gain",
                "Grey: the least time of the stage on this machine. Orange: what better software could save.",
                figures.optimisation_opportunities(found, each),
            ),
        ),
        anchor="opportunities",
    )


def _achieved(result: ProfileResult) -> Section:
    text = (
        "FLOPs and bytes are counted exactly from the model's shape: two FLOPs for each multiply-add, every weight "
        "once a pass, the keys and values of the context. Time is the ledger's compute. Activations are left out, "
        "because they may stay in caches. If the weights of a small model stay in caches too, the peak is that of the "
        "caches."
    )
    return Section(
        "Achieved bandwidth and FLOP/s",
        (text,),
        tables=(tables.achieved_table(result),),
        pictures=(
            Picture(
                "roofline",
                "Roofline",
                "Lines: the machine's limits. Points: measurements, prompts with their length.",
                figures.roofline(result),
            ),
        ),
        anchor="roofline",
    )


def _memory(result: ProfileResult) -> Section:
    model, peaks = result.model, result.peaks
    text = (
        f"Weights: {model.shape.num_parameters:,} parameters in {model.kept_in}, {model.weight_bytes / 1e6:,.1f} MB. "
        f"KV cache: 2 x {model.shape.attention_layers} layers x {model.shape.kv_heads} KV heads x "
        f"{model.shape.head_dim} dimensions x {model.precision.kv.bits_per_element / 8:g} bytes = "
        f"{model.kv_bytes_per_token:,} bytes a token."
    )
    more = (
        f"The server made a cache of {result.startup.num_blocks:,} blocks of {result.startup.block_size} tokens, "
        f"{result.pool_bytes / 1e6:,.0f} MB, on a machine with {peaks.memory_bytes / 1e9:,.1f} GB "
        "(set by --kv-cache-memory and --max-model-len)."
    )
    return Section(
        "Memory requirements",
        (
            text,
            more,
        ),
        pictures=(
            Picture(
                "memory-requirements",
                "Memory by context length",
                "Left: memory of one sequence whose prompt is computed in one step. Right: number of sequences that "
                "the cache holds.",
                figures.memory_requirements(result),
            ),
        ),
        anchor="memory",
    )


def _loading(result: ProfileResult) -> Section:
    return Section(
        "Model loading",
        ("Measured once, at the start. Weights that were read before come from the page cache, not from storage.",),
        tables=(tables.loading_table(result),),
        pictures=(
            Picture(
                "model-loading",
                "Stages of the start",
                "The engine's stages, one after the other.",
                figures.model_loading(tables.loading_stages(result), result.startup.seconds),
            ),
        ),
        anchor="loading",
    )


def _machine(result: ProfileResult) -> Section:
    return Section(
        "The machine's peaks",
        ("Measured just before, by python -m headway.calibration; the best repeat counts.",),
        tables=(tables.machine_table(result),),
        anchor="machine",
        folded=True,
    )
