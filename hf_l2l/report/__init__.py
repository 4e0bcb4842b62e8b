"""What a run says of itself: timeline and trace file, wait times, memory before the run, tensors on the host.

The engine runs without it.
"""

from __future__ import annotations
