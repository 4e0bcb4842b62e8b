"""What ranks of one host, or of several, take: memory of each host and device, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.memory.ledger import COPIES, GRADIENTS, MASTERS, MOMENTS, NORMS
from hf_l2l.option_names import option
from hf_l2l.pipeline.hosts import HostsLoad, backward_seconds, hosts_seconds
from hf_l2l.pipeline.ranks import HostBytes, RanksTime, ranks_time
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates, pipelined
from hf_l2l.runtime.tensors import size_text, two_digits

LEAST_SLOT = 2**16
"""Bytes of a slot for gradients of small models."""


@dataclass(frozen=True)
class Launch:
    """The processes that a launcher starts to train one model."""

    ranks: int = 1
    """On each host."""
    hosts: int = 1
    devices: int = 1
    """Of each rank."""
    network: float | None = None
    """Bytes per second that a host sends, and as many that it receives; None if that is not known."""

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.ranks * self.hosts

    def may_add_on_devices(self, config: L2LConfig) -> bool:
        """Whether devices will add gradients, or may: those of one host, one for each rank."""
        return config.reduce != "host" and self.ranks > 1 and self.hosts == 1 and self.devices == 1

    def refuse(self, config: L2LConfig) -> None:
        """Raise ValueError for options that ranks refuse."""
        stays = config.resident != "none" or config.resident_layers
        if self.count > 1 and stays and config.resident_update == "device":
            raise ValueError(
                f"ranks share the weights on the host, where they are updated (got {option('resident')}="
                f"{config.resident!r}, {option('resident_layers')}={config.resident_layers} and {self.count} ranks); "
                f"set {option('resident_update')}='host', which keeps copies on the device, or leave both out"
            )
        if self.count > 1 and config.state_tier == "disk":
            raise ValueError(
                f"{option('state_tier')}='disk' is for one process (got {self.count} ranks); use "
                f"{option('state_tier')}='host', where all ranks of a host have one set of masters and state"
            )
        if self.count > 1 and config.reduce == "device" and not self.may_add_on_devices(config):
            raise ValueError(
                f"{option('reduce')}='device' adds gradients on the devices of several ranks of one host, one device "
                f"for each rank (got {self.hosts} hosts with {self.ranks} ranks, and {self.devices} devices of each); "
                f"use {option('reduce')}='host', or 'auto'"
            )


@dataclass(frozen=True)
class Together:
    """What all ranks take."""

    ranks: int
    hosts: int
    host_bytes: int
    """Of each host, at the peak: what its ranks share, and what each of them has."""
    shared_bytes: int
    """Of it, what its ranks share: masters and copies, and gradient sums and moments of what they update."""
    landing_bytes: int
    """Of what each rank has, the slots for the gradients that it sends."""
    device_bytes: int
    """Of each device, for sums of gradients there, beside the report."""
    seconds_per_step: float | None = None
    bound: str | None = None
    times_as_many: float | None = None
    """Rows per second, of those of one rank alone."""
    moved_bytes: int | None = None
    """Through the memory of each host, in a step."""
    network_seconds: float | None = None
    """That the network alone would take for a step."""

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def together(
    run: RunShapes,
    config: L2LConfig,
    launch: Launch,
    rates: Rates | None,
    dram: float | None,
    batches: int,
    of_one: Mapping[str, Mapping[str, int]],
) -> Together:
    """What the ranks of `launch` take, each with its devices and the batch of `run`.

    Args:
        run: the model, and the batch of one rank.
        config: the options.
        launch: the ranks.
        rates: of the machine; without them, and without `dram`, there are no times.
        dram: bytes per second that a host reads and writes.
        batches: of each rank in a step, one after the other.
        of_one: host memory of one process, as its report has it.
    """
    host = {name: size["peak"] for name, size in of_one.items() if name != "total"}
    # Each host has those of the parameters that its own ranks update.
    host |= {name: -(-host[name] // launch.hosts) for name in (GRADIENTS, MOMENTS)}
    shared = sum(host[name] for name in (MASTERS, COPIES, GRADIENTS, MOMENTS, NORMS))
    landing = 0 if launch.may_add_on_devices(config) and config.reduce == "device" else _landing(run)
    own = sum(host.values()) - shared + landing
    found: dict[str, Any] = {
        "ranks": launch.ranks,
        "hosts": launch.hosts,
        "host_bytes": shared + launch.ranks * own,
        "shared_bytes": shared,
        "landing_bytes": landing,
        "device_bytes": run.for_ranks,
    }
    if rates is None or dram is None:
        return Together(**found)
    return Together(**found, **_times(run, config, launch, rates, dram, batches))


def _landing(run: RunShapes) -> int:
    """Bytes of the two slots of a rank, each with room for the gradients of the largest layer, or of all small
    parameters in no layer; a large one lands in parts."""
    return 2 * max(LEAST_SLOT, *(each.gradients for each in (*run.weights.layers, run.weights.small)))


def _times(
    run: RunShapes, config: L2LConfig, launch: Launch, rates: Rates, dram: float, batches: int
) -> dict[str, Any]:
    """The fields of `Together` that are times. Each host updates its part of the parameters."""
    costs = run.costs(config)
    calls = [cost for cost in costs.layers if cost.forward_flops]
    *layers, outside = (
        each._replace(update=each.update / launch.hosts)
        for each in (*(pipelined(cost, rates) for cost in calls), run.outside_seconds(config, rates))
    )
    moved = [
        HostBytes(cost.forward_up + cost.backward_up, cost.backward_down, cost.parameters)
        for cost in (*calls, costs.shell)
    ]
    options: dict[str, Any] = {
        "ubatches": costs.ubatches,
        "devices": launch.devices,
        "passed": run.own_input / costs.ubatches / rates.link_down,
        "launch": rates.per_call,
        "defers": config.eps_update != "serial",
        "dram": dram,
        "on_devices": launch.may_add_on_devices(config) and config.reduce == "device",
    }
    last = ranks_time(layers, outside, moved, launch.ranks, **options)
    # The batches before the last one of a step are followed by no update.
    still = [each._replace(update=0.0) for each in (*layers, outside)]
    unchanged = [each._replace(parameters=0) for each in moved]
    other = ranks_time(still[:-1], still[-1], unchanged, launch.ranks, **options)
    alone = sum(each.seconds * launch.ranks / each.times_as_many for each in (last, *[other] * (batches - 1)))
    of_a_host = last.seconds + (batches - 1) * other.seconds
    seconds: float | None = of_a_host
    network: float | None = None
    if launch.hosts > 1:
        seconds, network = _over_network(run, launch, last, other, batches)
    return {
        "seconds_per_step": seconds,
        "bound": "network" if network is not None and network > of_a_host else last.bound,
        "times_as_many": None if seconds is None else launch.count * alone / seconds,
        "moved_bytes": last.host_bytes + (batches - 1) * other.host_bytes,
        "network_seconds": network,
    }


def _over_network(
    run: RunShapes, launch: Launch, last: RanksTime, other: RanksTime, batches: int
) -> tuple[float | None, float | None]:
    """Seconds of a step of several hosts, and of what crosses the network in it alone; None if the network is not
    known."""
    if launch.network is None:
        return None, None
    sums = [4 * each.trained for each in (*run.weights.layers, run.weights.shell)]
    hosts, bandwidth = launch.hosts, launch.network
    before = other.forward + backward_seconds(HostsLoad(other.forward, other.backward, sums), hosts, bandwidth)
    seconds = (batches - 1) * before + hosts_seconds(HostsLoad(last.forward, last.backward, sums), hosts, bandwidth)
    # Sums of each batch, and the new weights once.
    crosses = (batches + 1) * sum(sums) * (hosts - 1) / hosts / bandwidth
    return seconds + last.seconds - last.forward - last.backward, crosses


def sentences(found: Together, launch: Launch) -> Iterator[str]:
    """What an estimate says of it."""
    own = (found.host_bytes - found.shared_bytes) // found.ranks
    several = f"Each of {found.hosts} hosts, with {found.ranks} ranks," if found.hosts > 1 else f"{found.ranks} ranks"
    part = f" of one part in {found.hosts} of the parameters" if found.hosts > 1 else ""
    yield (
        f"{several} {'holds' if found.hosts > 1 else 'hold'} {size_text(found.host_bytes)} of host memory: "
        f"{size_text(found.shared_bytes)} once, for masters, copies, and gradient sums and moments{part}, and "
        f"{size_text(own)} for each rank, of which {size_text(found.landing_bytes)} are slots for gradients that it "
        "sends. The table above is of one process alone."
    )
    if found.device_bytes:
        yield (
            f"Each device needs {size_text(found.device_bytes)} more, if devices add gradients "
            f"({option('reduce')}; left free in a budget)."
        )
    if found.seconds_per_step is not None:
        where = f"{found.hosts} hosts with {found.ranks} ranks each" if found.hosts > 1 else f"{found.ranks} ranks"
        where += f", each with {launch.devices} devices that run its layers in turn," if launch.devices > 1 else ""
        yield (
            f"A step of {where} takes {two_digits(found.seconds_per_step)} s, with "
            f"{found.times_as_many:.1f} times the rows per second of one rank; what takes longest is {found.bound}. "
            f"{size_text(found.moved_bytes or 0)} pass through the memory of a host in a step."
        )
    if found.network_seconds is not None:
        seconds = two_digits(found.network_seconds)
        yield f"What passes between hosts in a step takes {seconds} s of the network of each."
    if found.moved_bytes is not None and found.seconds_per_step is None:
        yield "The time of a step of several hosts depends on their network: give --network."
