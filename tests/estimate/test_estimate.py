"""`hf_l2l.estimate`: bytes from shapes, the state of optimizers, names, configs and the Trainer's arguments, the
largest model that a host holds, and the phases of a process."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch import nn
from transformers.optimization import Adafactor

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, estimate
from hf_l2l.sizing.capacity import LORA, RANK, SETTINGS
from host_phases import LARGE, ROWS, TOKENS, measured
from models import SMALL, VOCAB, batch_for, bert, gpt2, llama, train_once, vit
from runs import assert_same_run, run_of
from tiers import nightly

WIDTH, INNER, POSITIONS = 16, 24, 20
SHELL = (VOCAB + POSITIONS + 2) * WIDTH + 2 * WIDTH + (WIDTH * WIDTH + WIDTH) + (2 * WIDTH + 2)
"""Embeddings of words, positions and types, their norm, pooler, classifier."""
LAYER = 4 * (WIDTH * WIDTH + WIDTH) + (2 * WIDTH * INNER + INNER + WIDTH) + 2 * 2 * WIDTH
"""Query, key, value and output, the two dense layers, two norms."""
ALL, POSITION_IDS = SHELL + 2 * LAYER, 2 * 8 * POSITIONS
SLOT = sum(-(-4 * n // 256) * 256 for n in [WIDTH * WIDTH] * 4 + [2 * WIDTH * INNER // 2] * 2 + [INNER] + [WIDTH] * 9)
"""Bytes of a layer in a slot, where every parameter starts at a multiple of 256."""


def small_bert() -> nn.Module:
    return bert(max_position_embeddings=POSITIONS)


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> int:
    return estimate(model, L2LConfig(**options), optimizer).moments


def test_bytes_of_a_model():
    with torch.device("meta"):
        model = small_bert()
    need = estimate(model)
    assert need.masters == need.gradients == 4 * ALL and need.moments == 2 * need.masters
    assert need.shell == 2 * 4 * SHELL + POSITION_IDS
    assert need.slots == 4 * SLOT, "weights of two layers, gradients of two"
    assert estimate(model, L2LConfig(gradient_slots=1)).slots == 3 * SLOT
    assert need.host_bytes == 4 * need.masters and need.device_peak == need.shell + need.slots
    assert estimate(small_bert().double()).masters == 8 * ALL
    assert estimate(small_bert().bfloat16()).gradients == 2 * ALL
    tied = gpt2()
    assert estimate(tied).masters == 4 * sum(p.numel() for p in tied.parameters())
    need = estimate(nn.Linear(3, 2))  # without layers, all is shell
    assert (need.masters, need.gradients, need.moments, need.shell, need.slots) == (32, 32, 64, 64, 0)


def test_moments_of_8_bits_make_8_bytes_per_parameter():
    """And an exponent for 256 elements of each; without what is under way."""
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, vocab_size=4096))
    short = {"cmp": "bf16", "grad_dtype": "16bit", "host_copies": "per_sweep"}
    bf16, eight = (estimate(model, L2LConfig(moment_dtype=each, **short), device="cuda") for each in ("bf16", "8bit"))
    count = sum(p.numel() for p in model.parameters())
    assert bf16.host_bytes == 10 * count and eight.host_bytes / count == pytest.approx(8 + 2 / 256, rel=1e-6)
    assert round(eight.host_bytes / count, 2) == 8.01 and bf16.widened == eight.widened == 0


@pytest.mark.parametrize(
    ("make", "options", "is_widened"),
    [
        (torch.optim.AdamW, {"grad_dtype": "16bit", "moment_dtype": "8bit"}, False),
        (torch.optim.SGD, {"grad_dtype": "16bit", "moment_dtype": "bf16"}, False),
        (partial(torch.optim.AdamW, fused=True), {"grad_dtype": "16bit"}, False),
        (torch.optim.AdamW, {"grad_dtype": "16bit"}, True),
        (partial(torch.optim.AdamW, amsgrad=True), {"grad_dtype": "16bit", "moment_dtype": "bf16"}, True),
        (torch.optim.RMSprop, {"moment_dtype": "bf16"}, True),
        (torch.optim.RMSprop, {}, False),
    ],
)
def test_updates_in_one_pass_widen_nothing_and_others_at_most_what_was_expected(make, options, is_widened):
    """Of two parts at once, if the machine has threads for that; counters of steps are in what is expected."""
    model, config = llama(), L2LConfig(device="cpu", **options)
    expected = estimate(model, config, make(model.parameters(), lr=0.1)).widened
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(make(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    optimizer.step()
    train_once(model, batch_for(model))
    optimizer.step()
    eps.synchronize()
    found = eps.memory_report()["host"]["optimizer transients"]["peak"]
    assert found <= expected <= 2.01 * found and (expected > 0) == is_widened


def test_frozen_parts_need_no_gradients_and_no_moments():
    model = small_bert()
    for name, p in model.named_parameters():
        p.requires_grad_(".layer.1." in name or "classifier" in name)
    head = 2 * WIDTH + 2
    need = estimate(model)
    assert (need.masters, need.gradients, need.moments) == (4 * ALL, 4 * (LAYER + head), 8 * (LAYER + head))
    assert need.shell == 4 * (SHELL + head) + POSITION_IDS
    assert need.slots == 4 * SLOT, "of the largest layer, whose gradients are all needed"


@nightly
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        partial(torch.optim.AdamW, amsgrad=True),
        partial(torch.optim.SGD, momentum=0.9),
        partial(Adafactor, lr=0.1, relative_step=False, beta1=0.9),
        torch.optim.Adagrad,
    ],
    ids=["adamw", "adamw amsgrad", "sgd momentum", "transformers' adafactor with lr", "adagrad"],
)
def test_moments_are_those_of_the_real_optimizer_after_a_step(make):
    model = small_bert()
    model.bert.encoder.layer[0].requires_grad_(False)
    optimizer = make(model.parameters())
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which patches the step
    step, optimizer.step = optimizer.step, lambda *args: pytest.fail("the user's step ran")
    found = moments(optimizer, model)
    assert all(torch.equal(p, before[key]) and p.grad is None for key, p in model.named_parameters())
    assert make is torch.optim.Adagrad or not optimizer.state
    train_once(model, batch_for(model))
    optimizer.step = step
    optimizer.step()
    kept = [t for p, state in optimizer.state.items() if p.requires_grad for t in state.values()]
    assert found == sum(t.nbytes for t in kept if isinstance(t, torch.Tensor))


def test_each_shape_of_a_group_is_tried_once():
    """Layers have the same shapes, and the groups they are in may have other state."""
    tried = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            tried.extend((g["momentum"], p.shape) for g in self.param_groups for p in g["params"])
            return super().step(closure)

    model = small_bert()
    later = list(model.bert.encoder.layer[1].parameters())
    others = [p for p in model.parameters() if all(p is not each for each in later)]
    groups = [{"params": others, "momentum": 0.0}, {"params": later, "momentum": 0.9}]
    optimizer = Noted(groups, lr=0.1)
    assert estimate(model, optimizer=optimizer).moments == 4 * LAYER
    expected = {(group["momentum"], p.shape) for group in groups for p in group["params"]}
    assert len(tried) == len(expected) and {*tried} == expected
    tried.clear()
    on_device = estimate(model, L2LConfig(device="cuda", resident="all"), optimizer, device="cuda")
    assert on_device.moments == 0 and len(tried) == len(expected) and {*tried} == expected


class Strange(torch.optim.Optimizer):
    """Reads values, which meta tensors do not have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["norm"] = p.grad.norm().item()


class Careless(torch.optim.SGD):
    """Keeps a map that it moves to where the parameters are, as some 8-bit optimizers do, and then gives up."""

    def __init__(self, params: Any, *, makes_state: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.map, self.makes_state = {"signed": torch.linspace(-1, 1, 256)}, makes_state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.map["signed"] = self.map["signed"].to(p.device)
            torch.rand(3)
            random.random()
            if self.makes_state:
                self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.uint8)
        raise Exception("the step needs a GPU")


def test_an_optimizer_that_cannot_be_tried_is_taken_for_adam_and_left_as_it_is():
    """Unless it has made its state before it gave up. No generator moves."""
    model = nn.Linear(3, 2)
    before = torch.get_rng_state(), random.getstate()
    assert moments(Strange(model.parameters()), model) == 2 * 4 * 8
    assert moments(Strange(model.parameters()), model, moment_dtype="bf16") == 2 * 2 * 8
    for makes_state, expected in ((False, 2 * 4 * 8), (True, 8)):
        optimizer = Careless(model.parameters(), makes_state=makes_state)
        assert moments(optimizer, model) == expected
        assert optimizer.map["signed"].device.type == "cpu" and not optimizer.state
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_an_optimizer_that_trains_and_that_accelerate_has_wrapped_is_left_alone():
    model = small_bert()
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    eps = attach_l2l(model)
    eps.wrap(optimizer)
    train_once(model, batch_for(model))
    optimizer.step()
    eps.synchronize()
    before, steps = run_of(model, optimizer, []), []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train_once(model, batch_for(model))
    count = len(before.state["state"])
    assert moments(optimizer, model) == moments(optimizer.optimizer, model) == 8 * ALL + 4 * count
    assert all(p.grad is not None for p in model.parameters())
    assert_same_run(run_of(model, optimizer, []), before)
    assert steps == []


# ---- of names, configs and arguments


BATCH: dict[str, Any] = {"rows": 4, "tokens": 8}
HOST: dict[str, Any] = {"stash": "host", "ubatch_size": 1}


def arguments(folder: Path, **options: Any) -> L2LTrainingArguments:
    return L2LTrainingArguments(output_dir=str(folder), report_to="none", **options)


def bytes_of(found: Any) -> dict[str, int]:
    """The peaks of both tiers, but for what this process holds otherwise."""
    names = {(tier, name): size["peak"] for tier in ("device", "host") for name, size in found.report[tier].items()}
    del names["host", "Python, libraries and other"], names["host", "total"]
    return names


def test_a_config_a_folder_and_a_file_are_the_model_they_make(tmp_path):
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=1, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    expected = bytes_of(estimate(hf.LlamaForCausalLM(config), **BATCH))
    assert bytes_of(estimate(str(tmp_path), **BATCH)) == expected
    for source in (tmp_path, tmp_path / "config.json", config):
        assert estimate(source).masters == expected["host", "masters"]


def test_a_class_for_a_config():
    config = hf.BertConfig(**SMALL)
    found = estimate(config, **BATCH, model_class="BertForSequenceClassification")
    assert found.masters == 4 * sum(p.numel() for p in hf.BertForSequenceClassification(config).parameters())
    found = estimate(config, L2LConfig(ubatch_size=1), rows=2, model_class="BertForMultipleChoice")
    assert found.device_peak > found.shell + found.slots, "inputs of another shape"


def test_options_rows_and_the_optimizer_come_from_the_arguments(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=4, cmp="bf16", l2l_boundary="device", **HOST)
    config = L2LConfig(cmp="bf16", boundary="device", **HOST)
    model = llama()
    by_args = estimate(model, args, tokens=8)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    assert bytes_of(by_args) == bytes_of(estimate(model, config, adamw, rows=4, tokens=8))
    assert by_args.rows == 4


def test_the_state_is_that_of_the_optimizer_of_the_arguments(tmp_path):
    model = llama()
    parameters, counts = sum(p.numel() for p in model.parameters()), 4 * len(list(model.parameters()))
    for optim, expected in (("sgd", 0), ("adagrad", 4 * parameters + counts)):
        assert estimate(model, arguments(tmp_path, optim=optim)).moments == expected, optim
    assert estimate(model, arguments(tmp_path, l2l_optimizer="lamb")).moments >= 8 * parameters


@nightly
def test_accumulated_batches_that_run_as_one_are_on_the_device_together(tmp_path):
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    merged = estimate(llama(), arguments(tmp_path, **options), tokens=8)
    apart = estimate(llama(), arguments(tmp_path, l2l_merge_accumulation="off", **options), tokens=8)
    assert (merged.rows, apart.rows) == (6, 2)
    expected = estimate(llama(), L2LConfig(ubatch_size=2), rows=6, tokens=8)
    # The batches that are put together are there as well.
    assert merged.device_peak == expected.device_peak + 2 * 8 * 6 * 8 > apart.device_peak


def test_autocast_of_the_arguments_is_followed(tmp_path):
    plain = estimate(llama(), arguments(tmp_path), **BATCH)
    found = estimate(llama(), arguments(tmp_path, bf16=True, use_cpu=True), **BATCH)
    assert found.device_peak < plain.device_peak and found.plain < plain.plain and found.notes == plain.notes


class Sees(nn.Module):
    """A model of texts that takes the patches of images, packed, as Qwen2-VL does."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.patches = llama(), nn.Linear(6, SMALL["hidden_size"])
        self.config = self.text.config

    def forward(self, input_ids: Any = None, labels: Any = None, pixel_values: Any = None) -> Any:
        embedded = self.text.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            embedded = embedded + self.patches(pixel_values).mean(0)
        return self.text(inputs_embeds=embedded, labels=labels)


def test_packed_inputs_are_not_cut():
    """Their first dimension is not that of rows, though it is larger, and a multiple of it."""
    ids, patches = torch.zeros(4, 8, dtype=torch.long), torch.zeros(64, 6)
    batch = {"input_ids": ids, "labels": ids}
    config = L2LConfig(stash="device", ubatch_size=2)
    both, text = (estimate(Sees(), config, inputs={**batch, **more}) for more in ({"pixel_values": patches}, {}))
    assert (both.rows, text.rows) == (4, 4)
    for name, more in (("stash", 0), ("slots", 0), ("inputs", patches.nbytes)):
        assert both.report["device"][name]["peak"] == text.report["device"][name]["peak"] + more
    [note] = estimate(Sees(), **BATCH).notes
    assert note == "a Sees takes pixel_values, too: this is the memory for batches of text alone"


def test_bad_input_is_one_sentence(tmp_path):
    """With options as the Trainer calls them."""
    plain = hf.TrainingArguments(output_dir=str(tmp_path), report_to="none", optim="adamw_torch", fp16=True)
    for source, given, options, said in (
        ("nobody/no-such-model", [], {}, "HF_HUB_OFFLINE"),
        (hf.BertConfig(**SMALL), [], {"model_class": "Nothing"}, "model_class"),
        (nn.Linear(3, 2), [], {"inputs": {"input": torch.empty(2, 3)}}, "none was found in a Linear"),
        (vit(), [], BATCH, "text"),
        (llama(), [arguments(tmp_path, l2l_resident_layers=9)], BATCH, "l2l_resident_layers"),
        (llama(), [plain], BATCH, "fp16 cannot be used"),
    ):
        with pytest.raises(ValueError) as error:
            estimate(source, *given, **options)
        text = str(error.value)
        assert said in text and "\n" not in text and "; " in text


# ---- the largest model of a host

OF_TWO: dict[str, Any] = {"rows": 2, "tokens": 8}


@pytest.fixture
def nothing_else(monkeypatch):
    """What Python and libraries take is more than all of these models."""
    monkeypatch.setattr("hf_l2l.plan.estimate.process_bytes", lambda: (0, 0))


def of_layers(layers: int, width: int = SMALL["hidden_size"]) -> nn.Module:
    sizes = {**SMALL, "num_hidden_layers": layers, "hidden_size": width}
    with torch.device("meta"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1))


def on_host(**options: Any) -> L2LConfig:
    return L2LConfig(stash="host", boundary="host", ubatch_size=1, **options)


@nightly
def test_the_largest_fits_and_one_layer_more_does_not(nothing_else):
    name = list(SETTINGS)[-1]
    report = estimate(of_layers(6), on_host(**SETTINGS[name]), **OF_TWO).report
    assert report is not None
    room = report["host"]["total"]["peak"]
    found = estimate(of_layers(2), on_host(), **OF_TWO, host_memory=room).largest[name]
    assert found.layers == 6 and found.parameters == sum(p.numel() for p in of_layers(6).parameters())
    # Norms of gradients, 8 bytes per tensor, are taken to be those of the given model.
    assert estimate(of_layers(2), on_host(), **OF_TWO, host_memory=room - 2000).largest[name].layers == 5
    none = estimate(of_layers(2), on_host(), **OF_TWO, host_memory=1000).largest
    assert {(each.layers, each.parameters) for each in none.values()} == {(0, 0)}


def test_settings_and_adapters_need_less_and_less(nothing_else):
    found = estimate(of_layers(3, width=256), on_host(), **OF_TWO, host_memory=10**8).largest
    assert list(found) == [*SETTINGS, LORA]
    layers = [found[name].layers for name in SETTINGS if name != "fp32"]
    assert layers == sorted(layers) and layers[0] < found["fp32"].layers < layers[-1] < found[LORA].layers
    # Of a matrix with m rows and n columns, adapters have 16 (m + n) parameters.
    width, inner = 256, SMALL["intermediate_size"]
    key = width // SMALL["num_attention_heads"]
    adapters = RANK * (2 * (width + width) + 2 * (width + key) + 3 * (width + inner))
    per_layer = 2 * sum(p.numel() for p in of_layers(1, width).model.layers.parameters()) + 18 * adapters
    assert found[LORA].layers == pytest.approx(10**8 / (per_layer + 2 * 8 * width * 2), rel=0.01)


def test_the_largest_depends_on_the_optimizer(nothing_else):
    """As do the settings: others keep no moments in 8 bits."""
    model = of_layers(2)
    adagrad = torch.optim.Adagrad(model.parameters())
    found = estimate(model, on_host(), adagrad, **OF_TWO, host_memory=10**6).largest
    assert list(found) == [name for name in (*SETTINGS, LORA) if "8-bit" not in name]
    sgd, adam = (
        estimate(model, on_host(), optimizer, **OF_TWO, host_memory=10**6).largest["fp32"].layers
        for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), None)
    )
    assert sgd > 1.8 * adam


# ---- host memory of loading, attaching, training, saving and resuming, against that of a process that does all of it


W = sum(p.numel() for p in llama().parameters()) * 4


@nightly  # the bytes that the engine counts: `tests/sim/test_estimate.py`
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read in Linux' way")
@pytest.mark.parametrize(("kind", "options"), [("l2l", {"stash": "host"}), ("plain_checkpointing", {})], ids=str)
def test_a_process_takes_what_was_expected(kind, options, tmp_path):
    """In steps within 5 %, else within a tenth of the weights, and 2 MiB that threads keep of what they have freed.
    Memory of the simulated device is memory of the process, too."""
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**LARGE))
    expected = estimate(model, L2LConfig(**options), rows=ROWS, tokens=TOKENS)
    found = measured(kind, tmp_path, **options)
    phases, weights = expected.phases[kind], expected.masters
    simulated = found["train"]["simulated"]
    assert found["train"]["process"] == pytest.approx(phases["train"].host + simulated, rel=0.05)
    for phase in ("attach", "save", "resume"):
        assert abs(found[phase]["host"] - phases[phase].host) < 0.1 * weights + 2 * 2**20, phase


def phases(**options: Any) -> dict[str, tuple[int, int]]:
    """Bytes of host and device by phase."""
    model = llama()
    adamw = torch.optim.AdamW(model.parameters())
    found = estimate(model, L2LConfig(**options), adamw, rows=2, tokens=4, device="cuda").phases["l2l"]
    return {phase: (size.host, size.device) for phase, size in found.items()}


def test_what_is_resident_comes_back_to_be_saved_and_copies_are_there_from_the_start():
    count = len(list(llama().parameters()))
    found = phases(resident="all")
    assert found["attach"] == (0, W) and found["save"][0] == W + 8 * count, "and the norms of gradients"
    assert found["resume"] == (2 * W + 4 * count, 3 * W + 4 * count), "and the step counts"
    found = phases(cmp="bf16")
    assert found["attach"][0] == W // 2 and found["resume"][0] == pytest.approx(3.5 * W, rel=0.01)
    found = phases(stash="host", boundary="host", ubatch_size=1)
    assert 4 * W < found["save"][0] <= found["train"][0] and found["load"] == (0, 0)
