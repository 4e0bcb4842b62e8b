"""`hf_l2l.estimate` of names, configs and the Trainer's arguments, and what it refuses in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from cli_models import LLAMA, written
from hf_l2l import L2LConfig, L2LTrainingArguments, estimate
from hf_l2l.plan.estimate import Estimate
from models import SMALL, llama

BATCH: dict[str, Any] = {"rows": 4, "tokens": 8}
HOST: dict[str, Any] = {"stash": "host", "ubatch_size": 1}


def arguments(folder: Path, **options: Any) -> L2LTrainingArguments:
    return L2LTrainingArguments(output_dir=str(folder), report_to="none", **options)


def bytes_of(found: Estimate) -> dict[str, int]:
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
    folder = written(tmp_path, LLAMA)
    expected = bytes_of(estimate(hf.LlamaForCausalLM(hf.AutoConfig.from_pretrained(folder)), **BATCH))
    for source in (folder, tmp_path, tmp_path / "config.json", hf.AutoConfig.from_pretrained(folder)):
        assert bytes_of(estimate(source, **BATCH)) == expected
    assert estimate(folder).masters == expected["host", "masters"]


def test_a_class_for_a_config():
    config = hf.BertConfig(**SMALL)
    found = estimate(config, **BATCH, model_class="BertForSequenceClassification")
    assert found.masters == 4 * sum(p.numel() for p in hf.BertForSequenceClassification(config).parameters())
    assert "takes no labels); set model_class to a class with a head, such as " in refused(config, **BATCH)


def test_options_rows_and_the_optimizer_come_from_the_arguments(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=4, cmp="bf16", l2l_boundary="device", **HOST)
    config = L2LConfig(cmp="bf16", boundary="device", **HOST)
    model = llama()
    by_args = estimate(model, args, tokens=8)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    assert bytes_of(by_args) == bytes_of(estimate(model, config, adamw, rows=4, tokens=8))
    assert estimate(model, args, rows=2, tokens=8).rows == 2 and by_args.rows == 4
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert estimate(model, args, sgd, tokens=8).moments == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [({"optim": "sgd"}, 0), ({"optim": "adamw_torch"}, 8), ({"l2l_optimizer": "lamb"}, 8), ({"optim": "adagrad"}, 4)],
    ids=str,
)
def test_the_state_is_that_of_the_optimizer_of_the_arguments(options, per_parameter, tmp_path):
    model = llama()
    found = estimate(model, arguments(tmp_path, **options), **BATCH)
    parameters, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert found.moments in (per_parameter * parameters, per_parameter * parameters + 4 * tensors)


def test_plain_arguments_have_the_defaults(tmp_path):
    args = hf.TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, report_to="none")
    found = estimate(llama(), args, tokens=8)
    assert found.rows == 3
    assert bytes_of(found) == bytes_of(estimate(llama(), arguments(tmp_path, per_device_train_batch_size=3), tokens=8))


def test_accumulated_batches_that_run_as_one_are_on_the_device_together(tmp_path):
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    merged = estimate(llama(), arguments(tmp_path, **options), tokens=8)
    apart = estimate(llama(), arguments(tmp_path, l2l_merge_accumulation="off", **options), tokens=8)
    assert (merged.rows, apart.rows) == (6, 2)
    expected = estimate(llama(), L2LConfig(ubatch_size=2), rows=6, tokens=8)
    # The batches that are put together are there as well.
    assert merged.device_peak == expected.device_peak + 2 * 8 * 6 * 8 > apart.device_peak
    # The Trainer would compute the loss itself, so its batches run one by one.
    assert estimate(llama(), arguments(tmp_path, label_smoothing_factor=0.1, **options), tokens=8).rows == 2


def test_autocast_of_the_arguments_is_followed(tmp_path, caplog, monkeypatch):
    plain = estimate(llama(), arguments(tmp_path), **BATCH)
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        found = estimate(llama(), arguments(tmp_path, bf16=True, use_cpu=True), **BATCH)
    assert found.device_peak < plain.device_peak and found.plain < plain.plain
    assert found.notes == plain.notes and "autocast" not in caplog.text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it
    assert bytes_of(estimate(llama(), arguments(tmp_path), **BATCH)) == bytes_of(found)


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


def test_batches_of_text_alone_are_said_to_be_so():
    found = estimate(Sees(), **BATCH)
    assert found.notes == ("a Sees takes pixel_values, too: this is the memory for batches of text alone",)
    assert estimate(llama(), **BATCH).notes == ()


WAV2VEC2: dict[str, Any] = {"conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}


@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (hf.BertConfig(**SMALL), "BertForMultipleChoice"),
        pytest.param(hf.Wav2Vec2Config(**SMALL, **WAV2VEC2), "Wav2Vec2ForCTC", marks=pytest.mark.slow),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_models_with_inputs_of_other_shapes(config, model_class):
    found = estimate(config, L2LConfig(ubatch_size=1), rows=2, model_class=model_class)
    assert found.device_peak > found.shell + found.slots


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (3, {}, "model must be a model, a config of transformers, a folder"),
        ("./nowhere", {}, "model must be a folder with a config.json, the path of one, or a name on the Hub"),
        ("nobody/no-such-model", {}, "HF_HUB_OFFLINE is set, and the cache has no such model"),
        (llama, {"model_class": "LlamaForCausalLM"}, "model_class is for a model that is made of its config"),
        (hf.BertConfig(**SMALL), {"model_class": "Nothing"}, "model_class must be a class of models in transformers"),
        (llama, {"config": {"stash": "host"}}, "must be an L2LConfig or training arguments (got {'stash': 'host'})"),
        (llama, {"tokens": 8}, "tokens are those of a row of a batch (got tokens=8 without rows)"),
        (llama, {"rows": 0}, "rows of an estimate must be at least 1 (got 0)"),
        (llama, {"rows": 1, "inputs": {}}, "inputs have rows and tokens of their own"),
        (llama, {"device": "nothing"}, "nothing"),
        (
            hf.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=16, patch_size=8),
            {"model_class": "ViTForImageClassification", **BATCH},
            "tokens are those of a text (got tokens=8 and a ViTForImageClassification",
        ),
    ],
)
def test_bad_input_is_one_sentence(source, options, said):
    made = source() if source is llama else source
    assert said in refused(made, **options)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (L2LTrainingArguments, {"stash": "device", "l2l_device_stash": 9}, "l2l_device_stash"),
        (hf.TrainingArguments, {"optim": "adamw_torch", "fp16": True}, "fp16 cannot be used with L2L"),
    ],
)
def test_options_are_named_as_the_trainer_calls_them(kind, options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        estimate(llama(), kind(output_dir=str(tmp_path), report_to="none", **options), **BATCH)


def test_a_number_of_layers_is_named_as_the_trainer_calls_it(tmp_path):
    args = arguments(tmp_path, l2l_resident_layers=9)
    assert "l2l_resident_layers" in refused(llama(), args, **BATCH)
