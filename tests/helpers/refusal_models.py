"""Models, devices, optimizers and budgets that are refused, and what is warned of."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from budgeted import FIGURES
from hf_l2l import L2LConfig, Lamb, attach_l2l, copy_as
from hf_l2l.runtime import stream
from hf_l2l.testing import enable_simulated_accelerator, page_lock_limit
from models import llama
from refusals import (
    Act,
    Change,
    Prepare,
    Rows,
    Scene,
    attached,
    call,
    counts,
    gives,
    late,
    row,
    trainer,
    used,
    variable,
)
from toy_quantized import ToyInt8, quantized
from training import rows, tiny_bert

SGD = partial(torch.optim.SGD, lr=0.1)


def batch() -> dict[str, torch.Tensor]:
    """One batch of `rows`."""
    some = rows(8)
    return {name: torch.tensor([row[name] for row in some]) for name in some[0]}


on_sim = partial(attached, device="sim")


# ---- models


def _weight(make: Callable[[nn.Parameter], nn.Parameter]) -> Change:
    """Another weight of a linear module."""
    return lambda scene, model: model.bert.pooler.dense.register_parameter(
        "weight", make(model.bert.pooler.dense.weight)
    )


def _named(name: str, values: torch.Tensor, **options: Any) -> nn.Parameter:
    """A parameter of a class that the package knows by its name, since a real one needs its library, or several
    processes."""
    return type(name, (nn.Parameter,), {})(values.detach(), **options)


class _NoKernel(ToyInt8):
    """A quantized weight whose library computes nothing with it."""

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError("no kernel for this device")


def _untrainable(weight: nn.Parameter) -> nn.Parameter:
    parts = (torch.zeros(16, 16, dtype=torch.int8), torch.ones(16, 1))
    return nn.Parameter(_NoKernel(*parts, shape=torch.Size([16, 16]), dtype=torch.float32), requires_grad=False)


def _hooked(scene: Scene, model: Any) -> None:
    add_hook_to_module(model.get_submodule("bert.pooler"), AlignDevicesHook())


def _sharing(scene: Scene, model: Any) -> None:
    other = scene.model()
    attach_l2l(other, L2LConfig(device="cpu"))
    model.bert.encoder = other.bert.encoder


def _quantized_elsewhere(scene: Scene, model: Any) -> None:
    config = SimpleNamespace(quant_method="awq")
    vars(model).update(is_quantized=True, hf_quantizer=SimpleNamespace(quantization_config=config))


def _reformer(scene: Scene, model: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 24}
    config = hf.ReformerConfig(attn_layers=["local", "local"], vocab_size=60, axial_pos_embds=False, **sizes)
    return hf.ReformerModel(config)


def _another_layer(model: Any, eps: Any) -> Act:
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[0]))
    return partial(model, **batch())


MODELS: Rows = {
    "`from_pretrained(name, device_map='auto')`": attached(
        lambda scene, model: setattr(model, "hf_device_map", {"": "disk"})
    ),
    "a model made inside `torch.device('meta')`": attached(lambda scene, model: model.to("meta")),
    "`fully_shard(model)`, or `tp_plan='auto'`": attached(_weight(lambda weight: _named("DTensor", weight.data))),
    "`FullyShardedDataParallel(model)`": attached(
        lambda scene, model: type("FullyShardedDataParallel", (nn.Sequential,), {})(model)
    ),
    "`DataParallel(model)`": attached(lambda scene, model: nn.DataParallel(model)),
    "`torch.compile(model)`": attached(lambda scene, model: torch.compile(model, backend="eager")),
    "`accelerate.cpu_offload(model)`": attached(_hooked),
    "a model that shares layers with one that is attached": attached(_sharing),
    "a quantized model whose weights require gradients": attached(
        _weight(lambda each: quantized(each).requires_grad_())
    ),
    "`BitsAndBytesConfig(load_in_8bit=True)`": attached(
        _weight(lambda weight: _named("Int8Params", weight.to(torch.int8), requires_grad=False))
    ),
    "a quantized model without quantized parameters, as of AWQ": attached(_quantized_elsewhere),
    "a quantized model whose library has no kernel for the device": attached(_weight(_untrainable)),
    "Reformer on an accelerator": attached(_reformer, device="sim"),
    "a model without a stack of layers": attached(lambda scene, model: nn.Linear(16, 16)),
    "`attach_l2l(model, L2LConfig(layer_classes=('BertLayers',)))`": row(attached(), varies="BertAttention.*"),
    "`attach_l2l(model, L2LConfig(resident_layers=9))`": attached(),
    "`attach_l2l(model, {'stash': 'host'})`": lambda scene: partial(attach_l2l, scene.model(), {"stash": "host"}),
    "`attach_l2l(model, other_config)`, on an attached model": attached(
        lambda scene, model: attach_l2l(model, L2LConfig(device="cpu", ubatch_size=4))
    ),
    "`model.bert.encoder.layer.append(...)`, on an attached model": used(_another_layer),
    "`model.half()`, on an attached model": used(lambda model, eps: partial(model.to, torch.float16)),
    "`model.to('meta')`, on an attached model": used(lambda model, eps: partial(model.to, "meta")),
    "`torchrun --nproc_per_node 4`, without a process group, and `attach_l2l`": attached(variable("WORLD_SIZE", "4")),
    "`torchrun --nproc_per_node 4`, and `attach_l2l(model, L2LConfig(resident='shell'))`": on_sim(
        gives("torch.distributed.is_initialized", True), gives("torch.distributed.get_world_size", 4)
    ),
}


# ---- devices and memory


def _held(scene: Scene, model: Any) -> None:
    scene.held += map(weakref.ref, model.parameters())


def _saved_by_a_graph(scene: Scene, model: Any) -> None:
    scene.held.append(model.classifier.bias.square().sum())


def _short(scene: Scene, model: Any) -> None:
    model.bfloat16()


def _gradient_hook(scene: Scene | None, model: Any) -> None:
    model.classifier.bias.register_hook(lambda gradient: gradient)


def _in_two_layers(scene: Scene, model: Any) -> None:
    first, second = (layer.output.dense for layer in model.bert.encoder.layer)
    second.weight = first.weight


def _tied_by_memory(scene: Scene, model: Any) -> None:
    embeddings = model.bert.embeddings
    embeddings.position_embeddings.weight = nn.Parameter(embeddings.word_embeddings.weight.detach()[:16])


def _misplaced(model: Any, eps: Any) -> Act:
    model.bert.encoder.layer[1].output.dense.bias = nn.Parameter(torch.zeros(16, device="sim"))
    return partial(model, **batch())


FIGURES_FILE = variable("HF_L2L_FIGURES", "figures.json")
"""Nothing of this machine is measured; to ask what was is another error, where there is no such file."""


def _with_figures(scene: Scene, model: Any) -> None:
    FIGURES_FILE(scene, model)
    (scene.folder / "figures.json").write_text(FIGURES.to_json())


def _budget(*changes: Change) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model, inputs = scene.model(), batch()
        for change in changes:
            change(scene, model)
        return lambda: attach_l2l(model, scene.config(device="sim"), inputs=inputs)

    return prepare


def _visible(devices: int) -> Change:
    def change(scene: Scene, model: Any) -> None:
        enable_simulated_accelerator(devices=devices)
        scene.exits.callback(enable_simulated_accelerator)

    return change


_LACKS_BF16 = gives("hf_l2l.model.precision.stream.device_module", SimpleNamespace(is_bf16_supported=lambda: False))
_FOLDER = "'/[^']*'"
_NO_MEMORY = [gives(f"hf_l2l.memory.host_limits.{name}", 0) for name in ("available_host_bytes", "own_bytes")]
DEVICES: Rows = {
    "`attach_l2l(model, L2LConfig(device='sim:9'))`": attached(),
    "`attach_l2l(model, L2LConfig(device=['sim:0', 'cpu']))`": attached(),
    "`attach_l2l(model, L2LConfig(device=['sim:0', 'sim:0']))`": attached(),
    "`attach_l2l(model, L2LConfig(device=[]))`": attached(),
    "`l2l_devices='2'`, where one is visible": trainer(_visible(1), use_cpu=False),
    "`l2l_devices='2'`, with `torchrun --nproc_per_node 2`": trainer(
        _visible(2), counts("world_size", 2), use_cpu=False
    ),
    "`l2l_devices='1,0'`": trainer(_visible(2), use_cpu=False),
    "`attach_l2l(model, L2LConfig(device='meta'))`": attached(),
    "a device whose torch module has no `get_rng_state`": on_sim(
        lambda scene, model: scene.patch.delattr(torch.get_device_module("sim"), "get_rng_state")
    ),
    "`cmp='bf16'`, on a device that only emulates it": attached(_LACKS_BF16),
    "`cmp='auto', eps_update='eager'`, on a device without bf16": attached(_LACKS_BF16),
    "`cmp='bf16'`, on a model in 16 bits, with weak references to it": attached(_short, _held),
    "`stash='disk', spill_dir='nowhere'`": on_sim(),
    "`state_tier='disk', state_dir='nowhere'`": attached(),
    "`state_tier='disk'`, on Windows": row(attached(gives("hf_l2l.state_tier.server.can_map", False)), varies=_FOLDER),
    "`state_tier='disk'`, on a full disk": row(
        attached(gives("shutil.disk_usage", SimpleNamespace(free=0))), varies=_FOLDER
    ),
    "`state_tier='disk'`, with `torchrun --nproc_per_node 2`": attached(
        gives("hf_l2l.state_tier.server.launched_processes", 2)
    ),
    "`stash='disk'`, on Windows": on_sim(gives("hf_l2l.stash.spill.can_spill", False)),
    "`resident='shell'`, with weak references to parameters": on_sim(_held),
    "`resident='shell'`, with a gradient hook": on_sim(_gradient_hook),
    "`resident_layers=1`, of a weight that two layers share": on_sim(_in_two_layers),
    "`resident='shell'`, after a forward whose graph is still there": late(on_sim(_saved_by_a_graph)),
    "`resident_layers=1`, and a device parameter put into another layer": used(_misplaced, device="sim"),
    "a host without memory for training": late(
        trainer(*_NO_MEMORY, runs=True), varies=r"[\d.]+ KiB|\d bytes", kind=MemoryError
    ),
    "`attach_l2l(model, L2LConfig(device_memory_budget='1GiB'))`": on_sim(_with_figures),
    "`device_memory_budget='1KiB'`": row(_budget(FIGURES_FILE), varies=r"\d+KiB"),
    "`device_memory_budget='1GiB'`, of which less is free": _budget(
        _with_figures, gives("hf_l2l.runtime.stream.memory_free", 2**20)
    ),
    "`device_memory_budget='1GiB', label_smoothing_factor=0.1`": trainer(runs=True, use_cpu=False),
}


# ---- optimizers


class MyOptimizer(torch.optim.SGD):
    """Cannot be taken apart: its step draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(())
        return super().step(closure)


def _wrapped(make: Callable[..., torch.optim.Optimizer] = MyOptimizer, *changes: Change, **options: Any) -> Prepare:
    """A model is attached, and its optimizer wrapped."""
    return used(lambda model, eps: partial(eps.wrap, make(model.parameters())), *changes, **options)


def _half_frozen(scene: Scene, model: Any) -> None:
    model.bfloat16().requires_grad_(False)
    model.classifier.float().requires_grad_()


def _hooked_later(model: Any, eps: Any) -> Act:
    _gradient_hook(None, model)
    return partial(eps.wrap, SGD(model.parameters()))


OPTIMIZERS: Rows = {
    "`torch.optim.LBFGS(parameters)`": _wrapped(torch.optim.LBFGS),
    "`AdamW(other_model.parameters())`": _wrapped(lambda parameters: torch.optim.AdamW(tiny_bert().parameters())),
    "`cmp='bf16'`, and weights of 16 bits thawed after attaching": used(
        lambda model, eps: partial(eps.wrap, SGD(model.requires_grad_().parameters())), _half_frozen
    ),
    "`parameter.register_hook(...)`": used(_hooked_later),
    "`eps_update='eager'`, `MyOptimizer(parameters)`": _wrapped(),
    "`grad_dtype='16bit'`, `MyOptimizer(parameters)`": _wrapped(),
    "`moment_dtype='8bit'`, `torch.optim.NAdam(parameters)`": _wrapped(torch.optim.NAdam),
    "`state_tier='disk'`, `MyOptimizer(parameters)`": _wrapped(),
    "`resident='shell'`, `MyOptimizer(parameters)`": _wrapped(device="sim"),
    "`eps_update='eager'`, `eps.clip_grad_norm_(1.0)`": used(lambda model, eps: partial(eps.clip_grad_norm_, 1.0)),
    "`grad_dtype='16bit'`, `optimizer.step(closure)`": used(
        lambda model, eps: partial(eps.wrap(SGD(model.parameters())).step, lambda: None)
    ),
    "`copy_as(model, torch.float32)`": call(copy_as, nn.Linear(2, 2), torch.float32),
    "`Lamb(parameters, lr=-1.0)`": call(Lamb, [nn.Parameter(torch.ones(2))], lr=-1.0),
    "`Lamb(parameters, betas=(0.9, 1.0))`": call(Lamb, [nn.Parameter(torch.ones(2))], betas=(0.9, 1.0)),
    "`Lamb(parameters, lr=tensor([1., 1.]))`": call(Lamb, [nn.Parameter(torch.ones(2))], lr=torch.ones(2)),
}


# ---- warnings


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


def _called_with_rows(layer: Callable[[], nn.Module]) -> Prepare:
    """A stack of two such layers, in training."""
    return used(
        lambda model, eps: partial(model, torch.ones(4, 16, requires_grad=True)),
        lambda scene, model: nn.Sequential(layer(), layer()),
        layer_classes=(type(layer()).__name__,),
    )


def _with_a_cache(model: Any, eps: Any) -> Act:
    ids = torch.arange(8).view(2, 4)
    return partial(model, input_ids=ids, labels=ids, use_cache=True)


def _not_locked(scene: Scene) -> Act:
    model, inputs = scene.model(), batch()
    scene.exits.callback(stream.forget_refusal, torch.device("sim:0"))
    scene.exits.enter_context(page_lock_limit(0))
    return lambda: attach_l2l(model, L2LConfig(device="sim")) and model(**inputs)


WARNINGS: Rows = {
    "a model whose layers are of no class that is known": attached(
        lambda scene, model: nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(4))})
    ),
    "`cmp='auto'`, in any case": attached(),
    "`device_memory_budget='1GiB', per_device_eval_batch_size=32`, and less to train": trainer(
        _with_figures, runs=True, use_cpu=False, eval_strategy="steps"
    ),
    "`ubatch_size=2`, and a layer with batch norm": _called_with_rows(lambda: nn.BatchNorm1d(16)),
    "`cmp='bf16'`, and a layer that writes to a buffer": _called_with_rows(Counting),
    "a driver that refuses to page-lock memory": late(_not_locked, varies=r"[\d.]+ KiB"),
    "`model(..., use_cache=True)`, in training": used(_with_a_cache, lambda scene, model: llama()),
    "`gradient_checkpointing=True`, or `model.gradient_checkpointing_enable()`": attached(
        lambda scene, model: model.gradient_checkpointing_enable()
    ),
    "`model.to('cuda')` before `attach_l2l`": attached(lambda scene, model: model.to("sim")),
    "a model loaded in 16 bits, without `cmp`": attached(_short),
    "`gradient_accumulation_steps=4, l2l_merge_accumulation='off'`": late(
        trainer(gives("hf_l2l.hf.preparation.weights_travel", True), runs=True)
    ),
    "`L2LTrainer(model)`, of a model without a stack of layers": trainer(lambda scene, model: nn.Linear(16, 16)),
    "`L2LTrainer(model)`, with an accelerator that torch knows and Accelerate does not": trainer(
        lambda scene, model: scene.patch.delenv("ACCELERATE_TORCH_DEVICE"), use_cpu=False
    ),
    "`MyOptimizer(parameters)`, whose step draws random numbers": _wrapped(eps_update="deferred"),
    "`state_tier='disk'`, with `state_dir` in host memory": row(
        attached(gives("hf_l2l.state_tier.server.is_in_memory", True)), varies=_FOLDER
    ),
    "`stash='disk'`, with `spill_dir` in host memory": row(
        on_sim(gives("hf_l2l.stash.spill.is_in_memory", True)), varies=_FOLDER
    ),
    "`resident='shell'`, with weights that share memory": on_sim(_tied_by_memory),
}
