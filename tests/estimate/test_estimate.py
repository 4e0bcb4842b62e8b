"""`hf_l2l.estimate` of names, configs and the Trainer's arguments, and the largest model that a host holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, estimate
from hf_l2l.sizing.capacity import LORA, RANK, SETTINGS
from models import SMALL, llama, vit
from tiers import nightly

BATCH: dict[str, Any] = {"rows": 4, "tokens": 8}
HOST: dict[str, Any] = {"stash": "host", "ubatch_size": 1}


def arguments(folder: Path, **options: Any) -> L2LTrainingArguments:
    return L2LTrainingArguments(output_dir=str(folder), report_to="none", **options)


def bytes_of(found: Any) -> dict[str, int]:
    """The peaks of both tiers, but for what this process holds otherwise."""
    assert found.report is not None
    names = {(tier, name): size["peak"] for tier in ("device", "host") for name, size in found.report[tier].items()}
    del names["host", "Python, libraries and other"], names["host", "total"]
    return names


def refused(*arguments: Any, **options: Any) -> str:
    """The one sentence with which an estimate is refused."""
    with pytest.raises(ValueError) as error:
        estimate(*arguments, **options)
    text = str(error.value)
    assert "\n" not in text and "; " in text
    return text


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
    assert "set model_class to a class with a head" in refused(config, **BATCH)


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
    kinds = {"sgd": (0, 0), "adagrad": (4, counts)}
    for optim, (per_parameter, besides) in kinds.items():
        found = estimate(model, arguments(tmp_path, optim=optim)).moments
        assert found == per_parameter * parameters + besides, optim
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
    assert both.report is not None and text.report is not None
    for name in ("stash", "slots"):
        assert both.report["device"][name] == text.report["device"][name]
    assert both.report["device"]["inputs"]["peak"] - text.report["device"]["inputs"]["peak"] == patches.nbytes

    [note] = estimate(Sees(), **BATCH).notes
    assert note == "a Sees takes pixel_values, too: this is the memory for batches of text alone"


@nightly
def test_models_with_inputs_of_other_shapes():
    found = estimate(hf.BertConfig(**SMALL), L2LConfig(ubatch_size=1), rows=2, model_class="BertForMultipleChoice")
    assert found.device_peak > found.shell + found.slots


def test_bad_input_is_one_sentence():
    for source, options, said in (
        ("nobody/no-such-model", {}, "HF_HUB_OFFLINE"),
        (hf.BertConfig(**SMALL), {"model_class": "Nothing"}, "model_class"),
        (llama(), {"rows": 1, "tokens": 0}, "at least 1"),
        (nn.Linear(3, 2), {"inputs": {"input": torch.empty(2, 3)}}, "none was found in a Linear"),
        (vit(), BATCH, "text"),
    ):
        assert said in refused(source, **options)


def test_options_are_named_as_the_trainer_calls_them(tmp_path):
    assert "l2l_resident_layers" in refused(llama(), arguments(tmp_path, l2l_resident_layers=9), **BATCH)
    plain = hf.TrainingArguments(output_dir=str(tmp_path), report_to="none", optim="adamw_torch", fp16=True)
    assert "fp16 cannot be used" in refused(llama(), plain, **BATCH)


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
    none = estimate(of_layers(3), on_host(), **OF_TWO, host_memory=1000).largest
    assert {(each.layers, each.parameters) for each in none.values()} == {(0, 0)}


def test_the_largest_depends_on_the_optimizer(nothing_else):
    model = of_layers(2)

    def layers(optimizer: Any = None) -> int:
        found = estimate(model, on_host(), optimizer, **OF_TWO, host_memory=10**6)
        return found.largest["fp32"].layers

    assert layers(torch.optim.SGD(model.parameters(), lr=0.1)) > 1.8 * layers()
