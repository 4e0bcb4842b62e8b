"""`attach_l2l` and `detach_l2l` by the path that pickles of attached models name; they live in `hf_l2l.hf.attach`."""

from __future__ import annotations

from hf_l2l.hf.attach import attach_l2l, detach_l2l
from hf_l2l.hf.hooks import bound_method

__all__ = ["attach_l2l", "bound_method", "detach_l2l"]
