"""The picture of a run: what it logged, read from the state of its Trainer or from files; and how that is drawn, with
matplotlib, which nothing else of the package needs.
"""

from __future__ import annotations
