"""The plan: what stays on the device within a budget of its memory, and the time of a step that is expected of it.

A plan begins with the least that the device must hold. Then the choice that saves most seconds per byte is made, as
long as it fits, and what bounds the step is looked at again after each choice, since it changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from typing import Any

from hf_l2l.config import L2LConfig, option
from hf_l2l.plan.device_bytes import Bytes
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates, StepTime, step_time
from hf_l2l.runtime.tensors import size_text

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")

_KINDS = ("resident", "resident_layers", "kept_weights", "kept_graphs", "device_stash")
"""Options that keep more on the device."""
_TRIED_AGAIN = 3
"""The best so many options to begin with are tried with some kinds of choices first."""
_AT_ONCE = 16
"""First, choices are made for one part in so many of the layers at once; at last, layer by layer."""
_WORTH = 1e-3
"""A choice is made if it saves this share of the time of a step."""


def parse_budget(text: str) -> int:
    """Bytes of a budget such as "8GiB" (2**30 bytes each) or "8GB" (10**9).

    Raises:
        ValueError: if it is no size.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    count = 0 if match is None else int(float(match[1]) * _UNITS.get(match[2].upper(), 0))
    if count <= 0:
        raise ValueError(
            f"a budget of device memory must be a size with its unit, such as '8GiB' or '7500MB' (got {text!r}); give "
            "one, or leave it out"
        )
    return count


@dataclass(frozen=True)
class Plan:
    """What was chosen, and what is expected of it."""

    config: L2LConfig
    """The options, with those that were chosen."""
    chosen: dict[str, Any]
    """The options that were chosen, by name."""
    budget: int
    phase: str
    """What runs when the device holds most."""
    peak: Bytes
    """Its bytes then, by name."""
    time: StepTime

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        names = ", ".join(f"{option(name)}={value!r}" for name, value in self.chosen.items())
        return (
            f"plan for {size_text(self.budget)} of device memory: {names or 'the options as they are'}; expected: "
            f"{size_text(self.peak_bytes)} at the peak (in the {self.phase}), {self.time.seconds:.3g} s per step, "
            f"bound by {self.time.bound}"
        )


class BudgetError(ValueError):
    """A budget that no choice can meet."""

    def __init__(self, budget: int, smallest: int, chosen: dict[str, Any]) -> None:
        """`chosen` are the options with which the device holds least."""
        self.smallest = smallest
        """Bytes of the smallest budget that can be met."""
        flags = " ".join(f"{option(name)}={value}" for name, value in chosen.items()) or "the options as they are"
        super().__init__(
            f"the device must hold what a step needs, whatever is chosen (a budget of {size_text(budget)}, and "
            f"{size_text(smallest)} needed at least, with {flags}); give at least that, or shorter rows, or leave out "
            "options that bind the choice"
        )


def _is_set(run: RunShapes, name: str) -> bool:
    """Whether the user has set an option: it binds the plan."""
    default = next(each.default for each in fields(L2LConfig) if each.name == name)
    return name in run.given or bool(getattr(run.config, name) != default)


def _least(run: RunShapes) -> dict[str, Any]:
    """The options with which the device holds least, of those that the user has not set."""
    wanted = {"stash": "host", "boundary": "host", "ubatch_size": 1, "gradient_slots": 1}
    found = {name: value for name, value in wanted.items() if not _is_set(run, name)}
    if _is_set(run, "stash") and run.config.stash == "device":
        found.pop("boundary", None)
    return found


def make_plan(run: RunShapes, budget: int, rates: Rates) -> Plan:
    """The fastest options within `budget` bytes of device memory.

    Args:
        run: the model and its device batch, with the options of the user, which bind the plan.
        budget: bytes.
        rates: of the machine.

    Raises:
        BudgetError: if the device would need more than the budget whatever is chosen.
    """
    search = _Search(run, budget, rates)
    starts = [(search.bytes(start), start) for start in _starts(run, replace(run.config, **_least(run)))]
    least, at_least = min(starts, key=lambda each: each[0])
    if least > budget:
        raise BudgetError(budget, least, _changed(run.config, at_least))
    found = [(search.best(start), start) for size, start in starts if size <= budget]
    found.sort(key=lambda each: (each[0][0].seconds, each[0][1]))
    # What saves most per byte first may take the room of what saves more in all: try some kinds before the others.
    again = [search.best(search.best(start, kinds)[2]) for _, start in found[:_TRIED_AGAIN] for kinds in _subsets()]
    every = [each for each, _ in found] + again
    fastest = min(time.seconds for time, _, _ in every)
    # Of equally fast ones, that with the largest micro-batches: each has a price that may not have been measured.
    equal = [each for each in every if each[0].seconds <= fastest * (1 + _WORTH)]
    time, _, best = min(equal, key=lambda each: (-(each[2].ubatch_size or run.rows), each[1]))
    # "auto" would be decided by the memory of the device, and not by the budget.
    stash, boundary, _ = run.resolved(best)
    settled: dict[str, Any] = {"stash": stash, "boundary": best.boundary if stash == "device" else boundary}
    best = replace(best, **settled)
    phase, names = run.peak(best)
    return Plan(best, _changed(run.config, best), budget, phase, names, time)


def _changed(before: L2LConfig, after: L2LConfig) -> dict[str, Any]:
    """The options that differ."""
    names = [each.name for each in fields(L2LConfig)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def _starts(run: RunShapes, floor: L2LConfig) -> Iterator[L2LConfig]:
    """The options to begin with: for each size of micro-batch, with the stash on the host and on the device."""
    sizes = [floor.ubatch_size]
    if not _is_set(run, "ubatch_size"):
        sizes = [*_powers(run.rows)]
    slots = [floor.gradient_slots] if _is_set(run, "gradient_slots") else [2, 1]
    for size in sizes:
        for count in slots:
            start = replace(floor, ubatch_size=size, gradient_slots=count)
            yield start
            if not _is_set(run, "boundary") and floor.stash != "device":
                yield replace(start, boundary="device")
            if not (_is_set(run, "stash") or _is_set(run, "boundary")):
                yield replace(start, stash="device", boundary="auto")


def _subsets() -> Iterator[tuple[str, ...]]:
    """Some of the kinds of choices: all combinations but none and all."""
    return chain.from_iterable(combinations(_KINDS, count) for count in range(1, len(_KINDS)))


def _powers(rows: int) -> list[int]:
    """1, 2, 4, ... and `rows`."""
    return [1 << n for n in range(rows.bit_length()) if 1 << n < rows] + [rows]


class _Search:
    """Choices for one run and budget."""

    def __init__(self, run: RunShapes, budget: int, rates: Rates) -> None:
        self.run, self.budget, self.rates = run, budget, rates
        self.count = len(run.layers)

    def bytes(self, config: L2LConfig) -> int:
        """Of the device at the peak."""
        return sum(self.run.peak(config)[1].values())

    def time(self, config: L2LConfig) -> StepTime:
        """The time of a step."""
        return time_of(self.run, config, self.rates)

    def best(self, config: L2LConfig, kinds: Collection[str] = _KINDS) -> tuple[StepTime, int, L2LConfig]:
        """The time, the bytes, and the options after all choices among `kinds` that are worth it."""
        time, held = self.time(config), self.bytes(config)
        for at_once in sorted({max(1, self.count // _AT_ONCE), 1}, reverse=True):
            while (found := self._next(config, kinds, time, held, at_once)) is not None:
                time, held, config = found
        return time, held, config

    def _next(
        self, config: L2LConfig, kinds: Collection[str], time: StepTime, held: int, at_once: int
    ) -> tuple[StepTime, int, L2LConfig] | None:
        best, most = None, 0.0
        for each in self._moves(config, kinds, at_once):
            size = self.bytes(each)
            if size > self.budget:
                continue
            after = self.time(each)
            saved = (time.seconds - after.seconds) / max(1, size - held)
            if after.seconds < time.seconds * (1 - _WORTH / self.count) and saved > most:
                best, most = (after, size, each), saved
        return best

    def _moves(self, config: L2LConfig, kinds: Collection[str], at_once: int) -> Iterator[L2LConfig]:
        """What can be chosen next."""
        if "resident" in kinds and config.resident == "none" and not _is_set(self.run, "resident"):
            yield replace(config, resident="shell")
        streamed = self.count - config.resident_layers
        counts = {
            "resident_layers": self.count,
            "kept_weights": streamed,
            "kept_graphs": self.count,
            "device_stash": 0 if config.stash == "device" else self.count,
        }
        for name, most in counts.items():
            now = getattr(config, name)
            if name in kinds and now < most and not _is_set(self.run, name) and config.resident != "all":
                # All of them, too: slots go with the last layer that is uploaded.
                for count in {min(most, now + at_once), most}:
                    more = {name: count}
                    if name == "resident_layers":
                        more["kept_weights"] = min(config.kept_weights, self.count - count)
                    yield replace(config, **more)


def time_of(run: RunShapes, config: L2LConfig, rates: Rates) -> StepTime:
    """The time of a step with these options."""
    costs = run.costs(config)
    return step_time(
        costs.layers,
        costs.shell,
        rates,
        ubatches=costs.ubatches,
        gradient_slots=config.gradient_slots,
        prefetches=config.prefetch,
        defers=config.eps_update != "serial",
    )
