"""Reports on a run: summary, timeline, trace file, stall times.

The engine records its timeline here; nothing that is computed depends on it.
"""

from __future__ import annotations
