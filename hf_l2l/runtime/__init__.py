"""Devices, streams and waits, page-locked memory, worker threads, autocast state, callbacks at the end of a backward.

Nothing here knows of layers, optimizers or transformers.
"""

from __future__ import annotations
