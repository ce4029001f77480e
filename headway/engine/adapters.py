"""The adapters of an engine: on disk all that were found, in the host's memory some, in slots those of its sequences.

One thread reads folders and fills slots while steps run. A folder is known by the digest of what was in it, and is read
again where the host's memory did not keep it; if it holds something else by then, it is not that adapter any more.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.engine.messages import AdapterFound
from headway.models.config import ModelError
from headway.policy.cache.adapters import AdapterLoad

if TYPE_CHECKING:
    from headway.engine.layout import ModelInput
    from headway.models.adapted import AdaptedModel
    from headway.models.adapters import Adapter
    from headway.models.decoder import Decoder
    from headway.policy.step.plan import ScheduledSequence


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

    Attributes:
        slots: the slot of each known sequence with an adapter, by seq_id.
    """

    def __init__(self, model: AdaptedModel, most_in_memory: int) -> None:
        self._model, self._most = model, most_in_memory
        self._paths: dict[str, Path] = {}  # by digest
        self._kept: OrderedDict[str, Adapter] = OrderedDict()  # only the thread touches it
        self._thread = ThreadPoolExecutor(1, "headway-adapters", initializer=torch.set_num_threads, initargs=(1,))
        self.slots: dict[int, int] = {}

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

    def load(self, wanted: AdapterLoad) -> Future[None]:
        """Begin to fill a slot that no sequence uses; the future's ValueError is one line for the user."""
        return self._thread.submit(self._fill, wanted)

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
