"""`headway bench profile`: where the time of a single request goes, on a machine with nothing else to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli.bench_values import as_percentiles
from headway.cli.values import fail, size
from headway.installation import require_engine


def profile(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or a Hugging Face id; default: the bundled model.")
    ] = None,
    prompt_lens: Annotated[
        str | None, typer.Option(help="Tokens of the prompts, as 16,256,1024. Default: 16 to 2048, as far as they fit.")
    ] = None,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Requests of each prompt length.")] = 10,
    metric_percentiles: Annotated[str, typer.Option(help="Which to report.")] = "50,90,95,99",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type of weights and activations.")
    ] = "auto",
    quantization: Annotated[
        Literal["none", "int8", "int8-weight-only", "int4"],
        typer.Option("--quantization", "-q", help="Quantise the weights of an ordinary checkpoint while loading; CPU."),
    ] = "none",
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="Type of keys and values in the KV cache; auto: --dtype. int8: CPU.")
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], typer.Option(help="dummy makes random weights from config.json.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine. Default: one a core.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Default: the model's.")] = None,
    kv_cache_memory: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Memory of the KV cache, as 4G. Default: measured.")
    ] = None,
    serve_argument: Annotated[
        list[str] | None, typer.Option(help="One more argument for `headway serve`; may be repeated.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Output of `python -m headway.calibration`. Default: the machine is measured.")
    ] = None,
    result_dir: Annotated[Path, typer.Option(help="Folder in which the profile's folder is made.")] = Path(
        "bench-results"
    ),
    result_name: Annotated[str | None, typer.Option(help="Of that folder. Default: from the model and time.")] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the model to load.")] = 900.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each request.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
) -> None:
    """Serve a local model, measure one request at a time, and show where the time goes and what it could be.

    Ends with exit code 1 when a request failed.
    """
    require_engine()

    import asyncio

    from headway.bench.errors import BenchError
    from headway.bench.profile.options import ProfileOptions
    from headway.report.page import ReportError

    try:
        options = ProfileOptions(
            model=model,
            prompt_lens=_lengths(prompt_lens),
            output_len=output_len,
            repeats=repeats,
            percentiles=as_percentiles(metric_percentiles),
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            load_format=load_format,
            threads=threads,
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            serve_arguments=tuple(serve_argument or ()),
            calibration=calibration,
            result_dir=result_dir,
            result_name=result_name,
            ready_timeout_s=ready_timeout,
            request_timeout_s=timeout,
            seed=seed,
        )
        code = asyncio.run(_profile(options))
    except (BenchError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(code)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    from headway.bench.errors import BenchError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BenchError(f"--prompt-lens is {text!r}; give token counts, as 16,256,1024") from None


async def _profile(options: Any) -> int:
    import asyncio

    from rich.console import Console

    from headway.bench.interrupts import interrupts
    from headway.bench.profile.run import run_profile

    stop, console = asyncio.Event(), Console()
    with interrupts(stop, Console(stderr=True)):
        result = await run_profile(options, console, stop)
    return 130 if stop.is_set() else 0 if result.ok else 1
