"""Counts what copies between the host and the simulated accelerator carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.testing import sim_copies


class Bytes:
    """Bytes that are uploaded from memory of masters, and downloaded, from now on."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the parameters at and below `model`."""
        self.uploaded = self.downloaded = 0
        with without_interception():  # this is no use of values
            self._masters = {p.untyped_storage().data_ptr() for p in model.parameters() if p.device.type == "cpu"}
        self._copy = sim_copies.copy
        monkeypatch.setattr(sim_copies, "copy", self.count)

    def count(self, source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        if source.device.type == "cpu" and source.untyped_storage().data_ptr() in self._masters:
            self.uploaded += source.nbytes
        if target.device.type == "cpu" and source.nbytes >= 64:  # numbers, such as norms, are smaller
            self.downloaded += source.nbytes
        self._copy(source, target, *rest)
