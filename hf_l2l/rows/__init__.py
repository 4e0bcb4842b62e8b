"""Rows of the device batch in host memory or on disk: the stash of layer inputs, and what passes between layers, a
micro-batch at a time. Nothing here knows what a layer computes."""
