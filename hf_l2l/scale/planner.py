"""The fastest arrangement of a training, and the smallest cluster for a wanted time (sections 5 and 6).

An arrangement is searched among all divisions of layers and heads, with the smallest micro-batches whose transfers are
hidden behind the computation. A batch is never above the critical one: more rows would be wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_l2l.scale.shape import TransformerShape
from hf_l2l.scale.usage import Cluster, Degrees, Method, Usage

METHODS = tuple(method.value for method in Method)
PARALLELISM = ("none", "data", "data+pipe", "data+tensor", "pipe+tensor", "3d")
DAY_S = 86_400
YEAR_S = 365 * DAY_S

MOST_OVERHEAD = 0.25
"""Of tensor parallelism, and of a reduction that a standard pipeline cannot hide (section 5)."""
_GROWTH = 1.05
"""From one tried number of micro-batches to the next, where many are tried."""


@dataclass(frozen=True)
class Plan:
    """An arrangement that was found, and for which steps it is."""

    usage: Usage
    steps: int

    @property
    def seconds(self) -> float:
        """Of the training; see `Usage.seconds`."""
        return self.usage.seconds(self.steps)


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to; None: as is best."""

    devices: int | None = None
    """Most devices."""
    batch: int | None = None
    """Most rows of a batch; None: the critical batch."""
    pipeline: int | None = None
    """The degree of pipeline parallelism."""
    tensor: int | None = None
    """The degree of tensor parallelism."""
    offload: bool = True
    """Whether state and checkpoints may be in host memory."""

    def check(self, shape: TransformerShape) -> None:
        """
        Raises:
            ValueError: if a number is below 1, does not divide what it divides, or needs more devices than there are.
        """
        for name in ("devices", "batch", "pipeline", "tensor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of a plan must be at least 1 (got {value}); leave it out for what is best")
        if self.pipeline is not None and shape.layers % self.pipeline:
            raise ValueError(
                f"the pipeline must divide the {shape.layers} layers (got {self.pipeline}); take one of "
                f"{_listed(_divisors(shape.layers))}"
            )
        if self.tensor is not None and shape.heads % self.tensor:
            raise ValueError(
                f"tensor parallelism must divide the {shape.heads} heads (got {self.tensor}); take one of "
                f"{_listed(_divisors(shape.heads))}"
            )
        needed = (self.pipeline or 1) * (self.tensor or 1)
        if self.devices is not None and self.devices < needed:
            raise ValueError(
                f"one instance of the model takes {needed} devices, pipeline times tensor (got {self.devices}); "
                "give more, or lower degrees"
            )


@dataclass(frozen=True)
class _Search:
    shape: TransformerShape
    cluster: Cluster
    method: Method
    parallelism: str
    limits: Limits

    @property
    def rows(self) -> int:
        """Most rows of a batch."""
        return self.limits.batch or max(1, int(self.shape.critical_batch))

    def found(self, data_of: Callable[[Usage], int], *, fast: bool) -> Iterator[Usage]:
        """Arrangements whose transfers are hidden; `data_of` gives the degree of data parallelism for one without it.
        If all are to be as fast as possible (`fast`), a standard pipeline is as long as the model."""
        for tensor in self._tensor():
            for pipeline in self._pipeline(longest=fast):
                for number in self._micro_batches(pipeline, many=not fast):
                    yield from self._smallest_micro_batch(Degrees(1, number, 1, pipeline, tensor), data_of)

    def _smallest_micro_batch(self, to: Degrees, data_of: Callable[[Usage], int]) -> Iterator[Usage]:
        for size in range(1, self.rows // to.micro_batches + 1):
            usage = Usage(self.shape, self.cluster, self.method, replace(to, micro_batch=size))
            most = min(data_of(usage), self.rows // usage.degrees.batch)
            if most < 1:
                return
            data = most if "data" in self.parallelism or self.parallelism == "3d" else 1
            usage = replace(usage, degrees=replace(usage.degrees, data=data))
            if not usage.fits:
                if data == 1:
                    return  # larger ones do not fit either
                continue  # fewer instances share the memory of their node
            if usage.is_offloaded and not self.limits.offload:
                continue  # fewer instances may be enough for a smaller stash
            if self._hides_transfers(usage):
                yield self._with_all_rows(usage)
                return

    def _with_all_rows(self, usage: Usage) -> Usage:
        """With as many micro-batches as there are rows for: those shorten the bubble."""
        to = usage.degrees
        if self.method is Method.IMPROVED or to.pipeline == 1 and self.parallelism != "none":
            return usage
        more = replace(usage, degrees=replace(to, micro_batches=self.rows // (to.micro_batch * to.data)))
        return more if more.fits and self._hides_transfers(more) else usage

    @staticmethod
    def _hides_transfers(usage: Usage) -> bool:
        found = usage.efficiency
        return found.offload == 0 and (
            found.reduction <= MOST_OVERHEAD
            if usage.method is Method.BASELINE and usage.degrees.pipeline > 1
            else found.reduction == 0
        )

    def _tensor(self) -> list[int]:
        if "tensor" not in self.parallelism and self.parallelism != "3d":
            return [1]
        if self.limits.tensor is not None:
            return [self.limits.tensor]
        plain = Usage(self.shape, self.cluster, self.method, Degrees(1, 1))
        return [
            degree
            for degree in _divisors(self.shape.heads)
            if degree <= self.cluster.largest_tensor
            and replace(plain, degrees=Degrees(1, 1, tensor=degree)).efficiency.tensor <= MOST_OVERHEAD
        ]

    def _pipeline(self, *, longest: bool) -> list[int]:
        if "pipe" not in self.parallelism and self.parallelism != "3d":
            return [1]
        if self.limits.pipeline is not None:
            return [self.limits.pipeline]
        found = [degree for degree in _divisors(self.shape.layers) if degree <= self.rows]
        return found[-1:] if longest and self.method is Method.BASELINE else found

    def _micro_batches(self, pipeline: int, *, many: bool) -> list[int]:
        """Their numbers to try: those that fill the pipeline, with and without hiding its transfers."""
        usage = Usage(self.shape, self.cluster, self.method, Degrees(1, 1, pipeline=pipeline))
        hiding = math.ceil(pipeline * (1 + self.cluster.network_intensity / usage.pipeline_intensity))
        found = {1} if pipeline == 1 else {hiding}
        if self.method is Method.IMPROVED:
            enough = math.ceil(2 * self.cluster.network_intensity / self.shape.tokens)
            found |= {pipeline, max(pipeline, enough), max(hiding, enough)}
        if many:
            number = float(min(found))
            while number < self.rows:
                number = max(number + 1, number * _GROWTH)
                found.add(int(number))
        return sorted(number for number in found if number <= self.rows)


def fastest(
    shape: TransformerShape,
    cluster: Cluster,
    method: Method = Method.IMPROVED,
    parallelism: str = "3d",
    limits: Limits | None = None,
    *,
    steps: int = 100_000,
) -> Plan:
    """The fastest arrangement.

    Args:
        parallelism: one of `PARALLELISM`.
        limits: what it keeps to; without a number of devices, it has as many as the critical batch has work for.
        steps: of the training, at the critical batch.

    Raises:
        ValueError: if `parallelism` is none of these, the limits cannot be kept, or nothing can be arranged so.
    """
    search = _search(shape, cluster, method, parallelism, limits, steps)
    devices = search.limits.devices

    def data_of(usage: Usage) -> int:
        return search.rows if devices is None else devices // (usage.degrees.pipeline * usage.degrees.tensor)

    found = min(
        search.found(data_of, fast=devices is None),
        key=lambda usage: (usage.seconds(steps), usage.degrees.devices, usage.memory.resident),
        default=None,
    )
    return _planned(
        search, found, steps, "" if devices is None else f" on at most {devices:,} device{'s' if devices > 1 else ''}"
    )


def smallest(
    shape: TransformerShape,
    cluster: Cluster,
    days: float,
    method: Method = Method.IMPROVED,
    parallelism: str = "3d",
    limits: Limits | None = None,
    *,
    steps: int = 100_000,
) -> Plan:
    """The arrangement with the fewest devices that trains within so many days; see `fastest`.

    Raises:
        ValueError: as `fastest`, and if no arrangement is so fast.
    """
    search = _search(shape, cluster, method, parallelism, limits, steps)
    if not days > 0:
        raise ValueError(f"a plan needs more than 0 days (got {days}); give a number such as 30")
    devices = search.limits.devices

    def data_of(usage: Usage) -> int:
        enough = math.ceil(usage.seconds(steps) / (days * DAY_S))
        return enough if devices is None or enough * usage.degrees.devices <= devices else 0

    found = min(
        (usage for usage in search.found(data_of, fast=False) if usage.seconds(steps) <= days * DAY_S),
        key=lambda usage: (usage.degrees.devices, usage.seconds(steps), usage.memory.resident),
        default=None,
    )
    return _planned(search, found, steps, f" within {days:g} days")


def _search(
    shape: TransformerShape, cluster: Cluster, method: Method, parallelism: str, limits: Limits | None, steps: int
) -> _Search:
    if parallelism not in PARALLELISM:
        raise ValueError(f"parallelism must be one of {', '.join(PARALLELISM)} (got {parallelism!r})")
    if steps < 1:
        raise ValueError(f"a training has at least 1 step (got {steps}); give a number such as 100000")
    limits = limits or Limits()
    limits.check(shape)
    return _Search(shape, cluster, method, parallelism, limits)


def _planned(search: _Search, found: Usage | None, steps: int, where: str) -> Plan:
    if found is None:
        where += "" if search.limits.offload else " without offload"
        raise ValueError(
            f"an arrangement must hide its transfers and fit the memory of devices and hosts{where}, with at most "
            f"{search.rows:,} rows in a batch (got none with parallelism {search.parallelism} and the "
            f"{search.method.value} method); allow more devices, days or host memory, or another kind of parallelism"
        )
    return Plan(found, steps)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _divisors(of: int) -> list[int]:
    return [number for number in range(1, of + 1) if of % number == 0]
