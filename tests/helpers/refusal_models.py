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
from torch import distributed, nn

from budgeted import FIGURES
from hf_l2l import L2LCallback, L2LConfig, L2LTrainer, Lamb, attach_l2l, copy_as
from hf_l2l.hf import preparation
from hf_l2l.memory import host_limits
from hf_l2l.model import precision
from hf_l2l.runtime import stream
from hf_l2l.stash import spill
from hf_l2l.state_tier import server as state_server
from hf_l2l.testing import enable_simulated_accelerator, page_lock_limit
from refusals import Act, Case, Prepare, Scene
from toy_quantized import ToyInt8, quantized
from training import rows, tiny_bert


def batch() -> dict[str, torch.Tensor]:
    """One batch of `rows`."""
    some = rows(8)
    return {name: torch.tensor([row[name] for row in some]) for name in some[0]}


def _attached(change: Callable[[Scene, nn.Module], nn.Module | None] | None = None, **options: Any) -> Prepare:
    """A model that was changed before it is attached with these options."""

    def prepare(scene: Scene) -> Act:
        model = tiny_bert(layers=2)
        changed = None if change is None else change(scene, model)
        model = scene.model(model if changed is None else changed)
        return lambda: attach_l2l(model, L2LConfig(**{"device": "cpu", **options}))

    return prepare


def _with(**options: Any) -> Case:
    """A model as it is, attached with these options."""
    typed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return Case(f"`attach_l2l(model, L2LConfig({typed}))`", _attached(**options))


# ---- models


def _placed(scene: Scene, model: nn.Module) -> None:
    setattr(model, "hf_device_map", {"": "disk"})  # noqa: B010  # modules have no such attribute by their type


def _no_advice(scene: Scene, model: nn.Module) -> None:
    scene.patch.setattr(state_server, "can_map", lambda: False)


def _full_disk(scene: Scene, model: nn.Module) -> None:
    scene.patch.setattr(state_server.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))


def _two_processes(scene: Scene, model: nn.Module) -> None:
    scene.patch.setattr(state_server, "launched_processes", lambda: 2)


def _hooked(scene: Scene, model: nn.Module) -> None:
    add_hook_to_module(model.get_submodule("bert.pooler"), AlignDevicesHook())


def _sharing(scene: Scene, model: nn.Module) -> None:
    other = scene.model()
    attach_l2l(other, L2LConfig(device="cpu"))
    model.get_submodule("bert").encoder = other.get_submodule("bert.encoder")


def _sharded(scene: Scene, model: nn.Module) -> None:
    """As `fully_shard` leaves it; the class is known by its name, since a real one needs a process group."""
    kind = type("DTensor", (nn.Parameter,), {})
    dense = model.get_submodule("bert.pooler.dense")
    dense.register_parameter("weight", kind(torch.zeros(16, 16)))


def _fsdp(scene: Scene, model: nn.Module) -> nn.Module:
    return type("FullyShardedDataParallel", (nn.Sequential,), {})(model)


def _trained_quantized(scene: Scene, model: nn.Module) -> None:
    linear = model.get_submodule("bert.pooler.dense")
    linear.register_parameter("weight", quantized(linear.get_parameter("weight")).requires_grad_())


def _packed(scene: Scene, model: nn.Module) -> None:
    kind = type("Int8Params", (nn.Parameter,), {})
    packed = kind(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    model.get_submodule("bert.pooler.dense").register_parameter("weight", packed)


def _quantized_elsewhere(scene: Scene, model: nn.Module) -> None:
    config = SimpleNamespace(quant_method="awq")
    vars(model).update(is_quantized=True, hf_quantizer=SimpleNamespace(quantization_config=config))


class _NoKernel(ToyInt8):
    """A quantized weight whose library computes nothing with it."""

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError("no kernel for this device")


def _untrainable(scene: Scene, model: nn.Module) -> None:
    linear = model.get_submodule("bert.pooler.dense")
    parts = (torch.zeros(16, 16, dtype=torch.int8), torch.ones(16, 1))
    weight = _NoKernel(*parts, shape=torch.Size([16, 16]), dtype=torch.float32)
    linear.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def _reformer(scene: Scene, model: nn.Module) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 24}
    config = hf.ReformerConfig(attn_layers=["local", "local"], vocab_size=60, axial_pos_embds=False, **sizes)
    return hf.ReformerModel(config)


def _flat(scene: Scene, model: nn.Module) -> nn.Module:
    return nn.Linear(16, 16)


def _several_processes(scene: Scene, model: nn.Module) -> None:
    scene.patch.setattr(distributed, "is_initialized", lambda: True)
    scene.patch.setattr(distributed, "get_world_size", lambda: 4)


def _launched(scene: Scene, model: nn.Module) -> None:
    scene.patch.setenv("WORLD_SIZE", "4")


def _attached_before(scene: Scene, model: nn.Module) -> None:
    attach_l2l(model, L2LConfig(device="cpu", ubatch_size=4))


def _changed_layers(scene: Scene) -> Act:
    model, inputs = scene.model(), batch()
    attach_l2l(model, L2LConfig(device="cpu"))
    layers: Any = model.get_submodule("bert.encoder.layer")
    layers.append(copy.deepcopy(layers[0]))
    return lambda: model(**inputs)


def _moved(dtype: torch.dtype | None, device: str | None) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model = scene.model()
        attach_l2l(model, L2LConfig(device="cpu"))
        return lambda: model.to(device=device, dtype=dtype)

    return prepare


def _config_of_another_kind(scene: Scene) -> Act:
    model, config = scene.model(), {"stash": "host"}
    return lambda: attach_l2l(model, config)  # type: ignore[arg-type]  # that is what is refused


MODELS = [
    Case("`from_pretrained(name, device_map='auto')`", _attached(_placed)),
    Case("a model made inside `torch.device('meta')`", _attached(lambda scene, model: model.to("meta"))),
    Case("`fully_shard(model)`, or `tp_plan='auto'`", _attached(_sharded)),
    Case("`FullyShardedDataParallel(model)`", _attached(_fsdp)),
    Case("`DataParallel(model)`", _attached(lambda scene, model: nn.DataParallel(model))),
    Case("`torch.compile(model)`", _attached(lambda scene, model: torch.compile(model, backend="eager"))),  # type: ignore[arg-type, return-value]  # a module
    Case("`accelerate.cpu_offload(model)`", _attached(_hooked)),
    Case("a model that shares layers with one that is attached", _attached(_sharing)),
    Case("a quantized model whose weights require gradients", _attached(_trained_quantized)),
    Case("`BitsAndBytesConfig(load_in_8bit=True)`", _attached(_packed)),
    Case("a quantized model without quantized parameters, as of AWQ", _attached(_quantized_elsewhere)),
    Case("a quantized model whose library has no kernel for the device", _attached(_untrainable)),
    Case("Reformer on an accelerator", _attached(_reformer, device="sim")),
    Case("a model without a stack of layers", _attached(_flat)),
    _with(layer_classes=("BertLayers",))._replace(varies="BertAttention.*"),
    _with(resident_layers=9),
    Case("`attach_l2l(model, {'stash': 'host'})`", _config_of_another_kind),
    Case("`attach_l2l(model, other_config)`, on an attached model", _attached(_attached_before)),
    Case("`model.bert.encoder.layer.append(...)`, on an attached model", _changed_layers),
    Case("`model.half()`, on an attached model", _moved(torch.float16, None)),
    Case("`model.to('meta')`, on an attached model", _moved(None, "meta")),
    Case("`torchrun --nproc_per_node 4`, without a process group, and `attach_l2l`", _attached(_launched)),
    Case(
        "`torchrun --nproc_per_node 4`, and `attach_l2l(model, L2LConfig(resident='shell'))`",
        _attached(_several_processes, resident="shell", device="sim"),
    ),
]


# ---- devices and memory


def _no_bf16(scene: Scene, model: nn.Module) -> None:
    lacks = SimpleNamespace(is_bf16_supported=lambda: False)
    scene.patch.setattr(precision.stream, "device_module", lambda device: lacks)


def _no_generator(scene: Scene, model: nn.Module) -> None:
    scene.patch.delattr(torch.get_device_module("sim"), "get_rng_state")


def _no_locks(scene: Scene, model: nn.Module) -> None:
    scene.patch.setattr(spill, "can_spill", lambda: False)


def _short_and_held(scene: Scene, model: nn.Module) -> None:
    model.bfloat16()
    scene.held += map(weakref.ref, model.parameters())


def _held(scene: Scene, model: nn.Module) -> None:
    scene.held += map(weakref.ref, model.parameters())


def _gradient_hook(scene: Scene, model: nn.Module) -> None:
    model.get_parameter("classifier.bias").register_hook(lambda gradient: gradient)


def _in_two_layers(scene: Scene, model: nn.Module) -> None:
    first, second = (model.get_submodule(f"bert.encoder.layer.{n}.output.dense") for n in (0, 1))
    second.register_parameter("weight", first.get_parameter("weight"))


def _tied_by_memory(scene: Scene, model: nn.Module) -> None:
    word = model.get_parameter("bert.embeddings.word_embeddings.weight")
    model.get_submodule("bert.embeddings.position_embeddings").register_parameter(
        "weight", nn.Parameter(word.detach()[:16])
    )


def _no_host_memory(scene: Scene) -> Act:
    scene.patch.setattr(host_limits, "available_host_bytes", lambda: 0)
    scene.patch.setattr(host_limits, "own_bytes", lambda *_: 0)
    model, data = scene.model(), rows()
    args = scene.arguments(use_cpu=True)
    return lambda: L2LTrainer(model, args, train_dataset=data).train()


def _with_figures(scene: Scene) -> None:
    """Nothing of this machine is measured."""
    scene.patch.setenv("HF_L2L_FIGURES", str(scene.folder / "figures.json"))
    (scene.folder / "figures.json").write_text(FIGURES.to_json())


def _budget(asked: str, *, inputs: bool = True, free: int | None = None) -> Prepare:
    def prepare(scene: Scene) -> Act:
        _with_figures(scene)
        if free is not None:
            scene.patch.setattr(stream, "memory_free", lambda device: free)
        model, given = scene.model(), batch() if inputs else None
        config = L2LConfig(device="sim", device_memory_budget=asked)
        return lambda: attach_l2l(model, config, inputs=given)

    return prepare


def _saved_by_a_graph(scene: Scene, model: nn.Module) -> None:
    scene.held.append(model.get_parameter("classifier.bias").square().sum())


def _misplaced(scene: Scene) -> Act:
    model, inputs = scene.model(), batch()
    attach_l2l(model, L2LConfig(device="sim", resident_layers=1))
    dense = model.get_submodule("bert.encoder.layer.1.output.dense")
    dense.register_parameter("bias", nn.Parameter(torch.zeros(16, device="sim")))
    return lambda: model(**inputs)


def _budget_without_batches(scene: Scene) -> Act:
    model, data = scene.model(), rows()
    args = scene.arguments(device_memory_budget="1GiB", label_smoothing_factor=0.1)
    return lambda: L2LTrainer(model, args, train_dataset=data).train()


def _on_devices(asked: str, *, visible: int = 1, ranks: int = 1) -> Prepare:
    def prepare(scene: Scene) -> Act:
        enable_simulated_accelerator(devices=visible)
        scene.exits.callback(enable_simulated_accelerator)
        model, data, args = scene.model(), rows(), scene.arguments(l2l_devices=asked)
        scene.patch.setattr(type(args), "world_size", property(lambda self: ranks))
        return lambda: L2LTrainer(model, args, train_dataset=data)

    return prepare


DEVICES = [
    _with(device="sim:9"),
    _with(device=["sim:0", "cpu"]),
    _with(device=["sim:0", "sim:0"]),
    _with(device=[]),
    Case("`l2l_devices='2'`, where one is visible", _on_devices("2")),
    Case("`l2l_devices='2'`, with `torchrun --nproc_per_node 2`", _on_devices("2", visible=2, ranks=2)),
    Case("`l2l_devices='1,0'`", _on_devices("1,0", visible=2)),
    _with(device="meta"),
    Case("a device whose torch module has no `get_rng_state`", _attached(_no_generator, device="sim")),
    Case("`cmp='bf16'`, on a device that only emulates it", _attached(_no_bf16, cmp="bf16")),
    Case(
        "`cmp='auto', eps_update='eager'`, on a device without bf16",
        _attached(_no_bf16, cmp="auto", eps_update="eager"),
    ),
    Case("`cmp='bf16'`, on a model in 16 bits, with weak references to it", _attached(_short_and_held, cmp="bf16")),
    Case("`stash='disk', spill_dir='nowhere'`", _attached(device="sim", stash="disk", spill_dir="nowhere")),
    Case("`state_tier='disk', state_dir='nowhere'`", _attached(state_tier="disk", state_dir="nowhere")),
    Case("`state_tier='disk'`, on Windows", _attached(_no_advice, state_tier="disk"), varies="'/[^']*'"),
    Case("`state_tier='disk'`, on a full disk", _attached(_full_disk, state_tier="disk"), varies="'/[^']*'"),
    Case("`state_tier='disk'`, with `torchrun --nproc_per_node 2`", _attached(_two_processes, state_tier="disk")),
    Case("`stash='disk'`, on Windows", _attached(_no_locks, device="sim", stash="disk")),
    Case("`resident='shell'`, with weak references to parameters", _attached(_held, device="sim", resident="shell")),
    Case("`resident='shell'`, with a gradient hook", _attached(_gradient_hook, device="sim", resident="shell")),
    Case(
        "`resident_layers=1`, of a weight that two layers share",
        _attached(_in_two_layers, device="sim", resident_layers=1),
    ),
    Case(
        "`resident='shell'`, after a forward whose graph is still there",
        _attached(_saved_by_a_graph, device="sim", resident="shell"),
        is_early=False,  # torch refuses the move of the parameter itself; those before it move back
    ),
    Case("`resident_layers=1`, and a device parameter put into another layer", _misplaced),
    Case("a host without memory for training", _no_host_memory, is_early=False, varies=r"[\d.]+ KiB|\d bytes"),
    Case("`attach_l2l(model, L2LConfig(device_memory_budget='1GiB'))`", _budget("1GiB", inputs=False)),
    Case("`device_memory_budget='1KiB'`", _budget("1KiB"), varies=r"\d+KiB"),
    Case("`device_memory_budget='1GiB'`, of which less is free", _budget("1GiB", free=2**20)),
    Case("`device_memory_budget='1GiB', label_smoothing_factor=0.1`", _budget_without_batches),
]


# ---- optimizers


class MyOptimizer(torch.optim.SGD):
    """Cannot be taken apart: its step draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        """Make a step."""
        torch.rand(())
        return super().step(closure)


def _wrapped(make: Callable[[nn.Module], torch.optim.Optimizer], *, device: str = "cpu", **options: Any) -> Prepare:
    """A model is attached, and its optimizer wrapped."""

    def prepare(scene: Scene) -> Act:
        model = scene.model()
        eps, optimizer = attach_l2l(model, L2LConfig(device=device, **options)), make(model)
        return lambda: eps.wrap(optimizer)

    return prepare


def _noisy(model: nn.Module) -> torch.optim.Optimizer:
    return MyOptimizer(model.parameters(), lr=0.1)


def _thawed(scene: Scene) -> Act:
    model = scene.model(tiny_bert(layers=2).bfloat16().requires_grad_(False))
    model.get_submodule("classifier").float().requires_grad_()
    eps = attach_l2l(model, L2LConfig(device="cpu", cmp="bf16"))
    model.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: eps.wrap(optimizer)


def _hooked_later(model: nn.Module) -> torch.optim.Optimizer:
    model.get_parameter("classifier.bias").register_hook(lambda gradient: gradient)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _closure(scene: Scene) -> Act:
    model = scene.model()
    eps = attach_l2l(model, L2LConfig(device="cpu", grad_dtype="16bit"))
    optimizer: Any = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda: optimizer.step(lambda: None)


def _clipped(scene: Scene) -> Act:
    model = scene.model()
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager"))
    return lambda: eps.clip_grad_norm_(1.0)


def _lamb(**options: Any) -> Case:
    def prepare(scene: Scene) -> Act:
        model = scene.model()
        return lambda: Lamb(model.parameters(), **options)

    typed = ", ".join(f"{name}={value}" for name, value in options.items())
    return Case(f"`Lamb(parameters, {typed})`", prepare)


OPTIMIZERS = [
    Case("`torch.optim.LBFGS(parameters)`", _wrapped(lambda model: torch.optim.LBFGS(model.parameters()))),
    Case("`AdamW(other_model.parameters())`", _wrapped(lambda model: torch.optim.AdamW(tiny_bert().parameters()))),
    Case("`cmp='bf16'`, and weights of 16 bits thawed after attaching", _thawed),
    Case("`parameter.register_hook(...)`", _wrapped(_hooked_later)),
    Case("`eps_update='eager'`, `MyOptimizer(parameters)`", _wrapped(_noisy, eps_update="eager")),
    Case("`grad_dtype='16bit'`, `MyOptimizer(parameters)`", _wrapped(_noisy, grad_dtype="16bit")),
    Case("`state_tier='disk'`, `MyOptimizer(parameters)`", _wrapped(_noisy, state_tier="disk")),
    Case("`resident='shell'`, `MyOptimizer(parameters)`", _wrapped(_noisy, device="sim", resident="shell")),
    Case("`eps_update='eager'`, `eps.clip_grad_norm_(1.0)`", _clipped),
    Case("`grad_dtype='16bit'`, `optimizer.step(closure)`", _closure),
    Case("`copy_as(model, torch.float32)`", lambda scene: partial(copy_as, scene.model(), torch.float32)),
    _lamb(lr=-1.0),
    _lamb(betas=(0.9, 1.0)),
    _lamb(lr=torch.ones(2)),
]


# ---- trainers of other libraries


def _called_back(config: L2LConfig) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model, data = scene.model(), rows()
        args = scene.arguments()
        return lambda: hf.Trainer(model, args, train_dataset=data, callbacks=[L2LCallback(config)])

    return prepare


def _several_ranks(scene: Scene) -> Act:
    args = scene.arguments()
    scene.patch.setattr(type(args), "world_size", property(lambda self: 4))
    scene.patch.setattr("sys.argv", ["train.py"])
    model, data = scene.model(), rows()
    return lambda: hf.Trainer(model, args, train_dataset=data, callbacks=[L2LCallback()])


def _several_visible(scene: Scene) -> Act:
    scene.patch.setattr(hf.TrainingArguments, "n_gpu", property(lambda self: 2))
    scene.patch.setattr("sys.argv", ["train.py"])
    return _called_back(L2LConfig())(scene)


CALLBACKS = [
    Case("`Trainer(..., callbacks=[L2LCallback()])`, with two visible devices", _several_visible, is_early=False),
    Case(
        "`Trainer(..., callbacks=[L2LCallback()])`, with `torchrun --nproc_per_node 4`", _several_ranks, is_early=False
    ),
    Case("`L2LCallback(L2LConfig(nonfinite='skip'))`", lambda scene: lambda: L2LCallback(L2LConfig(nonfinite="skip"))),
    Case(
        "`L2LCallback(L2LConfig(device_memory_budget='1GiB'))`",
        _called_back(L2LConfig(device="sim", device_memory_budget="1GiB")),
        is_early=False,  # a Trainer moves the model before it calls its callbacks
    ),
]


# ---- warnings


def _checkpointing(scene: Scene, model: Any) -> None:
    model.gradient_checkpointing_enable()


def _train(**options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model, data = scene.model(), rows()
        args = scene.arguments(use_cpu=True, **options)
        return lambda: L2LTrainer(model, args, train_dataset=data).train()

    return prepare


def _without_layers(scene: Scene) -> Act:
    model, data = scene.model(nn.Linear(16, 16)), rows()
    args = scene.arguments(use_cpu=True)
    return lambda: L2LTrainer(model, args, train_dataset=data)


def _on_the_cpu(scene: Scene) -> Act:
    scene.patch.delenv("ACCELERATE_TORCH_DEVICE")
    model, args, data = scene.model(), scene.arguments(), rows()
    return lambda: L2LTrainer(model, args, train_dataset=data)


def _in_memory(scene: Scene, model: nn.Module) -> None:
    for module in (spill, state_server):
        scene.patch.setattr(module, "is_in_memory", lambda folder: True)


def _with_a_cache(scene: Scene) -> Act:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = scene.model(hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=60, **sizes)))
    attach_l2l(model, L2LConfig(device="cpu"))
    ids = torch.arange(8).view(2, 4)
    return lambda: model(input_ids=ids, labels=ids, use_cache=True)


class Normalized(nn.Module):
    """A layer that normalizes over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> Any:
        """Normalize `x`, of shape [rows, 16]."""
        return self.norm(x)


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Another `x`, of shape [rows, 16]."""
        self.calls += 1
        return self.linear(x)


def _written_buffers(scene: Scene) -> Act:
    model = scene.model(nn.Sequential(Counting(), Counting()))
    attach_l2l(model, L2LConfig(device="cpu", cmp="bf16", layer_classes=("Counting",)))
    return lambda: model(torch.ones(4, 16, requires_grad=True))


def _unknown_layers(scene: Scene, model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(4))})


def _not_cut(scene: Scene) -> Act:
    model = scene.model(nn.Sequential(Normalized(), Normalized()))
    attach_l2l(model, L2LConfig(device="cpu", ubatch_size=2, layer_classes=("Normalized",)))
    return lambda: model(torch.ones(4, 16, requires_grad=True))


def _not_locked(scene: Scene) -> Act:
    model, inputs = scene.model(), batch()
    scene.exits.callback(stream.forget_refusal, torch.device("sim:0"))
    scene.exits.enter_context(page_lock_limit(0))
    return lambda: attach_l2l(model, L2LConfig(device="sim")) and model(**inputs)


def _larger_evaluations(scene: Scene) -> Act:
    _with_figures(scene)
    model, data = scene.model(), rows()
    args = scene.arguments(device_memory_budget="1GiB", eval_strategy="steps", per_device_eval_batch_size=32)
    return lambda: L2LTrainer(model, args, train_dataset=data, eval_dataset=data).train()


def _accumulating(scene: Scene) -> Act:
    scene.patch.setattr(preparation, "weights_travel", lambda config: True)  # as on an accelerator
    return _train(gradient_accumulation_steps=4, l2l_merge_accumulation="off")(scene)


WARNINGS = [
    Case("a model whose layers are of no class that is known", _attached(_unknown_layers)),
    Case("`cmp='auto'`, in any case", _attached(cmp="auto")),
    Case("`device_memory_budget='1GiB', per_device_eval_batch_size=32`, and less to train", _larger_evaluations),
    Case("`ubatch_size=2`, and a layer with batch norm", _not_cut),
    Case("`cmp='bf16'`, and a layer that writes to a buffer", _written_buffers),
    Case("a driver that refuses to page-lock memory", _not_locked, is_early=False, varies=r"[\d.]+ KiB"),
    Case("`model(..., use_cache=True)`, in training", _with_a_cache),
    Case("`gradient_checkpointing=True`, or `model.gradient_checkpointing_enable()`", _attached(_checkpointing)),
    Case("`model.to('cuda')` before `attach_l2l`", _attached(lambda scene, model: model.to("sim"))),
    Case("a model loaded in 16 bits, without `cmp`", _attached(lambda scene, model: model.bfloat16())),
    Case(
        "`gradient_accumulation_steps=4, l2l_merge_accumulation='off'`",
        _accumulating,
        is_early=False,
    ),
    Case("`L2LTrainer(model)`, of a model without a stack of layers", _without_layers),
    Case("`L2LTrainer(model)`, with an accelerator that torch knows and Accelerate does not", _on_the_cpu),
    Case("`MyOptimizer(parameters)`, whose step draws random numbers", _wrapped(_noisy, eps_update="deferred")),
    Case(
        "`state_tier='disk'`, with `state_dir` in host memory",
        _attached(_in_memory, state_tier="disk"),
        varies="'/[^']*'",
    ),
    Case(
        "`stash='disk'`, with `spill_dir` in host memory",
        _attached(_in_memory, device="sim", stash="disk"),
        varies="'/[^']*'",
    ),
    Case(
        "`resident='shell'`, with weights that share memory",
        _attached(_tied_by_memory, device="sim", resident="shell"),
    ),
]
