"""The noise scale of the gradient, from the gradients of micro-batches (`l2l_noise_scale`), and batches that grow with
it. "An Empirical Model of Large-Batch Training" (arXiv:1812.06162); arXiv:2106.02679, section 8.1.
"""

from __future__ import annotations
