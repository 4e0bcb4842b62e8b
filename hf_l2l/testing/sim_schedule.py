"""Computes when recorded tasks run: each after the tasks it waits for, and on some lanes one at a time.

While the program runs, only dependencies are recorded; times are computed on request. So they depend on the order
within each stream, and not on the interleaving of the threads that fill the streams.
"""

from __future__ import annotations

import collections
import heapq
from typing import NamedTuple

ONE_AT_A_TIME = frozenset(
    {"upload", "download", "peer", "host", "disk"}
)  # the links of a device, host memory, the disk
LANES = ("compute", "launch", *sorted(ONE_AT_A_TIME))

START = 0  # the node that stands for the time 0

Rank = tuple[int, str]
_Turn = tuple[float, Rank, int]  # order on a lane: by time of readiness, then by rank, then in the order of issue


class Task(NamedTuple):
    """A span of work on a lane, in virtual seconds."""

    lane: str
    """ "compute", "upload", "download" and "peer" of a device; "host", for its memory, "disk" and "launch"."""
    name: str
    start: float
    end: float
    stream: str
    """The name of the stream, or of the host's time ("host" for the time that threads share)."""
    device: int = 0


class _Node(NamedTuple):
    after: tuple[int, ...]
    seconds: float = 0.0
    lane: str = ""  # none for a point where others meet
    name: str = ""
    stream: str = ""
    rank: Rank = (0, "")
    device: int = 0


class Schedule:
    """A graph of tasks and joins, as numbered nodes; 0 is the start."""

    def __init__(self) -> None:
        self._nodes = [_Node(())]
        self._forget_times()

    def add(
        self,
        first: int,
        second: int,
        *,
        seconds: float,
        lane: str,
        name: str,
        stream: str,
        rank: Rank,
        device: int = 0,
    ) -> int:
        """Record a task that comes after two nodes, and return its number.

        If tasks are ready at once on a lane that runs one at a time, the task with the lowest `rank` runs first; among
        tasks of equal rank, the one recorded first.
        """
        self._nodes.append(_Node(_distinct(first, second), seconds, lane, name, stream, rank, device))
        return len(self._nodes) - 1

    def join(self, first: int, second: int) -> int:
        """Return a node that ends when both nodes have ended."""
        for one, other in ((first, second), (second, first)):
            if other in (START, one) or other in self._nodes[one].after:
                return one
        self._nodes.append(_Node((first, second)))
        return len(self._nodes) - 1

    def end_of(self, node: int) -> float:
        """Return the time at which `node` ends, in seconds."""
        self._place()
        return self._ends[node]

    def end(self) -> float:
        """Return the time at which all recorded tasks have ended, in seconds."""
        self._place()
        return max(self._ends)

    def tasks(self) -> list[Task]:
        """Return all tasks, by start."""
        self._place()
        placed = [
            Task(node.lane, node.name, self._starts[i], self._ends[i], node.stream, node.device)
            for i, node in enumerate(self._nodes)
            if node.lane
        ]
        return sorted(placed, key=lambda t: (t.start, t.end, t.lane, t.stream))

    def _forget_times(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._free: dict[tuple[str, int], float] = {}
        """By lane and device, when it is free."""
        self._last: dict[tuple[str, int], _Turn] = {}

    def _place(self) -> None:
        """Compute times of tasks recorded since the last call; of all tasks if a new one comes before earlier ones."""
        if not self._place_new():
            self._forget_times()
            self._place_new()

    def _place_new(self) -> bool:
        """Compute times of nodes that have none yet; return False if one of them should have run before others."""
        known = len(self._ends)
        unplaced = [0.0] * (len(self._nodes) - known)
        self._starts += unplaced
        self._ends += unplaced
        followers = collections.defaultdict(list)
        missing = {}
        for i in range(known, len(self._nodes)):
            awaited = [j for j in self._nodes[i].after if j >= known]
            missing[i] = len(awaited)
            for j in awaited:
                followers[j].append(i)
        ready = [i for i, count in missing.items() if count == 0]
        turns: list[_Turn] = []
        while ready or turns:
            if ready:
                i = ready.pop()
                node = self._nodes[i]
                start = max((self._ends[j] for j in node.after), default=0.0)
                if node.lane in ONE_AT_A_TIME:
                    heapq.heappush(turns, (start, node.rank, i))
                    continue
            else:
                # Whatever is not ready by now comes after one of these, so no earlier turn can turn up.
                turn = heapq.heappop(turns)
                i = turn[2]
                node = self._nodes[i]
                place = node.lane, node.device
                if turn < self._last.get(place, turn):
                    return False
                self._last[place] = turn
                start = max(turn[0], self._free.get(place, 0.0))
                self._free[place] = start + node.seconds
            self._starts[i], self._ends[i] = start, start + node.seconds
            for j in followers[i]:
                missing[j] -= 1
                if missing[j] == 0:
                    ready.append(j)
        return True


def _distinct(first: int, second: int) -> tuple[int, ...]:
    return (first,) if first == second else (first, second)
