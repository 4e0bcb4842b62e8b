"""`hf-l2l estimate`: bytes by name, times with figures, a plan for a budget, and bad input in one sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cli_models import LLAMA, T5, Ran, ran, refused, written
from hf_l2l import L2LConfig
from hf_l2l.memory.device_memory import DEVICE_NAMES
from hf_l2l.memory.ledger import HOST_NAMES, OTHER
from hf_l2l.plan.planner import BudgetError, needed
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.sizing.capacity import LORA, SETTINGS, run_with
from hf_l2l.sizing.fit import ON_DISK, fits
from tiers import nightly

SMALL = {**LLAMA, "num_hidden_layers": 2}
MACHINE = HardwareFigures(
    device_name="a device",
    device_memory_bytes=2**34,
    link_up=2e10,
    link_down=2e10,
    link_up_both=1e10,
    link_down_both=1e10,
    dram=1e11,
    adamw_by_threads={1: 1e9, 8: 4e9},
    device_adamw=5e10,
    flops={"fp32": 1e13, "bf16": 1e14},
    page_locked=True,
)
KNOWN: dict[tuple[str, ...], Ran] = {}
"""What calls have given that more than one test makes; files are named by their content."""


def machine(folder: Path, **changes: Any) -> list[str]:
    """The flags that give the figures of a machine, with these changes."""
    file = folder / "machine.json"
    file.write_text(json.dumps(json.loads(MACHINE.to_json()) | changes))
    return ["--figures", str(file)]


def estimated(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str, rows: int = 4) -> Ran:
    call = ("--tokens", "64", "--per_device_train_batch_size", str(rows), *flags)
    key = tuple(Path(each).read_text() if each.endswith(".json") else each for each in call)
    if key not in KNOWN:
        KNOWN[key] = ran(capsys, "estimate", written(folder / "model", SMALL), *call)
    return KNOWN[key]


def test_bytes_by_name_and_by_phase_in_json_in_text_and_in_a_picture(tmp_path, capsys, monkeypatch):
    found = estimated(capsys, tmp_path, "--json").json
    assert set(found["device"]) == {*DEVICE_NAMES, "total"} and set(found["host"]) == {*HOST_NAMES, "total"}
    assert found["rows"] == 4 and found["seconds_per_step"] is found["chosen"] is found["bound"] is None
    names = {name: size["peak"] for name, size in found["device"].items()}
    assert names.pop("total") == sum(names.values()) > 0
    assert found["plain"] > found["plain_checkpointing"] > 0
    for who, peak in (("l2l", found["device"]["total"]["peak"]), ("plain", found["plain"])):
        assert list(found["phases"][who]) == ["load", "attach", "train", "save", "resume"]
        assert found["phases"][who]["train"]["device"] == peak
    pytest.importorskip("matplotlib")
    picture, source = tmp_path / "memory.png", written(tmp_path / "model", SMALL)
    told = estimated(capsys, tmp_path, "--plot", str(picture)).out
    assert "slots" in told and "Plain training in fp32 would need" in told
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "a file that can be written" in refused(capsys, "estimate", source, "--plot", "/nowhere/x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "needs the package matplotlib" in refused(capsys, "estimate", source, "--plot", "memory.png")


def test_options_of_the_trainer_are_flags(tmp_path, capsys):
    """They may be written with dashes, too."""

    def found(*flags: str, rows: int = 4) -> dict[str, Any]:
        return estimated(capsys, tmp_path, "--json", *flags, rows=rows).json

    whole = found()["device"]
    host = found("--ubatch-size", "1", "--stash", "host", "--l2l-boundary", "host")["device"]
    assert whole["workspace"]["peak"] > host["workspace"]["peak"] and whole["stash"]["peak"] > host["stash"]["peak"]
    short = found("--cmp", "bf16", "--optim", "sgd")
    assert short["device"]["shell"]["peak"] < whole["shell"]["peak"] and short["host"]["copies"]["peak"] > 0
    assert short["host"]["moments"]["peak"] == 0 < short["host"]["masters"]["peak"]
    autocast = found("--gradient-accumulation-steps", "2", "--bf16", rows=2)
    assert autocast["rows"] == 4 and autocast["device"]["total"]["peak"] < whole["total"]["peak"]
    assert autocast["device"]["shell"] == whole["shell"], "weights travel in fp32"


# ---- with figures of a machine


@nightly
def test_times_of_a_machine(tmp_path, capsys, monkeypatch):
    found = estimated(capsys, tmp_path, *machine(tmp_path), "--json").json
    assert found["seconds_per_step"] > 0 and found["bound"] in found["busy"]
    slow = machine(tmp_path, link_up_both=1e6)
    one = estimated(capsys, tmp_path, *slow, "--json", "--l2l_num_threads", "1").json
    assert one["busy"]["update"] == pytest.approx(4 * found["busy"]["update"]) and one["bound"] == "upload"
    layers = []

    def with_layer_rates(rates, run, device):
        layers.append(run.layers[0])
        return replace(rates, flops=1.0)  # so that a step takes as many seconds as it has operations

    monkeypatch.setattr("hf_l2l.probe.rates.probe", lambda: MACHINE)
    monkeypatch.setattr("hf_l2l.sizing.machine.with_layer_rates", with_layer_rates)
    probed = estimated(capsys, tmp_path, "--probe", "--json").json
    assert len(layers) == 1 and probed["seconds_per_step"] > 1e5 and probed["bound"] == "compute"
    # The memory of the device, which is none of this machine, decides where the stash is.
    small = machine(tmp_path, device_memory_bytes=4_000)
    assert "stash host" in estimated(capsys, tmp_path, *small, "--stash", "auto").out


def test_several_devices(tmp_path, capsys):
    """The batch has rows for each; each link carries a part, the host updates all."""
    flags = machine(tmp_path)
    one = estimated(capsys, tmp_path, *flags, "--json").json
    two = estimated(capsys, tmp_path, *flags, "--devices", "2", "--json").json
    assert (one["rows"], two["rows"]) == (4, 8) and one["other_devices"] == {}
    [(name, other)] = two["other_devices"].items()
    assert name.endswith(":1") and set(other) == {*DEVICE_NAMES, "total"}
    assert other["shell"]["peak"] == 0 < other["total"]["peak"] < two["device"]["total"]["peak"]
    assert two["busy"]["update"] == one["busy"]["update"] and two["busy"]["download"] < one["busy"]["download"]


# ---- of several ranks


def test_ranks_share_what_is_in_the_memory_of_their_host_and_add_on_it_or_on_devices(tmp_path, capsys):
    """Each has a batch of its own, and 4 bytes of a sum per parameter come to the host, and not 4 of each rank, which
    are read again. Accumulated batches are not merged: the masters are updated once."""
    flags = [*machine(tmp_path), "--json"]
    one = estimated(capsys, tmp_path, *flags, rows=1).json
    host, device, three = (
        estimated(capsys, tmp_path, *flags, "--ranks", "4", *more, rows=1).json
        for more in ([], ["--l2l_reduce", "device"], ["--gradient_accumulation_steps", "3"])
    )
    assert one["ranks"] is None and host["rows"] == device["rows"] == three["rows"] == 1
    found, names = host["ranks"], {name: size["peak"] for name, size in host["host"].items()}
    shared = sum(names[name] for name in ("masters", "gradients", "moments", "copies", "norm rooms"))
    own = names["total"] - shared + found["landing_bytes"]
    assert (found["shared_bytes"], found["host_bytes"]) == (shared, shared + 4 * own)
    assert found["moved_bytes"] - device["ranks"]["moved_bytes"] == 2 * 4 * names["gradients"]
    assert device["ranks"]["landing_bytes"] == 0 < found["landing_bytes"]
    assert three["busy"]["download"] == pytest.approx(3 * host["busy"]["download"])
    assert three["busy"]["update"] == pytest.approx(host["busy"]["update"])


def test_several_hosts(tmp_path, capsys):
    """Each has all masters, and a part of the sums and moments; the network takes its time."""
    flags = [*machine(tmp_path), "--ranks", "2", "--json", "--hosts"]
    one, two = (estimated(capsys, tmp_path, *flags, *hosts).json for hosts in (["1"], ["2", "--network", "0.1"]))
    state = sum(one["host"][name]["peak"] for name in ("gradients", "moments"))
    assert one["ranks"]["shared_bytes"] - two["ranks"]["shared_bytes"] == state // 2
    masters = one["host"]["masters"]["peak"]
    assert two["ranks"]["network_seconds"] == pytest.approx(2 * masters / 2 / (0.1e9 / 8))
    assert two["ranks"]["seconds_per_step"] >= two["ranks"]["network_seconds"] and two["ranks"]["bound"] == "network"


# ---- with a budget, and with the memory of a host


def test_a_plan_keeps_within_the_budget(tmp_path, capsys):
    """What is given binds it, even at its default; one that is too small names the smallest."""
    flags = [*machine(tmp_path), "--budget"]
    found = estimated(capsys, tmp_path, *flags, "200KB", "--json").json
    assert found["device"]["total"]["peak"] <= 200_000 and found["chosen"]["ubatch_size"] >= 1
    bound = estimated(capsys, tmp_path, *flags, "1GB", "--ubatch_size", "2", "--json").json
    assert "ubatch_size" not in bound["chosen"] and bound["seconds_per_step"] <= found["seconds_per_step"]
    small = estimated(capsys, tmp_path, *flags, "10KB", rows=2)
    assert small.status == 2 and "needed at least, with " in small.err and "--ubatch_size 1 " in small.err


def test_a_model_fits_a_card_and_a_host_or_not(tmp_path, capsys):
    """A card that does not multiply in bf16 computes in fp16. With it, the largest model of the host is told. The host
    is so large that what this process takes, which tests before have an effect on, is of no account."""
    flags = ["--card", "V 100", "--host-memory", "1TiB", "--tokens", "64", "--per_device_train_batch_size", "1"]
    found = ran(capsys, "estimate", written(tmp_path, LLAMA), *flags, "--json").json
    fit = found["fit"]
    assert list(fit) == [*SETTINGS, ON_DISK, LORA] and found["chosen"] is not None
    assert all(each["fits"] and each["host_bytes"] < 2**40 for each in fit.values())
    # Python's own part is read for each, and may have grown meanwhile.
    most = max(phase["host"] for phase in found["phases"]["l2l"].values()) + found["host"][OTHER]["peak"]
    assert fit["fp32"]["host_bytes"] == pytest.approx(most, abs=2**26)
    assert fit["cmp"]["seconds_per_step"] < fit["fp32"]["seconds_per_step"] == found["seconds_per_step"]
    assert fit["cmp"]["seconds_per_step"] < fit[ON_DISK]["seconds_per_step"], "the assumed disk bounds it"
    assert fit[LORA]["seconds_per_step"] > 0
    assert fit[ON_DISK]["options"].items() >= {"cmp": "fp16", "l2l_state_tier": "disk"}.items()
    assert any("assumed figures, not measured ones, of the V100" in note for note in found["notes"])
    assert all(each["parameters"] > each["layers"] > 0 for each in found["largest"].values())


@nightly
def test_a_budget_that_one_setting_meets_is_no_error():
    """A step in fp32 needs more of the device than one in bf16."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "hidden_size": 256}))
    run = RunShapes(model, L2LConfig(), example_inputs(model, 1, 64), device=torch.device("cuda"), device_memory=2**40)
    floor = {"stash": "host", "boundary": "host", "ubatch_size": 1, "gradient_slots": 1}
    short = run_with(run, L2LConfig(), SETTINGS["cmp"])
    least, most = (needed(each, replace(each.config, **floor)) for each in (short, run))
    assert least < most
    found = fits(run, run.config, 2**40, (least + most) // 2, MACHINE).by_setting
    assert not found["fp32"].fits and found["fp32"].seconds_per_step is None
    assert (found["fp32"].device_bytes or 0) > (least + most) // 2
    assert found["cmp"].fits and found["cmp"].seconds_per_step is not None
    small = fits(run, run.config, 2**20, None, None).by_setting
    assert not any(each.fits for each in small.values()), "this process alone takes more than 1 MiB"
    with pytest.raises(BudgetError, match="the device must hold what a step needs"):
        fits(run, run.config, 2**40, least // 2, MACHINE)


# ---- bad input


def test_bad_input_is_one_sentence(tmp_path, capsys):
    """Those of the program's table of refusals (refusal_commands.py) aside. T5 cannot make inputs of its decoder
    without the token that begins them."""
    source = written(tmp_path / "model", SMALL)
    for flags, said in (
        (["--l2l_boundary", "host"], "--l2l_boundary host passes what is in the stash"),
        (["--class", "AutoModel"], "set --class to a class with a head"),
        (["--card", "rtx409"], "did you mean rtx4090?"),
    ):
        assert said in refused(capsys, "estimate", source, *flags)
    t5 = written(tmp_path / "t5", T5, decoder_start_token_id=None)
    assert "on tensors without values, which failed" in refused(capsys, "estimate", t5, "--tokens", "8")
