"""The plan: what stays on the device within a budget of its memory, and the time of a step that is expected of it.

A plan begins with the least that the device must hold. Then the choice that saves most seconds per byte is made, as
long as it fits, and what bounds the step is looked at again after each choice, since it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import chain, combinations
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.counts import parse_size
from hf_l2l.option_names import option
from hf_l2l.own_command import with_options
from hf_l2l.pipeline.times import step_time as pipeline_time
from hf_l2l.plan.device_bytes import Bytes
from hf_l2l.plan.run_shapes import Costs, RunShapes
from hf_l2l.plan.step_time import Rates, StepTime, pipelined, step_time
from hf_l2l.runtime.tensors import size_text, two_digits

_KINDS = ("resident", "resident_layers", "kept_weights", "kept_graphs", "device_stash")
"""Options that keep more on the device."""
_FLOOR: dict[str, Any] = {"stash": "host", "boundary": "host", "ubatch_size": 1, "gradient_slots": 1}
"""The options with which the device holds least."""
_BOUND = (*_FLOOR, *_KINDS)
"""Options that are searched; those that are set bind the choice."""
CHOSEN = (*_BOUND, "chunked_loss")
"""Options that are chosen."""
_BUDGET = "device_memory_budget"
_TRIED_AGAIN = 3
"""The best so many options to begin with are tried with some kinds of choices first."""
_AT_ONCE = 16
"""First, choices are made for one part in so many of the layers at once; at last, layer by layer."""
MARGIN = 0.03
"""By how much the estimate may be too low: a plan leaves so much of what it needs free."""
_AS_PLAIN = 0.03
"""A model that fits whole is trained as without L2L, unless that takes longer by this share."""
WORTH = 1e-3
"""A choice is made if it saves this share of the time of a step."""


def parse_budget(text: str, name: str = "a budget of device memory") -> int:
    """Bytes of a budget such as "8GiB" (2**30 bytes each) or "8GB" (10**9).

    Raises:
        ValueError: if it is no size; `name` is what the user calls it.
    """
    count = parse_size(text)
    if not count:
        raise ValueError(
            f"{name} must be a size with its unit, such as '8GiB' or '7500MB' (got {text!r}); give one, or "
            "leave it out"
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
    batches: int = 1
    """How many batches of gradient accumulation run as one."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        names = ", ".join(f"{option(name)}={value!r}" for name, value in self.chosen.items())
        together = f", {self.batches} accumulated batches at once" if self.batches > 1 else ""
        with_disk = ", if the disk with masters and moments keeps up" if self.config.state_tier == "disk" else ""
        return (
            f"plan for {size_text(self.budget)} of device memory: {names or 'the options as they are'}{together}; "
            f"expected: {size_text(self.peak_bytes)} at the peak (in the {self.phase}), "
            f"{two_digits(self.time.seconds)} s per step, bound by {self.time.bound}{with_disk}"
        )


class BudgetError(ValueError):
    """A budget that cannot be met."""

    def __init__(self, message: str, smallest: int | None = None) -> None:
        """With the message for the user."""
        super().__init__(message)
        self.smallest = smallest
        """Bytes of the smallest budget that can be met with the options that bind the choice, if that is known."""


def _is_set(run: RunShapes, name: str) -> bool:
    """Whether the user has set an option: it binds the plan."""
    return name in run.given or bool(getattr(run.config, name) != getattr(L2LConfig, name))  # the default


def _least(run: RunShapes) -> dict[str, Any]:
    """The options with which the device holds least, of those that the user has not set."""
    found = {name: value for name, value in _FLOOR.items() if not _is_set(run, name)}
    if _is_set(run, "stash") and run.config.stash == "device":
        found.pop("boundary", None)
    return found


def needed(run: RunShapes, config: L2LConfig) -> int:
    """Bytes of the budget that a step with these options needs."""
    return math.ceil((1 + MARGIN) * run.most(config))


def run_within(run_of: Callable[[int], RunShapes], budget: int) -> RunShapes:
    """The run that `run_of` makes, given the memory for which chunks of logits have as many tokens as fit it: that of
    `budget`, or, where the device would need more then, none, for which they have the fewest.

    Raises:
        BudgetError: if the device would need more than `budget` bytes whatever is chosen.
    """
    run = run_of(budget)
    try:
        refuse_small(run, budget)
    except BudgetError:
        if run.config.chunked_loss != "auto":
            raise
        run = run_of(0)
        refuse_small(run, budget)
    return run


def refuse_small(run: RunShapes, budget: int) -> None:
    """Raise BudgetError if the device would need more than `budget` bytes whatever is chosen."""
    if _plain(run, budget) is None:
        check_floor(run, budget)


def check_floor(run: RunShapes, budget: int) -> list[L2LConfig]:
    """The options to begin with that are within `budget` bytes of device memory.

    Raises:
        BudgetError: if the device would need more whatever is chosen.
    """
    sizes = {start: needed(run, start) for start in _starts(run, replace(run.config, **_least(run)))}
    least = min(sizes, key=lambda start: sizes[start])
    if sizes[least] > budget:
        flags = " ".join(f"{option(name)}={value}" for name, value in _changed(run.config, least).items())
        raise BudgetError(
            f"the device must hold what a step needs, whatever is chosen (got a budget of {size_text(budget)}, and "
            f"{size_text(sizes[least])} are needed at least, with {flags or 'the options as they are'}); "
            f"{_remedy(run, budget, sizes[least])}",
            sizes[least],
        )
    return [start for start, size in sizes.items() if size <= budget]


def _remedy(run: RunShapes, budget: int, smallest: int) -> str:
    """What to do about a budget that is below the `smallest` that can be met."""
    bound = [name for name in _BOUND if _is_set(run, name) and name not in run.given]
    defaults: dict[str, Any] = {name: getattr(L2LConfig, name) for name in bound}
    floor = replace(run.config, **defaults | _FLOOR)
    if bound and needed(run, floor) <= budget:
        return f"do not bind the choice: {with_options(dict.fromkeys(bound))}"
    unit, size = ("MiB", 2**20) if smallest >= 2**26 else ("KiB", 2**10)
    enough = f"{-(-smallest // size)}{unit}"
    logits, fewest = "", run.fewest_chunk_rows
    if fewest is not None and (run.chunk_rows is None or run.chunk_rows > fewest):
        logits = f" fewer tokens in a chunk of logits (leave out {option('chunked_loss')}),"
    return f"give shorter rows,{logits} or the smallest budget that can be met: {with_options({_BUDGET: enough})}"


def make_plan(run: RunShapes, budget: int, rates: Rates, *, apart: bool = True) -> Plan:
    """The fastest options within `budget` bytes of device memory.

    Args:
        run: the model and its device batch, with the options of the user, which bind the plan.
        budget: bytes.
        rates: of the machine.
        apart: whether some weights may be resident without others.

    Raises:
        BudgetError: if the device would need more than the budget whatever is chosen.
    """
    search = _Search(run, budget, rates, apart=apart)
    plain = _plain(run, budget)
    if plain is not None and search.time(plain).seconds <= (1 + _AS_PLAIN) * _fewest_seconds(run, plain, rates):
        return _plan(run, budget, rates, plain)
    starts = check_floor(run, budget)
    if not apart and _may_hold_all(run) and not (_is_set(run, "resident") or _is_set(run, "resident_layers")):
        whole = [replace(start, resident="all") for start in starts]
        starts += [start for start in whole if needed(run, start) <= budget]
    found = [(search.best(start), start) for start in starts]
    found.sort(key=lambda each: (each[0][0].seconds, each[0][1]))
    # What saves most per byte first may take the room of what saves more in all: try some kinds before the others.
    again = [search.best(search.best(start, kinds)[2]) for _, start in found[:_TRIED_AGAIN] for kinds in _subsets()]
    every = [each for each, _ in found] + again
    fastest = min(time.seconds for time, _, _ in every)
    # Of equally fast ones, that with the largest micro-batches: each has a price that may not have been measured.
    equal = [each for each in every if each[0].seconds <= fastest * (1 + WORTH)]
    _, _, best = min(equal, key=lambda each: (-(each[2].ubatch_size or run.most_rows), each[1]))
    if plain is not None and search.time(plain).seconds <= (1 + _AS_PLAIN) * fastest:
        return _plan(run, budget, rates, plain)
    # "auto" would be decided by the memory of the device, and not by the budget.
    stash, boundary, _ = run.resolved(best)
    settled: dict[str, Any] = {"stash": stash, "boundary": best.boundary if stash == "device" else boundary}
    return _plan(run, budget, rates, _simplest(search, replace(best, **settled)))


def _plain(run: RunShapes, budget: int) -> L2LConfig | None:
    """The options with which a model is trained as without L2L; None if it does not fit so, or options that are set
    speak against it."""
    if any(_is_set(run, name) for name in _KINDS) or not _may_hold_all(run):
        return None
    plain = replace(run.config, resident="all", kept_graphs=len(run.layers))
    return plain if needed(run, plain) <= budget else None


def _may_hold_all(run: RunShapes) -> bool:
    """Whether all weights may be resident: state on disk is that of masters on the host."""
    return run.config.state_tier != "disk"


def _fewest_seconds(run: RunShapes, plain: L2LConfig, rates: Rates) -> float:
    """The seconds that a step takes at least, whatever is chosen: those of its operations without any recompute."""
    costs = run.costs(plain)
    return sum(cost.forward_flops + cost.backward_flops for cost in (*costs.layers, costs.shell)) / rates.flops


def _simplest(search: _Search, best: L2LConfig) -> L2LConfig:
    """As fast and within the budget, with fewer options that differ from those of the user."""
    user = {each.name: getattr(search.run.config, each.name) for each in fields(L2LConfig)}
    on_device = {name: user[name] for name in ("stash", "boundary")}
    single = [{name: user[name]} for name in (*reversed(_KINDS), "boundary", "gradient_slots")]
    tried = [{**on_device, "device_stash": user["device_stash"]}, *single, on_device]
    for change in tried:
        if change.get("stash") == "device" and change.get("device_stash", best.device_stash):
            continue
        simpler = replace(best, **change)
        if search.time(simpler).seconds <= search.time(best).seconds and search.needed(simpler) <= search.budget:
            best = simpler
    return best


def plan_as(run: RunShapes, budget: int, rates: Rates, chosen: Mapping[str, Any]) -> Plan | None:
    """The plan with the options that were `chosen` before; None if they do not fit the budget any more."""
    plan = _plan(run, budget, rates, replace(run.config, **chosen))
    return plan if needed(run, plan.config) <= budget else None


def _plan(run: RunShapes, budget: int, rates: Rates, config: L2LConfig) -> Plan:
    phase, names = run.peak(config)
    time = time_of(run, config, rates)
    if run.chunk_rows is not None:
        config = replace(config, chunked_loss=run.chunk_rows)
    return Plan(config, _changed(run.config, config), budget, phase, names, time, run.batches)


def _changed(before: L2LConfig, after: L2LConfig) -> dict[str, Any]:
    """The options that differ."""
    names = [each.name for each in fields(L2LConfig)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def _starts(run: RunShapes, floor: L2LConfig) -> Iterator[L2LConfig]:
    """The options to begin with: for each size of micro-batch, with the stash on the host and on the device."""
    sizes: Sequence[int | None] = [floor.ubatch_size]
    if not _is_set(run, "ubatch_size"):
        sizes = _powers(run.most_rows)
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

    def __init__(self, run: RunShapes, budget: int, rates: Rates, *, apart: bool) -> None:
        self.run, self.budget, self.rates, self.apart = run, budget, rates, apart
        self.count = len(run.layers)
        # Searches from several beginnings come to the same options again and again.
        self.time = cache(partial(time_of, run, rates=rates))
        """The time of a step with given options."""
        self.needed = cache(partial(needed, run))
        """The bytes of the budget that it needs."""
        self.changed = cache(replace)
        """`dataclasses.replace`, which checks all options each time."""

    def best(self, config: L2LConfig, kinds: Collection[str] = _KINDS) -> tuple[StepTime, int, L2LConfig]:
        """The time, the bytes, and the options after all choices among `kinds` that are worth it."""
        time, held = self.time(config), self.needed(config)
        for at_once in sorted({max(1, self.count // _AT_ONCE), 1}, reverse=True):
            while (found := self._next(config, kinds, time, held, at_once)) is not None:
                time, held, config = found
        return time, held, config

    def _next(
        self, config: L2LConfig, kinds: Collection[str], time: StepTime, held: int, at_once: int
    ) -> tuple[StepTime, int, L2LConfig] | None:
        best, most = None, 0.0
        for each in self._moves(config, kinds, at_once):
            size = self.needed(each)
            if size > self.budget:
                continue
            after = self.time(each)
            saved = (time.seconds - after.seconds) / max(1, size - held)
            if after.seconds < time.seconds * (1 - WORTH / self.count) and saved > most:
                best, most = (after, size, each), saved
        return best

    def _moves(self, config: L2LConfig, kinds: Collection[str], at_once: int) -> Iterator[L2LConfig]:
        """What can be chosen next. With each, all streamed layers may keep their weights: then there are no slots."""
        keeps_all = "kept_weights" in kinds and not _is_set(self.run, "kept_weights")
        for each in self._single_moves(config, kinds, at_once):
            yield each
            streamed = self.count - each.resident_layers
            if keeps_all and each.resident != "all" and each.kept_weights < streamed:
                yield self.changed(each, kept_weights=streamed)

    def _single_moves(self, config: L2LConfig, kinds: Collection[str], at_once: int) -> Iterator[L2LConfig]:
        kinds = kinds if self.apart else set(kinds) - {"resident", "resident_layers"}
        if "resident" in kinds and config.resident == "none" and not _is_set(self.run, "resident"):
            yield self.changed(config, resident="shell")
        keeps = config.kept_weights if _is_set(self.run, "kept_weights") else 0
        most_of = {
            "resident_layers": self.count - keeps,
            "kept_weights": self.count - config.resident_layers,
            "kept_graphs": self.count,
            "device_stash": 0 if config.stash == "device" else self.count,
        }
        for name, most in most_of.items():
            now = getattr(config, name)
            has_it = config.resident == "all" and name in ("resident_layers", "kept_weights")
            if name in kinds and now < most and not (has_it or _is_set(self.run, name)):
                # All of them, too: what all of them have may need no place of its own.
                for count in {min(most, now + at_once), most}:
                    more = {name: count}
                    if name == "resident_layers":
                        more["kept_weights"] = min(config.kept_weights, self.count - count)
                    yield self.changed(config, **more)


def time_of(run: RunShapes, config: L2LConfig, rates: Rates, *, batches: int = 1) -> StepTime:
    """The time of a step with these options, and with so many batches one after the other."""
    costs = run.costs(config)
    if len(run.turns) > 1:
        return _time_on_several(run, config, rates, costs, batches)
    options: dict[str, Any] = {
        "ubatches": costs.ubatches,
        "gradient_slots": config.gradient_slots,
        "prefetches": config.prefetch,
        "defers": config.eps_update != "serial",
    }
    step = step_time(costs.layers, costs.shell, rates, **options)
    if batches == 1:
        return step
    layers = [replace(cost, parameters=0, on_device=0) for cost in costs.layers]
    shell = replace(costs.shell, parameters=0, on_device=0)
    other = step_time(layers, shell, rates, **options)
    seconds = {lane: step.busy[lane] + (batches - 1) * other.busy[lane] for lane in step.busy}
    return StepTime(
        step.seconds + (batches - 1) * other.seconds,
        step.forward + (batches - 1) * other.forward,
        step.backward + (batches - 1) * other.backward,
        seconds,
    )


def _time_on_several(run: RunShapes, config: L2LConfig, rates: Rates, costs: Costs, batches: int) -> StepTime:
    """The time of a step on devices that run layers in turn; rows that pass through host memory are not counted."""
    layers = [pipelined(cost, rates) for cost in costs.layers if cost.forward_flops]
    found = pipeline_time(
        layers,
        run.outside_seconds(config, rates),
        len(run.turns),
        costs.ubatches,
        passed=run.own_input / costs.ubatches / rates.link_down,
        launch=rates.per_call,
        defers=config.eps_update != "serial",
    )
    busy = {lane: batches * seconds for lane, seconds in found.busy.items()}
    busy["update"] /= batches
    return StepTime(found.seconds * batches, found.forward * batches, found.backward * batches, busy)
