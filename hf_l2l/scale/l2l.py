"""The time and memory of a layer-to-layer step by the equations of the L2L papers (arXiv:2002.05645).

Equations 1 to 7 of the first text, and 1 to 6 of the later one (`throughput`). They are for one device and equal
layers; `hf_l2l.plan.step_time` is the model of this package, with more of what happens at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_l2l.scale.hardware import GIB
from hf_l2l.scale.shape import TransformerShape
from hf_l2l.scale.usage import COPY_BYTES, UPDATE_BYTES, Cluster


@dataclass(frozen=True)
class LayerTimes:
    """A training step of equal layers: times in seconds, sizes in bytes."""

    layers: int
    """`N`."""
    ubatches: int
    """`u`, all of which a layer runs before the next one."""
    forward: float
    """Of one layer and one ubatch, `F_t`."""
    backward: float
    """Of the same, without its recomputation, `B_t`."""
    layer_bytes: float
    """Weights of a layer, `L`."""
    host_to_device: float
    """Bytes per second, `H_b`."""
    device_update: float = 0.0
    """The optimizer's step on the device, `O_t`."""
    host_update: float = 0.0
    """The same on the host, `O_tc`."""

    @classmethod
    def of(cls, shape: TransformerShape, cluster: Cluster, rows: int) -> LayerTimes:
        """A step with so many rows on one device of `cluster`, at its peak. One micro-batch stands for all rows: those
        of a layer follow one another."""
        hardware = cluster.hardware
        forward = 2 * rows * shape.tokens * shape.layer_parameters / hardware.peak_flops
        host = (cluster.host_bandwidth or hardware.host_memory_bandwidth) * GIB
        return cls(
            shape.layers,
            ubatches=1,
            forward=forward,
            backward=2 * forward,
            layer_bytes=COPY_BYTES * shape.layer_parameters,
            host_to_device=hardware.cpu_gpu / 2 * GIB,  # one way of both
            host_update=UPDATE_BYTES * shape.parameters / host,
        )

    @property
    def upload(self) -> float:
        """Of one layer, `L / H_b`."""
        return self.layer_bytes / self.host_to_device

    @property
    def plain(self) -> float:
        """A step that keeps everything on the device (first text, equation 5)."""
        return self.layers * self.ubatches * (self.forward + self.backward) + self.device_update

    @property
    def serial(self) -> float:
        """A layer-to-layer step with one thing after the other (equation 6)."""
        return self.layers * 2 * self.upload + self.computing + self.host_update

    @property
    def parallel(self) -> float:
        """One whose uploads and updates run beside the layers, L2L-p (equation 7)."""
        backward = self.layers * self.ubatches * self.backward
        forward = self.ubatches * self.forward
        return self.computing + max(0.0, self.host_update - backward) + max(0.0, self.layers * (self.upload - forward))

    @property
    def computing(self) -> float:
        """Forwards, recomputation and backwards."""
        return self.layers * self.ubatches * (2 * self.forward + self.backward)


@dataclass(frozen=True)
class LayerSizes:
    """Memory of equal layers, in bytes or any other unit."""

    layers: int
    """`N`."""
    layer: float
    """Weights of a layer, `L`."""
    rows: int
    """Of the device batch, `mb`."""
    inner: float
    """Activations within a layer for a row, `X`."""
    output: float
    """What a layer passes on for a row, `A`."""

    @property
    def plain(self) -> float:
        """Weights, gradients and two moments of all layers, and activations of all (first text, equation 1)."""
        return self.layers * (4 * self.layer + self.rows * self.inner) + self.rows * self.output

    @property
    def serial(self) -> float:
        """A layer and its gradients, its activations, and the stash (equation 2)."""
        return 2 * self.layer + self.rows * self.inner + self.layers * self.rows * self.output

    @property
    def parallel(self) -> float:
        """Two layers and their gradients, so that one travels while the other computes (equation 3)."""
        return 2 * self.layer + self.serial

    @property
    def parallel_with_host_stash(self) -> float:
        """The same with the stash in host memory: it does not grow with the layers (equation 4)."""
        return 4 * self.layer + self.rows * self.inner


def throughput(rows: int, ubatches: int, forward: float, upload: float, layers: int) -> tuple[float, float]:
    """Rows per second of a forward, and of a whole step, with uploads that nothing hides (later text, equations 4 to
    6; with one ubatch 1 to 3).

    Equations 3 and 6 are printed without the number of layers, and 5 without that of ubatches in its denominator;
    the total times, equations 1 and 4, have them, and so has this.

    Args:
        rows: of a ubatch, `ub`.
        ubatches: `u`.
        forward: seconds of one layer and ubatch, `C`; a backward takes twice that, and recomputation as long.
        upload: seconds of a layer's weights, `X`.
        layers: `N`.
    """
    sweep = layers * (ubatches * forward + upload)
    step = layers * (4 * ubatches * forward + 2 * upload)
    return ubatches * rows / sweep, ubatches * rows / step
