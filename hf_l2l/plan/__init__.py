"""What a run will take, before it: bytes by name from shapes alone, and the time of a step by a cost model.

A model runs on tensors without values, so that what each of its parts allocates is known; what the engine does with
these parts is computed from that. Nothing of it is needed to train.
"""

from __future__ import annotations
