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

from cli_models import LLAMA, T5, Ran, ran, written
from hf_l2l import L2LConfig
from hf_l2l.cli.printed.estimate import _print_fit, _verdict
from hf_l2l.memory.device_memory import DEVICE_NAMES
from hf_l2l.memory.ledger import HOST_NAMES, OTHER
from hf_l2l.plan.planner import BudgetError, needed
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.sizing.capacity import LORA, run_with
from hf_l2l.sizing.capacity import SETTINGS as SETTINGS_OF
from hf_l2l.sizing.fit import Fit, Fits, fits

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


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "machine.json"
    file.write_text(MACHINE.to_json())
    return str(file)


KNOWN: dict[tuple[str, ...], Ran] = {}
"""What calls have given that more than one test makes; files are named by their content."""


def estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path, *flags: str) -> Ran:
    call = "estimate", written(tmp_path / "model", LLAMA), "--tokens", "64", *flags
    if {"--plot", "--probe"} & {*flags}:  # which write a file, and depend on more
        return ran(capsys, *call)
    key = tuple(Path(flag).read_text() if flag.startswith(str(tmp_path)) else flag for flag in flags)
    if key not in KNOWN:
        KNOWN[key] = ran(capsys, *call)
    return KNOWN[key]


def test_bytes_by_name(tmp_path, capsys):
    found = estimated(capsys, tmp_path, "--per_device_train_batch_size", "4", "--json").json
    assert set(found["device"]) == {*DEVICE_NAMES, "total"} and set(found["host"]) == {*HOST_NAMES, "total"}
    assert found["rows"] == 4 and found["seconds_per_step"] is found["chosen"] is found["bound"] is None
    names = {name: size["peak"] for name, size in found["device"].items()}
    assert names.pop("total") == sum(names.values()) > 0
    assert found["plain"] > found["plain_checkpointing"] > 0


def test_phases_of_a_training(tmp_path, capsys):
    found = estimated(capsys, tmp_path, "--json").json
    assert set(found["phases"]) == {"l2l", "plain", "plain_checkpointing"}
    for who, peak in (("l2l", found["device"]["total"]["peak"]), ("plain", found["plain"])):
        assert list(found["phases"][who]) == ["load", "attach", "train", "save", "resume"]
        assert found["phases"][who]["train"]["device"] == peak
    text = estimated(capsys, tmp_path).out
    assert "L2L, host" in text and "plain, checkpointing, device" in text and "can take back" in text


def test_flags_of_the_trainer(tmp_path, capsys):
    host = estimated(capsys, tmp_path, "--optim", "sgd", "--json").json["host"]
    assert host["moments"]["peak"] == 0 < host["masters"]["peak"]
    flags = ["--per_device_train_batch_size", "2", "--gradient-accumulation-steps", "3", "--json"]
    assert estimated(capsys, tmp_path, *flags).json["rows"] == 6


def test_options_of_the_trainer_are_flags(tmp_path, capsys):
    """They may be written with dashes, too."""
    whole = estimated(capsys, tmp_path, "--json").json["device"]
    parts = estimated(capsys, tmp_path, "--json", "--ubatch_size", "1", "--stash", "host").json["device"]
    host = estimated(capsys, tmp_path, "--json", "--ubatch-size", "1", "--stash", "host", "--l2l-boundary", "host")
    assert whole["workspace"]["peak"] > parts["workspace"]["peak"]
    assert whole["stash"]["peak"] > parts["stash"]["peak"]
    assert parts["total"]["peak"] > host.json["device"]["total"]["peak"]
    short = estimated(capsys, tmp_path, "--json", "--cmp", "bf16").json
    assert short["device"]["shell"]["peak"] < whole["shell"]["peak"] and short["host"]["copies"]["peak"] > 0


def test_autocast_is_a_flag_of_the_trainer(tmp_path, capsys):
    plain = estimated(capsys, tmp_path, "--json").json["device"]
    short, named = (estimated(capsys, tmp_path, "--json", *bf16).json for bf16 in (["--bf16"], ["--bf16", "True"]))
    assert short["device"] == named["device"] and short["device"]["total"]["peak"] < plain["total"]["peak"]
    assert short["device"]["shell"] == plain["shell"], "weights travel in fp32"
    assert estimated(capsys, tmp_path, "--json", "--bf16", "false").json["device"] == plain


def test_the_text_and_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    found = estimated(capsys, tmp_path, "--plot", str(picture))
    assert "slots" in found.out and "Plain training in fp32 would need" in found.out
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("file", ["/nowhere/x.png", pytest.param("x.nothing", marks=pytest.mark.slow)])
def test_a_picture_that_cannot_be_written_is_one_sentence(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = estimated(capsys, tmp_path, "--plot", file)
    assert found.status == 2 and found.err.count("\n") == 1
    assert f"--plot must be a file that can be written, with an ending such as .png (got {file!r}: " in found.err


def test_a_picture_needs_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = estimated(capsys, tmp_path, "--plot", "memory.png")
    assert found.status == 2 and "--plot needs the package matplotlib" in found.err


def test_times_of_a_machine(tmp_path, capsys, machine):
    found = estimated(capsys, tmp_path, "--figures", machine, "--json").json
    assert found["seconds_per_step"] > 0 and found["bound"] in found["busy"]
    slower = json.loads(MACHINE.to_json()) | {"link_up_both": 1e6}
    Path(machine).write_text(json.dumps(slower))
    assert estimated(capsys, tmp_path, "--figures", machine, "--json").json["bound"] == "upload"


def test_layers_compute_in_a_dtype_of_the_figures(tmp_path, capsys, machine):
    found = estimated(capsys, tmp_path, "--figures", machine, "--cmp", "fp16")
    assert found.status == 2 and "got fp16, and figures of a device with fp32, bf16" in found.err


def test_fewer_threads_update_longer(tmp_path, capsys, machine):
    flags = ["--figures", machine, "--json"]
    every, one = (estimated(capsys, tmp_path, *flags, *more).json for more in ([], ["--l2l_num_threads", "1"]))
    assert one["busy"]["update"] == pytest.approx(4 * every["busy"]["update"])


def test_several_devices(tmp_path, capsys, machine):
    """The batch has rows for each; each link carries a part, the host updates all."""
    flags = ["--per_device_train_batch_size", "4", "--figures", machine, "--json"]
    one, two = (estimated(capsys, tmp_path, *flags, "--devices", count).json for count in ("1", "2"))
    assert (one["rows"], two["rows"]) == (4, 8) and one["other_devices"] == {}
    [(name, other)] = two["other_devices"].items()
    assert name.endswith(":1") and set(other) == {*DEVICE_NAMES, "total"}
    assert other["shell"]["peak"] == 0 < other["total"]["peak"] < two["device"]["total"]["peak"]
    assert two["busy"]["update"] == one["busy"]["update"] and two["busy"]["download"] < one["busy"]["download"]
    text = estimated(capsys, tmp_path, *flags[:-1], "--devices", "2").out
    assert "8 rows in micro-batches of 2" in text  # two for each device
    assert "2 devices run the layers in turn, with 4 micro-batches: a step takes" in text
    assert "Each link carries one part in 2 of the weights" in text and "data parallel" in text


def test_several_ranks(tmp_path, capsys, machine):
    """They share what is in the host's memory; each has a batch of its own."""
    text = estimated(capsys, tmp_path, "--ranks", "4").out
    assert "4 ranks hold " in text and "for each rank, of which" in text and "A step" not in text
    assert "if devices add gradients (l2l_reduce" in text
    text = estimated(capsys, tmp_path, "--ranks", "4", "--figures", machine).out
    assert "A step of one process alone takes" in text and "A step of 4 ranks takes" in text
    assert "pass through the memory of a host in a step" in text
    one, four = (estimated(capsys, tmp_path, "--json", *more).json for more in ([], ["--ranks", "4"]))
    assert one["ranks"] is None and four["host"] == {**one["host"], **{n: four["host"][n] for n in ("total", OTHER)}}
    found, names = four["ranks"], {name: size["peak"] for name, size in four["host"].items()}
    shared = sum(names[name] for name in ("masters", "gradients", "moments", "copies", "norm rooms"))
    own = names["total"] - shared + found["landing_bytes"]
    assert (found["shared_bytes"], found["host_bytes"]) == (shared, shared + 4 * own)
    assert found["seconds_per_step"] is found["network_seconds"] is None


def test_slots_of_ranks_have_room_for_small_parameters_in_no_layer(capsys):
    """Embedding, head and last norm of this model are larger together than a layer. Devices need no slots."""
    flags = ["--params", "1e6", "--layers", "8", "--hidden", "64", "--vocab", "2000", "--tokens", "8", "--json"]
    found = ran(capsys, "estimate", *flags, "--ranks", "2").json["ranks"]
    assert found["landing_bytes"] == 2 * 4 * (2 * 2000 * 64 + 64)
    found = ran(capsys, "estimate", *flags, "--ranks", "2", "--l2l_reduce", "device").json["ranks"]
    assert found["landing_bytes"] == 0


def test_ranks_do_not_merge_batches(tmp_path, capsys, machine):
    """They run one by one, and the masters are updated once."""
    flags = ["--per_device_train_batch_size", "2", "--figures", machine, "--json"]
    one, three = (
        estimated(capsys, tmp_path, *flags, "--ranks", "2", *more).json
        for more in ([], ["--gradient_accumulation_steps", "3"])
    )
    assert one["rows"] == three["rows"] == 2
    assert three["busy"]["download"] == pytest.approx(3 * one["busy"]["download"])
    assert three["busy"]["update"] == pytest.approx(one["busy"]["update"])
    seconds = [each["ranks"]["seconds_per_step"] for each in (one, three)]
    assert 2 < seconds[1] / seconds[0] <= 3.01
    moved = [each["ranks"]["moved_bytes"] for each in (one, three)]
    updates = 30 * one["host"]["masters"]["peak"] / 4
    assert moved[1] - updates == pytest.approx(3 * (moved[0] - updates))


def test_devices_of_a_rank_share_its_batch(tmp_path, capsys, machine):
    flags = ["--per_device_train_batch_size", "4", "--figures", machine, "--ranks", "4", "--json"]
    one, two = (estimated(capsys, tmp_path, *flags, "--devices", count).json for count in ("1", "2"))
    assert one["rows"] == two["rows"] == 4 and len(two["other_devices"]) == 1
    assert one["ranks"]["device_bytes"] > 0 == two["ranks"]["device_bytes"]
    text = estimated(capsys, tmp_path, *flags[:-1], "--devices", "2").out
    assert "A step of 4 ranks, each with 2 devices that run its layers in turn, takes" in text
    assert "data parallel" not in text
    assert two["ranks"]["seconds_per_step"] == pytest.approx(two["seconds_per_step"], rel=0.2), "of both devices"


def test_a_budget_of_ranks_chooses_what_ranks_can_run(tmp_path, capsys, machine):
    """Nothing is resident, and there is room for sums on the devices."""
    flags = ["--figures", machine, "--per_device_train_batch_size", "1", "--budget", "300KB", "--json"]
    alone, ranks, host = (
        estimated(capsys, tmp_path, *flags, *more).json
        for more in ([], ["--ranks", "4"], ["--ranks", "4", "--l2l_reduce", "host"])
    )
    assert "resident" in alone["chosen"]
    for found in (ranks, host):
        assert not {"resident", "resident_layers"} & found["chosen"].keys()
    assert ranks["device"]["total"]["peak"] + ranks["ranks"]["device_bytes"] <= 300_000
    assert ranks["ranks"]["device_bytes"] > 0 == host["ranks"]["device_bytes"]


def test_ranks_add_on_their_devices(tmp_path, capsys, machine):
    """4 of a sum per parameter come to the host, and not 4 of each rank, which are read again."""
    flags = ["--figures", machine, "--ranks", "4", "--json"]
    host, device = (estimated(capsys, tmp_path, *flags, "--l2l_reduce", where).json for where in ("host", "device"))
    gradients = host["host"]["gradients"]["peak"]
    assert host["ranks"]["moved_bytes"] - device["ranks"]["moved_bytes"] == 2 * 4 * gradients
    assert device["ranks"]["landing_bytes"] == 0 < host["ranks"]["landing_bytes"]


def test_several_hosts(tmp_path, capsys, machine):
    """Each has all masters, and a part of the sums and moments; the network takes its time."""
    flags = ["--figures", machine, "--ranks", "2", "--json"]
    one, two = (estimated(capsys, tmp_path, *flags, "--hosts", hosts).json for hosts in ("1", "2"))
    state = sum(one["host"][name]["peak"] for name in ("gradients", "moments"))
    assert one["ranks"]["shared_bytes"] - two["ranks"]["shared_bytes"] == state // 2
    assert two["ranks"]["seconds_per_step"] is two["ranks"]["network_seconds"] is None
    fast, slow = (
        estimated(capsys, tmp_path, *flags, "--hosts", "2", "--network", each).json["ranks"] for each in ("1e6", "0.1")
    )
    masters = one["host"]["masters"]["peak"]
    assert slow["network_seconds"] == pytest.approx(2 * masters / 2 / (0.1e9 / 8))
    assert (fast["bound"], slow["bound"]) == (one["ranks"]["bound"], "network")
    assert fast["seconds_per_step"] == pytest.approx(one["ranks"]["seconds_per_step"], rel=0.1)
    assert slow["seconds_per_step"] >= slow["network_seconds"] and fast["times_as_many"] > 3.5
    text = estimated(capsys, tmp_path, *flags[:-1], "--hosts", "2").out
    assert "Each of 2 hosts, with 2 ranks, holds" in text and "of one part in 2 of the parameters" in text
    assert "give --network" in text
    text = estimated(capsys, tmp_path, *flags[:-1], "--hosts", "2", "--network", "10").out
    assert "A step of 2 hosts with 2 ranks each takes" in text and "between hosts in a step takes" in text


def test_the_device_of_the_figures_decides_where_the_stash_is(tmp_path, capsys, machine):
    """This machine has no device whose memory is known."""
    flags = ["--figures", machine, "--stash", "auto"]
    assert "stash device" in estimated(capsys, tmp_path, *flags).out
    small = json.loads(MACHINE.to_json()) | {"device_memory_bytes": 10_000}
    Path(machine).write_text(json.dumps(small))
    assert "stash host" in estimated(capsys, tmp_path, *flags).out


def test_the_largest_model(tmp_path, capsys):
    found = estimated(capsys, tmp_path, "--host-memory", "64GiB", "--json").json["largest"]
    assert all(each["parameters"] > each["layers"] > 0 for each in found.values())
    assert (
        "with LoRA, 16-bit base, all of its state on the host: "
        in estimated(capsys, tmp_path, "--host-memory", "64GiB").out
    )


def test_a_plan_keeps_within_the_budget(tmp_path, capsys, machine):
    flags = ["--figures", machine, "--per_device_train_batch_size", "4", "--json"]
    found = estimated(capsys, tmp_path, *flags, "--budget", "200KB").json
    assert found["device"]["total"]["peak"] <= 200_000 and found["chosen"]["ubatch_size"] >= 1
    bound = estimated(capsys, tmp_path, *flags, "--budget", "1GB", "--ubatch_size", "2").json
    assert "ubatch_size" not in bound["chosen"] and bound["seconds_per_step"] <= found["seconds_per_step"]


def test_a_model_of_numbers(capsys):
    found = ran(capsys, "estimate", "--params", "1e6", "--layers", "2", "--hidden", "64", "--vocab", "1e3", "--json")
    parameters = found.json["host"]["masters"]["peak"] / 4
    assert found.json["model"] is None and 0.97e6 < parameters < 1.03e6


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--budget", "8 bananas"], "--budget must be a size with its unit"),
        (["--budget", "8GiB"], "got none of --card, --figures and --probe"),
        (["--stash", "nowhere"], "stash must be one of 'device', 'host', 'disk', 'auto' (got 'nowhere')"),
        (["--l2l_boundary", "host"], "--l2l_boundary host passes what is in the stash"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size must be at least 1 (got 0)"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps must be at least 1 (got 0)"),
        (["--host-memory", "64"], "--host-memory must be a size with its unit, such as '8GiB' or '7500MB' (got '64')"),
        (["--optim", "adamw"], "--optim must be the name of an optimizer of the Trainer (got 'adamw'); use adamw_"),
        (["--optim", "?"], "(got '?'); use adamw_torch or sgd"),
        (["--bf16", "maybe"], "--bf16: must be True or False (got 'maybe'), or be given alone for True"),
        (["--optim", "lomo"], "--optim cannot be used with L2L (got --optim lomo)"),
        (["--params", "1e9"], "a model is given by MODEL, or by --params"),
        (["--class", "AutoModel"], "takes no labels); set --class to a class with a head, such as AutoModelFor"),
        (["--tokens", "0"], "--tokens must be at least 1 (got 0)"),
        (["--device-type", "foo"], "--device-type must be a type of device that torch has (got 'foo')"),
        (["--device-type", "cpu"], "must be a device with memory of its own"),
        (
            ["--figures", "/nowhere.json"],
            "--figures must be a file that can be read (got '/nowhere.json': No such file",
        ),
        (["--layers", "x"], "--layers: must be a finite number, such as 8e9 or 32 (got 'x')"),
        (["--ranks", "0"], "--ranks must be at least 1 (got 0)"),
        (["--hosts", "0"], "--hosts must be at least 1 (got 0)"),
        (["--hosts", "2", "--network", "-1"], "--network must be Gbit/s above 0 (got -1)"),
        (["--network", "100"], "--network is for the time of a step of several hosts"),
        (["--hosts", "2", "--network", "100"], "are needed (got none of --card, --figures and --probe)"),
        (["--ranks", "2", "--l2l_resident", "all"], "ranks share the weights on the host"),
        (["--hosts", "2", "--ranks", "2", "--l2l_reduce", "device"], "--l2l_reduce device adds gradients on"),
        (["--params", "inf"], "--params: must be a finite number, such as 8e9 or 32 (got 'inf')"),
    ],
)
def test_bad_input_is_one_sentence(flags, said, tmp_path, capsys):
    found = estimated(capsys, tmp_path, *flags)
    assert found.status == 2 and found.err.startswith("hf-l2l estimate: ") and found.err.count("\n") == 1
    assert said in found.err


def test_what_is_given_binds_the_plan_even_at_its_default(tmp_path, capsys, machine):
    """The least memory has the stash on the host."""
    flags = ["--figures", machine, "--per_device_train_batch_size", "2", "--budget"]
    told = estimated(capsys, tmp_path, *flags, "10KB").err
    flags = [*flags, told.split()[-1], "--json"]
    assert estimated(capsys, tmp_path, *flags).json["chosen"]["stash"] == "host"
    bound = estimated(capsys, tmp_path, *flags, "--stash", "device")
    assert bound.status == 2 and "stash" not in bound.err.partition("needed at least, with ")[2]


def test_a_model_that_fails_is_one_sentence(tmp_path, capsys):
    """T5 cannot make inputs of its decoder without the token that begins them."""
    found = ran(capsys, "estimate", written(tmp_path, T5, decoder_start_token_id=None), "--tokens", "8")
    assert found.status == 2 and "runs the model on tensors without values, which failed" in found.err


def test_figures_of_a_cpu_have_no_link(tmp_path, capsys, machine):
    without = json.loads(MACHINE.to_json()) | dict.fromkeys(("link_up", "link_down", "link_up_both", "link_down_both"))
    Path(machine).write_text(json.dumps(without))
    assert "whose device has memory of its own" in estimated(capsys, tmp_path, "--figures", machine).err


def test_probe_measures_the_machine_and_a_layer(tmp_path, capsys, monkeypatch):
    layers = []

    def with_layer_rates(rates, run, device):
        layers.append(run.layers[0])
        return replace(rates, flops=1.0)  # so that a step takes as many seconds as it has operations

    monkeypatch.setattr("hf_l2l.probe.rates.probe", lambda: MACHINE)
    monkeypatch.setattr("hf_l2l.sizing.machine.with_layer_rates", with_layer_rates)
    found = estimated(capsys, tmp_path, "--probe", "--json").json
    assert len(layers) == 1 and found["seconds_per_step"] > 1e6 and found["bound"] == "compute"


def test_a_budget_that_is_too_small_names_the_smallest(tmp_path, capsys, machine):
    flags = ["--figures", machine, "--per_device_train_batch_size", "2", "--budget", "10KB"]
    found = estimated(capsys, tmp_path, *flags)
    assert found.status == 2 and "needed at least, with " in found.err and "--ubatch_size 1 " in found.err


def test_numbers_that_make_no_model(capsys):
    flags = {"params": "1e3", "layers": "2", "hidden": "64", "vocab": "1e3"}
    found = ran(capsys, "estimate", *(part for name, value in flags.items() for part in (f"--{name}", value)))
    assert found.status == 2 and "--params must be more than embedding, head and attention of these sizes" in found.err
    assert "(got 1000); give at least 161,152" in found.err
    flags["hidden"] = "100"
    found = ran(capsys, "estimate", *(part for name, value in flags.items() for part in (f"--{name}", value)))
    assert "--hidden must be a multiple of 64, the width of a head (got 100); give 128" in found.err


def test_the_figures_are_those_that_env_prints(tmp_path, capsys):
    whole: dict[str, Any] = {"versions": {}, "probe": json.loads(MACHINE.to_json())}
    file = tmp_path / "env.json"
    file.write_text(json.dumps(whole))
    assert estimated(capsys, tmp_path, "--figures", str(file), "--json").json["seconds_per_step"] > 0


SETTINGS = [
    *("fp32", "cmp", "cmp, 16-bit gradients", "cmp, 16-bit gradients, bf16 moments"),
    "cmp, 16-bit gradients, bf16 moments, copies per sweep",
    "the same, with masters and moments on disk",
    "LoRA, 16-bit base",
]


def test_a_model_fits_a_card_and_a_host_or_not(tmp_path, capsys):
    """A card that does not multiply in bf16 computes in fp16."""
    found = estimated(capsys, tmp_path, "--card", "V 100", "--host-memory", "900MiB", "--json").json
    fit = found["fit"]
    assert list(fit) == SETTINGS and found["chosen"] is not None
    assert all(each["fits"] == (each["host_bytes"] <= 900 * 2**20) for each in fit.values())
    # Python's own part is read for each, and may have grown meanwhile.
    most = max(phase["host"] for phase in found["phases"]["l2l"].values()) + found["host"][OTHER]["peak"]
    assert fit["fp32"]["host_bytes"] == pytest.approx(most, abs=2**26)
    assert fit["cmp"]["seconds_per_step"] < fit["fp32"]["seconds_per_step"] == found["seconds_per_step"]
    assert fit["cmp"]["seconds_per_step"] < fit[SETTINGS[-2]]["seconds_per_step"], "the assumed disk bounds it"
    assert fit[SETTINGS[-1]]["seconds_per_step"] > 0
    assert fit[SETTINGS[-2]]["options"] == {
        **{"cmp": "fp16", "l2l_grad_dtype": "16bit", "l2l_moment_dtype": "bf16"},
        **{"l2l_host_copies": "per_sweep", "l2l_state_tier": "disk"},
    }
    assert any("assumed figures, not measured ones, of the V100" in note for note in found["notes"])


def test_whether_it_fits_is_a_table(capsys):
    fitting = Fit(2**30, True, 2**31, 2.0, {"cmp": "bf16"})
    _print_fit(Fits(2**30, 2**32, 512, {"fp32": Fit(2**34, False, 2**31, 4.0), "cmp": fitting}))
    assert capsys.readouterr().out.splitlines() == [
        "Does it fit 1.0 GiB of host memory and 4.0 GiB of the device?",
        f"  {'with':<54}        host        fits      device  s per step    tokens/s",
        f"  {'fp32':<54}    16.0 GiB          no     2.0 GiB           4         130",
        f"  {'cmp':<54}     1.0 GiB         yes     2.0 GiB           2         260",
        "It fits with --cmp bf16, 2 s per step, 260 tokens/s.",
    ]


def test_a_setting_is_what_the_estimate_of_its_options_says(tmp_path, capsys):
    """With no card, there is no plan, so that the options are the same, those of the user among them."""
    own = ["--ubatch_size", "2", "--stash", "host", "--l2l_kept_weights", "1"]
    fit = estimated(capsys, tmp_path, *own, "--cmp", "bf16", "--host-memory", "1GiB", "--json").json["fit"]
    assert "fp32" not in fit
    flags = ["--cmp", "bf16", "--l2l_grad_dtype", "16bit", "--l2l_moment_dtype", "bf16", "--json"]
    alone = estimated(capsys, tmp_path, *own, *flags).json
    known = fit["cmp, 16-bit gradients, bf16 moments"]
    most = max(phase["host"] for phase in alone["phases"]["l2l"].values()) + alone["host"][OTHER]["peak"]
    assert known["host_bytes"] == pytest.approx(most, abs=2**26)
    assert known["device_bytes"] is known["seconds_per_step"] is None


def test_a_budget_that_one_setting_meets_is_no_error():
    """A step in fp32 needs more of the device than one in bf16."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "hidden_size": 256}))
    run = RunShapes(model, L2LConfig(), example_inputs(model, 2, 64), device=torch.device("cuda"), device_memory=2**40)
    floor = {"stash": "host", "boundary": "host", "ubatch_size": 1, "gradient_slots": 1}
    short = run_with(run, L2LConfig(), SETTINGS_OF["cmp"])
    least, most = (needed(each, replace(each.config, **floor)) for each in (short, run))
    assert least < most
    found = fits(run, run.config, 2**40, (least + most) // 2, MACHINE).by_setting
    assert not found["fp32"].fits and found["fp32"].seconds_per_step is None
    assert (found["fp32"].device_bytes or 0) > (least + most) // 2
    assert found["cmp"].fits and found["cmp"].seconds_per_step is not None
    with pytest.raises(BudgetError, match="the device must hold what a step needs"):
        fits(run, run.config, 2**40, least // 2, MACHINE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fp32": Fit(2**40, False)}, "It does not fit: at least 1024.0 GiB of host memory are needed"),
        ({"fp32": Fit(2**20, True, 2**20, 4.0)}, "It fits with the options as they are, 4 s per step, 130 tokens/s."),
        ({"fp32": Fit(2**40, False), LORA: Fit(2**20, True, None, 2.0)}, "It fits with adapters only (LoRA"),
    ],
)
def test_the_last_line_is_the_answer(settings, said):
    assert _verdict(Fits(2**30, 2**32, 512, settings)).startswith(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--card", "rtx409"], "--card must be one of t4, v100, a100, h100, h200, rtx3090, rtx4090, rtx5090 (got"),
        (["--card", "rtx409"], "did you mean rtx4090?"),
        (["--card", "abacus"], "measure yours with --probe"),
        (
            ["--card", "a100", "--probe"],
            "--card, --figures and --probe each give the machine's figures (got --card and",
        ),
        (["--budget", "8GiB"], "(got none of --card, --figures and --probe)"),
    ],
)
def test_a_card_that_is_not_known(flags, said, tmp_path, capsys):
    found = estimated(capsys, tmp_path, *flags)
    assert found.status == 2 and said in found.err
