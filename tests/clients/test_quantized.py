"""Adapters over a base that torchao or bitsandbytes has quantized, as in QLoRA: the same training as by themselves.

With L2L_TEST_DEVICE=sim in the environment, on the simulated accelerator, in whose memory the kernels of both work.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():  # of what they import in turn
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="an environment with clients has it")
    torchao = pytest.importorskip("torchao.quantization", reason="an environment with clients has it")
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="an environment with clients has it")

import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import is_quantized, parts_of, tensor_bytes
from hf_l2l.testing import Costs, enable_simulated_accelerator, virtual_clock
from memory_switches import forced_copies
from models import assert_same_bits, batch_for, gradients, relative_error, train_once
from tiers import on_a_device, on_the_host

ON_SIM = DEVICE == "sim"
DEVICE = "sim" if ON_SIM else "cpu"
if ON_SIM:
    enable_simulated_accelerator()

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`(is_)?gradient_checkpointing\w*` is deprecated:FutureWarning"),
    # Adapters over what torchao has quantized cannot be merged; that is not tested here.
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
]
MEMORY = pytest.mark.parametrize("memory", [nullcontext] if ON_SIM else [nullcontext, forced_copies])
LAYERS = 3


def small_llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Of sizes that are no multiples of 64, kernels of bitsandbytes for the CPU compute something else."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 60}
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    return hf.LlamaForCausalLM(config).to(dtype)


def in_nf4(model: nn.Module, *, kind: str = "Linear4bit", twice: bool = True) -> None:
    for parent in list(model.model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                options: dict[str, Any] = {"has_fp16_weights": False}
                if kind == "Linear4bit":
                    dtype = linear.weight.dtype
                    options = {"quant_type": "nf4", "compute_dtype": dtype, "compress_statistics": twice}
                made = getattr(bitsandbytes.nn, kind)(linear.in_features, linear.out_features, bias=False, **options)
                made.load_state_dict(linear.state_dict())
                setattr(parent, name, made)
    model.to("cpu")  # here it is quantized


QUANTIZED: dict[str, Callable[[nn.Module], None]] = {
    "int8": lambda model: torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig()),
    "nf4 twice": in_nf4,
    "nf4": partial(in_nf4, twice=False),
}
every_kind = pytest.mark.parametrize("kind", QUANTIZED)


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A quantized model with adapters of which none is zero, so that every one of them gets a gradient."""
    model = small_llama(dtype)
    QUANTIZED[kind](model)
    # Dropout would be drawn by another generator on another device.
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    """bitsandbytes compiles its kernels for devices that it does not know, which the simulated accelerator is."""
    with torch.compiler.set_stance("force_eager" if ON_SIM else "default"):
        yield


@MEMORY
@every_kind
@pytest.mark.parametrize(
    ("options", "dtype", "error"),
    [
        ({}, torch.float32, None),
        ({}, torch.bfloat16, 2e-2 if ON_SIM else None),  # the host rounds products of 16-bit matrices differently
        ({"ubatch_size": 3}, torch.float32, 1e-6),
        ({"stash": "host", "ubatch_size": 4}, torch.float32, 1e-6),
        ({"cmp": "bf16"}, torch.float32, 5e-2),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_library(kind, options, dtype, error, memory):
    """To the bit, unless an error is given."""
    plain, model = adapted(kind, dtype), adapted(kind, dtype)
    with memory():
        attach_l2l(model, L2LConfig(device=DEVICE, **options))
        for seed in range(2):
            losses = [train_once(each, batch_for(each, seed=seed)) for each in (model, plain)]
            if error is None:
                assert torch.equal(*losses)
                assert_same_bits(gradients(model), gradients(plain))
            else:
                assert relative_error(gradients(model), gradients(plain)) < error
    for name, p in model.named_parameters():
        assert (p.grad is not None) == ("lora_" in name) == p.requires_grad, name


@every_kind
def test_the_host_holds_packed_weights(kind):
    model = adapted(kind)
    packed = [part for p in model.parameters() if is_quantized(p) for part in parts_of(p)]
    ordinary = [p for p in model.parameters() if not is_quantized(p)]
    trained = [p for p in ordinary if p.requires_grad]
    need = estimate(model, L2LConfig(device=DEVICE))
    assert need.masters == sum(p.nbytes for p in [*packed, *ordinary])
    assert need.gradients == sum(p.nbytes for p in trained) and need.moments == 2 * need.gradients
    full = sum(4 * p.numel() for p in small_llama().model.layers.parameters())
    assert sum(part.nbytes for part in packed) < full * (0.3 if kind == "int8" else 0.2)


@every_kind
def test_the_detached_model_is_as_before(kind):
    model = adapted(kind)
    before = copy.deepcopy(model)
    state = {name: type(value) for name, value in model.state_dict().items()}
    attach_l2l(model, L2LConfig(device=DEVICE))
    train_once(model, batch_for(model))
    detach_l2l(model)
    for p, own in zip(model.parameters(), before.parameters(), strict=True):
        assert type(p) is type(own) and p.device.type == "cpu"
        for part, own_part in zip(parts_of(p), parts_of(own), strict=True):
            assert torch.equal(part.as_subclass(torch.Tensor), own_part.as_subclass(torch.Tensor))
    assert {name: type(value) for name, value in model.state_dict().items()} == state
    model.zero_grad()
    for each in (model, before):
        train_once(each, batch_for(each))
    assert_same_bits(gradients(model), gradients(before))


@on_a_device
@every_kind
def test_a_layer_is_uploaded_as_it_is_packed_and_adapters_come_back(kind):
    model = adapted(kind)
    eps = attach_l2l(model, L2LConfig(device=DEVICE))
    optimizer = eps.wrap(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    eps.synchronize()
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=1e9, host_bytes_per_s=1e9)) as clock:
        train_once(model, batch_for(model))
    moved: dict[str, list[int]] = {"upload": [], "download": []}
    for task in clock.tasks:
        if task.lane in moved and task.stream != "the default stream":
            moved[task.lane].append(round(task.end - task.start))
    unit = eps.masters.layer_units[0]
    layer = list(model.get_base_model().model.layers[0].parameters())
    parts = [part for p in layer for part in parts_of(p)]
    assert unit.layout.num_bytes == Layout(parts).num_bytes < tensor_bytes(parts) + 256 * len(parts)
    assert moved["upload"].count(unit.layout.num_bytes) == 2 * LAYERS - 2  # two stay in their slots
    adapters = [p for p in layer if p.requires_grad]
    sums, norms = Layout(adapters).num_bytes, 4 * len(adapters)
    assert sum(moved["download"]) == LAYERS * (sums + norms)


def test_eight_bits_of_bitsandbytes_are_refused():
    """Its modules keep the weight of the last call, which would be that of another layer in the slot."""
    model = small_llama()
    in_nf4(model, kind="Linear8bitLt")
    with pytest.raises(ValueError, match=r"must have __tensor_flatten__.*or be a Params4bit.*a Int8Params\)"):
        attach_l2l(model, L2LConfig(device=DEVICE))


@on_the_host
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_trainer_trains_what_from_pretrained_has_quantized(kind, tmp_path):
    small_llama().save_pretrained(tmp_path / "base")
    ids = torch.randint(5, 60, (16, 6), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options: dict[str, Any] = {"quantization_config": hf.TorchAoConfig(torchao.Int8WeightOnlyConfig())}
    if kind == "nf4":
        nf4 = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        options = {"quantization_config": nf4, "device_map": "cpu"}

    def trained(trainer: type[hf.Trainer], arguments: type[hf.TrainingArguments], folder: Path) -> Any:
        base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, **options)
        few = {"max_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
        own: dict[str, Any] = {"args": arguments(str(folder), **few), "train_dataset": rows}
        with pytest.raises(ValueError, match="purely quantized"):
            trainer(model=base, **own)
        torch.manual_seed(2)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        made = trainer(model=peft.get_peft_model(base, lora), **own)
        made.train()
        made.save_model(str(folder))
        return made

    plain = trained(hf.Trainer, hf.TrainingArguments, tmp_path / "plain")
    made = trained(L2LTrainer, L2LTrainingArguments, tmp_path / "l2l")
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (made, plain)]
    assert losses[0] == losses[1]
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("plain", "l2l")]
    assert files[0] == files[1]
    assert "Frozen" in made.l2l_summary()
