"""Reports on a run: summary, timeline, trace file, stall times, memory estimate and limits, tensors on the host.

The engine records its timeline here; nothing that is computed depends on it.
"""

from __future__ import annotations
