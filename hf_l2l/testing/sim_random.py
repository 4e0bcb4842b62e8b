"""The random generator of the simulated accelerator.

It is apart from the host's, as a GPU's is: code that saves and restores only the host's generator around a
recomputation draws other dropout masks here, as it would there. Seeded alike, both generators draw the same numbers.
Every random operation that the host has a kernel for takes a generator, but for dropout: `sim_kernels` writes it out.
"""

from __future__ import annotations

import torch

GENERATOR = torch.Generator("cpu")
