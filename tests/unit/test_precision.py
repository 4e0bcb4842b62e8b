"""What is on the device in which dtype, models that are loaded or saved in 16 bits, and the loss scale."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, copy_as, detach_l2l
from hf_l2l.model.precision import Precision, computing_dtype, let_heads_return_fp32
from hf_l2l.optim.loss_scale import LossScale, with_gradients_times
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes
from models import batch_for, bert, gpt2, t5, train_once, vit
from runs import assert_same_tensors
from tiers import more

DTYPES = (torch.bfloat16, *more(torch.float16))
SCALE = 2.0**10


def test_modules_that_declare_it_stay_fp32():
    def kept_in_fp32(model: nn.Module, cmp: str) -> set[str]:
        attach_l2l(model, L2LConfig(device="cpu", cmp=cmp))
        dtypes: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(
                    lambda m, _, name=name: dtypes.update({name: next(m.parameters(recurse=False)).dtype})
                )
        model(**batch_for(model))
        assert set(dtypes.values()) == {torch.float32, computing_dtype(cmp, stream.HOST)}
        return {name for name, dtype in dtypes.items() if dtype == torch.float32}

    model, strict = t5(), bert()
    assert kept_in_fp32(model, "fp16") == {name for name, _ in model.named_modules() if name.endswith(".wo")}
    strict._keep_in_fp32_modules_strict = ["LayerNorm"]
    assert {name.rpartition(".")[2] for name in kept_in_fp32(strict, "bf16")} == {"LayerNorm"}


def test_heads_return_fp32_while_attached_and_copies_have_no_graph():
    model = gpt2()
    eps = attach_l2l(model, L2LConfig(device="cpu", cmp="bf16"))
    with torch.no_grad():
        assert model(**batch_for(model)).logits.dtype == torch.float32
        # Outputs of the engine are fp32, for any further computation.
        assert model.transformer(batch_for(model)["input_ids"]).last_hidden_state.dtype == torch.float32
        for copied in (copy.deepcopy(model).bfloat16(), copy_as(model, torch.bfloat16)):
            assert copied(batch_for(model)["input_ids"]).logits.dtype == torch.bfloat16
    train_once(model, batch_for(model))
    assert eps.copies.kept and not any(copied.requires_grad for copied in eps.copies.kept)
    detach_l2l(model)
    assert all(not m._forward_hooks for m in model.modules())


def test_inputs_are_cast_and_labels_are_not():
    model = vit()
    eps = attach_l2l(model, L2LConfig(device="cpu", cmp="bf16"))
    assert batch_for(model)["pixel_values"].dtype == torch.float32
    model(**batch_for(model)).loss.backward()
    labels, states = torch.rand(2), torch.rand(2, 3, requires_grad=True)
    of_inputs = eps.copies.precision.of_inputs
    args, kwargs = of_inputs(model, (states,), {"labels": labels, "mask": torch.ones(2, 3)})
    assert (args[0].dtype, kwargs["mask"].dtype) == (torch.bfloat16, torch.bfloat16)
    assert kwargs["labels"] is labels and list(kwargs) == ["labels", "mask"]
    args[0].float().sum().backward()
    assert states.grad is not None
    # By position, too: the labels of this model come third.
    places = list(inspect.signature(model.forward).parameters).index("labels")
    found, _ = of_inputs(model, tuple(torch.rand(2) for _ in range(places + 1)), {})
    assert [t.dtype == torch.float32 for t in found] == [*[False] * places, True]


def test_embeddings_that_are_given_get_gradients():
    model, plain = bert(), bert()
    plain.load_state_dict(model.state_dict())
    eps = attach_l2l(model, L2LConfig(device="cpu", cmp="fp16", ubatch_size=2, loss_scale_init=SCALE))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters()))
    given = torch.randn(4, 6, 16, requires_grad=True)
    expected = given.detach().clone().requires_grad_()
    for each, states in ((model, given), (plain, expected)):
        each(inputs_embeds=states, labels=torch.zeros(4, dtype=torch.long)).loss.backward()
    assert given.grad.dtype == torch.float32 and optimizer is not None
    torch.testing.assert_close(given.grad, expected.grad, rtol=0.05, atol=1e-4)  # and not 1024 times as much


class TwoGpus:
    """A device module of two GPUs: the first is the current one, and the second emulates bfloat16, as a T4 does."""

    current = 0

    @classmethod
    @contextmanager
    def device(cls, device: torch.device) -> Iterator[None]:
        before, cls.current = cls.current, device.index
        yield
        cls.current = before

    @classmethod
    def is_bf16_supported(cls, including_emulation: bool = True) -> bool:
        return including_emulation or cls.current == 0


def test_a_device_without_bf16_is_told_to_use_fp16(monkeypatch):
    """The execution device is asked, and not the current one."""
    monkeypatch.setattr(stream, "device_module", lambda device: TwoGpus)
    first, second = (torch.device("cuda", index) for index in range(2))
    assert computing_dtype("auto", first) is torch.bfloat16
    assert computing_dtype("auto", second) is computing_dtype("fp16", second) is torch.float16
    with pytest.raises(ValueError, match=r"got cuda:1, which lacks"):
        computing_dtype("bf16", second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_are_made_fp32_one_after_the_other(dtype, monkeypatch):
    model = gpt2().to(dtype)
    model.transformer.wpe.weight.requires_grad_(False)
    before = {name: p for name, p in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in before.items()}
    largest = max(tensor_bytes([p]) for p in model.parameters()) * 2
    held: list[int] = []
    swap = torch.utils.swap_tensors

    def counting(p: torch.Tensor, wide: torch.Tensor) -> None:
        held.append(tensor_bytes(model.parameters()) + tensor_bytes([wide]))
        swap(p, wide)

    monkeypatch.setattr(torch.utils, "swap_tensors", counting)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_l2l(model, L2LConfig(device="cpu", cmp="bf16"))
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert model.lm_head.weight is optimizer.param_groups[0]["params"][0] is model.transformer.wte.weight
    for name, p in after.items():
        assert p.dtype == (torch.float32 if p.requires_grad else dtype)
        assert torch.equal(p, values[name].to(p.dtype))
    assert len(held) == len([p for p in model.parameters() if p.requires_grad])
    assert max(held) <= tensor_bytes(model.parameters()) + largest


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_is_saved_as_plain_transformers_saves_it(dtype, tmp_path):
    model = gpt2()
    attach_l2l(model, L2LConfig(device="cpu", cmp="bf16"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copy_as(model, dtype).save_pretrained(tmp_path / "ours", max_shard_size="4KB")
    copy.deepcopy(model).to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    ours, theirs = ({f.name: f.read_bytes() for f in (tmp_path / run).iterdir()} for run in ("ours", "theirs"))
    assert len(ours) > 3 and ours == theirs
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype="auto")
    assert_same_tensors(dict(loaded.named_parameters()), {name: p.to(dtype) for name, p in before.items()})
    assert_same_tensors(dict(model.named_parameters()), before)


def test_heads_are_found_wherever_they_are():
    """In a module that wraps the model, too."""
    config = hf.BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    model = nn.ModuleDict({"inner": hf.BartForSequenceClassification(config)})
    model.forward = lambda **inputs: model["inner"](**inputs)
    seen: list[torch.dtype] = []
    attach_l2l(model, L2LConfig(device="cpu", cmp="fp16", layer_classes=None))
    model["inner"].classification_head.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.no_grad():
        out = model(input_ids=torch.full((2, 6), 2), labels=torch.tensor([0, 1]))
    assert [*seen, out.loss.dtype, out.logits.dtype] == [torch.float32] * 3


class Counting(nn.Sequential):
    """Layers beside which something is counted."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


def test_what_modules_write_to_adds_up_in_fp32():
    model = Counting()
    attach_l2l(model, L2LConfig(device="cpu", cmp="bf16", layer_classes=("Linear",)))
    with torch.no_grad():
        for _ in range(300):
            model(torch.randn(8, 4))
    assert model.count.item() == 300  # bfloat16 stops at 256


def test_buffers_follow_the_weights_but_for_rotary_frequencies():
    positions = nn.Module()
    for name in ("inv_freq", "sinusoids", "saved_freq"):
        positions.register_buffer(name, torch.ones(3), persistent=name == "saved_freq")
    positions.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
    precision = Precision(positions, torch.bfloat16)
    found = {name: precision.of_buffer(positions, name, buffer) for name, buffer in positions.named_buffers()}
    others = {"sinusoids": torch.bfloat16, "saved_freq": torch.bfloat16, "mask": torch.bool}
    assert found == {"inv_freq": torch.float32, **others}


def test_only_the_last_part_of_a_head_returns_fp32():
    """Its `lm_head` is followed by the module that computes the logits."""
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 4), "decoder": nn.Linear(4, 9)})
    model.get_output_embeddings = lambda: model["decoder"]
    let_heads_return_fp32(model)
    assert not model["lm_head"]._forward_hooks and model["decoder"]._forward_hooks


# ---- the loss scale


def test_it_is_never_0_and_may_be_fixed():
    scale = LossScale(initial=16.0, growth=2.0, backoff=0.25, interval=2)
    for _ in range(300):
        scale.vote(finite=False)
    assert 0.0 < scale.value < 1e-29 and scale.get_scale() == scale.value and scale.is_enabled()
    fixed = LossScale(initial=1.0, growth=1.0, backoff=1.0)
    assert not fixed.is_dynamic and not fixed.vote(finite=False) and (fixed.value, fixed.skipped) == (1.0, 1)


def test_the_policy_is_that_of_torch_and_so_is_the_state():
    """Which a run may be given that scales by a number of its own, or by nothing."""
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    ours = LossScale(8.0, 3.0, 0.25, 2)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for finite in (True, True, False, True, False, False, True, True, True, True, True):
        theirs.scale(p.sum() * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.vote(finite=finite) is finite and ours.value == theirs.get_scale()
    state = ours.state_dict()
    assert ours.skipped == 3
    other, fixed = LossScale(8.0, 3.0, 0.25, 2), LossScale(1.0, growth=1.0, backoff=1.0)
    other.load_state_dict(state)
    assert other.state_dict() == state and (other.value, other.skipped) == (theirs.get_scale(), 3)
    other.load_state_dict(theirs.state_dict())
    assert (other.value, other.steps, other.skipped) == (theirs.get_scale(), ours.steps, 0)
    other.vote(finite=False)
    theirs.load_state_dict(other.state_dict())
    assert theirs.get_scale() == other.value
    fixed.load_state_dict(state)
    assert (fixed.value, fixed.skipped, fixed.is_dynamic) == (1.0, 3, False)


def test_gradients_of_outputs_are_multiplied_by_the_factor_of_the_backward():
    x, factor = torch.ones(2, requires_grad=True), [2.0]
    found = with_gradients_times(lambda: factor[0], {"loss": x.sum(), "ids": torch.ones(2, dtype=torch.long)})
    factor[0] = 8.0
    found["loss"].backward()
    assert x.grad.tolist() == [8.0, 8.0] and not found["ids"].requires_grad
    with torch.no_grad():
        assert with_gradients_times(lambda: 2.0, x) is x
