"""Many steps of ranks: losses, norms, weights and optimizer state have the bits of one process that accumulates.

Each row is a model in a mode, on the CPU or on simulated devices, with 2, 3 or 4 ranks. The last batch of every third
step has fewer rows, and gradients are clipped.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from rank_cases import MODELS, MODES, assert_same, trained
from rank_pool import RankDiedError, RankPool
from soak import page

STEPS = 50
_NAMES = [name for name in MODELS if name not in ("albert", "dropout")]
_PLACES = [(2, False), (3, False), (4, False), (2, True)]
"""Ranks, and whether their devices are simulated."""
CASES = [
    (name, mode, *_PLACES[(n + m) % len(_PLACES)])
    for (n, name), (m, mode) in product(enumerate(_NAMES), enumerate([*MODES, "eager"]))
]
"""A seed stands for one of them: each model in each mode, in turn at the places."""


def run(seed: int) -> dict[str, Any]:
    """Train with ranks, and in one process."""
    name, mode, size, sim = CASES[seed % len(CASES)]
    options, clips = ({"eps_update": "eager"}, None) if mode == "eager" else (MODES[mode], 0.5)
    given = name, options, size, STEPS, 1, clips
    row = {"model": name, "mode": mode, "ranks": size, "device": "simulated" if sim else "cpu"}
    one, ranks = RankPool(1, sim=sim, within_s=600), RankPool(size, sim=sim, within_s=600)
    try:
        assert_same(ranks.run(trained, *given), one.run(trained, *given)[0])
    except (AssertionError, RankDiedError) as error:
        return row | {"failure": str(error).strip().rpartition("\n")[2] or "other bits"}
    finally:
        one.close()
        ranks.close()
    return row | {"failure": None}


def document(rows: list[dict[str, Any]]) -> str:
    """Which cases have the same bits."""
    words = """
Losses, norms, sums, weights and optimizer state of all ranks against one process that accumulates the
same batches, in the order of the ranks. The last batch of every third step has fewer rows. Gradients
are clipped, but with eager updates."""
    head = ("model", "mode", "ranks", "device", "")
    lines = [(*(row[name] for name in head[:4]), row["failure"] or "the same bits") for row in rows]
    return page(f"{STEPS} steps of ranks", words, head, lines)
