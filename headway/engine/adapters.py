"""The adapters of an engine: on disk all that were found, in the host's memory some, in slots those of its sequences.

One thread reads folders and fills slots while steps run. A folder is known by the digest of what was in it, and is read
again where the host's memory did not keep it; if it holds something else by then, it is not that adapter any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.engine.executor import EngineFault
from headway.engine.hooks import StepHooks
from headway.engine.messages import AdapterFound
from headway.engine.unready import POLL_MS
from headway.models.adapted import AdaptedModel
from headway.models.config import ModelError
from headway.policy.cache.adapters import AdapterLoad
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler

if TYPE_CHECKING:
    from headway.engine.config import EngineConfig
    from headway.engine.layout import ModelInput
    from headway.models.adapters import Adapter
    from headway.models.decoder import Decoder
    from headway.policy.step.plan import ScheduledSequence


def adapters_of(config: EngineConfig, model: Decoder, tell: Callable[[str, str, int], None] | None = None) -> Adapters:
    """What serves the adapters of a model, or of this rank's part of it. See Adapters."""
    most_rows = config.batched_tokens(model.device.type)
    adapted = AdaptedModel(model, config.lora_slots, config.max_lora_rank, most_rows)
    return Adapters(adapted, config.max_cpu_loras or 4 * config.max_loras, tell)


def found_in(reading: Future[Adapter], name: str, path: str) -> AdapterFound:
    """What has come of reading a folder, which is waited for."""
    try:
        adapter = reading.result()
    except ValueError as error:
        return AdapterFound(name, path, error=f"{name}: {error}")
    return AdapterFound(name, path, adapter.digest, adapter.rank, adapter.num_bytes)


class Adapters:
    """The adapters that sequences may have.

    Args:
        model: has the slots.
        most_in_memory: how many adapters the host's memory keeps beside the slots.
        tell: has the other ranks fill a slot, by an adapter's digest and path; None: there are none.

    Attributes:
        slots: the slot of each known sequence with an adapter, by seq_id.
        loading: adapters on the way into slots, by digest.
    """

    def __init__(
        self, model: AdaptedModel, most_in_memory: int, tell: Callable[[str, str, int], None] | None = None
    ) -> None:
        self._model, self._most, self._tell = model, most_in_memory, tell
        self._paths: dict[str, Path] = {}  # by digest
        self._kept: OrderedDict[str, Adapter] = OrderedDict()  # only the thread touches it
        self._thread = ThreadPoolExecutor(1, "headway-adapters", initializer=torch.set_num_threads, initargs=(1,))
        self.slots: dict[int, int] = {}
        self.loading: dict[str, Future[None]] = {}

    def find(self, path: str) -> Future[Adapter]:
        """Begin to read a folder; the future's ValueError is one line for the user."""
        return self._thread.submit(self._read, Path(path))

    def _read(self, path: Path) -> Adapter:
        adapter = self._model.places.read(path, self._model.rank)
        self._paths[adapter.digest] = path
        self._keep(adapter)
        return adapter

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.digest] = adapter
        self._kept.move_to_end(adapter.digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def knows(self, digest: str) -> bool:
        """Whether a folder with this adapter was found."""
        return digest in self._paths

    def begin(self, loads: list[AdapterLoad]) -> None:
        """Begin to fill slots that no sequence uses, and take out what has begun."""
        while loads:
            wanted = loads.pop(0)
            self.loading[wanted.digest] = self._thread.submit(self._fill, wanted)
            if self._tell is not None:
                self._tell(wanted.digest, str(self._paths[wanted.digest]), wanted.slot)

    def fill(self, digest: str, path: str, slot: int) -> Future[None]:
        """Begin to fill a slot, as another rank says."""
        self._paths[digest] = Path(path)
        return self._thread.submit(self._fill, AdapterLoad(digest, slot))

    def take_loaded(self) -> list[tuple[str, str]]:
        """The loads that have ended: the digest, and one line for the user where the adapter could not be had.

        Raises:
            EngineFault: one has failed, and no adapter is at fault.
        """
        ended = [(digest, self.loading.pop(digest)) for digest in list(self.loading) if self.loading[digest].done()]
        for _, load in ended:
            error = load.exception()
            if error is not None and not isinstance(error, ValueError):
                raise EngineFault(f"an adapter could not be loaded: {error!r}") from error
        return [(digest, str(load.exception() or "")) for digest, load in ended]

    def _fill(self, wanted: AdapterLoad) -> None:
        adapter = self._kept.get(wanted.digest)
        if adapter is None:
            path = self._paths[wanted.digest]
            adapter = self._read(path)
            if adapter.digest != wanted.digest:
                raise ModelError(f"adapter {path}: the folder has changed since it was loaded; load it again")
        self._keep(adapter)
        self._model.put(wanted.slot, adapter)

    def drop(self, digest: str) -> None:
        """Let the host's memory forget an adapter. It stays where sequences have it, and may be read again for them."""
        self._thread.submit(self._kept.pop, digest, None)

    def forget(self, seq_id: int) -> None:
        """A sequence has ended or was preempted."""
        self.slots.pop(seq_id, None)

    def decoder_for(self, step: ModelInput, scheduled: list[ScheduledSequence]) -> Decoder | None:
        """The decoder of a step, told which rows have which adapter; None where none has any."""
        slots = [self.slots.get(item.seq_id, -1) for item in scheduled]
        if max(slots) < 0:
            return None
        rows = [slot for slot, item in zip(slots, scheduled, strict=True) for _ in item.token_ids]
        self._model.rows.fill(rows, len(step.token_ids))
        return self._model.decoder

    def empty_decoder(self, step: ModelInput) -> Decoder:
        """The decoder of a step in which no row has an adapter, for what is captured before there are any."""
        self._model.rows.fill([], len(step.token_ids))
        return self._model.decoder


class AdapterLoads(StepHooks):
    """Fills the slots that the scheduler chooses, while steps run."""

    allows_ahead = True

    def __init__(self, adapters: Adapters, scheduler: Scheduler) -> None:
        assert scheduler.sequences.slots is not None
        self._adapters, self._scheduler, self._slots = adapters, scheduler, scheduler.sequences.slots

    def ends(self, now: int) -> Iterable[tuple[Sequence, str]]:
        """Tell the scheduler which adapters are in their slots; those end who wait for one that cannot be had."""
        for digest, error in self._adapters.take_loaded():
            for sequence in self._scheduler.adapter_loaded(digest, now, not error):
                yield sequence, error

    def planned(self, plan: StepPlan, now: int) -> None:
        """Begin the loads. Where nothing runs, the next step comes when one may have ended."""
        self._adapters.begin(self._slots.loads)
        if self._adapters.loading and not plan.scheduled:
            plan.wait_until_ns = now + POLL_MS * 1_000_000
