"""A step between its launch and its end: what the device still has of it, and when it is done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from headway.engine.executor import StepOutcome
from headway.kernels.host import to_device
from headway.kernels.interface import RoutingCounts
from headway.policy.step.plan import ScheduledSequence, SequenceState

if TYPE_CHECKING:
    from headway.engine.grammars import Grammars


class Drawn:
    """The tokens of a step on the device, where the next step takes them from, and on their way to the host.

    Args:
        ids: [S] int64 on the device, below 0 where there is no token.
        seq_ids: whose they are.
    """

    def __init__(self, ids: Tensor, seq_ids: list[int]) -> None:
        self._ids, self._seq_ids = ids, seq_ids
        self._host = torch.empty(len(ids), dtype=ids.dtype, pin_memory=ids.device.type == "cuda")
        self._host.copy_(ids, non_blocking=True)

    def fill(self, token_ids: Tensor, scheduled: list[ScheduledSequence]) -> None:
        """Write the tokens of these sequences, which follow those that they were drawn for, to the first places."""
        wanted, ids = [item.seq_id for item in scheduled], self._ids
        if wanted != self._seq_ids:
            places = {seq_id: place for place, seq_id in enumerate(self._seq_ids)}
            ids = ids[to_device(np.array([places[seq_id] for seq_id in wanted]), ids.device)]
        token_ids[: len(wanted)] = ids.clamp(min=0)

    def read(self) -> list[int]:
        """The tokens, once the device has ended the step."""
        return self._host.tolist()


class DeviceTimer:
    """Times the end of the forward pass and the end of sampling on a GPU without an extra wait for it."""

    def __init__(self) -> None:
        self._computed, self._sampled = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._has_end = False
        self._computed.record()

    def end(self) -> None:
        """All that belongs to sampling is on its way to the device."""
        self._sampled.record()
        self._has_end = True

    def stop(self) -> tuple[int, int]:
        """(forward done, sampling done) on the host's clock, in nanoseconds; without end(), it is now."""
        if not self._has_end:
            self.end()
        self._sampled.synchronize()
        now = time.monotonic_ns()
        return now - int(self._computed.elapsed_time(self._sampled) * 1e6), now


class ComputedStep(msgspec.Struct, gc=False):
    """A step whose logits are there, or will be."""

    scheduled: list[ScheduledSequence]
    sequences: list[SequenceState]
    outcome: StepOutcome  # with the time of the launch
    logits: Tensor | None  # None where nothing is sampled
    grammars: Grammars | None  # None where no sequence has one
    routed: RoutingCounts | None  # what was counted of mixtures before; None where there are none
    timer: DeviceTimer | None  # of a GPU; None elsewhere, where computed_ns and sampled_ns are the times
    computed_ns: int
    sampled_ns: int = 0
    drawn: Drawn | None = None  # its tokens, where they were not read yet
