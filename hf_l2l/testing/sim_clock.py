"""A virtual clock for the simulated accelerator: how long a program would take on a machine of given speed.

Nothing is measured. While the clock runs, every kernel and copy that is issued to a stream of "sim" gets a start and
an end in virtual seconds. It starts after the operations before it on its stream, after the events that its stream has
waited for, and not before its issue on the host; it takes the time that `Costs` gives. Launches cost the host
`launch_s`, which is nothing unless it is given.
The host waits where it would with CUDA: for blocking copies, for copies from and to memory that is not page-locked,
for `.item()`, and where it synchronizes.

- Kernels cost their floating-point operations, by the formulas of `torch.utils.flop_counter` (matrix products,
  convolutions, attention). All others cost nothing, and kernels on different streams do not slow each other down.
- Copies between host and device run one at a time in each direction, in the order in which they are ready; if several
  are ready at once, those of the stream made first run first. So a copy that was issued early and must wait does not
  delay copies of other streams. Copies on the device cost nothing; those to other devices run one at a time for each
  device that sends.
- A disk reads and writes one transfer at a time (see `sim_disk`).
- `torch.optim.Optimizer.step` costs the host the bytes of the host tensors it reads and writes: per parameter that has
  a gradient, the gradient once, and the parameter and its state, except single numbers, twice. An update in one pass
  costs its bytes in the same way, 16-bit copies included, at a rate that its kind has beside that of a step.

All threads share the host's time, as those of a backward must. A thread that works concurrently with the others gets
its own time, with `VirtualClock.own_time`; waits between such threads are given by `moment` and `wait_for`. Then times
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

from hf_l2l.runtime.observer import HOST_LISTENERS, HostWork
from hf_l2l.testing.sim_race import LOCK, ORDER
from hf_l2l.testing.sim_recorder import Costs as Costs
from hf_l2l.testing.sim_recorder import Moment as Moment
from hf_l2l.testing.sim_recorder import Recorder, Running
from hf_l2l.testing.sim_schedule import LANES
from hf_l2l.testing.sim_schedule import Task as Task


class VirtualClock:
    """The clock that `virtual_clock` yields. All times are virtual seconds since its start.

    It can be read after it has stopped, and while it runs; then all that was issued so far is included.
    """

    def __init__(self, costs: Costs) -> None:
        self._recorder = Recorder(costs)

    @property
    def now(self) -> float:
        """The current time of the host, for the calling thread."""
        return self.moment().seconds

    @property
    def end(self) -> float:
        """The time at which the host, and all work that was issued, is finished."""
        with LOCK:
            return self._recorder.schedule.end()

    @property
    def tasks(self) -> list[Task]:
        """The tasks of all lanes by start, except those without length."""
        with LOCK:
            return self._recorder.schedule.tasks()

    def busy(self, lane: str, start: float = 0.0, end: float = math.inf, *, device: int = 0) -> float:
        """Return the time between `start` and `end` during which `lane` of a device was busy; simultaneous tasks count
        once.

        Raises:
            ValueError: there is no such lane.
        """
        if lane not in LANES:
            raise ValueError(f"lane must be one of {', '.join(LANES)} (got {lane!r}); name one of them")
        total, reached = 0.0, start
        for task in self.tasks:
            if task.lane == lane and task.device == device:
                total += max(0.0, min(task.end, end) - max(task.start, reached))
                reached = max(reached, task.end)
        return total

    def host_work(self, name: str, *, seconds: float | None = None, num_bytes: float | None = None) -> None:
        """Keep the host and the calling thread busy: for `seconds`, or for reading and writing `num_bytes`.

        Threads with times of their own share the host's memory, so their work runs one at a time.

        Raises:
            ValueError: none or both of the two are given, or the value is negative or not finite.
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        if (seconds is None) == (num_bytes is None):
            raise ValueError(f"host work takes either seconds or num_bytes (got {seconds} and {num_bytes}); give one")
        amount = num_bytes if seconds is None else seconds
        if amount is None or not 0 <= amount < math.inf:
            raise ValueError(f"host work must be finite and not negative (got {amount}); give 0 for none")
        self._recorder.host_work(name, amount if num_bytes is None else amount / self._recorder.costs.host_bytes_per_s)

    def disk_work(self, name: str, num_bytes: int) -> Moment:
        """Keep the disk busy with so many bytes, after what it was given before; returns the moment of its end.

        Raises:
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        return self._recorder.disk_work(name, num_bytes)

    @property
    def is_running(self) -> bool:
        """Whether work is added to this clock."""
        return Running.recorder is self._recorder

    def moment(self) -> Moment:
        """Return the time `now` as a moment, to be passed to another thread."""
        return Moment(self._recorder, self._recorder.host.node)

    def wait_for(self, moment: Moment) -> None:
        """Make the calling thread wait for `moment`; a moment of another clock has passed already.

        Raises:
            RuntimeError: the clock has stopped.
        """
        self._refuse_stopped()
        self._recorder.host_waits(moment)

    @contextlib.contextmanager
    def own_time(self, name: str, since: Moment | None = None) -> Iterator[None]:
        """Give this thread a time of its own inside, from `since` on (None: now), which moves no other thread's time.

        A worker that does one job after the other stays inside, and begins each job with `wait_for` of the moment at
        which the job was submitted.

        Args:
            name: the name of the thread in tasks of the lane "host"; it decides the order of tasks that are ready at
                once, so two such threads need two names.
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

    def _host_works(self, work: HostWork) -> None:
        """Work outside of torch costs its bytes, at its own rate."""
        num_bytes = sum(map(_host_bytes, (*work.reads, *work.writes))) + 2 * sum(map(_host_bytes, work.changes))
        seconds = work.slowness * num_bytes / self._recorder.costs.host_bytes_per_s
        self._recorder.host_work(work.what, seconds)

    def _refuse_stopped(self) -> None:
        if Running.recorder is not self._recorder:
            raise RuntimeError("nothing is added to a clock that has stopped; do so inside its virtual_clock block")


@contextlib.contextmanager
def virtual_clock(costs: Costs) -> Iterator[VirtualClock]:
    """Run a virtual clock, from 0 on, inside; work that was issued before has finished at 0.

    Raises:
        RuntimeError: another clock is running.
    """
    clock = VirtualClock(costs)
    with LOCK:
        if Running.recorder is not None:
            raise RuntimeError("only one virtual clock may run at a time (found one running); leave its block first")
        ORDER.activate()
        Running.recorder = clock._recorder
    steps = _OptimizerSteps(clock._recorder)
    HOST_LISTENERS.append(clock._host_works)
    try:
        yield clock
    finally:
        HOST_LISTENERS.remove(clock._host_works)
        steps.stop()
        Running.recorder = None


class _OptimizerSteps:
    """Records every step of an optimizer as work of the host."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By optimizer, the bytes of the gradients that it found; they may be cleared before `after` is called.
        self._gradients: dict[int, dict[torch.Tensor, int]] = {}
        self._handles: list[RemovableHandle] = [register_optimizer_step_pre_hook(self._listen)]
        self._extended: list[tuple[Any, int]] = []
        """Tables of hooks, and in each the number of the hook that `before` was combined with."""

    def stop(self) -> None:
        """Stop recording steps."""
        for hooks, number in self._extended:
            if number in hooks:
                hooks[number] = hooks[number].hook
        for handle in self._handles:
            handle.remove()

    def _listen(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Make `before` the last hook before the step, and `after` the first hook after it."""
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

    _listen.reads_gradients = False  # type: ignore[attr-defined]  # see `layer_optimizers`

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record which parameters have a gradient after all other hooks have run."""
        self._gradients[id(optimizer)] = _gradients(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the bytes that the step has read and written; a closure may have made gradients within it."""
        found = self._gradients.pop(id(optimizer), {}) | _gradients(optimizer)
        total = 0
        for parameter, gradient_bytes in found.items():
            state = optimizer.state.get(parameter, {}).values()
            moments = [s for s in state if isinstance(s, torch.Tensor) and s.numel() > 1]
            total += gradient_bytes + 2 * sum(_host_bytes(t) for t in (parameter, *moments))
        self._recorder.host_work(f"{type(optimizer).__name__}.step", total / self._recorder.costs.host_bytes_per_s)


class _Then:
    """A hook, and the function that is called after it."""

    def __init__(self, hook: Callable[..., Any], then: Callable[..., None]) -> None:
        self.hook, self.then = hook, then

    def __call__(self, *args: Any) -> Any:
        result = self.hook(*args)
        self.then(*args)
        return result


def _ran_nothing(*args: Any) -> None:
    """A hook of an optimizer that has no other."""


def _gradients(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Return, for each parameter that has a gradient, the bytes of that gradient on the host."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: _host_bytes(p.grad) for p in parameters if p.grad is not None}


def _host_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.device.type == "cpu" else 0
