"""The program `hf-l2l`: a module for each command, with its flags, its text and its JSON, and `main`, which finds the
command and gives the exit status. What commands do is in the folders below; nothing of the package imports this one.
"""

from __future__ import annotations
