"""`headway quantize`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.cli.commands import command, fail
from headway.cli.serve import model_folder
from headway.flags import Flag
from headway.installation import require_engine
from headway.quantize.calibration import Calibration
from headway.quantize.schemes import METHODS, SCHEMES, Recipe

# Keys of flags that a method has no use for.
_UNUSED = {"rtn": ("calibration", "samples", "sample_tokens", "act_order"), "awq": ("act_order",)}


@dataclass(slots=True)
class QuantizeOptions:
    """The options of `headway quantize`."""

    model: Annotated[str, Flag("Folder of a checkpoint, or a Hugging Face id.", positional=True)]
    output: Annotated[Path, Flag("Folder to write; it must not be there yet.", short="-o", common=True)]
    scheme: Annotated[str, Flag("What matrices become.", choices=tuple(SCHEMES), common=True)] = "W4A16"
    method: Annotated[
        str, Flag("To the nearest (rtn), or such that a text's results change least.", choices=METHODS, common=True)
    ] = "rtn"
    group_size: Annotated[
        int | None, Flag("Inputs that share a scale. Default: 128; 32 of W4A8.", min=8, common=True)
    ] = None
    act_order: Annotated[bool, Flag("gptq: begin with the largest inputs.", common=True)] = True
    given: frozenset[str] = frozenset()  # keys of the flags that were given


@command()
def quantize(options: QuantizeOptions, calibration: Calibration) -> None:
    """Write a quantised checkpoint of a model, for Headway and vLLM.

    Its format is compressed-tensors. Ctrl-C ends it and leaves nothing behind.
    """
    require_engine()
    if unused := options.given.intersection(_UNUSED.get(options.method, ())):
        key = min(unused)
        users = " or ".join(each for each in METHODS if key not in _UNUSED.get(each, ()))
        fail(f"--{key.replace('_', '-')} changes nothing with --method {options.method}; it is for {users}")

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from headway.quantize.run import quantize as write

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    console, began = Console(stderr=True), time.monotonic()
    folder = model_folder(options.model)
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("starting", total=1.0)
        try:
            result = write(
                folder,
                options.output,
                Recipe.of(options.scheme, options.method, options.group_size, options.act_order),
                calibration,
                lambda done, what: progress.update(task, completed=done, description=what),
            )
        except ValueError as error:
            progress.stop()
            fail(str(error))
    sys.stdout.write(
        f"{options.output}: {result.matrices} matrices in {options.scheme} by {options.method}; "
        f"{result.before / 1e6:,.1f} MB became {result.after / 1e6:,.1f} MB, "
        f"in {time.monotonic() - began:.0f} s. Serve it: headway serve {options.output}\n"
    )
