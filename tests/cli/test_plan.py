"""`hf-l2l plan`: plans of the paper's models and of configs, for so many devices or days, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import transformers

from cli_models import LLAMA, ran, refused, written


def test_the_paper_s_model(capsys):
    found = ran(capsys, "plan", "X160").out
    first = next(line for line in found.splitlines() if line.startswith("3d "))
    assert " ".join(first.split()) == "3d improved 38,640 483 5 16 2,415 1 5 0.88 6.8 d 4.72 0"
    assert "X160: 1.3 T parameters in 160 layers of width 25600" in found and "critical batch is 2,416 rows" in found
    assert "at their peak" in found


def test_json_has_the_parts_of_the_time_and_of_the_memory(capsys):
    found = ran(capsys, "plan", "X64", "--method", "improved", "--parallelism", "3d", "--json").json
    [plan] = found["plans"]
    parts = plan["overheads"]
    computing = (1 + parts["bubble"]) * (1 + sum(parts.values()) - parts["bubble"])
    assert plan["efficiency"] == pytest.approx(1 / computing)
    memory = plan["memory"]
    assert memory["offloadable"] == pytest.approx(memory["state"] + memory["checkpoints"])
    assert plan["devices"] == plan["data"] * plan["pipeline"] * plan["tensor"]
    assert found["hardware"]["name"] == "a100" and found["shape"]["parameters"] == 12 * 64**5


def test_layers_of_a_config_are_counted(tmp_path, capsys):
    found = ran(capsys, "plan", written(tmp_path, LLAMA), "--gpus", "1", "--tokens", "100", "--json").json
    layers = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).model.layers
    assert found["shape"]["parameters"] == sum(p.numel() for p in layers.parameters())
    assert (found["shape"]["layers"], found["shape"]["tokens"]) == (len(layers), 100)


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ("LlamaConfig", 2),
        ("Phi3Config", 2),  # one matrix makes both
        ("GPTNeoXConfig", 1),
        ("BertConfig", 1),
    ],
)
def test_gated_networks_have_two_intermediate_states(config, states, tmp_path, capsys):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "pad_token_id": 0}
    name = f"{config.removesuffix('Config')}{'Model' if config != 'GPTNeoXConfig' else 'ForCausalLM'}"
    given = getattr(transformers, config)(**sizes, num_attention_heads=2, architectures=[name])
    given.save_pretrained(tmp_path / "model")
    found = ran(capsys, "plan", str(tmp_path / "model"), "--gpus", "1", "--json").json
    assert found["shape"]["intermediate"] == states * 40


def test_the_intermediate_size_is_that_of_the_modules(tmp_path, capsys):
    """GPT-2 names it otherwise in its config, and its matrices are transposed."""
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_inner=24, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path / "model")
    found = ran(capsys, "plan", str(tmp_path / "model"), "--gpus", "1", "--json").json
    assert found["shape"]["intermediate"] == 24


def test_with_few_devices_equal_plans_are_told_once(capsys):
    plans = ran(capsys, "plan", "X32", "--gpus", "1", "--json").json["plans"]
    assert len({(plan["micro_batch"], plan["micro_batches"], plan["method"]) for plan in plans}) == len(plans)
    assert all(plan["devices"] == 1 for plan in plans) and len(plans) <= 4


def test_days_give_the_smallest_cluster_first(capsys):
    plans = ran(capsys, "plan", "--model", "X64", "--days", "3", "--json").json["plans"]
    assert [plan["devices"] for plan in plans] == sorted(plan["devices"] for plan in plans)
    assert all(plan["seconds"] <= 3 * 86_400 for plan in plans) and plans[0]["method"] == "improved"


def test_host_memory_bounds_what_is_offloaded(capsys):
    given = ["X64", "--hardware", "rtx4090", "--gpus", "8", "--json"]
    free = ran(capsys, "plan", *given).json["plans"]
    bound = ran(capsys, "plan", *given, "--host-memory", "256GiB").json["plans"]
    assert max(plan["devices"] * plan["memory"]["offloadable"] for plan in free) > 256 * 2**30
    for plan in bound:
        assert plan["devices"] * plan["in_host_memory"] <= 256 * 2**30


def test_a_slower_network_takes_longer(capsys):
    fast, slow = (
        ran(capsys, "plan", "X160", "--parallelism", "3d", "--method", "improved", "--network", gbits, "--json").json
        for gbits in ("200", "25")
    )
    assert slow["plans"][0]["seconds"] > fast["plans"][0]["seconds"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["figures.png", "figures.svg", "figures.pdf"])
def test_figures_are_drawn_and_the_model_is_marked(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = ran(capsys, "plan", "X160", "--network", "25", "--plot", str(tmp_path / name))
    assert found.status == 0 and "X160: 1.3 T parameters" in found.out
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[Path(name).suffix]
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs the package matplotlib (got 'a.png'" in refused(capsys, "plan", "X32", "--plot", "a.png")


@pytest.mark.parametrize("file", ["nowhere/a.png", "a.xyz"])
def test_a_picture_that_cannot_be_written(file, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    says = f"--plot must be a file that can be written, with an ending such as .png (got {file!r}: "
    assert says in refused(capsys, "plan", "X32", "--plot", file)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], r"a plan needs a model \(got none\); give MODEL"),
        (["X7"], r"must be even, from 2 to 10,000 \(got 7\)"),
        (["X32", "--hardware", "h10"], r"--hardware must be one of v100, .* \(got 'h10'\); did you mean h100\?"),
        (["X32", "--gpus", "0"], r"--gpus must be at least 1 \(got 0\)"),
        (
            ["X32", "--gpus", "4", "--pipeline", "8"],
            r"--gpus must be at least 8 .* --pipeline times --tensor \(got 4\)",
        ),
        (["X32", "--pipeline", "5"], r"--pipeline must divide the 32 layers \(got 5\)"),
        (["X32", "--tokens", "0"], r"--tokens must be at least 1 \(got 0\)"),
        (["X32", "--network", "0"], r"--network must be from 0.01 to 1,000,000 \(got 0.0\)"),
        (["X32", "--node-size", "0"], r"--node-size must be a whole number from 1 \(got 0\)"),
        (["X32", "--host-memory", "64"], "--host-memory"),
        (["X160", "--gpus", "1", "--host-memory", "64GiB"], "hosts on at most 1 device, with at most 2,416 rows"),
        (
            ["X160", "--tensor", "80"],
            r"--tensor must be at most the 16 devices of a node \(got 80\).* larger --node-size",
        ),
        (
            ["X160", "--parallelism", "data", "--tensor", "8"],
            r"--tensor must be left out with --parallelism data, .*\(got 8\)",
        ),
        (
            ["X160", "--parallelism", "none", "--method", "partitioned"],
            r"--parallelism must be one of data, .* with --method partitioned \(got none\)",
        ),
        (["X32", "--days", "inf"], r"--days must be a number above 0 \(got inf\)"),
        (["X32", "--days", "-1"], r"--days must be a number above 0 \(got -1.0\)"),
        (["X32", "--days", "nan"], r"--days must be a number above 0 \(got nan\)"),
        (["X32", "--network", "nan"], r"--network must be from .* \(got nan\)"),
        (["X32", "--host-bandwidth", "0"], r"--host-bandwidth must be from 0.01 to 1,000,000 \(got 0.0\)"),
        (
            ["X32", "--method", "l2l", "--parallelism", "3d"],
            r"--parallelism must be one of none, data with --method l2l",
        ),
        (["X160", "--method", "l2l", "--gpus", "1"], r"with parallelism data and the l2l method, and the state alone"),
        (["X32", "--node-size", "nan"], "--node-size: invalid int value: 'nan'"),
        (["X32", "--batch", "0"], r"--batch must be at least 1 \(got 0\)"),
        (["X32", "--steps", "0"], r"--steps must be from 1 to .* \(got 0\)"),
        (["X32", "--tensor", "3"], r"--tensor must divide the 16 heads \(got 3\)"),
        (["X32", "--days", "1", "--gpus", "1"], "not allowed with argument"),
    ],
)
def test_refusals(given, says, capsys):
    assert re.search(says, refused(capsys, "plan", *given))


def test_experts_are_refused(tmp_path, capsys):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, architectures=["MixtralForCausalLM"])
    config.save_pretrained(tmp_path / "experts")
    assert "layers have experts" in refused(capsys, "plan", str(tmp_path / "experts"))
