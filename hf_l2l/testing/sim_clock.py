"""A virtual clock for the simulated accelerator: how long a program would take on a machine of given speed.

Nothing is measured. While the clock runs, every kernel and copy that is issued to a stream of "sim" gets a start and
an end in virtual seconds: it starts when the operations before it on its stream, the events its stream has waited for
and the host at the time of issue allow, and takes what `Costs` says. Launching costs the host nothing; it waits where
it would with CUDA: for blocking copies, for copies from and to memory that is not page-locked, for `.item()`, and
where it synchronizes.

- Kernels cost their floating-point operations, by the formulas of `torch.utils.flop_counter` (matrix products,
  convolutions, attention). All others cost nothing, and kernels on different streams do not slow each other down.
- Copies between host and device go one at a time in each direction, in the order in which they are ready, and in a tie
  those of the stream made first. So one that was issued early and must wait does not hold up another stream's. Copies
  on the device cost nothing.
- `torch.optim.Optimizer.step` costs the host the bytes of the host tensors it reads and writes: per parameter that has
  a gradient, the gradient once, and the parameter and its state, but for single numbers, twice.

All threads share the host's time, as those of a backward must. A thread that works beside the others is given its
own, with `VirtualClock.own_time`; and where threads wait for each other, `moment` and `wait_for` say so. Then times
depend on the order within each stream and each such thread, and not on which thread was faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_l2l.testing.sim_race import LOCK, ORDER
from hf_l2l.testing.sim_recorder import Costs as Costs
from hf_l2l.testing.sim_recorder import Moment as Moment
from hf_l2l.testing.sim_recorder import Recorder, Running
from hf_l2l.testing.sim_schedule import LANES
from hf_l2l.testing.sim_schedule import Task as Task


class VirtualClock:
    """What `virtual_clock` yields. All times are virtual seconds since its start.

    It can be read after it has stopped, and while it runs; then what was issued so far counts.
    """

    def __init__(self, costs: Costs) -> None:
        self._recorder = Recorder(costs)

    @property
    def now(self) -> float:
        """How far the host is, for the thread that asks."""
        return self.moment().seconds

    @property
    def end(self) -> float:
        """When all that was issued, and the host, is done."""
        with LOCK:
            return self._recorder.schedule.end()

    @property
    def tasks(self) -> list[Task]:
        """What kept the lanes "compute", "upload", "download" and "host" busy, by start; nothing of no length."""
        with LOCK:
            return self._recorder.schedule.tasks()

    def busy(self, lane: str, start: float = 0.0, end: float = math.inf) -> float:
        """Return for how long, from `start` to `end`, `lane` had something to do; simultaneous tasks count once.

        Raises:
            ValueError: there is no such lane.
        """
        if lane not in LANES:
            raise ValueError(f"lane must be one of {', '.join(LANES)} (got {lane!r}); name one of them")
        total, reached = 0.0, start
        for task in self.tasks:
            if task.lane == lane:
                total += max(0.0, min(task.end, end) - max(task.start, reached))
                reached = max(reached, task.end)
        return total

    def host_work(self, name: str, *, seconds: float | None = None, num_bytes: float | None = None) -> None:
        """Keep the host, and the thread that asks, busy: for `seconds`, or for reading and writing `num_bytes`.

        Work of threads with times of their own shares the host's memory, so it goes one at a time.

        Raises:
            ValueError: not one of the two is given, or it is negative or not finite.
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        if (seconds is None) == (num_bytes is None):
            raise ValueError(f"host work takes either seconds or num_bytes (got {seconds} and {num_bytes}); give one")
        amount = num_bytes if seconds is None else seconds
        if amount is None or not 0 <= amount < math.inf:
            raise ValueError(f"host work must be finite and not negative (got {amount}); give 0 for none")
        self._recorder.host_work(name, amount if num_bytes is None else amount / self._recorder.costs.host_bytes_per_s)

    def moment(self) -> Moment:
        """Return what stands for the time `now`, to be handed to another thread."""
        return Moment(self._recorder, self._recorder.host.node)

    def wait_for(self, moment: Moment) -> None:
        """Let the thread that asks wait for `moment`; one of another clock has passed.

        Raises:
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        self._recorder.host_waits(moment)

    @contextlib.contextmanager
    def own_time(self, name: str, since: Moment | None = None) -> Iterator[None]:
        """Give this thread a time of its own inside, from `since` on (None: now), which moves no other thread's.

        A worker that does one job after the other stays inside, and begins each with `wait_for` of the moment at which
        that was submitted.

        Args:
            name: what tasks on the lane "host" call it; it decides in a tie, so two such threads need two names.
            since: for instance the moment at which the thread's work was submitted.

        Raises:
            ValueError: `since` is of another clock.
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        since = self.moment() if since is None else since
        if since.recorder is not self._recorder:
            raise ValueError(f"since must be a moment of this clock (got {since}); take it from its moment()")
        with self._recorder.own_time(name, since):
            yield

    def _refuse_stopped(self) -> None:
        if Running.recorder is not self._recorder:
            raise RuntimeError("nothing is added to a clock that has stopped; do so inside its virtual_clock block")


@contextlib.contextmanager
def virtual_clock(costs: Costs) -> Iterator[VirtualClock]:
    """Run a virtual clock, from 0 on, inside; what was issued before has been done by then.

    Raises:
        RuntimeError: another one is running.
    """
    clock = VirtualClock(costs)
    with LOCK:
        if Running.recorder is not None:
            raise RuntimeError("only one virtual clock may run at a time (found one running); leave its block first")
        ORDER.activate()
        Running.recorder = clock._recorder
    steps = _OptimizerSteps(clock._recorder)
    try:
        yield clock
    finally:
        steps.stop()
        Running.recorder = None


class _OptimizerSteps:
    """Puts every step of an optimizer on the host."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By optimizer, the bytes of the gradients that it found; they may be cleared before `after` is called.
        self._gradients: dict[int, dict[torch.Tensor, int]] = {}
        self._handles: list[RemovableHandle] = [register_optimizer_step_pre_hook(self._listen)]
        self._extended: list[tuple[Any, int]] = []
        """Tables of hooks, and the number of the hook in each that `before` was made a part of."""

    def stop(self) -> None:
        """Hear no more."""
        for hooks, number in self._extended:
            if number in hooks:
                hooks[number] = hooks[number].hook
        for handle in self._handles:
            handle.remove()

    def _listen(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Be the last to hear of the beginning of the step, and the first to hear of its end."""
        before: Any = optimizer._optimizer_step_pre_hooks
        after: Any = optimizer._optimizer_step_post_hooks
        if self.after not in after.values():  # a copy of an optimizer shares them
            self._handles.append(optimizer.register_step_post_hook(self.after))
            after.move_to_end(self._handles[-1].id, last=False)
            if not before:
                self._handles.append(optimizer.register_step_pre_hook(_ran_nothing))
            # Part of the last hook and not one more: what a hook does may depend on whether it is the last.
            last = next(reversed(before))
            before[last] = _Then(before[last], self.before)
            self._extended.append((before, last))
        assert isinstance(list(before.values())[-1], _Then), "hooks are not added while a clock runs"

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note which parameters have a gradient, that no hook has taken away."""
        self._gradients[id(optimizer)] = _gradients(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count what the step has read and written; a closure may have made gradients within it."""
        found = self._gradients.pop(id(optimizer), {}) | _gradients(optimizer)
        total = 0
        for parameter, gradient_bytes in found.items():
            state = optimizer.state.get(parameter, {}).values()
            moments = [s for s in state if isinstance(s, torch.Tensor) and s.numel() > 1]
            total += gradient_bytes + 2 * sum(_host_bytes(t) for t in (parameter, *moments))
        self._recorder.host_work(f"{type(optimizer).__name__}.step", total / self._recorder.costs.host_bytes_per_s)


class _Then:
    """A hook, and what is called after it."""

    def __init__(self, hook: Callable[..., Any], then: Callable[..., None]) -> None:
        self.hook, self.then = hook, then

    def __call__(self, *args: Any) -> Any:
        result = self.hook(*args)
        self.then(*args)
        return result


def _ran_nothing(*args: Any) -> None:
    """A hook of an optimizer that has no other."""


def _gradients(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Return, for each parameter that has a gradient, that one's bytes on the host."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: _host_bytes(p.grad) for p in parameters if p.grad is not None}


def _host_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.device.type == "cpu" else 0
