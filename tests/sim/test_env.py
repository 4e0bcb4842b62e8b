"""`hf-l2l env` on a machine with an accelerator."""

from __future__ import annotations

from cli_models import ran
from hf_l2l.probe import rates
from hf_l2l.probe.rates import Sizes
from hf_l2l.testing import page_lock_limit, page_locked_bytes


def test_the_device_and_page_locking(capsys):
    before = page_locked_bytes()
    found = ran(capsys, "env", "--json").json
    [device] = found["devices"]
    assert (device["device"], device["name"]) == ("sim:0", "simulated accelerator")
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert found["page_locking"]["works"] is True and page_locked_bytes() == before
    assert "devices:\n  device: sim:0, name: simulated accelerator, " in ran(capsys, "env").out


def test_page_locking_that_is_refused(capsys):
    with page_lock_limit(0):
        found = ran(capsys, "env", "--json").json["page_locking"]
    assert found["works"] is False and found["result"].startswith("refused with code ")
    assert ran(capsys, "env", "--json").json["page_locking"]["works"] is True


def test_the_probe(monkeypatch, capsys):
    monkeypatch.setattr(rates, "Sizes", lambda: Sizes(2**16, 2**10, 64, 0.0))
    found = ran(capsys, "env", "--probe", "--json").json["probe"]
    assert found["device_name"] == "simulated accelerator" and found["link_up"] > 0
    assert "link_up" in ran(capsys, "env", "--probe").out
