"""What is said to a host that is too small for training."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig
from hf_l2l.memory import host_limits
from hf_l2l.memory.host_remedies import disk_remedies, host_advice, lora_bytes, remedies
from hf_l2l.memory.memory_estimate import SKIP_VARIABLE, estimate
from hf_l2l.option_names import options_of_the_trainer
from training import l2l_trainer


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128, vocab_size=1000
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def advice(have: float, model: nn.Module | None = None, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> str:
    """With `have` bytes per parameter."""
    model = llama() if model is None else model
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    with options_of_the_trainer():
        return host_advice(model, L2LConfig(), optimizer, int(have * parameters(model)))


@pytest.mark.parametrize(
    ("cmp", "per_parameter"),
    [
        (None, [(2, ["grad_dtype"]), (4, ["moment_dtype"]), (6, ["grad_dtype", "moment_dtype"])]),
        (
            "bf16",
            [
                (2, ["grad_dtype"]),
                (4, ["moment_dtype"]),
                (2, ["host_copies"]),
                (8, ["grad_dtype", "moment_dtype", "host_copies"]),
            ],
        ),
    ],
)
def test_each_remedy_saves_so_many_bytes_per_parameter(cmp, per_parameter):
    model, config = llama(), L2LConfig(cmp=cmp)
    optimizer = torch.optim.AdamW(model.parameters())
    need = estimate(model, config, optimizer).host_bytes
    found = [
        ((need - each.host_bytes) / parameters(model), list(each.changes))
        for each in remedies(model, config, optimizer)
    ]
    assert [(round(saved, 2), names) for saved, names in found] == per_parameter


def test_what_the_user_has_set_is_no_remedy():
    model, config = llama(), L2LConfig(grad_dtype="16bit")
    [found] = remedies(model, config, torch.optim.AdamW(model.parameters()))
    assert found.changes == {"moment_dtype": "bf16"}


def test_an_optimizer_without_moments_has_none_to_round():
    model = llama()
    found = list(remedies(model, L2LConfig(), torch.optim.SGD(model.parameters(), lr=0.1)))
    assert [each.changes for each in found] == [{"grad_dtype": "16bit"}]


class Squares(torch.optim.Optimizer):
    """Steps by the sum over all gradients, so that the engine keeps them in fp32."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.square().sum()) for p in given)
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + total))


def test_an_optimizer_that_steps_as_a_whole_has_no_options_that_help():
    assert advice(11, kind=Squares).endswith("; no options fit, and LoRA does")


def test_lora_takes_two_bytes_per_parameter_and_16_of_each_hundredth():
    model = llama()
    assert lora_bytes(model) == pytest.approx(2.16 * parameters(model), rel=1e-3)
    assert lora_bytes(model.to(torch.bfloat16)) == pytest.approx(2.16 * parameters(model), rel=1e-3)


@pytest.mark.parametrize(
    ("have", "end"),
    [
        (15, "this fits: l2l_grad_dtype='16bit'"),
        (13, "this fits: l2l_moment_dtype='bf16'"),
        (11, "this fits: l2l_grad_dtype='16bit', l2l_moment_dtype='bf16'"),
        (3, "no options fit, and LoRA does"),
        (2, "none of these fits: use a machine with more memory"),
    ],
)
def test_it_ends_with_the_first_that_fits(have, end):
    assert advice(have).endswith(f"; {end}")


def test_it_says_of_each_whether_it_fits():
    said = re.sub(r"[\d.]+ [KM]iB", "N", advice(13))
    assert said == (
        "it would need N (does not fit) with l2l_grad_dtype='16bit', N (fits) with l2l_moment_dtype='bf16', N (fits) "
        "with l2l_grad_dtype='16bit' and l2l_moment_dtype='bf16', N (fits) with l2l_state_tier='disk', N (fits) with "
        "l2l_grad_dtype='16bit' and l2l_moment_dtype='bf16' and l2l_state_tier='disk', about N (fits) for LoRA over a "
        "16-bit base (load the model"
        " with dtype=torch.bfloat16, and let peft train adapters, here of 1% of the parameters); this fits: "
        "l2l_moment_dtype='bf16'"
    )


def test_training_is_refused_with_the_command_line_of_the_user(tmp_path, monkeypatch):
    made = l2l_trainer(tmp_path, optim="adamw_torch")
    need = estimate(made.model).host_bytes
    monkeypatch.delenv(SKIP_VARIABLE, raising=False)
    monkeypatch.setattr(host_limits, "own_bytes", lambda: 0)
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: need * 13 // 16)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--l2l_moment_dtype", "fp32"])
    with pytest.raises(
        MemoryError, match=r"; this fits: \S*python\S* train.py --output_dir out --l2l_moment_dtype=bf16$"
    ):
        made.train()


def test_remedies_are_those_of_each_of_several_hosts():
    """16-bit gradients and moments save as much on all hosts together as on one."""
    model, config = llama(), L2LConfig()
    optimizer = torch.optim.AdamW(model.parameters())
    one, two = (
        [estimate(model, config, optimizer).of_one_host(hosts).host_bytes - each.host_bytes for each in found]
        for hosts, found in ((count, list(remedies(model, config, optimizer, count))) for count in (1, 2))
    )
    assert one == [2 * each for each in two] and len(one) == 3


def test_the_disk_is_the_last_remedy():
    """For a process that has no ranks beside it; alone, and with all others."""
    model, config = llama(), L2LConfig()
    optimizer = torch.optim.AdamW(model.parameters())
    alone, last = disk_remedies(model, config, optimizer)
    assert alone.changes == {"state_tier": "disk"}
    assert last.changes == {"grad_dtype": "16bit", "moment_dtype": "bf16", "state_tier": "disk"}
    assert last.host_bytes < alone.host_bytes < estimate(model, config, optimizer).host_bytes
    assert not list(disk_remedies(model, L2LConfig(state_tier="disk"), optimizer))
    assert "state_tier" not in host_advice(model, config, optimizer, 2**40, has_ranks=True)
