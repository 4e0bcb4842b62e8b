"""Settings that are refused by themselves, by each other, and beside those of transformers' Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from accelerate import ParallelismConfig

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainerMixin, L2LTrainingArguments, make_l2l_arguments, make_l2l_trainer
from hf_l2l.checkpoint import reserved
from hf_l2l.hf import training_args
from hf_l2l.hf.training_args import L2LArgumentsMixin
from hf_l2l.option_names import argument
from refusals import Act, Case, Prepare, Scene
from training import rows

VALUES: dict[str, Any] = {
    "ubatch_size": 0,
    "stash": "ssd",
    "boundary": "disk",
    "cmp": "fp8",
    "loss_scale_growth": 1.0,
    "loss_scale_backoff": 1.5,
    "loss_scale_interval": 0.5,
    "loss_scale_init": 0.0,
    "grad_dtype": "bf16",
    "moment_dtype": "fp16",
    "host_copies": "none",
    "state_tier": "ssd",
    "state_window": 2,
    "nonfinite": "ignore",
    "check_recompute": "always",
    "resident": "layers",
    "resident_layers": -1,
    "resident_update": "auto",
    "kept_weights": -1,
    "kept_graphs": 1.5,
    "device_stash": "all",
    "chunked_loss": "on",
    "head_device": "last",
    "device_memory_budget": "8",
    "prefetch": 1,
    "gradient_slots": 3,
    "eps_update": "async",
    "num_threads": 0,
    "rank_timeout": 0.5,
    "reduce": "nccl",
    "trace": 7,
    "layer_classes": (),
}
"""Options of `L2LConfig`, each with a value that is refused."""

MORE_VALUES: list[dict[str, Any]] = [
    {"spill_dir": 7, "stash": "disk"},
    {"state_dir": 7, "state_tier": "disk"},
    {"num_threads": 100_000},
    {"trace": "nowhere/trace.json"},
    {"trace": "/dev"},
    {"trace": "x" * 300},
    {"layer_classes": "MyBlock"},
]
TOGETHER: list[dict[str, Any]] = [
    {"cmp": "fp16", "eps_update": "eager"},
    {"nonfinite": "skip", "eps_update": "eager"},
    {"boundary": "host"},
    {"spill_dir": "/mnt/nvme"},
    {"state_dir": "/mnt/nvme"},
    {"state_window": 3},
    {"device_stash": 2},
    {"resident_update": "host"},
    {"resident": "all", "resident_layers": 2},
    {"state_tier": "disk", "resident": "all"},
    {"host_copies": "per_sweep"},
    {"loss_scale_init": 2.0},
]
"""Options of `L2LConfig` that are refused together, some with the defaults of others."""

OF_THE_TRAINER: dict[str, Any] = {
    "l2l_devices": "all",
    "l2l_optimizer": "lion",
    "l2l_save_dtype": "fp8",
    "l2l_merge_accumulation": "on",
    "l2l_log_times": "no",
    "l2l_async_save": "yes",
    "l2l_realtime_checkpoint": 3,
    "l2l_realtime_every": 0,
    "l2l_realtime_errors": "ignore",
    "l2l_noise_scale": "yes",
    "l2l_noise_scale_every": 0,
}
"""Options that the Trainer's arguments alone have."""


def shown(settings: Mapping[str, Any]) -> str:
    """Settings as they are typed."""
    return f"`{', '.join(f'{name}={value!r}' for name, value in settings.items())}`"


def _no_trace_is_writable(scene: Scene) -> Act:
    scene.patch.setattr(os, "access", lambda *_: False)
    return lambda: scene.arguments(l2l_trace="trace.json")


def _arguments(**options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        scene.patch.setattr(os, "cpu_count", lambda: 8)
        return lambda: scene.arguments(**options)

    return prepare


def of_config(settings: Mapping[str, Any]) -> Case:
    """Options called as `L2LConfig` does, typed as the Trainer's arguments."""
    named = {argument(name): value for name, value in settings.items()}
    typed = shown({n: f"{v[:3]}..." if isinstance(v, str) and len(v) > 99 else v for n, v in named.items()})
    return Case(typed, _arguments(**named))


def as_config(settings: Mapping[str, Any]) -> Case:
    """The same by `L2LConfig`."""

    def prepare(scene: Scene) -> Act:
        scene.patch.setattr(os, "cpu_count", lambda: 8)
        return lambda: L2LConfig(**settings)

    return Case(f"`L2LConfig({shown(settings).strip('`')})`", prepare)


def _given(**options: Any) -> Case:
    return Case(shown(options), _arguments(**options))


def _launched(variable: str, value: str, **options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        scene.patch.setenv(variable, value)
        return _with_model(**options)(scene)

    return prepare


def _with_model(later: Mapping[str, Any] | None = None, **options: Any) -> Prepare:
    """A trainer of a model; what this machine has not the packages for is set `later`, after they were asked for."""

    def prepare(scene: Scene) -> Act:
        model, data = scene.model(), rows()

        def train() -> object:
            args = scene.arguments(use_cpu=True, **options)
            for name, value in (later or {}).items():
                setattr(args, name, value)
            return L2LTrainer(model, args, train_dataset=data)

        return train

    return prepare


def _trained(**options: Any) -> Case:
    return Case(shown(options), _with_model(**options))


def _no_places(scene: Scene) -> Act:
    scene.patch.setattr(reserved, "can_write_places", lambda: False)
    return _with_model(l2l_async_save=True)(scene)


def _in_one_folder(scene: Scene) -> Act:
    return _with_model(output_dir="run", l2l_realtime_checkpoint="run")(scene)


def _set(**options: Any) -> Case:
    return Case(shown(options), _with_model(options))


def _several(name: str, value: int, **options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        scene.patch.setattr(L2LTrainingArguments, name, property(lambda self: value))
        scene.patch.setattr("sys.argv", ["train.py"])
        return _with_model(**options)(scene)

    return prepare


def _each_alone(scene: Scene) -> Act:
    scene.patch.setattr(training_args, "launched_processes", lambda: 4)
    return _with_model()(scene)


def _passed(scene: Scene) -> Act:
    model, args = scene.model(), scene.arguments(use_cpu=True, l2l_optimizer="lamb")
    sgd, data = torch.optim.SGD(model.parameters(), lr=0.1), rows()
    return lambda: L2LTrainer(model, args, train_dataset=data, optimizers=(sgd, None))


def _config_as_arguments(scene: Scene) -> Act:
    model, data = scene.model(), rows()
    return lambda: L2LTrainer(model, L2LConfig(), train_dataset=data)


def _trained_by_another(scene: Scene) -> Act:
    model, data = scene.model(), rows()
    other = L2LTrainer(model, scene.arguments(use_cpu=True, ubatch_size=2), eval_dataset=data)

    class Evaluates(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            other.evaluate()

    trained = L2LTrainer(model, scene.arguments(use_cpu=True), train_dataset=data, callbacks=[Evaluates()])
    return trained.train


def _taken_name() -> object:
    fields = {"__annotations__": {"stash": str}, "stash": "attic"}
    return make_l2l_arguments(dataclass(type("Theirs", (hf.TrainingArguments,), fields)))


VALUES_AND_NAMES = [
    *(of_config({name: value}) for name, value in VALUES.items()),
    *map(of_config, MORE_VALUES),
    Case("`l2l_trace='trace.json'`, in a folder without permission", _no_trace_is_writable),
    *(_given(**{name: value}) for name, value in OF_THE_TRAINER.items()),
    Case("`L2LConfig(device='gpu')`", lambda scene: lambda: L2LConfig(device="gpu")),
    Case("`L2LConfig(device=True)`", lambda scene: lambda: L2LConfig(device=True)),
    _given(l2l_bounary="host"),
    Case("`L2LConfig(l2l_boundary='host')`", lambda scene: lambda: L2LConfig(**{"l2l_boundary": "host"})),
]
OURS_TOGETHER = [
    *map(of_config, TOGETHER),
    _given(l2l_optimizer="lamb", optim="sgd"),
    _given(cmp="bf16", bf16=True),
    _given(eps_update="eager", max_grad_norm=1.0),
]
WITH_THE_TRAINER = [
    _set(deepspeed="zero3.json"),
    _set(fsdp="full_shard"),
    Case("`parallelism_config=ParallelismConfig(...)`", _with_model(parallelism_config=ParallelismConfig())),
    _trained(torch_compile=True),
    _trained(fp16=True),
    _trained(fp16_full_eval=True),
    _trained(bf16_full_eval=True),
    _trained(optim="galore_adamw_layerwise", optim_target_modules=["attention"]),
    _trained(optim="lomo"),
    _trained(enable_jit_checkpoint=True, eps_update="eager", max_grad_norm=0.0),
    Case("`l2l_async_save=True`, on Windows", _no_places),
    _trained(l2l_realtime_checkpoint="now", save_only_model=True),
    _trained(l2l_realtime_every=5),
    _trained(l2l_noise_scale_every=5),
    Case("`output_dir='run', l2l_realtime_checkpoint='run'`", _in_one_folder),
    Case("`accelerate launch --mixed_precision fp16`", _launched("ACCELERATE_MIXED_PRECISION", "fp16")),
    Case(
        "`accelerate launch --mixed_precision bf16`, with `cmp='bf16'`",
        _launched("ACCELERATE_MIXED_PRECISION", "bf16", cmp="bf16"),
    ),
    Case("`accelerate launch --dynamo_backend inductor`", _launched("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")),
    Case("`torchrun --nproc_per_node 4`, without accelerators and `use_cpu=True`", _each_alone),
    Case(
        "`torchrun --nproc_per_node 4`, with `auto_find_batch_size=True`",
        _several("world_size", 4, auto_find_batch_size=True),
    ),
    Case(
        "`torchrun --nproc_per_node 4`, with `enable_jit_checkpoint=True`",
        _several("world_size", 4, enable_jit_checkpoint=True),
    ),
    Case(
        "`torchrun --nproc_per_node 4`, with `save_on_each_node=True`",
        _several("world_size", 4, save_on_each_node=True),
    ),
    Case("`L2LTrainer(..., optimizers=(sgd, None))`, with `l2l_optimizer='lamb'`", _passed),
    Case("`L2LTrainer(model, L2LConfig())`", _config_as_arguments),
    Case(
        "`L2LTrainer('bert-base-uncased')`", lambda scene: lambda: L2LTrainer("bert-base-uncased", scene.arguments())
    ),
    Case(
        "`L2LTrainer(model, ubatch_size=2)`, while another one trains the model", _trained_by_another, is_early=False
    ),
    Case(
        "`class Mine(Trainer, L2LTrainerMixin)`",
        lambda scene: lambda: type("Mine", (hf.Trainer, L2LTrainerMixin), {}),
    ),
    Case(
        "`class Mine(TrainingArguments, L2LArgumentsMixin)`",
        lambda scene: lambda: type("Mine", (hf.TrainingArguments, L2LArgumentsMixin), {}),
    ),
    Case("`make_l2l_trainer(trainer)`, of an object", lambda scene: lambda: make_l2l_trainer("trainer")),
    Case("`make_l2l_arguments(Theirs)`, which has a field `stash`", lambda scene: _taken_name),
]
