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

from hf_l2l.engine.splitting import Splitter
from hf_l2l.rows.weight_sums import WeightSums
from hf_l2l.runtime import stream
from hf_l2l.verify.__main__ import main
from hf_l2l.verify.cases import Case, transfers
from hf_l2l.verify.checks import CHECKS, Report, check_generation, check_gradients, check_split, verify
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import Family
from hf_l2l.verify.mixed import check_bf16
from hf_l2l.verify.results import OK, Caught, Result, note, red, worst
from hf_l2l.verify.table import line, summary
from tiers import more, nightly

FAMILIES = {family.name: family for group in GROUPS.values() for family in group}
QUICK = (
    "bert bert-embeddings electra albert distilbert deberta-v2 modernbert longformer gpt2 opt bloom llama mistral "
    "qwen3 gemma2 gemma4-shared-kv mixtral qwen3-moe mamba2 jamba t5 bart vit swin dinov2 whisper wav2vec2 clip llava"
).split()
"""Families of all kinds that take little time."""
ALWAYS = ("bert", "t5")


@functools.cache
def known(name: str) -> Report:
    """What is found of a family, once for all tests."""
    return verify(FAMILIES[name])


@pytest.mark.parametrize("name", [*ALWAYS, *more(*(name for name in QUICK if name not in ALWAYS))])
def test_families_are_green_or_refused_as_they_are_known_to_be(name):
    report = known(name)
    if report.status == "not run":
        # The newest transformers has all families; what they need beside it may not be installed.
        newest = Version(transformers.__version__) >= Version("5.23")
        assert "ImportError" in report.reason or not newest, report.reason
        pytest.skip(report.reason)
    assert report.status == ("refused" if FAMILIES[name].refused else "green"), line(report)


@nightly
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK][::20])
def test_other_families(name):
    """`python -m hf_l2l.verify` checks all of them."""
    test_families_are_green_or_refused_as_they_are_known_to_be(name)


def test_there_are_many_families_of_all_kinds():
    assert len(QUICK) >= 25 and len(FAMILIES) == sum(len(group) for group in GROUPS.values()) >= 200
    assert all(set(QUICK) & {f.name for f in group} for kind, group in GROUPS.items() if kind != "Time series")
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


# ---- the check sees what is wrong

Hook = Callable[[nn.Module, Any, Any], Any]


@dataclass(frozen=True)
class Broken(Family):
    """A family, of which some modules compute something else while the model is attached."""

    paths: tuple[str, ...] = ()
    hook: Hook = field(default=lambda module, args, output: output * 1.5)
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


def test_only_a_later_batch_of_another_size_is_wrong():
    def wrong(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.5 if len(output) == 5 else output

    result = check_gradients(Case.of(broken("classifier", hook=wrong)))
    assert result.text.startswith("5 rows, ubatch_size=2: the loss")


def test_an_engine_that_is_wrong_is_red_in_the_check_of_what_is_wrong(monkeypatch):
    """A batch that is not split, and nothing says why; sums outside the layers that are twice as large."""
    with monkeypatch.context() as patch:
        patch.setattr(Splitter, "split_for", lambda *args: None)
        report = verify(FAMILIES["bert"], ("gradients", "micro-batches", "boundary"))
    assert red_checks(report) == {"micro-batches"}
    assert "whole device batch runs through BertLayer at bert.encoder.layer" in report.results["micro-batches"].text
    results = WeightSums.results

    def doubled(sums: WeightSums) -> list[torch.Tensor | None]:
        return [None if each is None else 2 * each for each in results(sums)]

    monkeypatch.setattr(WeightSums, "results", doubled)
    assert red_checks(verify(FAMILIES["bert"], ("gradients", "boundary"))) == {"boundary"}


def test_generation_is_compared_by_its_logits():
    """Those that are half as large again choose the same tokens."""
    result = check_generation(Case.of(broken("lm_head", of="gpt2")))
    assert "the logits of token 0 is wrong by 5.0e-01" in result.text


def test_what_is_saved_while_attached_is_compared():
    class Saving(Broken):
        def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
            model = super().build(dtype)

            def wrong(module: nn.Module, state: dict[str, torch.Tensor], *rest: Any) -> None:
                if hasattr(module, "_hf_hook"):
                    state["classifier.bias"] = state["classifier.bias"] + 1e-3

            model.register_state_dict_post_hook(wrong)
            return model

    report = verify(Saving(**vars(broken())), ("gradients", "saving"))
    assert red_checks(report) == {"saving"} and "the loaded state" in report.results["saving"].text


def test_an_error_in_the_attached_model_is_red_and_said_in_one_line():
    def raising(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        raise RuntimeError("two\nlines")

    report = verify(broken("classifier", hook=raising), ("gradients", "bf16"))
    assert report.results["gradients"] == report.results["bf16"] == red("RuntimeError: two lines")


def test_in_bf16_only_what_the_plain_model_does_too_is_no_fault():
    """Layers of zeros; an error that the plain model has; and another one."""

    def raising(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyError("mine")

    layers = [f"bert.encoder.layer.{i}" for i in range(2)]
    result = check_bf16(Case.of(broken(*layers, hook=lambda module, args, output: output * 0)))
    assert result.status == "red" and "in bf16, the loss is wrong by" in result.text
    result = check_bf16(Case.of(FAMILIES["fnet"]))
    assert result == note("fails in bf16 without L2L: RuntimeError: Unsupported dtype BFloat16")
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


# ---- results


def test_the_worst_result_counts():
    refused = Result("refused", "refused: this")
    assert worst(OK, note("a"), refused, red("b")) == red("b")
    assert worst(OK, note("a"), refused) == refused and worst(OK, note("a")) == note("a") and worst(OK, OK) == OK
    good, bad = Report("a", {"gradients": OK, "LoRA": note("that")}), Report("b", {"a": refused, "LoRA": red("that")})
    absent = verify(replace(FAMILIES["bert"], model_class="ElfModel"))
    assert absent.status == "not run" and "has no ElfModel" in absent.reason and "not run" in line(absent)
    reports = [good, bad, Report("c", {"gradients": OK, "LoRA": refused}), absent]
    assert [each.status for each in reports] == ["green", "red", "refused", "not run"]
    assert summary(reports) == "4 families: 1 green, 1 refused, 1 red, 1 not run"


def test_a_refusal_is_an_error_of_the_package_with_its_text():
    """An error of a builtin is none, though it is a ValueError with a frame of the engine on top; an interrupt is not
    caught."""
    with (caught := Caught(refused="must not")):
        raise ValueError("a layer must not do this")
    assert caught.result == Result("refused", "refused: a layer must not do this")
    for code in ("list(zip([1], [], strict=True))", "a, b = [1]"):
        with (caught := Caught(refused="a layer that trains must not")):
            exec(compile(code, str(Path(stream.__file__)), "exec"))
        assert caught.result is not None and caught.result.status == "red"
    with pytest.raises(KeyboardInterrupt), Caught():
        raise KeyboardInterrupt


def test_transfers_are_copies_in_the_block():
    host = torch.ones(2)
    with transfers(real=True):
        assert stream.upload(host, stream.HOST).data_ptr() != host.data_ptr()
        with transfers(real=False):
            assert stream.upload(host, stream.HOST).data_ptr() == host.data_ptr()
    assert stream.upload(host, stream.HOST).data_ptr() == host.data_ptr()


# ---- the command


def test_names_are_listed_and_guessed(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in GROUPS) and all(name in shown for name in QUICK)
    for name, told in (("roberto", "did you mean roberta"), ("zzzzzz", "--list")):
        with pytest.raises(SystemExit) as stopped:
            main([name])
        assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_a_table_or_json_is_written(tmp_path, capsys, monkeypatch):
    """Of what was found before."""
    monkeypatch.setattr("hf_l2l.verify.__main__.verify", lambda family: known(family.name))
    file = tmp_path / "docs" / "table.md"
    assert main(["bert", "t5", "--write", str(file)]) == 0
    assert "bert: green (2 BertLayer)" in capsys.readouterr().out
    page = file.read_text()
    assert "| bert | 2 BertLayer | ok | ok | ok | ok | - |" in page and "## Sound" not in page
    assert transformers.__version__ in page and "python -m hf_l2l.verify bert t5 --write" in page
    assert all(f"- **{name}**" in page for name in CHECKS)
    assert main(["bert", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["transformers"] == transformers.__version__
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
