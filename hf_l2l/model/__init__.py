"""Properties of a model before it runs: layer stacks, units, batch dimensions, precision, captured outputs.

Modules here schedule nothing; of transformers, they know only class names and its collector of outputs.
"""

from __future__ import annotations
