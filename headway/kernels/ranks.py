"""What the ranks of a model, which several processes share, say to each other: the interface, and who has what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.kernels.interface import AddRMSNorm, Linear, Mixture, RMSNorm


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model a rank has."""

    # number, count: its number among the ranks that share each layer, and how many these are.
    number: int = 0
    count: int = 1
    whole_experts: bool = False  # experts are dealt out to them whole (expert parallelism), instead of each being cut
    # stage, stages: the number of its stage, which has some of the layers, and how many stages there are.
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, rank: int, count: int, whole_experts: bool, stages: int) -> Share:
        """The share of a rank. Those of the last stage come first, since rank 0 has the logits."""
        return cls(rank % count, count, whole_experts, stages - 1 - rank // count, stages)

    @property
    def is_last(self) -> bool:
        """Whether its layers are the last ones."""
        return self.stage == self.stages - 1


class Connection(NamedTuple):
    """A TCP connection with a rank on another machine."""

    descriptor: int
    # That rank takes, for all of its machine, what this one writes for those that share its layers.
    receives: bool = False
    has_first: bool = False  # its machine has the first of these


class Ranks(Protocol):
    """What a process that has a part of a model says to those with the other parts.

    All ask for the same sums in the same order, and get the same bits. Layers that follow each other have different
    places, 0 to 3.
    """

    share: Share

    def summed(self, linear: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        """A linear layer of which each rank has the columns of some inputs: the sum of all ranks, rounded once."""

    def summed_layer(self, layer: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        """The sum of what a layer gives in each rank, where that is rounded before."""

    def part(self, linear: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        """Such a layer as in `summed`, that gives this rank's part, for `joined`."""

    def part_of_layer(self, layer: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        """Such a layer as in `summed_layer`, that gives this rank's part, for `joined`."""

    def joined(self, add_rms_norm: AddRMSNorm) -> AddRMSNorm:
        """What Kernels.add_rms_norm gives for the sum of all parts, of this rank's part; also for long steps.

        A rank may then know only some rows of the residual stream.
        """

    def rms_norm(self, place: int) -> RMSNorm:
        """What Kernels.rms_norm gives for rows of which each rank has some elements, equally many."""

    def dealt(self, experts: Mixture, count: int) -> Mixture:
        """Experts of which each rank has equally many, of `count` to choose from: what those of this rank add."""

    def hand_on(self, residual: Tensor) -> None:
        """Give the residual stream [T, hidden] to the next stage."""

    def received(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """What stands for the embedding behind the first stage: token ids [T] -> what the stage before hands on."""

    def embedding(self, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """An embedding [T] int64 -> [T, hidden]; `rows` takes those of this rank's tokens, by their number here."""

    def head(self, linear: Linear) -> Linear:
        """The output layer, of which each rank has its own tokens: [R, hidden] -> [R, vocab] float32 on rank 0.

        Logits are good until the next call. On other ranks they are of no use.
        """
