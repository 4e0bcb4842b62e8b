"""What a training needs of each device, and which part of the time it computes (appendix C).

Symbols of the paper: batch `b`, micro-batch size `b_mu` and number `n_mu`; degrees of data, pipeline and tensor
parallelism `n_b`, `n_l`, `n_a`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hf_l2l.option_names import option
from hf_l2l.scale.hardware import GIB, Hardware
from hf_l2l.scale.shape import TransformerShape

STATE_BYTES = 12
"""Of a parameter: the weight and two moments of Adam, in fp32; gradients are used up at once (appendix C.3)."""
L2L_STATE_BYTES = 16
"""The same in this package's host memory, with the sum of gradients (arXiv:2002.05645, first text, equation 1)."""
COPY_BYTES = 2
"""Of a parameter: the copy in 16 bits that travels to the devices."""
UPDATE_BYTES = 2 * L2L_STATE_BYTES - 4 + COPY_BYTES
"""What an update on the host reads and writes for a parameter: all of its state, of which gradients are only read,
and the copy that travels."""


class Method(Enum):
    """How micro-batches, layers and state are arranged (section 5)."""

    BASELINE = "baseline"
    """Micro-batch after micro-batch through all layers; each data-parallel instance has the whole state."""
    PARTITIONED = "partitioned"
    """The same with the state divided among the data-parallel instances, as the third stage of ZeRO."""
    IMPROVED = "improved"
    """Layered gradient accumulation and modular pipeline parallelism, with the state divided."""
    L2L = "l2l"
    """Layer to layer as this package does it: layers come from host memory and are updated there by the host, whose
    memory has the state, divided among hosts (arXiv:2002.05645, first text, section 3.1)."""


ARRANGED: dict[Method, tuple[str, ...]] = {
    Method.BASELINE: ("none", "data", "data+pipe", "data+tensor", "pipe+tensor", "3d"),
    Method.PARTITIONED: ("data", "data+pipe", "data+tensor", "3d"),
    Method.IMPROVED: ("none", "data", "data+pipe", "data+tensor", "pipe+tensor", "3d"),
    Method.L2L: ("none", "data"),
}
"""Kinds of parallelism of each method: the state is partitioned among data-parallel instances only."""


@dataclass(frozen=True)
class Degrees:
    """How a batch and a model are divided."""

    micro_batch: int
    """Rows of a micro-batch, `b_mu`."""
    micro_batches: int
    """Micro-batches of an instance, one after the other, `n_mu`."""
    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.data * self.pipeline * self.tensor


@dataclass(frozen=True)
class Cluster:
    """Devices and what connects them."""

    hardware: Hardware
    network: float | None = None
    """Between nodes, in GiB/s for each device, both directions together; None: that of the hardware."""
    node_size: int | None = None
    """Devices of a node; None: that of the hardware."""
    host_bytes: float | None = None
    """Memory of a node for what its devices offload; None: as much as they need."""
    host_bandwidth: float | None = None
    """Of a node's host memory, in GiB/s; None: that of the hardware."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: if the node has no device.
        """
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(
                f"{option('node_size')} must be a whole number from 1 (got {self.node_size}); leave it out for that "
                "of the hardware"
            )

    def host_bytes_of(self, devices: int) -> float:
        """The share of a device in its node's memory, if a training has so many devices."""
        return math.inf if self.host_bytes is None else self.host_bytes / self.sharing(devices)

    def sharing(self, devices: int) -> int:
        """How many of so many devices have one node."""
        return min(devices, self.largest_tensor)

    @property
    def largest_tensor(self) -> int:
        """The largest degree of tensor parallelism."""
        return self.node_size or self.hardware.node_size

    @property
    def network_intensity(self) -> float:
        """From which on transfers between nodes are hidden, in flop/byte."""
        return self.hardware.intensity(self.network or self.hardware.network)

    @property
    def node_intensity(self) -> float:
        """The same within a node."""
        return self.hardware.intensity(self.hardware.tensor_link)


@dataclass(frozen=True)
class Efficiency:
    """What adds to the time of computing alone, as parts of it."""

    bubble: float
    """Devices of a pipeline that wait for their first micro-batch, or after their last one."""
    tensor: float
    """Sums of tensor parallelism, which nothing hides."""
    pipeline: float
    """Hidden states between devices of a pipeline, where they are not hidden."""
    reduction: float
    """Sums of gradients, and weights of other instances, where they are not hidden."""
    offload: float
    """Transfers of state to and from the host, where they are not hidden."""
    update: float
    """Updates on the host, where they are not hidden."""

    @property
    def value(self) -> float:
        """The time of computing alone, as a part of the whole: a pipeline that waits does so for slower steps, too."""
        more = self.tensor + self.pipeline + self.reduction + self.offload + self.update
        return 1 / ((1 + self.bubble) * (1 + more))


@dataclass(frozen=True)
class Memory:
    """Bytes of a device (appendix C.3)."""

    state: float
    checkpoints: float
    """Hidden states between layers: the stash."""
    buffers: float
    """Two layers' weights and one layer's gradients, in 16 bits (appendix C.2); with L2L two layers' gradients, whose
    sums are in fp32."""
    activations: float

    @property
    def offloadable(self) -> float:
        """What may be in host memory."""
        return self.state + self.checkpoints

    @property
    def resident(self) -> float:
        """What must be on the device."""
        return self.buffers + self.activations

    @property
    def total(self) -> float:
        """On the device and in host memory."""
        return self.offloadable + self.resident


@dataclass(frozen=True)
class Usage:
    """A training of a model in one arrangement."""

    shape: TransformerShape
    cluster: Cluster
    method: Method
    degrees: Degrees

    # ---- memory

    @property
    def memory(self) -> Memory:
        """What a device holds."""
        shape, to = self.shape, self.degrees
        state, buffers = STATE_BYTES * shape.parameters / to.devices, 6 * shape.layer_parameters / to.tensor
        if self.method is Method.BASELINE:
            state *= to.data
        elif self.method is Method.L2L:
            # Each host has all copies that travel, and of the rest its part (docs/ranks.md).
            state = L2L_STATE_BYTES * shape.parameters / to.devices
            state += COPY_BYTES * shape.parameters / self.cluster.sharing(to.devices)
            buffers = 12 * shape.layer_parameters
        return Memory(
            state=state,
            checkpoints=2 * to.batch * shape.tokens * shape.width * shape.layers / to.devices,
            buffers=buffers,
            activations=to.micro_batch * shape.tokens * shape.activation_bytes / to.tensor,
        )

    @property
    def in_host_memory(self) -> float:
        """Bytes of `memory` that are there: state and checkpoints, if the device cannot hold all; with L2L the state
        in any case, and checkpoints if the device cannot hold those."""
        memory, size = self.memory, self.cluster.hardware.memory_gib * GIB
        if self.method is Method.L2L:
            return memory.state + (0 if memory.resident + memory.checkpoints <= size else memory.checkpoints)
        return 0 if memory.total <= size else memory.offloadable

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is in host memory."""
        return self.in_host_memory > 0

    @property
    def fits_device(self) -> bool:
        """Whether the device holds what must be there."""
        return self.memory.resident <= self.cluster.hardware.memory_gib * GIB

    @property
    def fits(self) -> bool:
        """Whether the device holds what must be there, and the host what is offloaded."""
        share = self.cluster.host_bytes_of(self.degrees.devices)
        return self.fits_device and self.in_host_memory <= share

    @property
    def network_intensity(self) -> float:
        """From which on transfers between instances are hidden, in flop/byte: those of one node have its links."""
        return self.cluster.node_intensity if self.is_one_node else self.cluster.network_intensity

    @property
    def is_one_node(self) -> bool:
        """Whether one node has all devices."""
        return self.degrees.devices <= self.cluster.largest_tensor

    # ---- intensities, in flop/byte

    @property
    def reduction_intensity(self) -> float:
        """Of sums of gradients and, with a divided state, of weights (equations 5 to 9)."""
        to = self.degrees
        tokens = self.shape.tokens * to.batch / to.data
        if self.method is Method.L2L:
            # In the forward, the hosts send and receive updated weights in fp32; the devices of each share that.
            return tokens * self.cluster.sharing(to.devices) / 4
        if self.method is Method.IMPROVED:
            return tokens / 2
        if self.method is Method.PARTITIONED:
            return tokens / to.micro_batches / 2
        return tokens if to.pipeline > 1 else 0.75 * tokens / to.micro_batches

    @property
    def pipeline_intensity(self) -> float:
        """Of hidden states between devices (equations 10 and 11)."""
        each = self.shape.layer_parameters / (2 * self.shape.width)
        return each if self.method is Method.IMPROVED else each * self.shape.layers / self.degrees.pipeline

    @property
    def tensor_intensity(self) -> float:
        """Of sums within a layer (equation 12)."""
        return self.shape.layer_parameters / self.shape.width / (3 * (self.degrees.tensor - 1))

    @property
    def state_intensity(self) -> float:
        """Of weights and gradients between host and device (equation 13)."""
        to = self.degrees
        tokens = self.shape.tokens * to.micro_batch
        if self.method is Method.L2L:
            # All weights go to each device, one way over a link whose bandwidth counts both.
            return tokens * to.micro_batches / 2
        if self.method is Method.IMPROVED:
            return tokens * to.micro_batches * to.data
        return tokens * to.data if self.method is Method.PARTITIONED else tokens

    @property
    def checkpoint_intensity(self) -> float:
        """Of hidden states between host and device (equation 14)."""
        return self.shape.layer_parameters / self.shape.width

    # ---- time

    @property
    def efficiency(self) -> Efficiency:
        """What adds to the time of computing alone."""
        to, network = self.degrees, self.network_intensity
        bubble = (to.pipeline - 1) / to.micro_batches
        if self.method is Method.IMPROVED:
            bubble *= to.pipeline / self.shape.layers
        tensor = 0.0
        if to.tensor > 1:
            is_in_node = to.tensor <= self.cluster.largest_tensor
            link = self.cluster.node_intensity if is_in_node else self.cluster.network_intensity
            tensor = link / self.tensor_intensity
        return Efficiency(
            bubble,
            tensor,
            pipeline=0.0 if to.pipeline == 1 or self.hides_pipeline else network / self.pipeline_intensity,
            reduction=self._reduction() if to.data > 1 else 0.0,
            offload=self._offload() if self.is_offloaded else 0.0,
            update=self._update() if self.method is Method.L2L else 0.0,
        )

    @property
    def hides_pipeline(self) -> bool:
        """Whether there are enough micro-batches beside those that devices compute for the transfers between them
        (appendix C.4.2)."""
        more = 1 + self.network_intensity / self.pipeline_intensity
        return self.degrees.micro_batches >= self.degrees.pipeline * more

    def _reduction(self) -> float:
        to = self.degrees
        needed = self.network_intensity / self.reduction_intensity
        if self.method is Method.L2L:  # one host adds what it receives anyway; several hide theirs behind the forward
            return 0.0 if self.is_one_node else max(0.0, needed - 1) / 4
        if self.method is Method.BASELINE and to.pipeline > 1:
            return needed  # no device has anything to compute meanwhile (equation 6)
        return max(0.0, needed - 1)

    def _offload(self) -> float:
        """The time of transfers of the host that is not hidden, over the narrowest of what they pass."""
        hardware, to = self.cluster.hardware, self.degrees
        if self.method is Method.L2L:
            # In forwards, each a quarter of what is computed. One hides uploads (equation 7) and a stash that leaves.
            # A backward is three: weights and the stash go up meanwhile, and sums of gradients in fp32 down.
            link, has_stash = hardware.intensity(hardware.cpu_gpu), self.in_host_memory > self.memory.state
            weights = link / self.state_intensity
            stash = 2 * link / self.checkpoint_intensity if has_stash else 0.0
            forward, backward = max(weights, stash), max(weights + stash, 2 * weights)
            return (max(0.0, forward - 1) + max(0.0, backward - 3)) / 4
        found = hardware.intensity(hardware.cpu_gpu) / min(self.state_intensity, self.checkpoint_intensity)
        if to.data > 1:  # the slot also has what goes to other nodes
            both = 1 / self.state_intensity + 1 / self.reduction_intensity
            found = max(found, hardware.intensity(hardware.pci_express) * both)
        return max(0.0, found - 1)

    @property
    def update_seconds(self) -> float:
        """Of a step's updates by the hosts together, each of its part, at the bandwidth of their memory."""
        cluster, devices = self.cluster, self.degrees.devices
        nodes = devices / cluster.sharing(devices)
        bandwidth = (cluster.host_bandwidth or cluster.hardware.host_memory_bandwidth) * GIB
        return UPDATE_BYTES * self.shape.parameters / (bandwidth * nodes)

    def _update(self) -> float:
        """Equation 7 of the first text of arXiv:2002.05645: updates are hidden by backwards, half of what is computed
        with the recomputation."""
        return max(0.0, self.update_seconds / self.computing_seconds - 0.5)

    @property
    def computing_seconds(self) -> float:
        """What a device computes in a step."""
        to = self.degrees
        return self.shape.flops(to.batch) / (to.devices * self.cluster.hardware.peak_flops)

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return self.computing_seconds / self.efficiency.value

    @property
    def offload_gib_per_s(self) -> float:
        """The bandwidth between host and device that hides the transfers of state and checkpoints (section 8.2)."""
        intensity = min(self.state_intensity, self.checkpoint_intensity)
        return self.cluster.hardware.peak_flops / intensity / GIB

    def seconds(self, steps: int = 100_000) -> float:
        """Of a training of so many steps at the critical batch; with smaller batches as many rows in more steps."""
        flops = self.shape.flops(self.shape.critical_batch) * steps
        return flops / (self.degrees.devices * self.cluster.hardware.peak_flops * self.efficiency.value)
