"""How long a model takes to load: storage, deserialising, the way to the device, its layout (document 000)."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.hardware import Hardware

# Document 000: PCIe 4.0 drives sustain 3.5 to 7 GB/s of sequential reads.
STORAGE_BYTES_PER_S = 5e9
# The share of its nominal rate that a link to the host sustains one way: document 000 has 25 to 28 of 31.5 GB/s.
HOST_LINK_SHARE = 0.85
# Mapped files are checked and turned into tensors at about the rate of a copy in memory.
DESERIALIZE_BYTES_PER_S = 10e9


@dataclass(frozen=True, slots=True)
class Loading:
    """Seconds of each stage, one after the other, as document 000 lists them; engines overlap some of them."""

    storage_s: float  # reading the checkpoint, once for all devices of a machine
    deserialize_s: float  # making tensors of it
    transfer_s: float  # sending them to the devices, each over its own link; 0 where the device is the host
    layout_s: float  # rewriting the weights on the device in the order that kernels want: read and written once

    @property
    def seconds(self) -> float:
        """All stages one after the other: at most so long."""
        return self.storage_s + self.deserialize_s + self.transfer_s + self.layout_s

    @property
    def least_s(self) -> float:
        """All stages at the same time: at least so long."""
        return max(self.storage_s, self.deserialize_s, self.transfer_s, self.layout_s)


def loading(
    checkpoint_bytes: int, device_bytes: int, hardware: Hardware, storage_bytes_per_s: float = STORAGE_BYTES_PER_S
) -> Loading:
    """The stages of loading a checkpoint of which each device gets `device_bytes`."""
    host = hardware.host_bytes_per_s
    return Loading(
        storage_s=checkpoint_bytes / storage_bytes_per_s,
        deserialize_s=checkpoint_bytes / DESERIALIZE_BYTES_PER_S,
        transfer_s=device_bytes / (host * HOST_LINK_SHARE) if host else 0.0,
        layout_s=2 * device_bytes / hardware.bytes_per_s,
    )
