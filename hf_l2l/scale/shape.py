"""The shape of a transformer, as far as its computation, memory and transfers depend on it (section 5, appendix B)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

_OF_FAMILY = re.compile(r"[xX]_?\[?(\d+)\]?")
_LARGEST_OF_FAMILY = 10_000


@dataclass(frozen=True)
class TransformerShape:
    """Equal layers of attention and a feedforward network; embeddings and head are not counted (section 5)."""

    layers: int
    """Their number, `d_l`."""
    width: int
    """Elements of a hidden state, `d_m`."""
    heads: int
    """Attention heads, `d_a`."""
    tokens: int
    """Tokens of a row, `d_s`."""
    intermediate: int
    """Elements for a token between the matrices of the feedforward network, `d_I`; of a gated one, both states."""
    layer_parameters: int
    """Weights of a layer's matrices, `p_l`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(
                    f"{name.replace('_', ' ')} of a transformer must be at least 1 (got {value}); look at the config"
                )

    @classmethod
    def of(cls, layers: int, width: int, heads: int, tokens: int, intermediate: int | None = None) -> TransformerShape:
        """The shape of the original transformer: four square matrices for attention, two for the feedforward network
        (`intermediate`: 4 times the width, if not given).

        Raises:
            ValueError: if a number is below 1, or the heads do not divide the width.
        """
        inner = 4 * width if intermediate is None else intermediate
        shape = cls(layers, width, heads, tokens, inner, 4 * width**2 + 2 * width * inner)
        if width % heads:
            raise ValueError(
                f"the heads must divide the width (got {heads} heads and a width of {width}); the width is "
                "their number times the size of one"
            )
        return shape

    @classmethod
    def family(cls, x: int) -> TransformerShape:
        """The model X_[x] of appendix B, equation 1.

        Raises:
            ValueError: if `x` is odd, below 2 or above 10,000.
        """
        if x % 2 or not 2 <= x <= _LARGEST_OF_FAMILY:
            raise ValueError(
                f"the number of an X model must be even, from 2 to {_LARGEST_OF_FAMILY:,} (got {x}); the paper's own "
                "are X32, X64, X108 and X160"
            )
        return cls.of(layers=x, width=x**2, heads=x // 2, tokens=16 * x)

    @classmethod
    def named(cls, name: str) -> TransformerShape | None:
        """The model of the family with this name, such as "X160" or "X_[160]"; None for other names."""
        found = _OF_FAMILY.fullmatch(name)
        return cls.family(int(found[1])) if found else None

    def with_tokens(self, tokens: int) -> TransformerShape:
        """The same layers for rows of so many tokens."""
        return replace(self, tokens=tokens)

    @property
    def parameters(self) -> int:
        """Weights of all layers, `p`."""
        return self.layers * self.layer_parameters

    @property
    def critical_batch(self) -> float:
        """See `critical_batch`, in rows."""
        return critical_batch(self.parameters, self.tokens)

    @property
    def activation_bytes(self) -> int:
        """Bytes that a token needs within a layer, activations and their gradients, `m_0`. The paper prints results
        only; in table 6.2 they are 102 bytes for each element of the width, in models whose attention scores are 8
        times and whose intermediate states 4 times the width. Here those are three copies of 2 bytes of the scores,
        the intermediate states, and 5 states of the width, which gives the same."""
        return 6 * (5 * self.width + self.intermediate + self.heads * self.tokens)

    def flops(self, rows: int | float) -> float:
        """Operations of a step with so many rows: forward, recomputation, and both gradients (appendix C.1)."""
        return 8.0 * rows * self.tokens * self.parameters


def critical_batch(parameters: int, tokens: int = 1) -> float:
    """The batch above which more rows of so many tokens no longer reduce the steps in proportion, as measured for
    language models and scaled to GPT-3 (equation 2).

    Raises:
        ValueError: if a number is below 1.
    """
    if parameters < 1 or tokens < 1:
        raise ValueError(
            f"parameters and tokens must be at least 1 (got {parameters} and {tokens}); count those of the "
            "layers, and of a row"
        )
    return 573 * math.cbrt(parameters) / tokens
