"""The EPS of the ranks of a host: one set of masters, gradient sums and optimizer state for all of them.

Each rank is its own process with its own batch, device and relay; `shared_eps` has what they do together. Files here
are variants of those of the same names in `eps`.
"""
