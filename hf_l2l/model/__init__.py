"""Properties of a model before it runs: layer stacks, batch dimensions, masters, precision, captured outputs.

Modules here schedule nothing; of transformers, they know only class names and its collector of outputs.
"""

from __future__ import annotations
