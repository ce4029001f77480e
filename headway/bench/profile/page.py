"""A profile as a page: key figures, verdicts, and sections with figures and tables."""

from __future__ import annotations

from datetime import datetime

from headway.bench.profile import figures, tables
from headway.bench.profile.naive import Naive
from headway.bench.profile.result import ProfileResult, opportunities
from headway.bench.profile.stages import BY_KEY
from headway.bench.report.verdict import count
from headway.report.parts import Banner, Page, Picture, Section, Table
from headway.report.style import number, sentence


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
            *([_naive(result.naive)] if result.naive is not None else []),
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
        line = "Stopped before all requests were done; the figures are of those that were."
        found.append(Banner("Interrupted", (line,), "warn"))
    if result.peaks.busy:
        found.append(Banner("Busy machine", (sentence(result.peaks.busy),), "warn"))
    if result.notes:
        found.append(Banner("Beware", tuple(map(sentence, result.notes)), "warn"))
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
    caption = "Medians over prompt length, from the fastest to the slowest request, and the roofline."
    drawn = Picture("latency-by-length", "TTFT and TPOT", caption, figures.latency_by_length(result))
    return _section("Latency by prompt length", "latency", (text,), tables.latency_table(result), drawn)


def _stages(result: ProfileResult) -> Section:
    text = (
        "From the send to the end of the response, divided into stages by the server's ledger and the client's clock."
    )
    caption = "Milliseconds on the left, shares of the request on the right."
    drawn = Picture("stage-breakdown", "Stages by prompt length", caption, figures.stage_breakdown(result.measured))
    found = (tables.stage_table(result), *([tables.kernel_table(result)] if result.kernels else []))
    return Section("Where the time of a request goes", (text,), tables=found, pictures=(drawn,), anchor="stages")


def _naive(naive: Naive) -> Section:
    text = (
        "Without a cache of keys and values, each token takes a pass over the whole text before it; with one, a pass "
        f"over the newest token alone. The whole answer takes {naive.times:.1f} times as long without."
    )
    drawn = Picture("naive", "Until each token", "Milliseconds from the send.", figures.naive_and_cached(naive))
    return _section("What the KV cache saves", "naive", (text,), tables.naive_table(naive), drawn)


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
    caption = "Grey: the least time of the stage on this machine. Orange: what better software could save."
    figure = figures.optimisation_opportunities(found, each)
    drawn = Picture("optimisation-opportunities", "Largest possible gain", caption, figure)
    table = tables.opportunity_table(each) if each else None
    return _section("Optimisation opportunities", "opportunities", says, table, drawn)


def _achieved(result: ProfileResult) -> Section:
    text = (
        "FLOPs and bytes are counted exactly from the model's shape: two FLOPs for each multiply-add, every weight "
        "once a pass, the keys and values of the context. Time is the ledger's compute. Activations are left out, "
        "because they may stay in caches. If the weights of a small model stay in caches too, the peak is that of the "
        "caches."
    )
    caption = "Lines: the machine's limits. Points: measurements, prompts with their length."
    drawn = Picture("roofline", "Roofline", caption, figures.roofline(result))
    return _section("Achieved bandwidth and FLOP/s", "roofline", (text,), tables.achieved_table(result), drawn)


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
    caption = (
        "Left: memory of one sequence whose prompt is computed in one step. Right: number of sequences that the cache "
        "holds."
    )
    drawn = Picture("memory-requirements", "Memory by context length", caption, figures.memory_requirements(result))
    return _section("Memory requirements", "memory", (text, more), None, drawn)


def _loading(result: ProfileResult) -> Section:
    text = "Measured once, at the start. Weights that were read before come from the page cache, not from storage."
    figure = figures.model_loading(tables.loading_stages(result), result.startup.seconds)
    drawn = Picture("model-loading", "Stages of the start", "The engine's stages, one after the other.", figure)
    return _section("Model loading", "loading", (text,), tables.loading_table(result), drawn)


def _machine(result: ProfileResult) -> Section:
    text = "Measured just before, by python -m headway.calibration; the best repeat counts."
    found = (tables.machine_table(result),)
    return Section("The machine's peaks", (text,), tables=found, anchor="machine", folded=True)


def _section(title: str, anchor: str, says: tuple[str, ...], table: Table | None, drawn: Picture) -> Section:
    return Section(title, says, tables=(table,) if table else (), pictures=(drawn,), anchor=anchor)
