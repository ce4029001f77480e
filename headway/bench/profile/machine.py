"""What this machine can do at most: measured by a process of its own, or read from a file."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.bench.profile.local_server import child_options
from headway.calibration.peaks import MachinePeaks
from headway.load.errors import BenchError

if TYPE_CHECKING:
    from headway.bench.profile.model import ProfiledModel
    from headway.bench.profile.options import ProfileOptions


async def peaks_for(
    options: ProfileOptions, model: ProfiledModel, on_line: Callable[[str], None] = lambda line: None
) -> MachinePeaks:
    """The peaks that a model's passes are compared with, from --calibration or measured now.

    Raises:
        BenchError: there are none of the model's products in the file, or measuring failed.
    """
    if options.calibration is None:
        return await measure_peaks(options.device, model.products, options.num_threads, on_line)
    peaks = read_peaks(options.calibration)
    if model.products not in peaks.gemm_flops_per_s:
        known = ", ".join(peaks.gemm_flops_per_s)
        raise BenchError(
            f"--calibration {options.calibration} has measured products in {known}, but the model runs in "
            f"{model.products}; measure again with --dtype {model.products}"
        )
    return peaks


def read_peaks(path: Path) -> MachinePeaks:
    """A calibration from a file. Raises BenchError when there is none in it."""
    try:
        return MachinePeaks.from_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"--calibration {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(
            f"--calibration {path} is not the output of `python -m headway.calibration` ({error}); make it again"
        ) from None


async def measure_peaks(
    device: str, dtype: str, threads: int | None, on_line: Callable[[str], None] = lambda line: None
) -> MachinePeaks:
    """Run the calibration; it takes some seconds and all of the machine.

    Raises:
        BenchError: it failed.
    """
    arguments = ["--device", device, "--dtype", dtype, *(["--threads", str(threads)] if threads is not None else [])]
    code, last, text = await run_calibration(arguments, on_line)
    if code != 0:
        raise BenchError(f"measuring the machine failed with code {code}: {last.removeprefix('headway: ')}")
    return MachinePeaks.from_json(text)


async def run_calibration(arguments: Sequence[str], on_line: Callable[[str], None]) -> tuple[int, str, bytes]:
    """Run `python -m headway.calibration` in a process of its own, which never outlives us.

    Args:
        on_line: hears each line of its progress.

    Returns:
        Its exit code, its last words, and what it printed.
    """
    command = [sys.executable, "-m", "headway.calibration", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **child_options()
    )
    assert process.stdout is not None and process.stderr is not None
    last = "it said nothing"
    try:
        answer = asyncio.create_task(process.stdout.read())
        async for raw in process.stderr:
            last = raw.decode(errors="replace").strip() or last
            on_line(last)
        return await process.wait(), last, await answer
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
        await process.wait()
