"""`Passed`: which layers take and return the same memory, in one forward of a model that was traced."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from hf_l2l.shapes.pieces import TracedCall


class Passed:
    """The memory of arguments and results of layer calls, found once."""

    def __init__(self, calls: Sequence[TracedCall]) -> None:
        self.uses: dict[int, list[int]] = {}
        """Memory of an argument -> the calls that take it."""
        self.first: dict[int, tuple[int, int]] = {}
        """Memory of an argument -> the first call that takes it, and its number there."""
        self.returned: set[int] = set()
        """Memory of arguments that layers return as they are: what the next one is given is another tensor."""
        self._gradients: dict[int, int] = {}
        """Memory of an argument -> the bytes of its gradient; 0 if it has none."""
        self._made_at: dict[int, int] = {}
        """Memory -> the call that makes it."""
        self._returned_at: dict[int, set[int]] = {}
        """Memory -> the calls that return it."""
        self._waiting: dict[int, list[tuple[int, int, int]]] = {}
        """Per call: memory, with the bytes of a single layer's gradient, and of a sum."""
        for number, call in enumerate(calls):
            for i, argument in enumerate(call.arguments):
                self.uses.setdefault(argument.memory, []).append(number)
                self.first.setdefault(argument.memory, (number, i))
                self._gradients.setdefault(argument.memory, argument.num_bytes if argument.needs_gradient else 0)
            for output in call.outputs:
                self._returned_at.setdefault(output.memory, set()).add(number)
                if output.is_new:
                    self._made_at[output.memory] = number
                else:
                    self.returned.add(output.memory)

    def gradients_waiting(self, number: int, of: Container[int]) -> tuple[int, int]:
        """Bytes of gradients of what layers read that wait, in the backward of call `number`, for those of earlier
        layers that read it: those of a single layer, and the sums of those of several. Of the memory in `of` alone. Of
        what this call and later ones return, the gradients are those of their outputs, and do not count here."""
        if number not in self._waiting:
            self._waiting[number] = list(self._waiting_at(number))
        waiting = [each for each in self._waiting[number] if each[0] in of]
        return sum(single for _, single, _ in waiting), sum(of_several for _, _, of_several in waiting)

    def _waiting_at(self, number: int) -> Iterator[tuple[int, int, int]]:
        for memory, uses in self.uses.items():
            count = sum(use > number for use in uses)
            returned = self._made_at.get(memory, -1) >= number or number in self._returned_at.get(memory, ())
            size = self._gradients[memory]
            if count and size and not returned:
                yield memory, size if count == 1 else 0, size if count > 1 else 0
