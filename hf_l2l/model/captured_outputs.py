"""Outputs that transformers collects from inside layers: attentions and router logits.

A model asked for `output_attentions` or `output_router_logits` installs hooks on modules inside its layers, which
append to a collector while the model's forward runs. Run ubatch by ubatch and without a graph, a layer would hand them
pieces that no gradient flows through: the auxiliary loss of a mixture of experts would train nothing. So the relay
collects them itself, call by call, makes them outputs of its node, and hands on what comes out of the node.
"""

from __future__ import annotations

from typing import Any

from hf_l2l.compat import active_collector

_LAYER_LEVEL = ("hidden_states", "_hidden_states_layers")
"""Keys collected from hooks on layers themselves, which see the joined output and need no help."""


class CapturedOutputs:
    """Collects, in `taken`, what hooks inside a layer capture while the context lasts.

    The keys are those the running model collects; in a recompute they are the ones of the forward, given to it.
    """

    def __init__(self, keys: tuple[str, ...] | None = None) -> None:
        self.taken: dict[str, list[Any]] = {}
        self._variable = active_collector()
        self._token: Any = None
        active = None if self._variable is None else self._variable.get()
        self.keys = keys if keys is not None else tuple(key for key in active or () if key not in _LAYER_LEVEL)

    def __enter__(self) -> CapturedOutputs:
        self.taken = {key: [] for key in self.keys}
        if self._variable is not None:
            # Also where there is nothing to take: a recompute must not append to a model that runs meanwhile.
            self._token = self._variable.set(self.taken)
        return self

    def __exit__(self, *error: object) -> None:
        if self._variable is not None:
            self._variable.reset(self._token)

    @staticmethod
    def deliver(captured: dict[str, list[Any]]) -> None:
        """Append captured outputs to the collector of the running model."""
        variable = active_collector()
        active = None if variable is None else variable.get()
        for key, values in captured.items():
            if active is not None and key in active:
                active[key].extend(values)
