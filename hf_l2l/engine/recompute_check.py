"""The check that a recompute gives what its forward gave.

The loss is that of the forward, and the gradients are those of the recompute. If a layer computes with something that
changes in between, they do not belong together, and nothing else shows it. So some calls are checked: sums of the
outputs of a few ubatches, with fixed signs, are kept from the forward to the backward, and compared there on the
device. They take some bytes per layer, whatever the size of the outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from hf_l2l.config import CheckRecompute
from hf_l2l.model.layer_state import Known
from hf_l2l.option_names import option
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import Backwards
from hf_l2l.runtime.compute_state import AutocastState

EVERY = 100
"""Of the calls of one kind, the first one is checked, and then one in so many."""


class _Compared(NamedTuple):
    """The comparison of one ubatch of a layer call."""

    layer: str
    known: Known
    differs: torch.Tensor
    """Whether the recompute gave other outputs: a bool on the device, 0-dim."""
    computed: stream.Point | None
    """The point after which it is there."""


class RecomputeCheck:
    """Decides which recomputes of one model are checked, and tells the program of layers whose outputs differ.

    What is found is read, and raised, at the end of the backward sweep through the layers. What is compared after
    that, of embeddings, is raised by `optimizer.step()`, as errors in hooks of autograd are.
    """

    def __init__(self, mode: CheckRecompute, backwards: Backwards) -> None:
        """`mode` says what becomes of a difference; `backwards` are those of the model."""
        self._mode = mode
        self._option = option("check_recompute")  # as the user called it, which is known while the model is attached
        self._compared: list[_Compared] = []
        """Those of the backward that runs."""
        self._warned: set[str] = set()
        backwards.call(at_end=self.tell, at_failure=self._forget)

    def of_call(
        self,
        known: Known,
        kind: Hashable,
        layer: nn.Module,
        name: str,
        *,
        ubatches: int,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
    ) -> CallCheck | None:
        """What checks a call that a backward may follow; None if it is not checked.

        Args:
            known: what is known of the layer, which counts its calls.
            kind: equal for calls of the layer that compute alike.
            layer: the module that is called.
            name: its name in messages.
            ubatches: the number of ubatches of the call.
            device: the device that computes it.
            dtypes: those in which it may compute, beside the ones of its outputs.
        """
        if self._mode == "off":
            return None
        count = known.calls.get(kind, 0)
        known.calls[kind] = count + 1
        if count % EVERY and not known.collects:  # hooks, whose values are used, read what programs change
            return None
        return CallCheck(self, known, f"{name} (a {type(layer).__name__})", ubatches, device, dtypes)

    def add(self, layer: str, known: Known, differs: torch.Tensor) -> None:
        """A recompute is being compared on the current stream of the device of `differs`."""
        self._compared.append(_Compared(layer, known, differs, stream.record(differs.device)))

    def tell(self) -> None:
        """Read the comparisons made so far: the host waits for them.

        Raises:
            RuntimeError: if a recompute differs, unless a warning is wanted.
        """
        compared, self._compared = self._compared, []
        by_device: dict[torch.device, list[_Compared]] = {}
        for each in reversed(compared):  # the first layer first
            stream.wait(each.computed, wait_reasons.RECOMPUTE_COMPARED, host=True, on=each.differs.device)
            by_device.setdefault(each.differs.device, []).append(each)
        found: list[_Compared] = []
        for those in by_device.values():
            flags = torch.stack([each.differs for each in those]).tolist()  # one copy
            found += [each for each, differs in zip(those, flags, strict=True) if differs]
        names = list(dict.fromkeys(each.layer for each in found))
        for each in found:
            each.known.calls.clear()  # its calls are compared until they are right
        if not set(names) - self._warned:
            return
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"the recompute of a layer must give the outputs of its forward, since its gradients are those of the "
            f"recompute (those of {names[0]}{more} differ). Usual causes: a random number generator that is neither "
            "torch's, Python's nor NumPy's; a counter, a global or another object that the layer reads and something "
            "changes; an attribute that is changed between the forward and backward(); a forward hook. Make the "
            f"layer depend on its arguments and weights alone, or train this model without L2L; {self._option}='warn' "
            "goes on all the same"
        )
        if self._mode == "raise":
            raise RuntimeError(text)
        self._warned.update(names)
        warnings.warn(text, stacklevel=2)

    def _forget(self) -> None:
        self._compared.clear()


class CallCheck:
    """Compares the recompute of one call with its forward, in the first and in the last ubatch.

    The forward runs in grad mode, as the recompute, so that both run the same kernels: torch chooses some of them by
    whether a gradient is needed.
    """

    def __init__(
        self,
        owner: RecomputeCheck,
        known: Known,
        name: str,
        ubatches: int,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """See `RecomputeCheck.of_call`."""
        self._owner, self._known, self._name, self._device, self._dtypes = owner, known, name, device, dtypes
        self._turns = {0, ubatches - 1}
        self._sums: dict[int, list[torch.Tensor | None]] = {}
        """The number of a ubatch -> the sums of each output of its forward."""
        self._on_host_kernels = stream.runs_host_kernels(device)

    def forward(self, turn: int, outputs: Sequence[torch.Tensor]) -> None:
        """The forward of ubatch number `turn` gave these `outputs`, on the device."""
        if turn in self._turns:
            self._sums[turn] = [_sums(out, self._device) if self._is_compared(out) else None for out in outputs]

    def recompute(self, turn: int, outputs: Sequence[torch.Tensor]) -> None:
        """The recompute of ubatch number `turn` gave these `outputs`: those of the forward, or the first ones of them,
        if nobody asks for the gradients of the others."""
        if turn not in self._turns:
            return
        now = [out for out in outputs if self._is_compared(out)]
        then = [sums for sums in self._sums[turn][: len(outputs)] if sums is not None]
        if len(now) != len(then):  # another device or dtype
            differs = [torch.ones((), dtype=torch.bool, device=self._device)]
        else:
            differs = [self._differ(sums, out) for sums, out in zip(then, now, strict=True)]
        if differs:
            self._owner.add(self._name, self._known, torch.stack(differs).any())

    def _differ(self, then: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        now = _sums(output, self._device)
        equal = (now == then) | (now.isnan() & then.isnan())
        if self._on_host_kernels:
            # The same operations give the same bits, but for how their memory is aligned.
            tolerance = 4 * torch.finfo(output.dtype).eps
        else:
            # Half of the digits agree, those of the dtype with the fewest: kernels may add in another order each time.
            tolerance = max(torch.finfo(dtype).eps for dtype in (output.dtype, *self._dtypes)) ** 0.5
        equal |= (now - then).abs() <= tolerance * then[1]
        return ~equal.all()

    def _is_compared(self, output: torch.Tensor) -> bool:
        is_number = output.is_floating_point() or output.is_complex()
        is_there = output.device == self._device and output.layout is torch.strided
        return is_number and is_there and output.numel() > 0


def _sums(output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of an output with fixed signs, and its norm: two numbers, in fp32 or wider.

    Of two outputs that differ by random amounts with the norm d, these sums differ by about d, too.
    """
    with torch.no_grad(), AutocastState.off(device).entered():
        values = torch.view_as_real(output) if output.is_complex() else output
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        rows = values.detach().reshape(-1, values.shape[-1] if values.dim() else 1)
        of_rows = torch.mv(rows, _signs(rows.shape[1], rows)).to(wide)
        total = torch.dot(of_rows, _signs(len(of_rows), of_rows))
        return torch.stack([total, torch.linalg.vector_norm(values.detach(), dtype=wide)])


def _signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """So many numbers, each 1 or -1, on the device and in the dtype of `like`: the same ones each time.

    They are computed, and not kept: memory of the device would have to be waited for by each stream that reads it.
    Random generators stay as they are.
    """
    number = torch.arange(count, device=like.device)
    # A bit of a quadratic function: neighbours, and numbers at a fixed distance, have independent signs.
    return (1 - 2 * ((number * number * 40503 + number * 12289) >> 13 & 1)).to(like.dtype)
