"""`hf-l2l verify`: a tiny copy of a model against plain torch, and the exit status that says how it went."""

from __future__ import annotations

from typing import Any

import pytest

from cli_models import LLAMA, ran, refused, written
from hf_l2l import testing
from hf_l2l.cli import verify as command
from hf_l2l.cli.verify import _verdict
from hf_l2l.device.slots import GradientSlots
from hf_l2l.hf import attach
from hf_l2l.verify.checks import CHECKS
from hf_l2l.verify.results import OK, Result, note, red


def test_a_model_that_is_exact(tmp_path, capsys):
    source = written(tmp_path, LLAMA, attention_bias=True)
    found = ran(capsys, "verify", source, "--json")
    assert found.status == 0
    told = found.json
    assert (told["class_name"], told["family"], told["device"]) == ("LlamaForCausalLM", "llama", "cpu")
    assert (told["status"], told["left_out"], told["notes"]) == ("green", [], [])
    assert {*told["carried"]} == {"attention_bias", "tie_word_embeddings"}
    assert told["sizes"]["attention_bias"] is True and told["sizes"]["hidden_size"] == 16
    verdicts = {name: check["verdict"] for name, check in told["checks"].items()}
    assert list(verdicts) == list(CHECKS)
    assert verdicts["layers"] == "note" and told["checks"]["layers"]["text"] == "2 LlamaDecoderLayer"
    assert {verdicts[name] for name in ("gradients", "evaluation", "saving")} <= {"exact", "within tolerance"}
    assert "exact" in verdicts.values()


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of layers that are twice what they should be."""
    add = GradientSlots.add

    def twice(self: Any, number: int, leaf: Any) -> None:
        leaf.grad = None if leaf.grad is None else 2 * leaf.grad
        add(self, number, leaf)

    monkeypatch.setattr(GradientSlots, "add", twice)


def test_a_model_that_differs(tmp_path, capsys, monkeypatch):
    broken(monkeypatch)
    source = written(tmp_path, LLAMA)
    found = ran(capsys, "verify", source)
    assert found.status == 1 and found.err == ""
    assert found.out.endswith("red: layer to layer computes something else\n")
    [line] = [line for line in found.out.splitlines() if line.startswith("gradients")]
    assert line.split()[1] == "differs" and "the gradient model.layers." in line and "of its largest entry" in line


def test_a_model_that_is_refused(tmp_path, capsys, monkeypatch):
    def refuse(model: Any) -> None:
        raise ValueError("a model under L2L must be another one; take that")

    monkeypatch.setattr(attach, "check_attachable", refuse)
    found = ran(capsys, "verify", written(tmp_path, LLAMA))
    assert found.status == 1
    assert "gradients      refused" in found.out and "a model under L2L must be another one; take that" in found.out
    assert found.out.endswith("refused: the engine does not run this model, and says why\n")


@pytest.mark.parametrize(
    ("result", "exact", "verdict", "text"),
    [
        (OK, OK, "exact", ""),
        (OK, red("the gradient a is wrong by 1e-16"), "within tolerance", "the gradient a differs by 1e-16"),
        (OK, None, "ok", ""),
        (note("so"), None, "note", "so"),
        (red("wrong"), None, "differs", "wrong"),
        (Result("refused", "refused: no"), None, "refused", "refused: no"),
    ],
)
def test_verdicts(result, exact, verdict, text):
    assert _verdict(result, exact) == {"verdict": verdict, "text": text}


def test_what_is_taken_from_the_config_is_told(tmp_path, capsys, monkeypatch):
    green = "green", {"layers": {"verdict": "ok", "text": ""}}
    monkeypatch.setattr(command, "_checked", lambda family, device: green)
    out = ran(capsys, "verify", written(tmp_path, LLAMA, mlp_bias=True)).out
    assert "a tiny LlamaForCausalLM on cpu, of the family 'llama'\n" in out
    assert "  taken from the config: tie_word_embeddings, mlp_bias\n" in out
    own = {"model_type": "xmod", "default_language": "de_DE", "languages": ["de_DE"], "hidden_size": 8}
    own |= {"architectures": ["XmodForMultipleChoice"], "num_hidden_layers": 1, "num_attention_heads": 2}
    out = ran(capsys, "verify", written(tmp_path, own)).out
    assert "  not taken, since it does not fit: default_language\n" in out
    assert "  no batch is known for a XmodForMultipleChoice: checked as a XmodForSequenceClassification" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--device", "cuda:9"),
            "one this machine has (got cuda:9); leave out --device for the CPU, or name one of hf-l2l env",
        ),
        (("--device", "gpu"), "device must name a torch device (got 'gpu'"),
        (("--class", "Nothing"), "--class must be a class of models"),
        (("--class", "BertModel"), "choose another class with --class"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, said):
    assert said in refused(capsys, "verify", written(tmp_path, LLAMA), *arguments)


def test_the_simulated_accelerator_beside_another_one(tmp_path, capsys, monkeypatch):
    def refuse() -> None:
        raise RuntimeError("the simulated accelerator must be the only one of the process (found cuda); hide it")

    monkeypatch.setattr(testing, "enable_simulated_accelerator", refuse)
    said = refused(capsys, "verify", written(tmp_path, LLAMA), "--device", "sim")
    assert said.startswith("hf-l2l verify: --device sim: the simulated accelerator must be the only one")


def test_a_model_without_a_batch(tmp_path, capsys):
    content = {"model_type": "encodec", "hidden_size": 8, "num_filters": 4}
    assert "a batch must be known for the class" in refused(capsys, "verify", written(tmp_path, content))


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    source = written(
        tmp_path,
        LLAMA,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (tmp_path / "own.py").write_text(OWN_CODE)
    assert "pass --trust-remote-code" in refused(capsys, "verify", source)
    trusting = ("--trust-remote-code", "--class", "AutoModelForCausalLM")
    assert "classes of transformers (got OwnModel" in refused(capsys, "verify", source, *trusting)
    assert ran(capsys, "inspect", source, *trusting, "--json").json["stacks"][0]["num_layers"] == 3
