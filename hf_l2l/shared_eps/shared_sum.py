"""What is pending for a gradient sum that all ranks have in one memory."""

from __future__ import annotations

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.pending import PendingSum


class SharedSum(PendingSum):
    """The norm of a sum in `p.grad`, and a factor to multiply it by before it is used. The program cannot write to it:
    each rank would."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Scale a copy that this rank alone has; the memory of all ranks is never written by the program."""
        factor, self.factor = self.factor, None
        if factor is not None:
            with without_interception(), torch.no_grad():
                tensor.set_(tensor * factor)  # type: ignore[call-overload]

    def before_write(self, tensor: torch.Tensor) -> None:
        raise RuntimeError(
            "p.grad of several ranks is one tensor in shared memory, to which each of them would write (got an "
            "operation that changes it, as torch.nn.utils.clip_grad_norm_ does); clip with "
            "eps.clip_grad_norm_(max_norm), and drop gradients with zero_grad(set_to_none=True)"
        )
