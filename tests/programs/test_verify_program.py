"""`hf-l2l verify`: a tiny copy of a model against plain torch, and the exit status that says how it went."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from cli_models import LLAMA, ran, refused, written
from hf_l2l import testing
from hf_l2l.device.slots import GradientSlots
from hf_l2l.hf import attach
from hf_l2l.verify.checks import CHECKS, verify
from hf_l2l.verify.family import VOCAB
from hf_l2l.verify.tiny import copies
from hf_l2l.verify.tiny.copies import TinyCopy, failure, tiny_copy
from tiers import more


def test_a_model_that_is_exact(tmp_path, capsys):
    source = written(tmp_path, LLAMA, attention_bias=True)
    found = ran(capsys, "verify", source, "--json")
    assert found.status == 0
    told = found.json
    assert (told["class_name"], told["family"], told["device"]) == ("LlamaForCausalLM", "llama", "cpu")
    assert (told["status"], told["left_out"], told["notes"]) == ("green", [], [])
    assert {*told["carried"]} == {"attention_bias", "tie_word_embeddings"}
    verdicts = {name: check["verdict"] for name, check in told["checks"].items()}
    assert list(verdicts) == list(CHECKS)
    assert verdicts["layers"] == "note" and told["checks"]["layers"]["text"] == "2 LlamaDecoderLayer"
    assert {verdicts[name] for name in ("gradients", "evaluation", "saving")} <= {"exact", "within tolerance"}
    assert "exact" in verdicts.values()


def test_a_model_that_differs_or_is_refused(tmp_path, capsys, monkeypatch):
    """Gradients of layers are twice what they should be, or wrong by rounding; or the engine refuses the model. Two
    checks show it."""
    source = written(tmp_path, LLAMA)
    monkeypatch.setattr("hf_l2l.cli.verify.COMPARED", ("gradients",))

    def of_two(family: Any, names: Any = ("layers", "gradients"), device: str = "cpu") -> Any:
        return verify(family, names, device)

    monkeypatch.setattr("hf_l2l.verify.checks.verify", of_two)
    add = GradientSlots.add
    for factor, verdict, status, last in (
        (2.0, "differs", 1, "red: layer to layer computes something else\n"),
        (1 + torch.finfo(torch.float32).eps, "within tolerance", 0, ""),
    ):

        def scaled(self: Any, number: int, leaf: Any, factor: float = factor) -> None:
            leaf.grad = None if leaf.grad is None else factor * leaf.grad
            add(self, number, leaf)

        with monkeypatch.context() as patch:
            patch.setattr(GradientSlots, "add", scaled)
            found = ran(capsys, "verify", source)
        assert found.status == status and found.err == "" and found.out.endswith(last)
        [line] = [line for line in found.out.splitlines() if line.startswith("gradients")]
        assert line.split(maxsplit=1)[1].startswith(verdict)
        assert "the gradient model.layers." in line and "of its largest entry" in line

    def refuse(model: Any) -> None:
        raise ValueError("a model under L2L must be another one; take that")

    monkeypatch.setattr(attach, "check_attachable", refuse)
    found = ran(capsys, "verify", source)
    assert found.status == 1
    assert "gradients      refused" in found.out and "a model under L2L must be another one; take that" in found.out
    assert found.out.endswith("refused: the engine does not run this model, and says why\n")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_bad_input_and_models_with_code_of_their_own(tmp_path, capsys, monkeypatch):
    def refuse() -> None:
        raise RuntimeError("the simulated accelerator must be the only one of the process (found cuda); hide it")

    source = written(tmp_path / "llama", LLAMA)
    monkeypatch.setattr(testing, "enable_simulated_accelerator", refuse)
    for arguments, said in (
        (("--device", "cuda:9"), "one this machine has (got cuda:9)"),
        (("--device", "sim"), "must be the only one"),
        (("--class", "BertModel"), "choose another class with --class"),
    ):
        assert said in refused(capsys, "verify", source, *arguments)

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    of_classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    own = written(tmp_path / "own", LLAMA, model_type="own", architectures=["OwnModel"], auto_map=of_classes)
    (tmp_path / "own" / "own.py").write_text(OWN_CODE)
    assert "pass --trust-remote-code" in refused(capsys, "verify", own)
    trusting = ("--trust-remote-code", "--class", "AutoModelForCausalLM")
    assert "classes of transformers (got OwnModel" in refused(capsys, "verify", own, *trusting)
    assert ran(capsys, "inspect", own, *trusting, "--json").json["stacks"][0]["num_layers"] == 3


# ---- the tiny copy of a config: small, with what switches behaviour, and trained as its head is

LARGE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}


def copied(config: Any, class_name: str) -> TinyCopy:
    """The tiny copy, which trains."""
    found = tiny_copy(config, class_name)
    assert failure(found.family) is None
    return found


# ---- of a family


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

    config = transformers.T5Config(d_model=64, num_heads=8, vocab_size=100, feed_forward_proj="gated-gelu")
    assert copied(config, "T5ForConditionalGeneration").of_family == "t5-gated", "the nearest of several"
    found = copied(transformers.LlamaConfig(**LARGE), "LlamaForCausalLM")
    assert (found.of_family, found.carried, found.left_out, found.notes) == ("llama", (), (), ())

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
