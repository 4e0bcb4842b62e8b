"""The estimate of the noise scale from norms of gradients (arXiv:1812.06162, appendix A.1). Plain numbers.

A loss counts items: tokens or rows. Micro-batch `j` has `n_j` of them, and its part of the gradient `G` of a step is
`c_j = p_j g_j`, where `g_j` is the mean over its items, and the weights `p_j` of all micro-batches of the step add up
to 1. If items are independent, with the covariance `S` of the gradient of one of them, then

    E sum_j |c_j|^2 = q |E G|^2 + v tr S,   E |sum_j c_j|^2 = |E G|^2 + v tr S,

where `q = sum_j p_j^2` and `v = sum_j p_j^2 / n_j`. Both norms are measured, so that the two unknowns follow without
bias: this is the method of two batch sizes of the reference, for micro-batches of any sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite

DECAY = 0.99
"""Of the moving averages, per step that was measured."""
_FEWEST = 1e-6
"""The least part of `1 - q` from which anything follows: below it there is one micro-batch."""


@dataclass(frozen=True)
class Measured:
    """What is known of a step, of one rank or, added up, of all. All of it is additive over micro-batches."""

    squares: float = 0.0
    """`sum_j |c_j|^2`, over the weights of the layers."""
    weight: float = 0.0
    """The sum of the weights of the micro-batches, in any unit: `p_j` is their part of it."""
    weight_squares: float = 0.0
    """The sum of their squares."""
    variance: float = 0.0
    """The sum of their squares, each divided by the items of the micro-batch."""
    items: float = 0.0
    """What the loss counts."""
    rows: float = 0.0

    def __add__(self, other: Measured) -> Measured:
        return Measured(*(mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        """The numbers, in the order of the fields."""
        return tuple(vars(self).values())

    def of_weight_1(self) -> Measured:
        """The same with weights that add up to 1."""
        if not self.weight:
            return self
        scale = self.weight
        squares, variance = self.weight_squares / scale**2, self.variance / scale**2
        return Measured(self.squares, 1.0, squares, variance, self.items, self.rows)


@dataclass
class NoiseScale:
    """Moving averages over steps, of which the noise scale is a ratio: the ratio of the averages, and not the average
    of the ratios, has little bias (arXiv:1812.06162, appendix A.1)."""

    signal: float = 0.0
    """`|E G|^2`."""
    noise: float = 0.0
    """`tr S`, of one item."""
    items: float = 0.0
    rows: float = 0.0
    steps: int = 0
    """How many were measured."""

    def observe(self, step: Measured, norm: float) -> None:
        """Take in a step, with the norm of the sum of its gradients. One that tells nothing is left out: with a single
        micro-batch, without items, or with gradients that are not finite."""
        if not step.weight or not step.items:
            return
        step = step.of_weight_1()
        rest, total = 1 - step.weight_squares, norm**2
        if rest < _FEWEST or not step.variance or not isfinite(total) or not isfinite(step.squares):
            return
        found = {
            "signal": (total - step.squares) / rest,
            "noise": (step.squares - step.weight_squares * total) / (rest * step.variance),
            "items": step.items,
            "rows": step.rows,
        }
        self.steps += 1
        for name, value in found.items():
            setattr(self, name, DECAY * getattr(self, name) + (1 - DECAY) * value)

    @property
    def scale(self) -> float | None:
        """The noise scale `tr S / |E G|^2`, in items; None as long as the averages do not tell it, since noise has
        hidden the signal."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None

    @property
    def critical_batch(self) -> float | None:
        """The same in rows: the batch at which training takes twice the fewest possible steps, and twice the fewest
        possible rows (arXiv:1812.06162, section 2.3). None as for `scale`."""
        scale = self.scale
        return None if scale is None else scale * self.rows / self.items

    def state(self) -> dict[str, float]:
        """The averages, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, float]) -> NoiseScale:
        """The averages of a checkpoint."""
        return cls(**{**state, "steps": int(state["steps"])})  # type: ignore[arg-type]  # the others are floats


def together(of_ranks: Iterable[Measured]) -> Measured:
    """A step of all ranks."""
    found = Measured()
    for each in of_ranks:
        found = found + each
    return found
