"""`hf-l2l verify --device sim`: weights travel to the simulated accelerator, and it computes what plain torch does."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import pytest
import torch

from cli_models import LLAMA, Ran, ran, written
from hf_l2l.cli.main import main
from hf_l2l.device.slots import GradientSlots


class Verified(NamedTuple):
    """One call, and the devices on which gradients were added up."""

    ran: Ran
    devices: set[torch.device | None]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    seen = set()
    add = GradientSlots.add

    def watched(self, *arguments, **options):
        seen.add(self.device if hasattr(self, "device") else None)
        return add(self, *arguments, **options)

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(GradientSlots, "add", watched)
        status = main(["verify", written(tmp_path_factory.mktemp("model"), LLAMA), "--device", "sim", "--json"])
    return Verified(Ran(status, out.getvalue(), ""), seen)


def test_a_model_is_green_there(verified):
    found = verified.ran
    assert found.status == 0 and (found.json["device"], found.json["status"]) == ("sim:0", "green")
    assert found.json["checks"]["gradients"]["verdict"] in ("exact", "within tolerance")
    assert found.json["checks"]["generate"]["verdict"] in ("exact", "within tolerance")


def test_the_cpu_is_there_beside_an_accelerator(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--json")
    assert (found.status, found.json["device"], found.json["status"]) == (0, "cpu", "green")


def test_layers_run_there(verified):
    assert {str(device) for device in verified.devices} == {"sim:0"}
