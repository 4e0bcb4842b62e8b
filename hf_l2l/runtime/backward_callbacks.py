"""Callbacks at the end or failure of a backward, for the backwards that an engine takes part in.

torch calls callbacks when a backward ends, but not when it fails. A failed backward drops them without a call, when it
raises or a moment later. So a callback that is garbage-collected without having been called reports a failure.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from hf_l2l.compat import call_at_end_of_backward, current_backward

_FAILED_BACKWARD_ENDS_WITHIN_S = 1.0


class HookErrors:
    """Keeps exceptions of hooks and callbacks of autograd: `with errors:` keeps the first one that leaves the block.

    On accelerators, hooks run in a thread of torch, where an exception can end the process without a message. What is
    no `Exception`, as KeyboardInterrupt, is kept before all others, and is to be raised as soon as others may be.
    """

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None and (self._first is None or (not isinstance(error, Exception) and not self.interrupted)):
            self._first = error
        return True

    @property
    def interrupted(self) -> bool:
        """Whether what is kept is no `Exception`."""
        return self._first is not None and not isinstance(self._first, Exception)

    def raise_first(self) -> None:
        """Raise the exception that was kept, and forget it."""
        error, self._first = self._first, None
        if error is not None:
            raise error


class RaisedIn:
    """Adds a note to an exception that leaves the block, saying where it was raised; its type stays the same."""

    def __init__(self, what: str, name: str) -> None:
        self.what, self.name = what, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.add_note(f"raised in {self.what} {self.name}")


class Backwards:
    """The backwards under way that an engine takes part in."""

    def __init__(self) -> None:
        self.errors = HookErrors()
        self._calls: dict[bool, list[weakref.WeakMethod[Callable[[], None]]]] = {True: [], False: []}
        """True for a failed backward, False for one that ended -> the callbacks."""
        self.under_way: dict[int, weakref.ref[End]] = {}
        """The number of a backward -> the object that torch calls at its end."""
        self._ending: set[int] = set()
        """Backwards whose callbacks are running, each in one thread."""
        self._changed = threading.Condition()

    def call(
        self, *, at_failure: Callable[[], None], at_end: Callable[[], None] | None = None, first: bool = False
    ) -> None:
        """Call these bound methods when a backward is over, or has failed, as long as their objects live; those that
        are `first` before all that are registered by then.

        Only weak references are kept, so that device memory of a detached engine is freed at once.
        """
        for failed, call in ((False, at_end), (True, at_failure)):
            if call is not None:
                calls = self._calls[failed]
                calls.insert(0 if first else len(calls), weakref.WeakMethod(call))

    def join(self) -> int:
        """Take part in the backward that calls this, and return its number."""
        task = current_backward()
        assert task != -1, "called in a node or hook of a backward"
        if task not in self.under_way:
            end = End(self, task)
            self.under_way[task] = weakref.ref(end)
            call_at_end_of_backward(end)
        return task

    def over(self, task: int, *, failed: bool) -> None:
        """Run the callbacks of the backward `task`, once; their exceptions are kept in `errors`."""
        with self._changed:
            # Two threads may call this for one failed backward.
            if task not in self.under_way or task in self._ending:
                return
            self._ending.add(task)
        try:
            for reference in self._calls[failed]:
                call = reference()
                with self.errors:
                    if call is not None:
                        call()
        finally:
            with self._changed:
                self.under_way.pop(task, None)
                self._ending.discard(task)
                self._changed.notify_all()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """`join` for a block; if the block raises, the callbacks of a failure run before the caller gets the error."""
        task = self.join()
        with ExitStack() as failure:
            failure.callback(self.over, task, failed=True)
            yield
            failure.pop_all()

    def refuse_others(self, *, own: bool) -> None:
        """Raise RuntimeError if a backward is under way and this thread is not inside it.

        With `own`, first wait for a failed backward of this thread, which torch's threads may not have left yet.
        """
        if current_backward() != -1:
            return
        if own:
            self.wait_until_over()
        if self.under_way:
            raise RuntimeError(ONE_THREAD)

    def wait_until_over(self) -> None:
        """Wait for failed backwards: torch's threads leave them a moment after the program has got the error."""
        if self.under_way:
            with self._changed:
                self._changed.wait_for(lambda: not self.under_way, _FAILED_BACKWARD_ENDS_WITHIN_S)


class End:
    """The callback that torch calls when a backward is over, and drops without a call when it has failed."""

    def __init__(self, backwards: Backwards, task: int) -> None:
        self._backwards = weakref.ref(backwards)
        self._task = task
        self._dropped = weakref.finalize(self, _report_failure, self._backwards, task)
        self._dropped.atexit = False

    def __call__(self) -> None:
        self._dropped.detach()
        backwards = self._backwards()
        if backwards is not None:
            backwards.over(self._task, failed=False)
            if backwards.errors.interrupted:  # an interrupt comes to the thread of the program, which is this one
                backwards.errors.raise_first()


def _report_failure(backwards: weakref.ref[Backwards], task: int) -> None:
    alive = backwards()
    if alive is not None:
        alive.over(task, failed=True)


ONE_THREAD = (
    "a model under L2L serves one thread at a time (it was used during a call or backward of another thread); let the "
    "threads take turns, or give each thread a deep copy of the model, and attach each copy"
)
