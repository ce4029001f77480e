"""A decoder with adapters beside its products. Steps whose rows have none are run by the plain decoder."""

from __future__ import annotations

from headway.kernels.adapters import Adapted, AdapterRows
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
        self.places = AdapterPlaces(plain.config, plain.weights.layers, plain.dtype)
        self.rows = AdapterRows(most_rows, slots, plain.device)
        self._products: dict[int, Adapted] = {}
        for number in range(1 if plain.device.type == "cpu" else len(self.places.placed)):
            self._product(number)
        self.decoder = self._rebuilt()

    def put(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot that no step uses, from any one thread while steps run."""
        known = len(self._products)
        for number, placed in enumerate(self.places.placed):
            matrices = self.places.matrices(placed, adapter)
            if matrices is not None:
                self._product(number).write(slot, *matrices)
            elif number in self._products:
                spec = self.places.spec(placed, self._slots, self.rank, self._plain.device)
                empty = spec.part_of.new_zeros(0, dtype=self._plain.dtype)
                self._products[number].write(
                    slot, empty.view(spec.parts, 0, spec.inputs), empty.view(0, len(spec.part_of))
                )
        if len(self._products) > known:
            self.decoder = self._rebuilt()

    def _product(self, number: int) -> Adapted:
        found = self._products.get(number)
        if found is None:
            placed, plain = self.places.placed[number], self._plain
            spec = self.places.spec(placed, self._slots, self.rank, plain.device)
            found = self._products[number] = plain.kernels.adapted(placed.product, spec, self.rows)
        return found

    def _rebuilt(self) -> Decoder:
        placed = self.places.placed
        products = {id(placed[number].product): each for number, each in self._products.items()}
        return self._plain.with_layers(adapted_layers(self._plain.weights.layers, products))
