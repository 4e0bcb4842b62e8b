"""`hf-l2l plan`: plans of the paper's models and of configs, for so many devices or days, and beside a real run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from cli_models import LLAMA, ran, refused, written
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.scale import HARDWARE, Cluster, Method, TransformerShape, Usage
from hf_l2l.scale.curves import arranged
from memory_switches import forced_copies
from tiers import more

GIB, DAY_S, YEAR_S = 2**30, 86_400, 365 * 86_400


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
    assert found["measured"] is None


def test_layers_of_a_config_are_counted(tmp_path, capsys):
    found = ran(capsys, "plan", written(tmp_path, LLAMA), "--gpus", "1", "--tokens", "100", "--json").json
    layers = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).model.layers
    assert found["shape"]["parameters"] == sum(p.numel() for p in layers.parameters())
    assert (found["shape"]["layers"], found["shape"]["tokens"]) == (len(layers), 100)


@pytest.mark.parametrize(
    ("config", "model", "states"),
    [
        ("LlamaConfig", "LlamaModel", 2),
        ("Phi3Config", "Phi3Model", 2),  # one matrix makes both
        *more(("GPTNeoXConfig", "GPTNeoXForCausalLM", 1)),
        ("BertConfig", "BertModel", 1),
        ("GPT2Config", "GPT2LMHeadModel", 1),  # whose matrices are transposed
    ],
)
def test_gated_networks_have_two_intermediate_states(config, model, states, tmp_path, capsys):
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "num_attention_heads": 2}
    width = "n_inner" if config == "GPT2Config" else "intermediate_size"
    getattr(transformers, config)(**sizes, **{width: 40}, architectures=[model]).save_pretrained(tmp_path / "model")
    found = ran(capsys, "plan", str(tmp_path / "model"), "--gpus", "1", "--json").json
    assert found["shape"]["intermediate"] == states * 40


def test_devices_days_and_host_memory_bound_the_plans(capsys):
    plans = ran(capsys, "plan", "X32", "--gpus", "1", "--json").json["plans"]
    assert len({(plan["micro_batch"], plan["micro_batches"], plan["method"]) for plan in plans}) == len(plans)
    assert all(plan["devices"] == 1 for plan in plans) and len(plans) <= 4  # equal ones are told once
    plans = ran(capsys, "plan", "--model", "X64", "--days", "3", "--json").json["plans"]
    assert [plan["devices"] for plan in plans] == sorted(plan["devices"] for plan in plans)
    assert all(plan["seconds"] <= 3 * 86_400 for plan in plans) and plans[0]["method"] == "improved"
    given = ["X64", "--hardware", "rtx4090", "--gpus", "8", "--json"]
    free = ran(capsys, "plan", *given).json["plans"]
    assert max(plan["devices"] * plan["memory"]["offloadable"] for plan in free) > 256 * 2**30
    for plan in ran(capsys, "plan", *given, "--host-memory", "256GiB").json["plans"]:
        assert plan["devices"] * plan["in_host_memory"] <= 256 * 2**30


def test_a_slower_network_takes_longer(capsys):
    fast, slow = (
        ran(capsys, "plan", "X160", "--parallelism", "3d", "--method", "improved", "--network", gbits, "--json").json
        for gbits in ("200", "25")
    )
    assert slow["plans"][0]["seconds"] > fast["plans"][0]["seconds"]


def test_figures_are_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, begins in (("figures.png", b"\x89PNG"), *more(("figures.svg", b"<?xml"), ("figures.pdf", b"%PDF"))):
        found = ran(capsys, "plan", "X160", "--network", "25", "--plot", name)
        assert found.status == 0 and "X160: 1.3 T parameters" in found.out
        assert (tmp_path / name).read_bytes().startswith(begins)
    for file in ("nowhere/a.png", "a.xyz"):
        assert f"can be written, with an ending such as .png (got {file!r}: " in refused(
            capsys, "plan", "X32", "--plot", file
        )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs the package matplotlib" in refused(capsys, "plan", "X32", "--plot", "a.png")


def test_refusals(capsys):
    for given, says in (
        ([], "a plan needs a model"),
        (["X7"], "must be even, from 2 to 10,000 (got 7)"),
        (["X32", "--hardware", "h10"], "did you mean h100?"),
        (["X32", "--gpus", "0"], "--gpus must be at least 1 (got 0)"),
        (["X32", "--gpus", "4", "--pipeline", "8"], "--gpus must be at least 8"),
        (["X32", "--pipeline", "5"], "--pipeline must divide the 32 layers (got 5)"),
        (["X32", "--tokens", "0"], "--tokens must be at least 1 (got 0)"),
        (["X32", "--network", "0"], "--network must be from 0.01 to 1,000,000 (got 0.0)"),
        (["X32", "--network", "nan"], "--network must be from"),
        (["X32", "--node-size", "0"], "--node-size must be a whole number from 1 (got 0)"),
        (["X32", "--node-size", "nan"], "--node-size: invalid int value: 'nan'"),
        (["X32", "--host-memory", "64"], "--host-memory"),
        (["X160", "--gpus", "1", "--host-memory", "64GiB"], "hosts on at most 1 device, with at most 2,416 rows"),
        (["X160", "--tensor", "80"], "larger --node-size"),
        (["X160", "--parallelism", "data", "--tensor", "8"], "--tensor must be left out with --parallelism data"),
        (["X160", "--parallelism", "none", "--method", "partitioned"], "with --method partitioned (got none)"),
        (["X32", "--method", "l2l", "--parallelism", "3d"], "must be one of none, data with --method l2l"),
        (["X160", "--method", "l2l", "--gpus", "1"], "and the state alone"),
        (["X32", "--days", "inf"], "--days must be a number above 0 (got inf)"),
        (["X32", "--days", "-1"], "--days must be a number above 0 (got -1.0)"),
        (["X32", "--days", "nan"], "--days must be a number above 0 (got nan)"),
        (["X32", "--host-bandwidth", "0"], "--host-bandwidth must be from 0.01 to 1,000,000 (got 0.0)"),
        (["X32", "--batch", "0"], "--batch must be at least 1 (got 0)"),
        (["X32", "--steps", "0"], "--steps must be from 1 to"),
        (["X32", "--tensor", "3"], "--tensor must divide the 16 heads (got 3)"),
        (["X32", "--days", "1", "--gpus", "1"], "not allowed with argument"),
    ):
        assert says in refused(capsys, "plan", *given)


def test_experts_are_refused(tmp_path, capsys):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, architectures=["MixtralForCausalLM"])
    config.save_pretrained(tmp_path / "experts")
    assert "layers have experts" in refused(capsys, "plan", str(tmp_path / "experts"))


# ---- beside a real run

ROWS, TOKENS = 4, 8


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """Three steps, whose layers travel and are updated in the background."""
    file: Path = tmp_path_factory.mktemp("run") / "trace.json"
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


def given(folder: Path, trace: Path, rows: int = ROWS) -> list[str]:
    flags = ["--measured", str(trace), "--batch", str(rows), "--tokens", str(TOKENS), "--hardware", "rtx4090"]
    return ["plan", written(folder / "model", LLAMA), *flags]


def test_each_layer_is_beside_the_plan(tmp_path, trace, capsys):
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
    assert [layer["name"] for layer in measured["layers"]] == [f"model.layers.{n}" for n in range(3)]
    for layer, its in zip(measured["layers"], run.layers, strict=True):
        for part, seconds in plan.items():
            assert layer[part]["plan"] == pytest.approx(seconds)
            assert layer[part]["measured"] == getattr(its, part) > 0
            assert layer[part]["ratio"] == pytest.approx(getattr(its, part) / seconds)
    for part, seconds in plan.items():
        assert measured["total"][part]["plan"] == pytest.approx(3 * seconds)
    assert measured["total"]["update"]["measured"] == run.update > sum(layer.update or 0 for layer in run.layers)
    assert measured["step"]["measured"] == run.step
    many = ran(capsys, *given(tmp_path, trace, rows=8), "--json").json["measured"]["layers"][0]["forward"]
    few = measured["layers"][0]["forward"]
    assert many["plan"] == pytest.approx(2 * few["plan"]) and many["measured"] == few["measured"]
    lines = ran(capsys, *given(tmp_path, trace)).out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    table = [line.split() for line in lines[head : head + 5]]
    assert table[0][1:4] == ["forward", "ms", "plan"] and {len(line) for line in table[1:]} == {13}
    assert [line[0] for line in table[1:]] == [*(f"model.layers.{n}" for n in range(3)), "all"]
    assert any(line.startswith("Means of 2 steps with 4 rows. A step took ") for line in lines)


def test_a_run_of_another_model_or_none_is_refused(tmp_path, trace, capsys):
    plain = ["plan", "X32", "--measured", str(trace)]
    assert "--measured needs --batch" in refused(capsys, *plain)
    assert "on one device, which has no --gpus" in refused(capsys, *plain, "--batch", "4", "--gpus", "8")
    assert "has no --no-offload" in refused(capsys, *plain, "--batch", "4", "--no-offload")
    assert "which has 32 layers (got 3 in the trace)" in refused(capsys, *plain, "--batch", "4")
    (tmp_path / "a.json").write_text("{}")
    assert "it is no such file" in refused(capsys, *given(tmp_path, tmp_path / "a.json"))


# ---- docs/planning.md has what its commands print, and in its table the figures of the plans

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planning.md").read_text()
BLOCKS = re.findall(r"```bash\nhf-l2l (.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
A100 = Cluster(HARDWARE["a100"])


def test_every_command_has_its_output(capsys):
    assert PAGE.count("```bash") == len(BLOCKS) >= 9
    for command, printed in BLOCKS:
        found = ran(capsys, *shlex.split(command))
        assert (found.out or found.err).partition("\n\nDevices and links")[0].rstrip() == printed, command
    assert "(planning.png)" in PAGE and (DOCS / "planning.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "planning.png").stat().st_size < 200_000


def largest(cluster: Cluster, holds: Callable[[Usage], bool]) -> Usage:
    usages = (arranged(TransformerShape.family(x), cluster, Method.IMPROVED) for x in range(1000, 20, -2))
    return next(usage for usage in usages if holds(usage))


def test_the_table_of_what_differs():
    any_node, x160 = Cluster(HARDWARE["a100"], node_size=10**6), TransformerShape.family(160)
    year = largest(A100, lambda usage: usage.seconds() <= YEAR_S)
    sizes = [
        year,
        largest(A100, lambda usage: usage.memory.resident <= 80 * GIB),
        largest(A100, lambda usage: usage.memory.total <= 80 * GIB),
        largest(any_node, lambda usage: usage.seconds() <= 30 * DAY_S),
        largest(any_node, lambda usage: usage.seconds() <= YEAR_S),
    ]
    a_year, offloaded, held, month_5, year_5 = (f"{usage.shape.parameters / 1e12:.0f}" for usage in sizes)
    ethernet = Cluster(HARDWARE["a100"], network=6.25)
    slower = [arranged(x160, each, Method.IMPROVED).seconds() for each in (ethernet, A100)]
    computed = [a_year, f"{year.memory.total / GIB:.0f}", offloaded, held, f"{month_5}, {year_5}"]
    rows = re.findall(r"^\| (?:figure|section) .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [*computed, f"{slower[0] / slower[1] - 1:.0%}".replace("%", " %")]
