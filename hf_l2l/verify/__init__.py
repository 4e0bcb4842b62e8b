"""The compatibility check: tiny random models of many families of transformers, what is checked of each when it runs
layer to layer, the table of the results, and the command `python -m hf_l2l.verify`. It uses the package as any program
would, but for one switch: what goes to the CPU as the execution device is copied, as to an accelerator. Nothing else
of the package uses it."""

from __future__ import annotations
