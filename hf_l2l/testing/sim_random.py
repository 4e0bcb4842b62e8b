"""The random generator of the simulated accelerator.

It is separate from the host's, like that of a GPU: code that saves and restores only the host's generator around a
recomputation draws other dropout masks here, as on a GPU. With equal seeds, both generators draw the same numbers.
Every random operation with a host kernel takes a generator, except dropout, which `sim_kernels` implements.
"""

from __future__ import annotations

import torch

GENERATOR = torch.Generator("cpu")
