"""`hf-l2l verify`: a tiny copy of a model against plain torch, and the exit status that says how it went."""

from __future__ import annotations

from typing import Any

import torch

from cli_models import LLAMA, ran, refused, written
from hf_l2l import testing
from hf_l2l.device.slots import GradientSlots
from hf_l2l.hf import attach
from hf_l2l.verify.checks import CHECKS, verify


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
