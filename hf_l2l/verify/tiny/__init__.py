"""The tiny copy of a model that somebody names: its config with tiny sizes and random weights, and a batch for its
head. It begins with a family of the same type, if there is one, and is checked as families are.
"""

from __future__ import annotations
