"""What is known of a model before it runs: layer stacks, batch dimensions, masters, precision, captured outputs.

When anything runs is decided elsewhere; of transformers, only class names and its collector of outputs are known.
"""

from __future__ import annotations
