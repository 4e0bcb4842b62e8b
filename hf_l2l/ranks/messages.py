"""The kinds of messages among ranks, and in which order a rank sends them."""

from __future__ import annotations

HEARTBEAT = 0
"""The rank is alive."""
LEAVING = 1
"""It has ended its part in order."""
FAILED = 2
"""It cannot continue; the content is the reason."""
BARRIER = 3
"""It has come to a point that all come to."""
MEMORY = 4
"""It asks for shared memory; the content says for what."""
LANDED = 5
"""Its gradients of an item are in its slot; the content has bits for each parameter."""
LATE = 6
"""It is at the end of a backward; the content names items of which it has more gradients."""
REDUCED = 7
"""It has added its share of all gradients of a backward."""
VOTE = 8
"""It is against this step, or not."""
STEP = 9
"""It has come to `optimizer.step()`; the content is what it has counted since the last one."""
UPDATED = 10
"""It has made one of its updates; the content is what is new of the optimizer's state."""

TOLD = 13
"""What it has to say where all ranks say something."""
STATE = 14
"""How many bytes of the optimizer's state it has received from other hosts."""
OPTIONS = 12
"""Its options and parameters, which all ranks must have."""

SUMMED = 15
"""Its share of an item, which it adds on its device, is in host memory."""

SECURED = 16
"""It has written values to a checkpoint, or copied them; the content is a number of what was written together."""

_IN_TURN = (BARRIER, MEMORY, LATE, REDUCED, VOTE, STEP, TOLD, STATE)
"""Those that the program's own thread waits for, one after the other. Another one waits for LANDED and SUMMED."""

NOT_BEFORE: dict[int, tuple[int, ...]] = {
    LANDED: tuple(kind for kind in _IN_TURN if kind != LATE),
    SUMMED: tuple(kind for kind in _IN_TURN if kind != LATE),
    LATE: tuple(kind for kind in _IN_TURN if kind != LATE),
    **{kind: (LANDED, *(other for other in _IN_TURN if other != kind)) for kind in _IN_TURN if kind != LATE},
}
"""What a rank does not send before a message of a kind that is waited for, if it makes the same calls as the others.
LANDED and LATE come from two threads, in any order."""
