"""What a placement takes of the device, and what of a step travels, by name and by the boundary: bytes, on the
simulated accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, estimate
from hf_l2l.testing import enable_simulated_accelerator, page_locked_bytes
from models import Toy, attached, batch_for, train_once
from placements import LAYERS, PLACEMENTS, traffic, travelling_bytes
from runs import OPTIMIZERS, attach, config_for
from tiers import more, nightly
from training import settled_memory, tiny_bert


def stepped(model: nn.Module, steps: int = 2, **options: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The EPS, the optimizer and a batch of a model that has made some steps."""
    eps = attach_l2l(model, config_for(model, **{"device": "sim", "ubatch_size": 4, **options}))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = batch_for(model, masked=False)
    for _ in range(steps):
        train_once(model, batch)
        optimizer.step(), optimizer.zero_grad()
    eps.synchronize()
    return eps, optimizer, batch


FEW = ("shell and layers", "all, updated on the host", "some of each")
MORE = more("all and graphs", "layers, updated on the host", "kept weights", "kept graphs")


@pytest.mark.parametrize("name", [*FEW, *MORE])
def test_what_travels_in_a_step(name):
    """The shell and the layers' weights, and gradients of what is updated on the host: `Placement.uploads` says how
    many layers; what stays is uploaded once per update, where it is updated on the host."""
    placement = PLACEMENTS[name]
    model = Toy(LAYERS, tied=False)
    eps, optimizer, batch = stepped(model, **placement.options)
    layer = travelling_bytes(model.blocks[0])
    shell = sum(p.nbytes for p in (*model.embed.parameters(), *model.head.parameters()))
    is_renewed = placement.options.get("resident_update") == "host"
    has_copies = is_renewed and placement.options.get("resident") == "all"
    travels = 0 if placement.resident_shell else shell
    found = traffic(lambda: train_once(model, batch))
    assert found["upload"] == placement.uploads * layer + travels
    streamed_gradients = (LAYERS - placement.resident_layers) * layer
    assert found["download"] >= streamed_gradients + travels
    assert found["download"] <= streamed_gradients + travels + 64 * (LAYERS + 8)  # and norms
    again = traffic(lambda: train_once(model, batch))["upload"]  # a second batch of the step
    renewed = LAYERS if has_copies else 2 if is_renewed else 0
    added_to = sum(p.grad.nbytes for p in model.parameters() if p.grad.is_cpu)
    assert again == found["upload"] - renewed * layer - (shell if has_copies else 0) + added_to
    optimizer.step(), optimizer.zero_grad()
    assert traffic(lambda: train_once(model, batch)) == found


@pytest.mark.parametrize("name", ["shell and layers", "kept weights", *more("all", "layers, updated on the host")])
@pytest.mark.parametrize("options", [{"cmp": "bf16"}, *more({})], ids=str)
def test_what_they_take_has_a_name_and_an_estimate(name, options):
    settled_memory()
    placement, model = PLACEMENTS[name], Toy(LAYERS, 32, tied=False)
    eps, optimizer, batch = stepped(model, **options, **placement.options)
    loss = model(**batch).loss
    found, layer = eps.memory_report()["device"], travelling_bytes(model.blocks[0], 2 if options else 4)
    loss.backward()
    resident = eps.memory_report()["device"]["resident layers"]["now"]  # with gradients
    need, streamed = (
        estimate(model, config_for(model, device="sim", **options, **places), optimizer)
        for places in (placement.options, {})
    )
    for kind, layers in placement.kept.items():
        assert found[kind]["now"] == layers * layer, kind
    assert found["kept weights"]["now"] == need.kept_weights
    assert resident == pytest.approx(need.resident, rel=0.02)
    count = sum(p.numel() for each in model.blocks[: placement.resident_layers] for p in each.parameters())
    assert 16 * count <= resident or "resident layers" in placement.kept
    if placement.resident_shell:
        count += sum(p.numel() for p in (*model.embed.parameters(), *model.head.parameters()))
    # Masters, gradients and moments of what is resident are not on the host.
    assert streamed.masters - need.masters == streamed.gradients - need.gradients == 4 * count
    assert streamed.moments - need.moments == pytest.approx(8 * count, rel=0.01)


@nightly
def test_slots_are_of_the_largest_streamed_layer_and_of_no_layer_that_stays():
    """Nor is anything stashed of layers with kept graphs."""
    found = {}
    for name, options in {
        "streamed": {},
        "first": {"resident_layers": 1},
        "all": {"resident": "all", "kept_graphs": 3, "stash": "host"},
        "all keep": {"kept_weights": 3, "gradient_slots": 1},
    }.items():
        model = Toy(tied=False)
        model.blocks[0].up, model.blocks[0].down = nn.Linear(8, 512), nn.Linear(512, 8)
        model, eps, optimizer, batch = attach(model, OPTIMIZERS["SGD"], **options)
        model(**batch).loss.backward()
        found[name] = eps.memory_report()["device"]["slots"]["now"]
        optimizer.step()
        assert name != "all" or eps.memory_report()["host"]["stash"]["peak"] == 0
    large = travelling_bytes(model.blocks[0])
    assert found["first"] < found["streamed"] / 10 and found["all"] == 0
    assert found["all keep"] == large and found["streamed"] == 4 * large


@nightly
def test_inputs_that_stay_do_not_travel():
    """Of four layers, the inputs of the first ones go to the host and come back, one micro-batch after the other."""
    seen, width, kept = [], 32, 3
    for on_device in (0, kept):
        model, eps, _, batch = attach(Toy(4, width), stash="host", boundary="host", device_stash=on_device)
        for _ in range(2):
            train_once(model, batch)
        losses: list[torch.Tensor] = []
        down = traffic(lambda model=model, batch=batch, losses=losses: losses.append(model(**batch).loss))["download"]
        seen.append((down, eps.memory_report()["device"]["stash"]["now"]))
        losses[0].backward()
    inputs = batch["input_ids"].numel() * width * 4
    assert seen[1][1] - seen[0][1] == seen[0][0] - seen[1][0] == kept * inputs


@pytest.mark.parametrize("options", [{"stash": "host"}, {"kept_graphs": 2}], ids=str)
def test_a_call_without_a_backward_frees_its_memory(options):
    model, _, optimizer, batch = attach(**options)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    held, locked = None, set()
    for grad in (False, True, True, True, False):
        with torch.set_grad_enabled(grad):
            loss = model(**batch).loss
        assert not grad or settled_memory() > held
        del loss
        held = held or settled_memory()
        assert settled_memory() == held
        locked.add(page_locked_bytes() if grad else None)
    assert len(locked) == 2


def test_evaluations_of_a_changed_model_leave_no_copies_behind():
    """Each such call has units of its own, until one that trains."""
    model = tiny_bert(layers=2)
    attach_l2l(model, L2LConfig(device="sim", **PLACEMENTS["all, updated on the host"].options))
    ids = torch.randint(5, 50, (2, 6))
    model(input_ids=ids, labels=torch.zeros(2, dtype=torch.long)).loss.backward()
    model.requires_grad_(False)
    held = []
    for _ in range(4):
        with torch.no_grad():
            model(input_ids=ids)
        held.append(settled_memory())
    assert held[1] == held[2] == held[3]


def test_a_look_at_how_calls_are_split_uploads_no_resident_copy():
    """The first call of a kind replays its beginning with the masters, which are only read."""
    model = tiny_bert(layers=2, dropout=0.0)
    stepped(model, 1, resident="all", resident_update="host")
    batch, other = batch_for(model, masked=False), batch_for(model, masked=False, rows=6)
    train_once(model, batch)
    with torch.no_grad():
        assert traffic(lambda: model(**other))["upload"] == 0
        assert traffic(lambda: model(**other))["upload"] == 0


def test_weights_that_do_not_fit_go_back_to_the_host():
    model = Toy()
    enable_simulated_accelerator(torch.accelerator.memory_allocated() + model.embed.weight.nbytes)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            attach(model, resident="shell")
    finally:
        enable_simulated_accelerator(None)
    assert "resident='shell'" in raised.value.__notes__[-1]
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    attach(model, resident="shell")


# ---- the boundary on the host


WIDTH, TOKENS = 64, 16
A = TOKENS * WIDTH * 4
"""Bytes of one layer output per row."""


def stack(layers: int, ubatch_size: int = 2, **options: Any) -> nn.Module:
    """The layers of a BERT alone: what grows with the device batch is theirs."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = hf.BertConfig(**sizes, intermediate_size=2 * WIDTH, attn_implementation="sdpa")
    model = hf.models.bert.modeling_bert.BertEncoder(config).eval()
    return attached(model, ubatch_size=ubatch_size, stash="host", **options)


def peak(rows: int, *, layers: int = 3, **options: Any) -> int:
    """Bytes of the device at the peak of a forward and backward; the gradient of the output is one number."""
    model, inputs = stack(layers, **options), torch.randn(rows, TOKENS, WIDTH)
    for _ in range(2):
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        output = model(inputs).last_hidden_state
        output.backward(torch.ones((), device="sim").expand(rows, TOKENS, WIDTH))
        del output
    return int(torch.accelerator.max_memory_allocated())


@nightly
def test_layers_need_memory_for_one_micro_batch():
    """What is left of the device batch are the inputs, and the output of the last layer; depth costs nothing."""
    few = {boundary: peak(4, boundary=boundary) for boundary in ("device", "host")}
    on_device, on_host = ((peak(8, boundary=b) - few[b]) / 4 / A for b in ("device", "host"))
    assert on_host <= 2.02 < on_device, f"{on_host:.2f} layer outputs per row, on the device {on_device:.2f}"
    assert peak(4, layers=4, boundary="host") == few["host"]


@nightly
def test_each_row_travels_once_in_each_direction():
    """Per layer: its output down, and up for the next layer; in the backward its input up once more, and gradients.
    Layer 0 gets a device tensor, which is stashed, and whose gradient stays there; layer 3 returns one."""
    model = stack(4, boundary="host")
    inputs, weights = torch.randn(8, TOKENS, WIDTH), travelling_bytes(model.layer[0])

    def step() -> None:
        model.zero_grad()
        model(inputs).last_hidden_state.sum().backward()

    step()
    found = traffic(step)
    assert found["upload"] == (3 + 4 + 3) * 8 * A + 6 * weights
    assert (3 + 1 + 3) * 8 * A + 4 * weights <= found["download"] < (3 + 1 + 3) * 8 * A + 4 * weights + A


@pytest.mark.parametrize("size", ["64MiB", *more(None, "64GiB")])
def test_auto_is_the_host_where_the_device_is_small(size):
    """And the device where it does not say how much memory it has. The output of a layer has 3 MiB."""
    rows, kinds = 2**20 // A * 3, []
    enable_simulated_accelerator(size)
    model = stack(2, rows // 4)
    model.layer[0].register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    model(torch.randn(rows, TOKENS, WIDTH))
    assert [kind is torch.Tensor for kind in kinds] == [size != "64MiB"]
    enable_simulated_accelerator()
