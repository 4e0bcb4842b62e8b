"""Layer-to-layer execution: the relay (the algorithm), calls of the model and its layers, splitting.

Needs torch only: nothing here imports transformers or accelerate.
"""

from __future__ import annotations
