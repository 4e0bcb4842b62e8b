"""The random generator of the simulated accelerator.

It is apart from the host's, as a GPU's is: code that saves and restores only the host's generator around a
recomputation draws other dropout masks here, as it would there. Seeded alike, both generators draw the same numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

GENERATOR = torch.Generator("cpu")
_swap_lock = threading.Lock()


@contextlib.contextmanager
def drawing_from_sim() -> Iterator[None]:
    """Let the host's default generator be the device's, for an operation that takes no generator.

    Such operations are rare; the lock keeps two of them on two threads apart. A draw on the host by another thread in
    the meantime would be lost, which torch offers no way to rule out.
    """
    with _swap_lock:
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(GENERATOR.get_state())
        try:
            yield
        finally:
            GENERATOR.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(host)
