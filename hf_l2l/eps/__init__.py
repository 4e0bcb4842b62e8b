"""The eager param-server: masters, gradient sums and norms, updates, 16-bit copies, votes on non-finite gradients.

This is the host side; device slots and layer calls are in `engine`.
"""

from __future__ import annotations
