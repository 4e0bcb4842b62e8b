"""Items: gradients that the ranks add up at once, and the order in which a backward makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.runtime.flat_memory import Layout


class Item:
    """The gradients of a layer, of a large parameter in no layer, or of all small ones in no layer."""

    def __init__(self, number: int, name: str, masters: Sequence[Master], *, is_layer: bool) -> None:
        self.number = number
        """The same on all ranks."""
        self.name = name
        self.masters = list(masters)
        """Those that are trained; a tied one is in the item of its first layer."""
        self.is_layer = is_layer
        with without_interception():
            self.layout = Layout(m.parameter for m in masters)
        """Of the gradients of one rank."""
        self.calls, self.arrivals = 0, 0
        """Counts of a backward: calls in graphs that may give gradients, and calls whose gradients arrived."""
        self.has_landed = False
        """Whether its gradients have been given to the others in this backward."""

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The byte ranges of its layout that fit into so many bytes each."""
        if self.layout.num_bytes <= num_bytes:
            yield 0, self.layout.num_bytes
            return
        assert len(self.masters) == 1, "an item of several parameters has room as a whole"
        end = self.layout.pieces[0].stop
        for start in range(0, end, num_bytes):
            yield start, min(start + num_bytes, end)


class Items:
    """The items of one model, and their order."""

    def __init__(self, masters: Masters) -> None:
        trained = [m for m in masters.on_host() if m.parameter.requires_grad]
        self.all: list[Item] = []
        self.of: dict[Master, Item] = {}
        self._of_unit: dict[MasterUnit, list[Item]] = {}
        large = [m for m in trained if m.layer_number == 0 and m.is_large]
        small = [m for m in trained if m.layer_number == 0 and not m.is_large]
        layers: dict[int, list[Master]] = {}
        for master in trained:
            if master.layer_number:
                layers.setdefault(master.layer_number, []).append(master)
        for number, group in layers.items():
            unit = masters.layer_units[number - 1]
            place_of = {master: place for place, master in enumerate(unit.masters)}
            # As the layer has them, in whose order its gradients come as one.
            self._add(unit.name, sorted(group, key=lambda m: place_of[m]), is_layer=True)
        for master in large:
            self._add(master.name, [master], is_layer=False)
        places = {master: place for place, master in enumerate(trained)}
        # A backward mostly comes to the last parameters first. Small ones of no layer come one by one, in any order.
        self.order = sorted(self.all, key=lambda item: -places[item.masters[0]])
        """In which the gradients of a backward are expected."""
        self.small: Item | None = None
        """All small parameters of no layer, which come last."""
        if small:
            self.small = self._add("small parameters in no layer", small, is_layer=False)
            self.order.append(self.small)

    def _add(self, name: str, masters: list[Master], *, is_layer: bool) -> Item:
        item = Item(len(self.all), name, masters, is_layer=is_layer)
        self.all.append(item)
        self.of.update(dict.fromkeys(masters, item))
        return item

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest item that cannot be taken in pieces; at least 64 KiB."""
        return max([2**16, *(item.layout.num_bytes for item in self.all if item.is_layer or item is self.small)])

    def of_unit(self, unit: MasterUnit) -> list[Item]:
        """The items with the trained masters of a layer: one, unless it shares parameters with others."""
        found = self._of_unit.get(unit)
        if found is None:
            of = self.of
            found = self._of_unit[unit] = list(dict.fromkeys(of[m] for m in unit.trained_masters if m in of))
        return found

    def reorder(self, numbers: Sequence[int]) -> None:
        """Expect these items in this order; others keep their places, for they may come again."""
        known = set(numbers)
        following = iter(numbers)
        self.order = [self.all[next(following)] if item.number in known else item for item in self.order]
