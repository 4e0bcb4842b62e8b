"""The compatibility check: families run layer to layer as plain torch does, and the check sees what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from cli_models import LLAMA, ran, refused, written
from hf_l2l import testing
from hf_l2l.device.slots import GradientSlots
from hf_l2l.engine.splitting import Splitter
from hf_l2l.hf import attach
from hf_l2l.rows.weight_sums import WeightSums
from hf_l2l.runtime import stream
from hf_l2l.verify.__main__ import main
from hf_l2l.verify.cases import Case
from hf_l2l.verify.checks import CHECKS, Report, check_generation, check_split, verify
from hf_l2l.verify.comparisons import SMALL, compare_gradients, compare_tensors
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import VOCAB, Family
from hf_l2l.verify.mixed import check_bf16
from hf_l2l.verify.results import OK, Caught, Result, note, red
from hf_l2l.verify.table import line
from hf_l2l.verify.tiny import copies
from hf_l2l.verify.tiny.copies import TinyCopy, failure, tiny_copy
from tiers import more

FAMILIES = {family.name: family for group in GROUPS.values() for family in group}
QUICK = (
    "bert bert-embeddings electra albert distilbert deberta-v2 modernbert longformer gpt2 opt bloom llama mistral "
    "qwen3 gemma2 gemma4-shared-kv mixtral qwen3-moe mamba2 jamba t5 bart vit swin dinov2 whisper wav2vec2 clip llava"
).split()
"""Families of all kinds that take little time."""


@functools.cache
def known(name: str) -> Report:
    """What is found of a family, once for all tests."""
    return verify(FAMILIES[name])


@pytest.mark.parametrize("name", ["bert", *more(*QUICK[1:], *[name for name in FAMILIES if name not in QUICK][::20])])
def test_families_are_green_or_refused_as_they_are_known_to_be(name):
    """`python -m hf_l2l.verify` checks all of them."""
    report = known(name)
    if report.status == "not run":
        # The newest transformers has all families; what they need beside it may not be installed.
        newest = Version(transformers.__version__) >= Version("5.23")
        assert "ImportError" in report.reason or not newest, report.reason
        pytest.skip(report.reason)
    assert report.status == ("refused" if FAMILIES[name].refused else "green"), line(report)


def test_there_are_many_families_and_the_page_has_them():
    assert len(FAMILIES) == sum(len(group) for group in GROUPS.values()) >= 200
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| (\S+) \| (?!---|layers)", page, re.M) == list(FAMILIES)


def test_what_shares_keys_and_values_is_refused_with_the_reason():
    """A refusal that is not expected is red."""
    names = ("layers", "gradients", "evaluation", "bf16")
    report = verify(FAMILIES["gemma4-shared-kv"], names)
    if report.status == "not run":
        pytest.skip(report.reason)
    assert report.results["gradients"].status == "refused" and "shared_kv_states" in line(report)
    assert report.results["evaluation"] == OK
    report = verify(replace(FAMILIES["gemma4-shared-kv"], refused=""), ("layers", "gradients"))
    assert report.status == "red" and "ValueError: a layer that trains must not write" in line(report)


def test_layers_with_a_backward_of_their_own_train_on_the_cpu_only():
    reformer = replace(FAMILIES["reformer"], own_backward=False)
    assert "which cannot run on" in verify(reformer, ["gradients"]).results["gradients"].text
    assert "makes a graph, though it has gradients" in check_split(Case.of(reformer)).text


@dataclass(frozen=True)
class Broken(Family):
    """A family, of which some modules compute something else while the model is attached."""

    paths: tuple[str, ...] = ()
    hook: Callable[[nn.Module, Any, Any], Any] = field(default=lambda module, args, output: output * 1.5)
    """A forward hook of each of these modules."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = super().build(dtype)

        def wrong(module: nn.Module, args: Any, output: Any) -> Any:
            return self.hook(module, args, output) if hasattr(module, "_hf_hook") else output

        for path in self.paths:
            model.get_submodule(path).register_forward_hook(wrong)
        return model


def broken(*paths: str, of: str = "bert", **given: Any) -> Broken:
    fields = {each.name: getattr(FAMILIES[of], each.name) for each in dataclasses.fields(Family)}
    return Broken(**{**fields, "name": "broken", "paths": paths, **given})


def red_checks(report: Report) -> set[str]:
    return {name for name, result in report.results.items() if result.status == "red"}


def test_a_wrong_model_is_red_in_every_check_of_its_outputs():
    """A hook on the classifier sees that of the engine: outputs are half as large again."""
    report = verify(broken("classifier"))
    with_peft = {"LoRA"} if find_spec("peft") else set()
    assert report.status == "red"
    assert red_checks(report) == {"gradients", "boundary", "evaluation", "saving", "bf16"} | with_peft
    assert "should be" in report.results["gradients"].text


def test_an_engine_that_is_wrong_is_red_in_the_check_of_what_is_wrong(monkeypatch):
    """Logits that are half as large again choose the same tokens; nothing says why a batch is not split."""

    def raising(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        raise RuntimeError("two\nlines")

    found = verify(broken("classifier", hook=raising), ["gradients"]).results["gradients"]
    assert found == red("RuntimeError: two lines")
    assert "logits of token 0 is wrong by 5.0e-01" in check_generation(Case.of(broken("lm_head", of="gpt2"))).text
    with monkeypatch.context() as patch:
        patch.setattr(Splitter, "split_for", lambda *args: None)
        report = verify(FAMILIES["bert"], ("gradients", "micro-batches", "boundary"))
    assert red_checks(report) == {"micro-batches"}
    assert "whole device batch runs through BertLayer at bert.encoder.layer" in report.results["micro-batches"].text
    results = WeightSums.results
    monkeypatch.setattr(
        WeightSums, "results", lambda sums: [None if each is None else 2 * each for each in results(sums)]
    )
    assert red_checks(verify(FAMILIES["bert"], ("gradients", "boundary"))) == {"boundary"}


def test_in_bf16_only_what_the_plain_model_does_too_is_no_fault():
    """Layers of zeros; an error that the plain model has; and another one."""

    def raising(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyError("mine")

    layers = [f"bert.encoder.layer.{i}" for i in range(2)]
    result = check_bf16(Case.of(broken(*layers, hook=lambda module, args, output: output * 0)))
    assert result.status == "red" and "in bf16, the loss is wrong by" in result.text
    said = "fails in bf16 without L2L: RuntimeError: Unsupported"
    assert check_bf16(Case.of(FAMILIES["fnet"])).text.startswith(said)
    assert check_bf16(Case.of(broken("fnet.embeddings", of="fnet", hook=raising))) == red("KeyError: 'mine'")


def test_what_depends_on_micro_batches_is_noted_and_no_warning_and_no_setting_remains():
    """Layers with batch norm are not split; I-BERT keeps the ranges of its activations."""
    before = transformers.utils.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = verify(FAMILIES["resnet"], ["micro-batches"]).results["micro-batches"]
    assert result.status == "note" and "BatchNorm2d" in result.text
    assert transformers.utils.logging.get_verbosity() == before
    result = check_split(Case.of(FAMILIES["ibert"]))
    assert result.status == "note" and re.search(r"\d+ buffers depend on the micro-batches, .*x_min", result.text)


def test_a_refusal_is_an_error_of_the_package_with_its_text():
    """A ValueError of a builtin in a frame of the engine is none; an interrupt is not caught."""
    with (caught := Caught(refused="must not")):
        raise ValueError("a layer must not do this")
    assert caught.result == Result("refused", "refused: a layer must not do this")
    with (caught := Caught(refused="a layer that trains must not")):
        exec(compile("a, b = [1]", str(Path(stream.__file__)), "exec"))
    assert caught.result is not None and caught.result.status == "red"
    with pytest.raises(KeyboardInterrupt), Caught():
        raise KeyboardInterrupt


def test_names_are_listed_and_guessed_and_a_table_or_json_is_written(tmp_path, capsys, monkeypatch):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in GROUPS) and all(name in shown for name in QUICK)
    with pytest.raises(SystemExit, match="2"):
        main(["roberto"])
    assert "did you mean roberta" in capsys.readouterr().err
    monkeypatch.setattr("hf_l2l.verify.__main__.verify", lambda family: known(family.name))
    file = tmp_path / "docs" / "table.md"
    assert main(["bert", "--write", str(file)]) == 0
    page = file.read_text()
    assert "| bert | 2 BertLayer | ok | ok | ok | ok | - |" in page and "## Sound" not in page
    assert transformers.__version__ in page and "python -m hf_l2l.verify bert --write" in page
    capsys.readouterr()
    assert main(["bert", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["families"]["bert"]["checks"]["gradients"] == {"status": "ok", "text": "ok"}


def test_something_red_gives_status_1_and_something_refused_0(capsys, tmp_path, monkeypatch):
    """BERT without layers trains, and has no stack."""
    sizes = {**FAMILIES["bert"].sizes, "num_hidden_layers": 0}
    bare = replace(FAMILIES["bert"], name="bare", sizes=sizes, refused="must have a stack of layers")
    assert main([], {"Text encoders": [bare]}) == 0
    shown = capsys.readouterr().out
    assert "refused: a model must have a stack of layers" in shown and "1 refused, 0 red" in shown
    wrong = {name: note("-") for name in CHECKS} | {"gradients": red("wrong")}
    monkeypatch.setattr("hf_l2l.verify.__main__.verify", lambda family: Report(family.name, wrong))
    file = tmp_path / "table.md"
    assert main(["broken", "--write", str(file)], {"Text encoders": [broken("classifier")]}) == 1
    assert "1 red" in capsys.readouterr().out and "**" in file.read_text()


INF, NAN = float("inf"), float("nan")


def test_gradients_are_compared_and_those_of_the_plain_model_must_be_finite_and_not_all_zero():
    expected = {"a": torch.tensor([1.0]), "b": None}
    assert compare_gradients(expected, expected, 1e-5) == OK
    for wrong in (
        {"a": torch.tensor([1.0 + 1e-3]), "b": None},
        {"a": torch.tensor([NAN]), "b": None},
        {"a": None, "b": None},
        {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])},
        {"a": torch.ones(2), "b": None},
    ):
        assert compare_gradients(wrong, expected, 1e-5).status == "red", wrong
    for value in (0.0, NAN, INF):
        gradients = {"a": torch.tensor([value])}
        assert compare_gradients(gradients, gradients, 1e-5).status == "red"


def test_a_tensor_is_compared_with_its_own_largest_entry():
    """Or with a small part of the largest of all, if it may hold nothing but rounding."""
    tiny = SMALL / 10
    for size, error, tolerance, status in (
        *((0.01, 1e-6, 1e-5, "red"), (0.01, 1e-8, 1e-5, "ok")),
        *((tiny, tiny, 1e-3, "red"), (tiny, 1e-3 * tiny, 1e-3, "ok")),
    ):
        expected = {"large": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), size, dtype=torch.float64)}
        found = {**expected, "b": expected["b"] + error}
        assert compare_tensors(found, expected, tolerance, "gradient").status == status, (size, error)

    # Entries that are not finite hide nothing.
    expected = {"a": torch.tensor([1.0, -INF])}
    assert compare_tensors(expected, expected, 1e-5, "output") == OK
    for wrong in ([2.0, -INF], [1.0, 0.0], [1.0, INF], [1.0, NAN], [1.0]):
        assert compare_tensors({"a": torch.tensor(wrong)}, expected, 1e-5, "output").status == "red", wrong
    same = {"a": torch.tensor([1.0, NAN])}
    assert compare_tensors(same, same, 1e-5, "output").status == "red"


# ---- `hf-l2l verify`: a tiny copy of a model against plain torch, and the exit status that says how it went


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
    """Gradients of layers are twice what they should be, or wrong by rounding; or the engine refuses the model."""
    source = written(tmp_path, LLAMA)
    monkeypatch.setattr("hf_l2l.cli.verify.COMPARED", ("gradients",))

    monkeypatch.setattr(
        "hf_l2l.verify.checks.verify",
        lambda family, names=("layers", "gradients"), device="cpu": verify(family, names, device),
    )
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


LARGE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}


def copied(config: Any, class_name: str) -> TinyCopy:
    """The tiny copy, which trains."""
    found = tiny_copy(config, class_name)
    assert failure(found.family) is None
    return found


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

    # What does not fit is left out: here a language without an adapter.
    config = transformers.XmodConfig(default_language="de_DE", languages=["de_DE"], hidden_act="relu")
    found = copied(config, "XmodForSequenceClassification")
    assert (found.carried, found.left_out) == (("hidden_act",), ("default_language",))


def test_heads(monkeypatch):
    """One without a batch is checked as another one, if there is one. What cannot be made small is refused."""
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
    monkeypatch.setattr(copies, "MOST_PARAMETERS", 10)
    with pytest.raises(ValueError, match="with the sizes of the family 'llama' does not: it still has"):
        tiny_copy(transformers.LlamaConfig(), "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        (transformers.BertConfig, "BertForSequenceClassification"),
        (transformers.MixtralConfig, "MixtralForCausalLM"),
        (transformers.Gemma3TextConfig, "Gemma3ForCausalLM"),
        (transformers.BartConfig, "BartModel"),
    ],
)
def test_a_type_without_a_family(config, class_name, monkeypatch):
    """As if there were none."""
    monkeypatch.setattr(copies, "GROUPS", {})
    found = tiny_copy(config(), class_name)
    assert found.of_family is None and failure(found.family) is None
    model = found.family.build()
    assert type(model).__name__ == class_name and sum(p.numel() for p in model.parameters()) < 100_000
