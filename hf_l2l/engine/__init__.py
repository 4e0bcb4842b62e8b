"""Layer-to-layer execution: the relay (the algorithm), layer calls, splitting, the shell, stash, slots.

Torch only: nothing here imports transformers or accelerate.
"""

from __future__ import annotations
