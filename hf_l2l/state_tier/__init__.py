"""Masters and optimizer state on disk, for models whose state host memory does not hold (`state_tier="disk"`).

Layer by layer they pass through a window of host memory of bounded size, in the order of sweeps and updates
(arXiv:2106.02679, section 8.2, state on slower tiers).
"""
