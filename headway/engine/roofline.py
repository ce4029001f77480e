"""The least time that this machine could take for a step, where `headway calibrate` has measured it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.files import config_folder
from headway.policy.step.plan import StepPlan

if TYPE_CHECKING:  # imported where a machine is known: others need not wait for it when the engine starts
    from headway.cost.attention import Chunk
    from headway.cost.hardware import Hardware
    from headway.cost.precision import Precision
    from headway.cost.shape import ModelShape


class StepRoofline:
    """The roofline of each step's own batch (Williams, Waterman and Patterson, 2009).

    An operation takes the time of its arithmetic at the peak rate or of its memory traffic at the peak bandwidth,
    whichever is longer.

    Raises:
        ValueError: the hardware has no rate for a format of the model.
    """

    def __init__(self, shape: ModelShape, precision: Precision, hardware: Hardware) -> None:
        from headway.cost.efficiency import Efficiency
        from headway.cost.timing import Deployment

        self.machine = hardware.key
        self._deployment = Deployment(shape, precision, hardware, Efficiency.ideal())

    def least_ns(self, plan: StepPlan) -> float:
        """The least nanoseconds for a plan in which something is scheduled."""
        from headway.cost.attention import Chunk, append_alike

        chunks: list[Chunk] = []
        for item in plan.scheduled:
            append_alike(chunks, Chunk(item.num_tokens, item.start, item.samples + item.logit_rows))
        if plan.work.repeated_context:
            chunks = _with_repeated(chunks, plan.work.repeated_context)
        return 1e9 * self._deployment.step(chunks).seconds


def _with_repeated(chunks: list[Chunk], repeated: int) -> list[Chunk]:
    """The same step with its decodes as one chunk of their mean context, of which so many tokens are not read again."""
    from headway.cost.attention import Chunk

    decodes = [chunk for chunk in chunks if (chunk.tokens, chunk.logit_rows) == (1, 1)]
    count = sum(chunk.sequences for chunk in decodes)
    if count < 2:
        return chunks
    context = sum(chunk.context * chunk.sequences for chunk in decodes) // count
    common = min(context, -(-repeated // (count - 1)))
    return [Chunk(1, context, 1, count, common), *(chunk for chunk in chunks if chunk not in decodes)]


def roofline_of(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, scheme: str, cache_dtype: torch.dtype
) -> StepRoofline | None:
    """The roofline of a model on this device; None where nobody has measured the device, or its formats.

    Args:
        scheme: the scheme of the weights' products; "none" for plain numbers.
    """
    files = [*(config_folder() / "hardware").glob("[!.]*.json")]
    hardware = _calibrated(files, device) if files else None
    if hardware is None:
        return None
    from headway.cost.precision import Precision

    cache = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(cache_dtype, "auto")
    try:
        name = str(dtype).removeprefix("torch.")
        precision = Precision.of_engine(name, scheme, cache, shape.head_dim, hardware.kind)
        return StepRoofline(shape, precision, hardware)
    except ValueError:
        return None


def _calibrated(files: list[Path], device: torch.device) -> Hardware | None:
    """This device as it was measured last; files that cannot be read are passed over."""
    import msgspec

    from headway.cost.hardware import Hardware

    machine = msgspec.defstruct("Calibrated", [("hardware", Hardware)])  # of the file, the part that matters here
    kind = "cpu" if device.type == "cpu" else "gpu"
    names = _cpu_names() if kind == "cpu" else torch.cuda.get_device_name(device)
    found: list[tuple[int, str, Hardware]] = []
    for path in files:
        try:
            hardware: Hardware = msgspec.json.decode(path.read_bytes(), type=machine).hardware  # type: ignore[attr-defined]
        except (OSError, ValueError, RecursionError):
            continue
        if hardware.kind == kind and hardware.name in names:
            found.append((path.stat().st_mtime_ns, path.name, hardware))
    return max(found, key=lambda each: each[:2])[2] if found else None


def _cpu_names() -> str:
    """What the system says of the processors, their names among it."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
