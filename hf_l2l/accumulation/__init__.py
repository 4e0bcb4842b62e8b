"""Gradient accumulation folded into the inner loop: the batches of an optimizer step run as one, cut between them.

What decides whether that is the same step, merging of batches, and the comparison with batch by batch. Of the Trainer
it knows what it calls and asks, and no class: those are in `hf`.
"""

from __future__ import annotations
