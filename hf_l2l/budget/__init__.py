"""A budget of device memory: for which batch it is planned, with what, and what was measured of the plan. How options
are chosen is `plan`."""

from __future__ import annotations
