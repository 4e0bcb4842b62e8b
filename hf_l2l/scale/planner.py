"""The fastest arrangement of a training, and the smallest cluster for a wanted time (sections 5 and 6).

An arrangement is searched among all divisions of layers and heads, with the smallest micro-batches whose transfers are
hidden behind the computation. A batch is never above the critical one: more rows would be wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_l2l.option_names import option
from hf_l2l.scale.hardware import GIB
from hf_l2l.scale.shape import TransformerShape
from hf_l2l.scale.usage import ARRANGED, Cluster, Degrees, Method, Usage

METHODS = tuple(method.value for method in Method)
PARALLELISM = ("none", "data", "data+pipe", "data+tensor", "pipe+tensor", "3d")
DAY_S = 86_400
YEAR_S = 365 * DAY_S

MOST_OVERHEAD = 0.25
"""Of tensor parallelism, and of a reduction that a standard pipeline cannot hide (section 5)."""
_GROWTH = 1.05
"""From one tried number to the next, where many are tried."""
_MOST_STEPS = 10**12


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
                raise ValueError(f"{option(name)} must be at least 1 (got {value}); leave it out for what is best")
        if self.pipeline is not None and shape.layers % self.pipeline:
            raise ValueError(
                f"{option('pipeline')} must divide the {shape.layers} layers (got {self.pipeline}); take one of "
                f"{_listed(_divisors(shape.layers))}"
            )
        if self.tensor is not None and shape.heads % self.tensor:
            raise ValueError(
                f"{option('tensor')} must divide the {shape.heads} heads (got {self.tensor}); take one of "
                f"{_listed(_divisors(shape.heads))}"
            )
        needed = (self.pipeline or 1) * (self.tensor or 1)
        if self.devices is not None and self.devices < needed:
            raise ValueError(
                f"{option('devices')} must be at least {needed} for one instance of the model, {option('pipeline')} "
                f"times {option('tensor')} (got {self.devices}); give more, or lower those"
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
        critical = max(1, int(self.shape.critical_batch))
        return min(self.limits.batch or critical, critical)

    def found(
        self, data_of: Callable[[Usage], int], is_wanted: Callable[[Usage], bool], *, fast: bool
    ) -> Iterator[Usage]:
        """Arrangements whose transfers are hidden, and which are wanted; `data_of` gives the least degree of
        data parallelism to try. If all are to be as fast as possible (`fast`), a standard pipeline is as long as the
        model."""
        if self.method is Method.L2L:
            yield from self._layer_to_layer(data_of, is_wanted)
            return
        for tensor in self._tensor():
            for pipeline in self._pipeline(longest=fast):
                for number in self._micro_batches(pipeline, many=not fast):
                    yield from self._smallest_micro_batch(Degrees(1, number, 1, pipeline, tensor), data_of, is_wanted)

    def _layer_to_layer(self, data_of: Callable[[Usage], int], is_wanted: Callable[[Usage], bool]) -> Iterator[Usage]:
        """Arrangements of L2L, whose transfers and updates need not be hidden: what is not counts as time. Those with
        many micro-batches have rows for few instances only, which may be faster than several nodes."""
        for number in _growing(1, self.rows):
            alone = Usage(self.shape, self.cluster, self.method, Degrees(1, number))
            most = self.rows // number if self._has_data else 1
            least = min(data_of(alone), most)
            for data in _growing(max(1, least), most):
                usage = replace(alone, degrees=replace(alone.degrees, data=data))
                if usage.fits and self.limits.offload and is_wanted(usage):
                    yield usage
                    break

    def _smallest_micro_batch(
        self, to: Degrees, data_of: Callable[[Usage], int], is_wanted: Callable[[Usage], bool]
    ) -> Iterator[Usage]:
        for size in _growing(1, self.rows // to.micro_batches):
            alone = Usage(self.shape, self.cluster, self.method, replace(to, micro_batch=size))
            if not alone.fits_device:
                return  # larger ones do not fit either
            most = self.rows // alone.degrees.batch
            least = min(data_of(alone), most)
            if least < 1:
                return
            hides = False
            # More instances than are needed for the time may be needed for the memory, or for what they send.
            for data in _growing(least, most) if self._has_data else [1]:
                usage = replace(alone, degrees=replace(alone.degrees, data=data))
                hides = self._hides_transfers(usage)
                if not hides:
                    break  # more instances do not send less
                if usage.fits and (self.limits.offload or not usage.is_offloaded):
                    usage = self._with_all_rows(usage)
                    if is_wanted(usage):
                        yield usage
                        return
            if hides:
                return  # larger micro-batches take more memory, and are not faster

    @property
    def _has_data(self) -> bool:
        return "data" in self.parallelism or self.parallelism == "3d"

    @property
    def _has_pipeline(self) -> bool:
        return "pipe" in self.parallelism or self.parallelism == "3d"

    @property
    def _has_tensor(self) -> bool:
        return "tensor" in self.parallelism or self.parallelism == "3d"

    def _with_all_rows(self, usage: Usage) -> Usage:
        """With as many micro-batches as there are rows for: those shorten the bubble."""
        to = usage.degrees
        is_improved = self.method is Method.IMPROVED
        if to.pipeline == 1 and (self._has_data or is_improved):
            return usage  # without a bubble, more of them only take memory
        if self._has_data and is_improved:
            return usage  # rows make more instances instead
        more = replace(usage, degrees=replace(to, micro_batches=self.rows // (to.micro_batch * to.data)))
        return more if more.fits and self._hides_transfers(more) else usage

    @staticmethod
    def _hides_transfers(usage: Usage) -> bool:
        """As section 5 has it: a modular pipeline may wait for what passes between its devices, for it needs few
        micro-batches; a standard one may wait for some of its reduction."""
        found, is_standard = usage.efficiency, usage.method is not Method.IMPROVED
        if is_standard and found.pipeline > 0 or found.offload > 0:
            return False
        allowed = MOST_OVERHEAD if usage.method is Method.BASELINE and usage.degrees.pipeline > 1 else 0
        return found.reduction <= allowed

    def _tensor(self) -> list[int]:
        if not self._has_tensor:
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
        if not self._has_pipeline:
            return [1]
        if self.limits.pipeline is not None:
            return [self.limits.pipeline]
        found = [degree for degree in _divisors(self.shape.layers) if degree <= self.rows]
        return found[-1:] if longest and self.method is Method.BASELINE else found

    def _micro_batches(self, pipeline: int, *, many: bool) -> list[int]:
        """Their numbers to try: those that fill the pipeline, with and without hiding its transfers."""
        usage = Usage(self.shape, self.cluster, self.method, Degrees(1, 1, pipeline=pipeline))
        found = {1} if pipeline == 1 else set()
        for network in {self.cluster.network_intensity, self.cluster.node_intensity}:
            hiding = math.ceil(pipeline * (1 + network / usage.pipeline_intensity))
            found |= {hiding} if pipeline > 1 else set()
            if self.method is Method.IMPROVED:
                enough = math.ceil(2 * network / self.shape.tokens)
                found |= {pipeline, max(pipeline, enough), max(hiding, enough)}
        if many:
            found |= set(_growing(min(found), self.rows))
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

    def is_wanted(usage: Usage) -> bool:
        return devices is None or usage.degrees.devices <= devices

    found = min(
        search.found(data_of, is_wanted, fast=devices is None),
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
    if not 0 < days < math.inf:
        raise ValueError(f"{option('days')} must be a number above 0 (got {days}); give one such as 30")
    devices = search.limits.devices

    def data_of(usage: Usage) -> int:
        return max(1, math.ceil(usage.seconds(steps) / (days * DAY_S)))

    def is_wanted(usage: Usage) -> bool:
        is_within = devices is None or usage.degrees.devices <= devices
        return is_within and usage.seconds(steps) <= days * DAY_S

    found = min(
        search.found(data_of, is_wanted, fast=False),
        key=lambda usage: (usage.degrees.devices, usage.seconds(steps), usage.memory.resident),
        default=None,
    )
    return _planned(search, found, steps, f" within {days:g} days")


def _search(
    shape: TransformerShape, cluster: Cluster, method: Method, parallelism: str, limits: Limits | None, steps: int
) -> _Search:
    if parallelism not in PARALLELISM:
        raise ValueError(f"{option('parallelism')} must be one of {', '.join(PARALLELISM)} (got {parallelism!r})")
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(
            f"{option('steps')} must be from 1 to {_MOST_STEPS:,} (got {steps}); give a number such as 100000"
        )
    if parallelism not in ARRANGED[method]:
        raise ValueError(
            f"{option('parallelism')} must be one of {', '.join(ARRANGED[method])} with {option('method')} "
            f"{method.value} (got {parallelism}); take one of those, or another {option('method')}"
        )
    limits = limits or Limits()
    limits.check(shape)
    search = _Search(shape, cluster, method, parallelism, limits)
    for name, has in (("pipeline", search._has_pipeline), ("tensor", search._has_tensor)):
        degree = getattr(limits, name)
        if degree is not None and degree > 1 and not has:
            raise ValueError(
                f"{option(name)} must be left out with {option('parallelism')} {parallelism}, which has no such "
                f"degree (got {degree}); drop it, or take {option('parallelism')} 3d"
            )
    if limits.tensor is not None and limits.tensor > cluster.largest_tensor:
        raise ValueError(
            f"{option('tensor')} must be at most the {cluster.largest_tensor} devices of a node (got {limits.tensor}"
            f"); lower it, or give a larger {option('node_size')}"
        )
    return search


def _planned(search: _Search, found: Usage | None, steps: int, where: str) -> Plan:
    if found is None:
        state = Usage(search.shape, search.cluster, search.method, Degrees(1, 1)).memory.state
        hides = "" if search.method is Method.L2L else "hide its transfers and "
        where += "" if search.limits.offload else " without offload"
        raise ValueError(
            f"an arrangement must {hides}fit the memory of devices and hosts{where}, with at most "
            f"{search.rows:,} rows in a batch (got none with parallelism {search.parallelism} and the "
            f"{search.method.value} method, and the state alone takes "
            f"{state / GIB:,.1f} GiB); allow more with {option('devices')}, "
            f"{option('days')} or {option('host_bytes')}, or another {option('parallelism')}"
        )
    return Plan(found, steps)


def _growing(first: int, last: int) -> Iterator[int]:
    """Numbers from `first` to `last`: one by one, and later in steps of some percent."""
    number = first
    while number <= last:
        yield number
        number = max(number + 1, int(number * _GROWTH))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _divisors(of: int) -> list[int]:
    return [number for number in range(1, of + 1) if of % number == 0]
