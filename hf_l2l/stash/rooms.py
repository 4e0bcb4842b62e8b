"""`RoomPool`: rooms of one kind of memory, which the next batches use again."""

from __future__ import annotations

from collections.abc import Callable

from hf_l2l.runtime.flat_memory import Room


class RoomPool:
    """Rooms for tensors of the stash, each of which holds one tensor at a time."""

    def __init__(self, new_rooms: Callable[[int, int], list[Room]], first: int) -> None:
        """`new_rooms` makes so many rooms of so many bytes; the first tensor makes `first` of them at once."""
        self._new_rooms = new_rooms
        self._first = first
        self._rooms: list[Room] = []
        self._most = 0
        """The most rooms that have been in use at once."""

    def take(self, num_bytes: int) -> Room:
        """The smallest free room that is large enough, or a new one.

        The stash's lane may copy into it without a wait of its own. A download into it before was made by the lane
        itself. An upload from it has ended when the device computed with its rows, and the lane waits for what the
        device computes now. Rows that are uploaded and not fetched yet keep their room.
        """
        fitting = [room for room in self._rooms if room.num_bytes >= num_bytes and room.is_free]
        if fitting:
            return min(fitting, key=lambda room: room.num_bytes)
        if self._rooms:
            self._rooms += self._new_rooms(1, rounded_up(num_bytes))
        else:
            self._rooms += self._new_rooms(self._first, num_bytes)
        return self._rooms[-1]

    def bytes_for(self, num_bytes: int) -> int:
        """The bytes of all rooms, free or not, that are large enough for a tensor of so many."""
        return sum(room.num_bytes for room in self._rooms if room.num_bytes >= num_bytes)

    def settle(self) -> None:
        """Note how many rooms are in use."""
        self._most = max(self._most, sum(not room.is_free for room in self._rooms))

    def drop_surplus(self) -> None:
        """Free the smallest rooms that are more than were ever in use at once."""
        spare = len(self._rooms) - self._most
        if spare > 0:
            free = sorted((room for room in self._rooms if room.is_free), key=lambda room: room.num_bytes)
            self._rooms = [room for room in self._rooms if room not in free[:spare]]


def rounded_up(num_bytes: int) -> int:
    """The bytes of a room for so many, if there are rooms already: up to a quarter more, in four sizes for each power
    of two. While batches slowly become longer, few of them need larger rooms, which are page-locked in the midst of a
    step."""
    size = 1 << max(0, num_bytes.bit_length() - 3)
    return -(-num_bytes // size) * size
