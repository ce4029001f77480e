"""The tables of `headway calibrate`: each figure, and what it means."""

from __future__ import annotations

from typing import Any

from headway.calibration.peaks import Rate
from headway.calibration.store import CalibratedMachine
from headway.report.parts import Cell, Table, cells
from headway.report.style import number

SHOWN_TOKENS = (1, 8, 32, 128, 512)


def machine_table(machine: CalibratedMachine) -> Table:
    """What the device can do at most."""
    hardware, peaks = machine.hardware, machine.peaks
    rows = [
        cells("memory", f"{number(hardware.memory_bytes / 2**30)} GiB", "available to programs"),
        *(
            cells(
                f"reads of {rate.size / 2**20:,.0f} MiB",
                f"{number(rate.best / 1e9)} GB/s",
                "more than any cache holds" if rate is peaks.memory_read else "repeated, so caches count",
            )
            for rate in peaks.read_bytes_per_s
        ),
        *(_products(name, rate, peaks.gemm_flops_per_s) for name, rate in hardware.flops_per_s.items()),
        cells("a call", f"{number(peaks.kernel_call_s * 1e6)} µs", "of an engine kernel without work"),
    ]
    threads = "" if hardware.kind == "gpu" else f", {machine.threads} thread{'s' * (machine.threads > 1)}"
    return Table(f"{hardware.name}{threads}", ("", "best", "what it is"), tuple(rows), left=frozenset({0, 2}))


def kernels_table(kept: dict[str, Any]) -> Table:
    """Which way each product of a CPU takes, and how fast each is that was timed."""
    timed = kept["gflops"]
    tokens = next((list(rates) for of in timed.values() for rates in of.values()), [])
    rows = []
    for product, chosen in kept["ways"].items():
        rows.append(cells(product, chosen, "", *("" for _ in tokens)))
        for way, of in timed.get(product, {}).items():
            rows.append(cells("", "", way, *(number(of[count]) for count in tokens)))
    columns = ("product", "takes", "of", *tokens)
    note = f"GFLOP/s of one thread by tokens, with weights in a near cache. Kept in {kept['path']}."
    if not tokens:
        note = "This processor has one way for each product, so nothing was measured."
    return Table("CPU kernels", columns, tuple(rows), left=frozenset({0, 1, 2}), note=note)


def _products(name: str, rate: float, measured: dict[str, Rate]) -> tuple[Cell, ...]:
    ours = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name) in measured
    what = "large matrices, by torch or the engine" if ours else "by torch; not measured with the engine"
    return cells(f"products in {name}", f"{number(rate / 1e9)} GFLOP/s", what)


def engine_table(machine: CalibratedMachine) -> Table:
    """What this engine reaches of it, as the cost model has it."""
    hardware, reached = machine.hardware, machine.efficiency
    main = next(name for name in ("bf16", "fp16", "fp32") if name in hardware.flops_per_s)
    rows = [
        *(
            cells(
                f"linear, {tokens} token{'s' * (tokens > 1)}",
                f"{reached.linear_factor(tokens, main):.0%}",
                f"of the time to read, then compute, in {main}",
            )
            for tokens in SHOWN_TOKENS
        ),
        cells("cache reads", f"{reached.kv_bytes:.0%}", "of the bandwidth, by attention"),
        cells("attention's products", f"{reached.attention_flops:.0%}", f"of the rate of products in {main}"),
        cells("scores", f"{number(reached.score_s * 1e9)} ns", "of a query, key and head, beside products"),
        cells("attention", f"{number(reached.attention_s * 1e6)} µs", "of each layer, whatever it reads"),
        cells("single elements", f"{reached.element_bytes:.0%}", "of the bandwidth: norms, rotary, activations"),
        cells("between kernels", f"{number(reached.kernel_s * 1e6)} µs", "of the host, for each"),
        cells("a step", f"{number(reached.step_s * 1e6)} µs", "of the host: scheduler, tensors, sampler"),
        cells("a sequence", f"{number(reached.sequence_s * 1e6)} µs", "of the host, for each in a step"),
    ]
    off = ", ".join(f"{kind} {error:.0%}" for kind, error in machine.fit_error.items())
    note = f"Median error of these figures on their own measurements: {off}."
    return Table("This engine on it", ("", "", "what it is"), tuple(rows), left=frozenset({0, 2}), note=note)
