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
from hf_l2l.verify.cases import Case
from hf_l2l.verify.checks import CHECKS, Report, check_generation, check_split, verify
from hf_l2l.verify.comparisons import (
    SMALL,
    compare_gradients,
    compare_tensors,
)
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import Family
from hf_l2l.verify.mixed import check_bf16
from hf_l2l.verify.results import OK, Caught, Result, note, red
from hf_l2l.verify.table import line
from tiers import more

FAMILIES = {family.name: family for group in GROUPS.values() for family in group}
QUICK = (
    "bert bert-embeddings electra albert distilbert deberta-v2 modernbert longformer gpt2 opt bloom llama mistral "
    "qwen3 gemma2 gemma4-shared-kv mixtral qwen3-moe mamba2 jamba t5 bart vit swin dinov2 whisper wav2vec2 clip llava"
).split()
"""Families of all kinds that take little time."""
ALWAYS = ("bert",)


@functools.cache
def known(name: str) -> Report:
    """What is found of a family, once for all tests."""
    return verify(FAMILIES[name])


OTHERS = [name for name in FAMILIES if name not in QUICK][::20]


@pytest.mark.parametrize("name", [*ALWAYS, *more(*(name for name in QUICK if name not in ALWAYS), *OTHERS)])
def test_families_are_green_or_refused_as_they_are_known_to_be(name):
    """`python -m hf_l2l.verify` checks all of them."""
    report = known(name)
    if report.status == "not run":
        # The newest transformers has all families; what they need beside it may not be installed.
        newest = Version(transformers.__version__) >= Version("5.23")
        assert "ImportError" in report.reason or not newest, report.reason
        pytest.skip(report.reason)
    assert report.status == ("refused" if FAMILIES[name].refused else "green"), line(report)


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


def test_an_engine_that_is_wrong_is_red_in_the_check_of_what_is_wrong(monkeypatch):
    """An error, which is said in one line; logits that are half as large again, and choose the same tokens; a batch
    that is not split, and nothing says why; sums outside the layers that are twice as large."""

    def raising(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        raise RuntimeError("two\nlines")

    assert verify(broken("classifier", hook=raising), ["gradients"]).results["gradients"] == red(
        "RuntimeError: two lines"
    )
    assert "logits of token 0 is wrong by 5.0e-01" in check_generation(Case.of(broken("lm_head", of="gpt2"))).text
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


def test_in_bf16_only_what_the_plain_model_does_too_is_no_fault():
    """Layers of zeros; an error that the plain model has; and another one."""

    def raising(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyError("mine")

    layers = [f"bert.encoder.layer.{i}" for i in range(2)]
    result = check_bf16(Case.of(broken(*layers, hook=lambda module, args, output: output * 0)))
    assert result.status == "red" and "in bf16, the loss is wrong by" in result.text
    assert check_bf16(Case.of(FAMILIES["fnet"])).text.startswith(
        "fails in bf16 without L2L: RuntimeError: Unsupported"
    )
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


def test_a_refusal_is_an_error_of_the_package_with_its_text():
    """An error of a builtin is none, though it is a ValueError with a frame of the engine on top; an interrupt is not
    caught."""
    with (caught := Caught(refused="must not")):
        raise ValueError("a layer must not do this")
    assert caught.result == Result("refused", "refused: a layer must not do this")
    with (caught := Caught(refused="a layer that trains must not")):
        exec(compile("a, b = [1]", str(Path(stream.__file__)), "exec"))
    assert caught.result is not None and caught.result.status == "red"
    with pytest.raises(KeyboardInterrupt), Caught():
        raise KeyboardInterrupt


# ---- the command


def test_names_are_listed_and_guessed(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in GROUPS) and all(name in shown for name in QUICK)
    with pytest.raises(SystemExit) as stopped:
        main(["roberto"])
    assert stopped.value.code == 2 and "did you mean roberta" in capsys.readouterr().err


def test_a_table_or_json_is_written(tmp_path, capsys, monkeypatch):
    """Of what was found before."""
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


# ---- comparisons of the check see what is wrong

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
    """Or with a small part of the largest of all, if it may hold nothing but rounding. The error is a part of the one
    or the other."""
    for size, error, status in (
        (0.01, 1e-4, "red"),
        (0.01, 1e-6, "ok"),
        (SMALL / 10, 1e-3, "ok"),
        (SMALL / 10, 1.0, "red"),
    ):
        expected = {"large": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), size, dtype=torch.float64)}
        found = {**expected, "b": expected["b"] + error * (size if size >= SMALL else SMALL / 10)}
        tolerance = 1e-3 if size < SMALL else 1e-5
        assert compare_tensors(found, expected, tolerance, "gradient").status == status, (size, error)


def test_entries_that_are_not_finite_hide_nothing():
    expected = {"a": torch.tensor([1.0, -INF])}
    assert compare_tensors(expected, expected, 1e-5, "output") == OK
    for wrong in ([2.0, -INF], [1.0, 0.0], [1.0, INF], [1.0, NAN], [1.0]):
        assert compare_tensors({"a": torch.tensor(wrong)}, expected, 1e-5, "output").status == "red", wrong
    same = {"a": torch.tensor([1.0, NAN])}
    assert compare_tensors(same, same, 1e-5, "output").status == "red"
