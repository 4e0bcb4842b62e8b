"""`hf-l2l plan`: plans of the paper's models and of configs, for so many devices or days, and beside a real run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import transformers

from cli_models import LLAMA, ran, refused, written
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.scale import HARDWARE
from memory_switches import forced_copies
from tiers import nightly

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


@nightly
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


def test_figures_are_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    given = ["plan", "X50", "--parallelism", "none", "--plot"]
    assert "X50: " in ran(capsys, *given, "figures.png").out
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert "can be written, with an ending such as .png" in refused(capsys, "plan", "X32", "--plot", "nowhere/a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs the package matplotlib" in refused(capsys, "plan", "X32", "--plot", "a.png")


# ---- beside a real run

ROWS, TOKENS = 4, 8


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three steps, whose layers travel and are updated in the background."""
    file = tmp_path / "trace.json"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    with forced_copies():
        eps = attach_l2l(model, L2LConfig(device="cpu", ubatch_size=2, eps_update="deferred", trace=str(file)))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            ids = torch.randint(0, LLAMA["vocab_size"], (ROWS, TOKENS))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
        eps.timeline.close()
    return file


def given(folder: Path, trace: Path) -> list[str]:
    flags = ["--measured", str(trace), "--batch", str(ROWS), "--tokens", str(TOKENS), "--hardware", "rtx4090"]
    return ["plan", written(folder / "model", LLAMA), *flags]


def test_each_layer_of_a_run_is_beside_the_plan(tmp_path, trace, capsys):
    """A run of another model is refused."""
    found = ran(capsys, *given(tmp_path, trace), "--json").json
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
    lines = ran(capsys, *given(tmp_path, trace)).out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == [
        *(f"model.layers.{n}" for n in range(3)),
        "all",
    ]

    plain = ["plan", "X32", "--measured", str(trace)]
    assert "on one device, which has no --gpus" in refused(capsys, *plain, "--batch", "4", "--gpus", "8")
    assert "which has 32 layers (got 3 in the trace)" in refused(capsys, *plain, "--batch", "4")


# ---- docs/planning.md has what its commands print

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
BLOCKS = re.findall(r"```bash\nhf-l2l (.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)


def test_every_command_has_its_output(capsys):
    assert PAGE.count("```bash") == len(BLOCKS) >= 9
    for command, printed in BLOCKS:
        found = ran(capsys, *shlex.split(command))
        assert (found.out or found.err).partition("\n\nDevices and links")[0].rstrip() == printed, command
