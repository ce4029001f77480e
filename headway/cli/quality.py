"""`headway bench quality`: what a lever costs in quality, beside what it gains in speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from headway.cli.commands import fail, with_flags
from headway.cli.serve import model_folder
from headway.installation import require_engine
from headway.quantize.quality_options import QualityOptions
from headway.report.parts import NOTHING, Table, cells
from headway.report.style import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.quantize.quality import Row


@with_flags
def quality(options: QualityOptions) -> None:
    """Measure what schemes of weights and KV cache cost in quality, and gain in speed, on one text.

    Each is loaded in this process, one after the other; the machine should do nothing else.
    """
    require_engine()

    import json
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from rich.console import Console

    from headway.bundled import NAME
    from headway.files import write_files
    from headway.quantize.pooling import pool_heads
    from headway.quantize.quality import measure
    from headway.report.console import print_table

    folder, rows = model_folder(NAME if options.model is None else options.model), []
    if options.output is not None and not options.output.expanduser().absolute().parent.is_dir():
        fail(f"--output {options.output} cannot be written: its folder is not there")
    try:
        with tempfile.TemporaryDirectory(prefix="headway-") as made, Console(stderr=True).status("loading") as status:
            pooled = {}
            for heads in options.kv_heads:
                pooled[heads] = str(Path(made) / f"{heads}-kv-heads")
                pool_heads(folder, Path(pooled[heads]), heads)
            for row in measure(options, folder, pooled):
                rows.append(row)
                status.update(f"{len(rows)} measured, the last {row.label} with a cache in {row.kv_cache_dtype}")
        if options.output is not None:
            about = {"model": folder.name, "windows": options.windows, "tokens": options.tokens, "dtype": options.dtype}
            content = about | {"rows": [asdict(row) for row in rows]}
            write_files({options.output.expanduser(): (json.dumps(content, indent=1) + "\n").encode()})
    except (OSError, ValueError) as error:
        fail(str(error))
    print_table(Console(), quality_table(folder.name, rows, own_tasks=options.tasks is None))
    raise typer.Exit(0)


def quality_table(model: str, rows: Sequence[Row], own_tasks: bool) -> Table:
    """A row for each setting: quality on the left, speed on the right."""
    shown = []
    for place, row in enumerate(rows):
        change = f"{100 * row.change:+.2f} % ± {100 * row.standard_error:.2f} %" if place else ""
        speeds = [NOTHING if rate is None else number(rate) for rate in (row.decode, row.prefill)]
        shares = (f"{100 * row.top1:.1f} %", f"{100 * row.solved:.0f} %")
        shown.append(cells(row.label, row.kv_cache_dtype, f"{row.perplexity:.3f}", change, *shares, *speeds))
    tasks = "which of four continuations of a piece is the text's own" if own_tasks else "the share that is solved"
    return Table(
        f"Quality and speed of {model}",
        ("weights", "cache", "perplexity", "change", "top 1", "tasks", "decode", "prefill"),
        tuple(shown),
        left=frozenset({0, 1}),
        note="Change: of perplexity, with its standard error over pieces of the text. Top 1: tokens that the model "
        f"holds for the likeliest. Tasks: {tasks}. Decode: tokens/s of one sequence; prefill: of four prompts at once.",
    )
