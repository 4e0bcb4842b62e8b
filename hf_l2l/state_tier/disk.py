"""`Disk`: reads segments ahead and frees their memory, on threads of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from hf_l2l.state_tier.files import Segment


class Transfer(Protocol):
    """What a disk has been asked for."""

    def done(self) -> bool:
        """Whether it is over."""

    def result(self) -> object:
        """Wait until it is over.

        Raises:
            OSError: if the disk has failed.
        """


class Disk:
    """One thread reads, another one writes, so that what is needed next does not wait for what has changed."""

    def __init__(self) -> None:
        self._reading = ThreadPoolExecutor(1, "hf_l2l state reads")
        self._writing = ThreadPoolExecutor(1, "hf_l2l state writes")

    def read(self, segment: Segment) -> Transfer:
        """Begin to read a segment."""
        return self._reading.submit(segment.read)

    def leave(self, segment: Segment, *, is_changed: bool) -> Transfer:
        """Begin to free the memory of a segment, which is written first if it `is_changed`."""
        return self._writing.submit(partial(segment.leave, is_changed=is_changed))

    def close(self) -> None:
        """Wait for all transfers, and end the threads."""
        self._reading.shutdown()
        self._writing.shutdown()
