"""Layer-to-layer execution: the relay (the algorithm), layer calls, splitting, non-layer modules, stash, slots.

Needs torch only: nothing here imports transformers or accelerate.
"""

from __future__ import annotations
