"""The compatibility check: tiny random models of many families of transformers, what is checked of each when it runs
layer to layer, the table of the results, and the command `python -m hf_l2l.verify`. It uses the package as any program
would, and nothing else of the package uses it."""

from __future__ import annotations
