"""What the hardware reaches: rates of the link between host and device, of host memory, of the optimizer on the host
and of matrix products, measured within a few seconds, and the record that holds them.

Modules here know torch and `runtime` only, no models, so that whatever plans or reports may use them.
"""

from __future__ import annotations
