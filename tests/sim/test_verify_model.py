"""`hf-l2l verify --device sim`: weights travel to the simulated accelerator, and it computes what plain torch does."""

from __future__ import annotations

from cli_models import LLAMA, ran, written
from hf_l2l.device.slots import GradientSlots


def test_a_model_is_green_there(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--device", "sim", "--json")
    assert found.status == 0 and (found.json["device"], found.json["status"]) == ("sim:0", "green")
    assert found.json["checks"]["gradients"]["verdict"] in ("exact", "within tolerance")
    assert found.json["checks"]["generate"]["verdict"] in ("exact", "within tolerance")


def test_the_cpu_is_there_beside_an_accelerator(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--json")
    assert (found.status, found.json["device"], found.json["status"]) == (0, "cpu", "green")


def test_layers_run_there(tmp_path, capsys, monkeypatch):
    seen = set()
    add = GradientSlots.add

    def watched(self, *arguments, **options):
        seen.add(self.device if hasattr(self, "device") else None)
        return add(self, *arguments, **options)

    monkeypatch.setattr(GradientSlots, "add", watched)
    ran(capsys, "verify", written(tmp_path, LLAMA), "--device", "sim", "--json")
    assert {str(device) for device in seen} == {"sim:0"}
