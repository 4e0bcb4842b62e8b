"""What a run will take, before it: bytes by name from shapes alone, the time of a step by a cost model, and the plan
that a budget of device memory allows. Nothing of it is needed to train without a budget."""

from __future__ import annotations
