"""`hf-l2l estimate`: bytes by name, times with figures, a plan for a budget, and bad input in one sentence."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cli_models import LLAMA, T5, Ran, ran, refused, written
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.memory.device_memory import DEVICE_NAMES
from hf_l2l.memory.ledger import HOST_NAMES, OTHER
from hf_l2l.plan.planner import BudgetError, needed
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.scale import HARDWARE
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.sizing.capacity import LORA, SETTINGS, run_with
from hf_l2l.sizing.fit import ON_DISK, fits
from memory_switches import forced_copies

SMALL = {**LLAMA, "num_hidden_layers": 2}
MACHINE = HardwareFigures(
    *("a device", 2**34, 2e10, 2e10, 1e10, 1e10, 1e11, {1: 1e9, 8: 4e9}, {"fp32": 1e13, "bf16": 1e14}),
    page_locked=True,
    device_adamw=5e10,
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


def test_bytes_by_name_and_by_phase(tmp_path, capsys):
    assert "slots" in estimated(capsys, tmp_path).out
    found = estimated(capsys, tmp_path, "--json").json
    assert set(found["device"]) == {*DEVICE_NAMES, "total"} and set(found["host"]) == {*HOST_NAMES, "total"}
    assert found["rows"] == 4 and found["seconds_per_step"] is found["chosen"] is found["bound"] is None
    names = {name: size["peak"] for name, size in found["device"].items()}
    assert names.pop("total") == sum(names.values()) > 0
    assert found["plain"] > found["plain_checkpointing"] > 0
    for who, peak in (("l2l", found["device"]["total"]["peak"]), ("plain", found["plain"])):
        assert list(found["phases"][who]) == ["load", "attach", "train", "save", "resume"]
        assert found["phases"][who]["train"]["device"] == peak


def test_pictures_of_an_estimate_and_of_a_plan(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    calls = (
        ("estimate", written(tmp_path / "model", SMALL), "--tokens", "8", "--plot"),
        ("plan", "X50", "--parallelism", "none", "--plot"),
    )
    for call, told in zip(calls, ("Plain training in fp32 would need", "X50: "), strict=True):
        assert told in ran(capsys, *call, "picture.png").out
        assert Path("picture.png").read_bytes()[:4] == b"\x89PNG"
        Path("picture.png").unlink()
        assert "can be written" in refused(capsys, *call, "nowhere/a.png")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "matplotlib", None)
            assert "needs the package matplotlib" in refused(capsys, *call, "a.png")


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


def test_times_of_a_machine(tmp_path, capsys, monkeypatch):
    found = estimated(capsys, tmp_path, *machine(tmp_path), "--json").json
    assert found["seconds_per_step"] > 0 and found["bound"] in found["busy"]
    slow = machine(tmp_path, link_up_both=1e6)
    one = estimated(capsys, tmp_path, *slow, "--json", "--l2l_num_threads", "1").json
    assert one["busy"]["update"] == pytest.approx(4 * found["busy"]["update"]) and one["bound"] == "upload"
    # So that a step takes as many seconds as it has operations.
    monkeypatch.setattr("hf_l2l.probe.rates.probe", lambda: MACHINE)
    monkeypatch.setattr("hf_l2l.sizing.machine.with_layer_rates", lambda rates, *_: replace(rates, flops=1.0))
    probed = estimated(capsys, tmp_path, "--probe", "--json").json
    assert probed["seconds_per_step"] > 1e5 and probed["bound"] == "compute"
    # The memory of the device, which is none of this machine, decides where the stash is.
    small = machine(tmp_path, device_memory_bytes=4_000)
    assert "stash host" in estimated(capsys, tmp_path, *small, "--stash", "auto").out


def test_several_devices(tmp_path, capsys):
    """The batch has rows for each; each link carries a part, the host updates all."""
    flags = [*machine(tmp_path), "--json"]
    one, two = (estimated(capsys, tmp_path, *flags, *more).json for more in ([], ["--devices", "2"]))
    assert (one["rows"], two["rows"]) == (4, 8) and one["other_devices"] == {}
    [(name, other)] = two["other_devices"].items()
    assert name.endswith(":1") and set(other) == {*DEVICE_NAMES, "total"}
    assert other["shell"]["peak"] == 0 < other["total"]["peak"] < two["device"]["total"]["peak"]
    assert two["busy"]["update"] == one["busy"]["update"] and two["busy"]["download"] < one["busy"]["download"]


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
    most = max(phase["host"] for phase in found["phases"]["l2l"].values()) + found["host"][OTHER]["peak"]
    assert fit["fp32"]["host_bytes"] == pytest.approx(most, abs=2**26)  # Python's own part may have grown meanwhile
    assert fit["cmp"]["seconds_per_step"] < fit["fp32"]["seconds_per_step"] == found["seconds_per_step"]
    assert fit["cmp"]["seconds_per_step"] < fit[ON_DISK]["seconds_per_step"], "the assumed disk bounds it"
    assert fit[LORA]["seconds_per_step"] > 0
    assert fit[ON_DISK]["options"].items() >= {"cmp": "fp16", "l2l_state_tier": "disk"}.items()
    assert any("assumed figures, not measured ones, of the V100" in note for note in found["notes"])
    assert all(each["parameters"] > each["layers"] > 0 for each in found["largest"].values())
    text = ran(capsys, "estimate", written(tmp_path, LLAMA), *flags).out
    assert (
        re.search(r"with +host +fits +device +s per step +tokens/s\n", text) and "\nIt fits with --cmp fp16, " in text
    )
    small = ran(capsys, "estimate", written(tmp_path, LLAMA), "--host-memory", "1MiB").out
    assert re.search(r"with +host +fits\n", small) and "\nIt does not fit: at least " in small


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


def test_bad_input_is_one_sentence(tmp_path, capsys):
    """What is not in the table of refusals. T5 has no inputs without the token that begins those of its decoder."""
    source = written(tmp_path / "model", SMALL)
    for flags, said in (
        (["--l2l_boundary", "host"], "--l2l_boundary host passes what is in the stash"),
        (["--class", "AutoModel"], "set --class to a class with a head"),
        (["--card", "rtx409"], "did you mean rtx4090?"),
    ):
        assert said in refused(capsys, "estimate", source, *flags)
    t5 = written(tmp_path / "t5", T5, decoder_start_token_id=None)
    assert "on tensors without values, which failed" in refused(capsys, "estimate", t5, "--tokens", "8")


# ---- `hf-l2l plan`: plans of the paper's models and of configs, for so many devices or days, and beside a real run


GIB = 2**30


def test_layers_of_a_config_are_counted_and_gated_networks_have_two_intermediate_states(tmp_path, capsys):
    """A model with experts is refused."""
    found = ran(capsys, "plan", written(tmp_path, LLAMA), "--gpus", "1", "--tokens", "100", "--json").json
    layers = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).model.layers
    assert found["shape"]["parameters"] == sum(p.numel() for p in layers.parameters())
    assert (found["shape"]["layers"], found["shape"]["tokens"]) == (len(layers), 100)
    assert found["shape"]["intermediate"] == 2 * LLAMA["intermediate_size"]
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "num_attention_heads": 2}
    for config, model, width, states in (
        ("Phi3Config", "Phi3Model", "intermediate_size", 2),  # one matrix makes both
        ("GPT2Config", "GPT2LMHeadModel", "n_inner", 1),  # whose matrices are transposed
    ):
        getattr(transformers, config)(**sizes, **{width: 40}, architectures=[model]).save_pretrained(tmp_path / model)
        found = ran(capsys, "plan", str(tmp_path / model), "--gpus", "1", "--json").json
        assert found["shape"]["intermediate"] == states * 40, config
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "architectures": ["MixtralForCausalLM"]}
    transformers.MixtralConfig(**sizes, **experts).save_pretrained(tmp_path / "experts")
    assert "layers have experts" in refused(capsys, "plan", str(tmp_path / "experts"))


def test_devices_days_host_memory_and_the_network_bound_the_plans(capsys):
    """Equal plans are told once."""
    given = ["X50", "--hardware", "rtx4090", "--gpus", "4", "--parallelism", "data", "--json"]
    free = ran(capsys, "plan", *given).json["plans"]
    assert {plan["devices"] for plan in free} == {4}
    on_one = ran(capsys, "plan", "X16", "--gpus", "1", "--json").json["plans"]  # of all kinds of parallelism
    assert len({(plan["micro_batch"], plan["micro_batches"], plan["method"]) for plan in on_one}) == len(on_one) > 1
    bounded = ran(capsys, "plan", *given, "--host-memory", "128GiB").json["plans"]
    needs = [max(plan["devices"] * plan["in_host_memory"] for plan in plans) for plans in (free, bounded)]
    assert needs[0] > 128 * 2**30 >= needs[1] and len(bounded) > 1
    plans = ran(capsys, "plan", "--model", "X64", "--days", "3", "--parallelism", "3d", "--json").json["plans"]
    assert all(plan["seconds"] <= 3 * 86_400 for plan in plans) and plans[0]["method"] == "improved"
    given = ["X160", "--parallelism", "3d", "--method", "improved", "--json"]
    own, same, slow = (
        ran(capsys, "plan", *given, *more).json["plans"][0]["seconds"]
        for more in ([], ["--network", "200"], ["--network", "25"])
    )
    assert own == same < slow, "that of the hardware carries 200 Gbit/s one way"


ROWS, TOKENS = 4, 8


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three steps, whose layers travel and are updated in the background."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    with forced_copies():
        config = L2LConfig(device="cpu", ubatch_size=2, eps_update="deferred", trace=str(tmp_path / "trace.json"))
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            ids = torch.randint(0, LLAMA["vocab_size"], (ROWS, TOKENS))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
        eps.timeline.close()
    return tmp_path / "trace.json"


def test_each_layer_of_a_run_is_beside_the_plan(tmp_path, trace, capsys):
    """A run of another model is refused."""
    flags = ["--measured", str(trace), "--batch", str(ROWS), "--tokens", str(TOKENS), "--hardware", "rtx4090"]
    call = ["plan", written(tmp_path / "model", LLAMA), *flags]
    found = ran(capsys, *call, "--json").json
    measured, run = found["measured"], traced_steps(trace)
    assert found["plans"] == [] and (measured["steps"], measured["rows"]) == (2, ROWS)
    card, weights = HARDWARE["rtx4090"], found["shape"]["layer_parameters"]
    flops = 2 * ROWS * TOKENS * weights / card.peak_flops
    plan = {
        "forward": flops,
        "backward": 3 * flops,
        "upload": 2 * 2 * weights / (card.pci_express / 2 * GIB),
        "update": 30 * weights / (card.host_memory_bandwidth * GIB),
    }
    for layer, its in zip(measured["layers"], run.layers, strict=True):
        for part, seconds in plan.items():
            assert layer[part]["plan"] == pytest.approx(seconds)
            assert layer[part]["measured"] == getattr(its, part) > 0
    assert measured["total"]["update"]["measured"] == run.update > sum(layer.update or 0 for layer in run.layers)
    lines = ran(capsys, *call).out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == [
        *(f"model.layers.{n}" for n in range(3)),
        "all",
    ]
    plain = ["plan", "X32", "--measured", str(trace), "--batch", "4"]
    assert "on one device, which has no --gpus" in refused(capsys, *plain, "--gpus", "8")
    assert "which has 32 layers (got 3 in the trace)" in refused(capsys, *plain)


PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
BLOCKS = re.findall(r"```bash\nhf-l2l (.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)


def test_every_command_has_its_output(capsys):
    assert PAGE.count("```bash") == len(BLOCKS) >= 9
    for command, printed in BLOCKS:
        found = ran(capsys, *shlex.split(command))
        assert (found.out or found.err).partition("\n\nDevices and links")[0].rstrip() == printed, command
