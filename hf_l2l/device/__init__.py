"""What each executing device has: slots for weights and gradient sums, lanes, and streams that copy to other devices.

Needs torch only: nothing here imports transformers or accelerate.
"""

from __future__ import annotations
