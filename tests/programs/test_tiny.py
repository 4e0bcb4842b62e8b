"""The tiny copy of a config: small, with what switches behaviour, and trained as its head is."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hf_l2l.verify.family import VOCAB
from hf_l2l.verify.tiny import copies
from hf_l2l.verify.tiny.copies import TinyCopy, failure, tiny_copy
from hf_l2l.verify.tiny.fields import fields_of, shrunk, switches
from tiers import more

LARGE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}


def copied(config: Any, class_name: str) -> TinyCopy:
    """The tiny copy, which trains."""
    found = tiny_copy(config, class_name)
    assert failure(found.family) is None
    return found


# ---- of a family


def test_a_config_that_switches_nothing_is_the_family():
    found = copied(transformers.LlamaConfig(**LARGE), "LlamaForCausalLM")
    assert (found.of_family, found.carried, found.left_out, found.notes) == ("llama", (), (), ())
    assert found.family.fp32 == "its norm computes in fp32"
    config = transformers.T5Config(d_model=64, num_heads=8, vocab_size=100, feed_forward_proj="gated-gelu")
    assert copied(config, "T5ForConditionalGeneration").of_family == "t5-gated", "the nearest of several"


def test_what_switches_behaviour_is_taken():
    """Also from a config inside the config, and of kinds of layers one of each; windows as they are."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given = {"attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True, "rms_norm_eps": 0.1}
    config = transformers.LlamaConfig(**LARGE, **given, rope_parameters=rope)
    found = copied(config, "LlamaForCausalLM")
    assert {*found.carried} == {*given, "rope_parameters"}
    tiny = found.family.build().config
    assert all(getattr(tiny, name) == getattr(config, name) for name in found.carried)
    assert (tiny.hidden_size, tiny.vocab_size, tiny.num_hidden_layers) == (16, VOCAB, 2)

    kinds = ["full_attention", *["sliding_attention"] * 5] * 2
    config = transformers.Qwen2Config(**LARGE, num_hidden_layers=12, layer_types=kinds, use_sliding_window=True)
    found = copied(config, "Qwen2ForCausalLM")
    assert found.family.build().config.layer_types == ["full_attention", "sliding_attention"]
    found = copied(transformers.MistralConfig(**LARGE, sliding_window=4096), "MistralForCausalLM")
    assert found.family.build().config.sliding_window == 4

    config = transformers.InternVLConfig(text_config=transformers.Qwen2Config(**LARGE, rms_norm_eps=0.1))
    found = copied(config, "InternVLForConditionalGeneration")
    assert "text_config.rms_norm_eps" in found.carried
    tiny = found.family.build().config.text_config
    assert (tiny.rms_norm_eps, tiny.hidden_size) == (0.1, 16)


def test_what_does_not_fit_is_left_out():
    """Here a language without an adapter."""
    config = transformers.XmodConfig(default_language="de_DE", languages=["de_DE"], hidden_act="relu")
    found = copied(config, "XmodForSequenceClassification")
    assert (found.carried, found.left_out) == (("hidden_act",), ("default_language",))


# ---- heads


def test_heads():
    """One without a batch is checked as another one, if there is one."""
    for config, class_name, family in (
        (transformers.BertConfig, "BertModel", "bert-embeddings"),
        (transformers.BertConfig, "BertForTokenClassification", "bert"),
    ):
        found = copied(config(), class_name)
        assert (found.of_family, found.family.model_class, found.notes) == (family, class_name, ())
        assert type(found.family.build()).__name__ == class_name
    found = copied(transformers.BertConfig(), "BertForMultipleChoice")
    assert found.family.model_class == "BertForSequenceClassification"
    assert len(found.notes) == 1 and "no batch is known for a BertForMultipleChoice" in found.notes[0]
    with pytest.raises(ValueError, match="a batch must be known .*; choose another one with --"):
        tiny_copy(transformers.EncodecConfig(), "EncodecModel")


# ---- of the config itself


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        (transformers.BertConfig, "BertForSequenceClassification"),
        (transformers.MixtralConfig, "MixtralForCausalLM"),
        *more((transformers.Gemma3TextConfig, "Gemma3ForCausalLM"), (transformers.BartConfig, "BartModel")),
    ],
)
def test_a_type_without_a_family(config, class_name, monkeypatch):
    """As if there were none."""
    monkeypatch.setattr(copies, "GROUPS", {})
    found = tiny_copy(config(), class_name)
    assert found.of_family is None and failure(found.family) is None
    model = found.family.build()
    assert type(model).__name__ == class_name and sum(p.numel() for p in model.parameters()) < 100_000


def test_what_cannot_be_made_small_is_refused(monkeypatch):
    monkeypatch.setattr(copies, "MOST_PARAMETERS", 10)
    with pytest.raises(ValueError, match="with the sizes of the family 'llama' does not: it still has"):
        tiny_copy(transformers.LlamaConfig(), "LlamaForCausalLM")


# ---- fields


def test_sizes():
    """Of lists with an entry for each layer, those of layers of every kind are kept."""
    fields = {
        **{"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 7, "word_dim": 64, "own_rank": 300},
        **{"image_token_id": 999, "mask_token_id": 7, "sliding_window": 512, "is_decoder": True, "eps": 0.5},
        "layer_types": ["a", "a", "b", "a", "c", "d", "e"],
        "intermediate_size": [256] * 7,
        "sub": {"model_type": "x", "hidden_size": 64, "num_hidden_layers": 1},
    }
    expected = {
        **{"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4, "word_dim": 16, "own_rank": 300},
        **{"image_token_id": 3, "mask_token_id": 7, "sliding_window": 4, "is_decoder": True, "eps": 0.5},
        "layer_types": ["a", "b", "c", "d"],
        "intermediate_size": [32] * 4,
        "sub": {"model_type": "x", "hidden_size": 16, "num_hidden_layers": 1},
    }
    assert shrunk(fields) == expected
    assert shrunk(fields, bold=True) == {**expected, "own_rank": 16}
    assert shrunk({"num_attention_heads": 8, "num_key_value_heads": 2})["num_key_value_heads"] == 1


def test_what_is_a_switch():
    """Of numbers, whether there are any is one."""
    tiny = fields_of(transformers.LlamaConfig())
    given = {**tiny, "hidden_size": 1, "initializer_range": 1.0, "attention_dropout": 1.0, "pad_token_id": None}
    assert switches({**given, "unknown": True}, tiny) == {}
    assert switches({**given, "mlp_bias": True}, tiny) == {"mlp_bias": {"mlp_bias": True}}
    fields = {"shared_layers": 0, "other_layers": 20, "same": 7, "hidden_size": 64}
    tiny = {"shared_layers": 2, "other_layers": 0, "same": 2, "hidden_size": 0}
    assert switches(fields, tiny) == {"shared_layers": {"shared_layers": 0}, "other_layers": {"other_layers": 1}}
