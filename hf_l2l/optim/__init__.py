"""One step of any separable optimizer, layer by layer, and the check for that; 16-bit state, loss scale, LAMB.

Modules here know neither models nor devices.
"""

from __future__ import annotations
