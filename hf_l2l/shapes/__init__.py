"""A model run on tensors without values, so that what each of its parts allocates and computes is known before the run.

Nothing of the engine is needed for it, and nothing is decided here.
"""

from __future__ import annotations
