"""Devices, streams and waits, page-locked memory, worker threads, autocast and generator state, backward callbacks.

Modules here do not know layers, optimizers or transformers.
"""

from __future__ import annotations
