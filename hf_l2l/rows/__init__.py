"""Rows of the device batch that are in host memory for a while, as tensors that models take for tensors of the device,
and what is computed of them a micro-batch at a time. Nothing here knows where the memory comes from."""
