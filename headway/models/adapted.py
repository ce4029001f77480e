"""A decoder with adapters beside its products. Steps whose rows have none are run by the plain decoder."""

from __future__ import annotations

from headway.kernels.adapters import Adapted, AdaptedMixture, AdapterRows
from headway.models.adapters import Adapter, AdapterPlaces, adapted_layers
from headway.models.decoder import Decoder


class AdaptedModel:
    """Slots for the adapters of a decoder, and a decoder of the same weights that computes them.

    On a CPU a product gets its slots with the first adapter that changes it, and is plain until then; the first product
    has them at once, so that kernels are compiled. Elsewhere all have them, as memory is divided at the start.

    Args:
        slots: how many adapters steps may have.
        rank: the greatest of an adapter.
        most_rows: the most tokens of a step.

    Attributes:
        decoder: runs steps that have adapters.
        rows: says of each step which rows have which.
    """

    def __init__(self, plain: Decoder, slots: int, rank: int, most_rows: int) -> None:
        self._plain, self._slots, self.rank = plain, slots, rank
        shared = plain.weights.shared
        part = None if shared is None else shared.part
        self.places = AdapterPlaces(plain.config, plain.own_layers, plain.dtype, part)
        self.rows = AdapterRows(most_rows, slots, plain.device)
        self._products: dict[int, Adapted] = {}
        self._mixtures: dict[int, AdaptedMixture] = {}
        for number in range(1 if plain.device.type == "cpu" else len(self.places.placed)):
            self._product(number)
        self.decoder = self._rebuilt()

    def put(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot that no step uses, from any one thread while steps run."""
        known = len(self._products) + len(self._mixtures)
        for number, placed in enumerate(self.places.placed):
            down, up = self.places.matrices(placed, adapter)
            if len(up) or number in self._products:
                self._product(number).write(slot, down, up)
        for number, experts in enumerate(self.places.placed_experts):
            matrices = self.places.matrices_of_experts(experts, adapter)
            if any(up.shape[1] for _, up in matrices) or number in self._mixtures:
                self._mixture(number).write(slot, matrices)
        if len(self._products) + len(self._mixtures) > known:
            self.decoder = self._rebuilt()

    def _product(self, number: int) -> Adapted:
        found = self._products.get(number)
        if found is None:
            placed, plain = self.places.placed[number], self._plain
            spec = self.places.spec(placed, self._slots, self.rank, plain.device)
            found = self._products[number] = plain.kernels.adapted(placed.product, spec, self.rows)
        return found

    def _mixture(self, number: int) -> AdaptedMixture:
        found = self._mixtures.get(number)
        if found is None:
            placed = self.places.placed_experts[number]
            specs = self.places.specs_of_experts(placed, self._slots, self.rank, self._plain.device)
            found = self._mixtures[number] = placed.mixture.adapted(specs, self.rows)
        return found

    def _rebuilt(self) -> Decoder:
        products: dict[int, Adapted | AdaptedMixture] = {
            id(self.places.placed[number].product): each for number, each in self._products.items()
        }
        experts = self.places.placed_experts
        products |= {id(experts[number].mixture): each for number, each in self._mixtures.items()}
        return self._plain.with_layers(adapted_layers(self._plain.own_layers, products))
