"""How memory and time of the fastest trainings grow with a model: figures 4, 5, 7 and 8 of arXiv:2106.02679.

As there, models are of the family X_[x], and degrees are whole numbers that need not divide layers or heads, so that
the curves have no steps for lack of divisors. Plans, which divide, are a little slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_l2l.scale.planner import MOST_OVERHEAD
from hf_l2l.scale.shape import TransformerShape
from hf_l2l.scale.usage import Cluster, Degrees, Method, Usage

SCALINGS = {
    "2d partitioned": Method.PARTITIONED,
    "3d baseline": Method.BASELINE,
    "3d improved": Method.IMPROVED,
}
"""What the figures compare: data and tensor parallelism with a partitioned state, and all three kinds."""
FEWEST_PARAMETERS, MOST_PARAMETERS = 1e9, 1e17
_SMALLEST, _LARGEST = 12, 1600
"""Of the family, in any case."""


def arranged(shape: TransformerShape, cluster: Cluster, method: Method) -> Usage:
    """The fastest training by the rules of section 5: as many instances as the critical batch has work for, and of
    these as many devices as their transfers allow."""
    alone = Usage(shape, cluster, method, Degrees(1, 1, tensor=_tensor(shape, cluster)))
    rows, network = max(1, int(shape.critical_batch)), cluster.network_intensity
    tensor = alone.degrees.tensor
    if method is Method.PARTITIONED:
        size = min(rows, math.ceil(2 * network / shape.tokens))
        return _with(alone, Degrees(size, 1, rows // size, 1, tensor))
    if method is Method.BASELINE:
        stages = min(shape.layers, rows)
        piped = _with(alone, Degrees(1, 1, 1, stages, tensor))
        number = min(rows, math.ceil(stages * (1 + network / piped.pipeline_intensity)))
        size = min(rows // number, math.ceil(network / MOST_OVERHEAD / (shape.tokens * number)))
        data = rows // (size * number)
        return _with(alone, Degrees(size, rows // (size * data), data, stages, tensor))
    number = min(rows, math.ceil(2 * network / shape.tokens))
    found = [
        _with(alone, Degrees(1, number, rows // number, stages, tensor))
        for stages in range(1, min(number, shape.layers) + 1)
    ]
    return min(found, key=lambda usage: usage.seconds())


def _with(usage: Usage, degrees: Degrees) -> Usage:
    return Usage(usage.shape, usage.cluster, usage.method, degrees)


def _tensor(shape: TransformerShape, cluster: Cluster) -> int:
    """The degree of tensor parallelism that is fastest: within a node, or over the network of several."""
    most = MOST_OVERHEAD * shape.layer_parameters / (3 * shape.width)  # equation 12, times an intensity
    within = min(cluster.largest_tensor, 1 + int(most / cluster.node_intensity))
    across = 1 + int(most / cluster.network_intensity)
    usages = [
        Usage(shape, cluster, Method.PARTITIONED, Degrees(1, 1, tensor=degree))
        for degree in (within, across)
        if degree == within or degree > cluster.largest_tensor
    ]
    return min(usages, key=lambda usage: usage.seconds()).degrees.tensor


@dataclass(frozen=True)
class Curves:
    """Models of the family, from small to large, and what each training takes."""

    shapes: list[TransformerShape]
    usages: dict[str, list[Usage]]
    """Of `SCALINGS`, for each shape."""

    @property
    def parameters(self) -> list[int]:
        """Of each model."""
        return [shape.parameters for shape in self.shapes]

    def offload_intensities(self) -> dict[str, list[float]]:
        """Figure 7, in flop/byte: of state of the baseline, whose micro-batches have the fewest rows, of a divided
        state, and of checkpoints (equations 13 and 14)."""
        baseline, improved = self.usages["3d baseline"], self.usages["3d improved"]
        return {
            "state, baseline": [usage.state_intensity for usage in baseline],
            "state, partitioned or improved": [usage.state_intensity for usage in improved],
            "checkpoints": [usage.checkpoint_intensity for usage in improved],
        }


def curves(cluster: Cluster, *, points: int = 60) -> Curves:
    """The curves of a cluster, at about so many models with from `FEWEST_PARAMETERS` to `MOST_PARAMETERS`."""
    first, last = (math.log(bound / 12) / 5 for bound in (FEWEST_PARAMETERS, MOST_PARAMETERS))
    wanted = (math.exp(first + (last - first) * n / (points - 1)) for n in range(points))
    family = sorted({min(max(2 * round(x / 2), _SMALLEST), _LARGEST) for x in wanted})
    shapes = [TransformerShape.family(x) for x in family]
    return Curves(
        shapes,
        {name: [arranged(shape, cluster, method) for shape in shapes] for name, method in SCALINGS.items()},
    )
