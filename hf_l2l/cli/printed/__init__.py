"""What commands print and draw that is too long for their own modules: text for people, one JSON object for
programs, and pictures."""

from __future__ import annotations
