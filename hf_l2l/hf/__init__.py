"""The Hugging Face side: attaching by Accelerate hooks, `L2LTrainer`, its arguments, checkpoints, model checks.

The algorithm is in `engine`.
"""

from __future__ import annotations
