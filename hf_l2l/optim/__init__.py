"""One step of any separable optimizer, layer by layer, and the check for that; 16-bit state, loss scale, LAMB.

Nothing here knows of models or devices.
"""

from __future__ import annotations
