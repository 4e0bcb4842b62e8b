"""The compatibility check: families run layer to layer as plain torch does, and the check sees what is wrong."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_l2l.verify.__main__ import main
from hf_l2l.verify.checks import CHECKS, Report, verify
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import Family, text
from hf_l2l.verify.results import OK, Caught, Result, compare_gradients, compare_loss, compare_states, note, red, worst
from hf_l2l.verify.table import line, summary

FAMILIES = {family.name: family for group in GROUPS.values() for family in group}
QUICK = (
    "bert bert-embeddings electra albert distilbert deberta-v2 modernbert longformer gpt2 opt bloom llama mistral "
    "qwen3 gemma2 gemma4-shared-kv mixtral qwen3-moe mamba2 jamba t5 bart vit swin dinov2 whisper wav2vec2 clip llava"
).split()
"""Families of all kinds that take little time."""


def name_of(family: Family) -> str:
    return family.name


def check(family: Family) -> None:
    """Nothing is red."""
    report = verify(family)
    if report.status == "not run":
        # The newest transformers has all families; what they need beside it may not be installed.
        newest = Version(transformers.__version__) >= Version("5.23")
        assert "ImportError" in report.reason or not newest, report.reason
        pytest.skip(report.reason)
    wrong = {name for name, result in report.results.items() if result.status == "red"}
    assert not wrong, line(report)


@pytest.mark.parametrize("family", [FAMILIES[name] for name in QUICK], ids=name_of)
def test_quick_families(family):
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.name not in QUICK], ids=name_of)
def test_other_families(family):
    check(family)


def test_there_are_many_families_of_all_kinds():
    assert len(QUICK) >= 25 and len(FAMILIES) == sum(len(group) for group in GROUPS.values()) >= 200
    assert all(set(QUICK) & {f.name for f in group} for kind, group in GROUPS.items() if kind != "Time series")


def test_what_shares_keys_and_values_is_refused_with_the_reason():
    report = verify(FAMILIES["gemma4-shared-kv"])
    if report.status == "not run":
        pytest.skip(report.reason)
    assert report.results["gradients"].status == "refused" and "shared_kv_states" in line(report)
    assert report.results["saving"] == OK


# ---- the check sees what is wrong


@dataclass(frozen=True)
class Broken(Family):
    """BERT, of which one module computes something else once it is hooked."""

    path: str = ""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = FAMILIES["bert"].build(dtype)
        module = model.get_submodule(self.path)

        def wrong(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * 1.5 if hasattr(module, "_hf_hook") else output

        module.register_forward_hook(wrong)
        return model


def broken(path: str) -> Broken:
    bert = FAMILIES["bert"]
    return Broken("broken", bert.model_class, bert.config_class, bert.sizes, text("class"), path=path)


def red_checks(report: Report) -> set[str]:
    return {name for name, result in report.results.items() if result.status == "red"}


def test_a_wrong_model_is_red():
    """A hook on the classifier sees that of the engine: outputs are half as large again."""
    report = verify(broken("classifier"))
    assert report.status == "red"
    assert {"gradients", "evaluation"} <= red_checks(report)
    assert "should be" in report.results["gradients"].text


def test_an_error_in_the_attached_model_is_red_and_said_in_one_line():
    class Raising(Broken):
        def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
            model = FAMILIES["bert"].build(dtype)

            def raising(module: nn.Module, args: Any) -> None:
                if hasattr(module, "_hf_hook"):
                    raise RuntimeError("two\nlines")

            model.get_submodule("classifier").register_forward_pre_hook(raising)
            return model

    bert = FAMILIES["bert"]
    report = verify(Raising("raising", bert.model_class, bert.config_class, bert.sizes, text("class")))
    assert report.results["gradients"] == red("RuntimeError: two lines")


def test_a_family_without_its_class_is_not_run():
    report = verify(replace(FAMILIES["bert"], model_class="ElfModel"))
    assert report.status == "not run" and "has no ElfModel" in report.reason and "not run" in line(report)


def test_layers_that_are_not_split_are_noted_with_the_reason():
    results = verify(FAMILIES["resnet"]).results
    assert results["micro-batches"].status == "note" and "BatchNorm2d" in results["micro-batches"].text


def test_no_warning_and_no_setting_remains():
    before = transformers.utils.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(FAMILIES["resnet"])
    assert transformers.utils.logging.get_verbosity() == before


# ---- comparisons


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"a": torch.tensor([1.0]), "b": None}, "ok"),
        ({"a": torch.tensor([1.0 + 1e-3]), "b": None}, "red"),
        ({"a": torch.tensor([float("nan")]), "b": None}, "red"),
        ({"a": None, "b": None}, "red"),
        ({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}, "red"),
        ({"a": torch.ones(2), "b": None}, "red"),
    ],
)
def test_gradients_are_compared(found, status):
    assert compare_gradients(found, {"a": torch.tensor([1.0]), "b": None}, 1e-5).status == status


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_gradients_of_the_plain_model_must_be_finite_and_not_all_zero(value):
    gradients = {"a": torch.tensor([value])}
    assert compare_gradients(gradients, gradients, 1e-5).status == "red"


@pytest.mark.parametrize(("found", "status"), [(2.0, "ok"), (2.1, "red"), (float("nan"), "red")])
def test_losses_are_compared(found, status):
    assert compare_loss(torch.tensor(found), torch.tensor(2.0), 1e-3).status == status


def test_states_are_compared():
    state = {"a": torch.ones(1)}
    assert compare_states(state, state, "loaded") == OK
    assert "differs in a" in compare_states({"a": torch.zeros(1)}, state, "loaded").text
    assert "other names" in compare_states({}, state, "loaded").text


def test_the_worst_result_counts():
    refused = Result("refused", "refused")
    assert worst(OK, note("a"), refused, red("b")) == red("b")
    assert worst(OK, note("a"), refused) == refused and worst(OK, note("a")) == note("a") and worst(OK, OK) == OK


def test_a_value_error_of_another_package_is_no_refusal():
    with (caught := Caught()):
        int("one")
    assert caught.result is not None and caught.result.status == "red"


def test_interrupts_are_not_caught():
    with pytest.raises(KeyboardInterrupt), Caught():
        raise KeyboardInterrupt


# ---- the command


def test_list(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in GROUPS) and all(name in shown for name in QUICK)


@pytest.mark.parametrize(("name", "told"), [("roberto", "did you mean roberta"), ("zzzzzz", "--list")])
def test_unknown_names(name, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name])
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_a_table_is_written(tmp_path: Path, capsys):
    file = tmp_path / "docs" / "table.md"
    assert main(["bert", "gpt2", "--write", str(file)]) == 0
    assert "bert: green (2 BertLayer)" in capsys.readouterr().out
    page = file.read_text()
    assert "| bert | 2 BertLayer | ok | ok | ok | - |" in page and "## Decoders" in page and "## Sound" not in page
    assert transformers.__version__ in page and "python -m hf_l2l.verify bert gpt2 --write" in page
    assert all(f"- **{name}**" in page for name in CHECKS)


def test_json(capsys):
    assert main(["bert", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["transformers"] == transformers.__version__
    assert told["families"]["bert"]["checks"]["gradients"] == {"status": "ok", "text": "ok"}


def test_something_red_gives_status_1(capsys, tmp_path: Path):
    file = tmp_path / "table.md"
    assert main(["broken", "--write", str(file)], {"Text encoders": [broken("classifier")]}) == 1
    assert "1 red" in capsys.readouterr().out and "**" in file.read_text()


def test_something_refused_gives_status_0(capsys):
    """BERT without layers trains, and has no stack."""
    bare = replace(FAMILIES["bert"], name="bare", sizes={**FAMILIES["bert"].sizes, "num_hidden_layers": 0})
    assert main([], {"Text encoders": [bare]}) == 0
    shown = capsys.readouterr().out
    assert "refused: a model must have a stack of layers" in shown and "1 refused, 0 red" in shown


def test_the_page_has_all_families():
    page = (Path(__file__).parent.parent.parent / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| (\S+) \| (?!---|layers)", page, re.M) == list(FAMILIES)


def test_the_summary_counts():
    good, bad = {"gradients": OK}, {"gradients": red("wrong")}
    reports = [Report("a", good), Report("b", bad), Report("c", {}, "absent")]
    assert summary(reports) == "3 families: 1 green, 0 refused, 1 red, 1 not run"
