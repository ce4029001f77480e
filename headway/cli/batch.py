"""`headway batch`."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headway.bundled import NAME
from headway.cli.commands import command, fail
from headway.cli.serve import model_folder
from headway.engine.config import EngineConfig
from headway.flags import Flag
from headway.installation import require_engine

_flag = functools.partial(Flag, panel="Batch")


@dataclass(slots=True)
class BatchOptions:
    """The options of `headway batch`."""

    source: Annotated[
        Path, _flag("File with one request per line, as for OpenAI's batches.", positional=True, metavar="INPUT")
    ]
    output: Annotated[Path, _flag("File for the answers, in the order of the requests.", short="-o", common=True)]
    model: Annotated[
        str | None,
        _flag("Folder of a checkpoint, or a Hugging Face id; default: the bundled model.", short="-m", common=True),
    ] = None
    served_model_name: Annotated[str | None, _flag("Model name in the requests. Default: MODEL.", common=True)] = None
    url: Annotated[str | None, _flag("Send the requests to the server at this address.", common=True)] = None
    api_key: Annotated[
        str | None, _flag("API key of that server.", envvar=("HEADWAY_API_KEY", "OPENAI_API_KEY"), common=True)
    ] = None
    service_class: Annotated[
        str | None, _flag("Service class of the requests, such as offline, if the server is Headway.", common=True)
    ] = None
    overwrite: Annotated[bool, _flag("Replace the file of answers if it exists.", common=True)] = False
    max_concurrency: Annotated[int, _flag("Maximum requests at that server at once.", min=1, common=True)] = 64


@command()
def batch(options: BatchOptions, engine: EngineConfig) -> None:
    """Answer a file of requests, with its own engine or a running server.

    After an interruption, the same command continues.
    """
    require_engine()

    from headway.batch import BatchFailed
    from headway.server.batches.store import StoreError
    from headway.text.tokenizer_files import TextError

    if options.url is not None and (options.model or options.served_model_name):
        fail("--url uses the model of the server; leave out --model and --served-model-name")
    if options.output.resolve() == options.source.resolve():
        fail(f"{options.output} has the requests; choose another file for the answers")
    if options.output.exists() and not options.overwrite:
        fail(f"{options.output} already exists; choose another file, or replace it with --overwrite")
    try:
        asyncio.run(_run(options, engine))
    except (BatchFailed, StoreError, TextError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("headway: interrupted; give the same command again to continue", file=sys.stderr)
        raise typer.Exit(130) from None


async def _run(options: BatchOptions, engine: EngineConfig) -> None:
    from rich.console import Console

    from headway.batch import check_files, first_failures, own_engine, run_batch, server_at
    from headway.server.startup_display import StartupDisplay

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        if options.url is not None:
            at = server_at(options.url, options.api_key, options.service_class, options.max_concurrency, console)
            by = await stack.enter_async_context(at)
        else:
            name = options.served_model_name or options.model or NAME
            check_files(options.source, options.output, [name])
            engine.model = str(model_folder(NAME if options.model is None else options.model))
            display = StartupDisplay(name, time.monotonic_ns(), console)
            display.start()
            try:
                by = await stack.enter_async_context(own_engine(engine, name, display.on_progress))
            finally:
                display.stop()
        done = await run_batch(options.source, options.output, by, console)
    counts, tokens = done.request_counts, done.usage.output_tokens
    seconds = time.monotonic() - began
    print(f"{options.output}: {counts.completed} answered, {counts.failed} failed; {tokens} tokens in {seconds:.1f} s")
    failures = first_failures(options.output) if counts.failed else []
    for said in failures:
        console.print(f"failed: {said}", markup=False)
    if counts.failed > len(failures):
        console.print(f"{counts.failed - len(failures)} more failed; {options.output} has their errors", markup=False)
