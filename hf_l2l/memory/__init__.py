"""Memory in bytes, by name: the estimate from shapes, the ledger of what is held on the device and the host, and its
report; limits of the host, and the tensors that training keeps there.

The engine says here what it allocates; nothing that is computed depends on it.
"""

from __future__ import annotations
