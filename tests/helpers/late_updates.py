"""Updates in the background that are as late as the waits of the program allow: one that lacks shows in the values."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hf_l2l.eps import updates
from hf_l2l.runtime.worker import Task, Worker


class Gate:
    """Lets an update begin when somebody waits for it, or for a later one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._open = 0

    def number(self, task: Task) -> None:
        task.number = next(self._numbers)  # type: ignore[attr-defined]

    def open_for(self, number: int) -> None:
        with self._changed:
            self._open = max(self._open, number)
            self._changed.notify_all()

    def open_all(self) -> None:
        """Let all that have been submitted begin."""
        self.open_for(next(self._numbers))

    def enter(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open >= number)


@contextmanager
def late_updates() -> Iterator[Gate]:
    """Inside, an update begins when it is waited for; before an engine is dropped, all of its updates must begin."""
    gate, submit, wait, carry_out = Gate(), Worker.submit, Task.wait, updates.carry_out

    def submitted(worker: Worker, task: Task, *args: Any, **kwargs: Any) -> None:
        gate.number(task)
        submit(worker, task, *args, **kwargs)

    def waited(task: Task, why: str) -> None:
        gate.open_for(getattr(task, "number", 0))
        wait(task, why)

    def carried_out(*args: Any) -> None:
        gate.enter(next(each for each in args if isinstance(each, updates.Update)).task.number)  # type: ignore[attr-defined]
        carry_out(*args)

    with (
        mock.patch.object(Worker, "submit", submitted),
        mock.patch.object(Task, "wait", waited),
        mock.patch.object(updates, "carry_out", carried_out),
    ):
        try:
            yield gate
        finally:
            gate.open_all()
