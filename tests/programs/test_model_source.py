"""A model's config and shapes by its folder, file or name; what cannot be read is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_l2l.model_source import load_config, load_shapes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 50,
}


def written(folder: Path, content: Any) -> str:
    """A folder with this config."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def refused(source: str, **options: Any) -> str:
    """The one sentence with which a source is refused."""
    with pytest.raises(ValueError) as error:
        load_shapes(source, **options)
    text = str(error.value)
    assert "\n" not in text and "; " in text
    return text


def test_the_class(tmp_path):
    for architectures, asked, kind in (
        (["Unknown"], None, "LlamaModel"),
        (["Unknown", "LlamaForCausalLM"], None, "LlamaForCausalLM"),
        (["LlamaForCausalLM"], "AutoModelForSequenceClassification", "LlamaForSequenceClassification"),
    ):
        source = written(tmp_path, {**LLAMA, "architectures": architectures})
        for place in (source, tmp_path, tmp_path / "config.json"):
            model = load_shapes(place, model_class=asked)
            assert type(model).__name__ == kind and {p.device.type for p in model.parameters()} == {"meta"}


def test_another_dtype(tmp_path):
    """Of the parameters alone: the default of the process stays, even where no model is made."""
    source = written(tmp_path, {**LLAMA, "dtype": "bfloat16"})
    assert next(load_shapes(source).parameters()).dtype == torch.float32
    assert next(load_shapes(source, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    text = refused(source, model_class="BertModel", dtype=torch.bfloat16)
    assert "BertModel must be able to make a model of this config (got AttributeError" in text
    assert refused(source, model_class="LlamaConfig").startswith("--class must be a class of models")
    assert torch.get_default_dtype() == torch.float32


def test_configs_that_are_refused(tmp_path):
    for content, said in (
        ("{", "must be a file of JSON"),
        ({"hidden_size": 16}, "must have the field model_type"),
        ({"model_type": "llama"}, "of model_type 'llama' without num_hidden_layers and hidden_size); add them"),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "without num_hidden_layers); add it"),
        ({**LLAMA, "model_type": "unknown"}, "has model type `unknown`"),
        ({**LLAMA, "hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({**LLAMA, "hidden_size": -4, "head_dim": 4}, "correct the fields that it names"),
        ({**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "pass --trust-remote-code"),
    ):
        assert said in refused(written(tmp_path, content))


def test_other_names_of_sizes_and_what_every_config_saves_are_enough(tmp_path):
    for content in (
        {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        {"model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        {"model_type": "clip", "text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ):
        assert next(load_shapes(written(tmp_path, content)).parameters()).is_meta
    transformers.CLIPConfig().save_pretrained(tmp_path)
    assert type(load_config(tmp_path)) is transformers.CLIPConfig


def test_what_is_not_there_is_refused(tmp_path):
    """A broken file in GGUF, or one that cannot be read without the package gguf, too."""
    for source in ("./none", "a/b/c"):
        assert f"(got {source!r}, and there is no such file or folder)" in refused(source)
    text = refused("nobody/nothing")
    assert "HF_HUB_OFFLINE is set" in text and "hf download nobody/nothing config.json" in text
    assert "which has none" in refused(str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert f"must be able to make a config of {str(file)!r} (got " in refused(str(file))


def test_an_adapter_is_no_model(tmp_path):
    for content, remedy in (
        ('{"base_model_name_or_path": "some/base"}', "give that: some/base"),
        ("no JSON", "give it; adapter_config.json does not name it"),
    ):
        (tmp_path / "adapter_config.json").write_text(content)
        text = refused(str(tmp_path))
        assert text.startswith("an adapter is a part of its base model (got ") and text.endswith(f"); {remedy}")
