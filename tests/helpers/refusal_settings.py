"""Settings that are refused by themselves, by each other, and beside those of transformers' Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from accelerate import ParallelismConfig
from torch import nn

from hf_l2l import L2LArgumentsMixin as ArgumentsMixin
from hf_l2l import L2LBatchGrowth, L2LCallback, L2LConfig, L2LTrainer, L2LTrainerMixin, make_l2l_arguments
from hf_l2l import make_l2l_trainer as make_trainer
from hf_l2l.option_names import argument
from models import albert
from refusals import Act, Case, Prepare, Rows, Scene, call, counts, gives, late, row, trainer, variable
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
    {"chunked_loss": 0},
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
    """Settings as they are typed as the Trainer's arguments."""
    typed = ", ".join(f"{argument(name)}={value!r}" for name, value in settings.items())
    return f"`{re.sub(r'x{300}', 'xxx...', typed)}`"


def _checked(make: Callable[[Scene], object], *changes: Callable[[Scene, Any], Any]) -> Prepare:
    """What is made, on a machine of 8 cores."""

    def prepare(scene: Scene) -> Act:
        for change in (gives("os.cpu_count", 8), *changes):
            change(scene, None)
        return partial(make, scene)

    return prepare


def _arguments(*changes: Callable[[Scene, Any], Any], **options: Any) -> Prepare:
    """The Trainer's arguments: what was typed, and these."""
    return _checked(lambda scene: scene.arguments(**options), *changes)


def _of_config(settings: Mapping[str, Any]) -> Case:
    """Options called as `L2LConfig` does, typed as the Trainer's arguments."""
    return row(_arguments(**{argument(name): value for name, value in settings.items()}), settings=settings)


def as_config(settings: Mapping[str, Any]) -> Case:
    """The same by `L2LConfig`."""
    return row(_checked(lambda scene: L2LConfig(**settings)))


VALUES_AND_NAMES: Rows = {
    **{shown(each): _of_config(each) for each in (*({name: value} for name, value in VALUES.items()), *MORE_VALUES)},
    "`l2l_trace='trace.json'`, in a folder without permission": _arguments(gives("os.access", False)),
    **{f"`{name}={value!r}`": _arguments() for name, value in OF_THE_TRAINER.items()},
    "`L2LConfig(device='gpu')`": call(L2LConfig, device="gpu"),
    "`L2LConfig(device=True)`": call(L2LConfig, device=True),
    "`l2l_bounary='host'`": row(_arguments(), kind=TypeError),
    "`L2LConfig(l2l_boundary='host')`": row(call(L2LConfig, l2l_boundary="host"), kind=TypeError),
}
OURS_TOGETHER: Rows = {
    **{shown(each): _of_config(each) for each in TOGETHER},
    "`l2l_optimizer='lamb', optim='sgd'`": _arguments(),
    "`cmp='bf16', bf16=True`": _arguments(),
    "`eps_update='eager', max_grad_norm=1.0`": _arguments(),
}


# ---- beside those of transformers' Trainer


def _argv(scene: Scene, model: Any) -> None:
    scene.patch.setattr("sys.argv", ["train.py"])


def _trained_by_another(scene: Scene) -> Act:
    model, data = scene.model(), rows()
    other = L2LTrainer(model, scene.arguments(use_cpu=True), eval_dataset=data)
    scene.typed = {}

    class Evaluates(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            other.evaluate()

    return L2LTrainer(model, scene.arguments(use_cpu=True), train_dataset=data, callbacks=[Evaluates()]).train


_Theirs = dataclass(type("Theirs", (hf.TrainingArguments,), {"__annotations__": {"stash": str}, "stash": "attic"}))
_MIXED = "ACCELERATE_MIXED_PRECISION"
WITH_THE_TRAINER: Rows = {
    "`deepspeed='zero3.json'`": trainer(later=True),
    "`fsdp='full_shard'`": trainer(later=True),
    "`parallelism_config=ParallelismConfig(...)`": trainer(parallelism_config=ParallelismConfig()),
    "`torch_compile=True`": trainer(),
    "`fp16=True`": trainer(),
    "`fp16_full_eval=True`": trainer(),
    "`bf16_full_eval=True`": trainer(),
    "`optim='galore_adamw_layerwise', optim_target_modules=['attention']`": trainer(),
    "`optim='lomo'`": trainer(),
    "`enable_jit_checkpoint=True, eps_update='eager', max_grad_norm=0.0`": trainer(),
    "`l2l_async_save=True`, on Windows": trainer(gives("hf_l2l.checkpoint.reserved.can_write_places", False)),
    "`l2l_realtime_checkpoint='now', save_only_model=True`": trainer(),
    "`l2l_realtime_every=5`": trainer(),
    "`l2l_noise_scale_every=5`": trainer(),
    "`output_dir='run', l2l_realtime_checkpoint='run'`": trainer(),
    "`accelerate launch --mixed_precision fp16`": trainer(variable(_MIXED, "fp16")),
    "`accelerate launch --mixed_precision bf16`, with `cmp='bf16'`": trainer(variable(_MIXED, "bf16")),
    "`accelerate launch --dynamo_backend inductor`": trainer(variable("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")),
    "`torchrun --nproc_per_node 4`, without accelerators and `use_cpu=True`": trainer(
        gives("hf_l2l.hf.training_args.launched_processes", 4)
    ),
    **{
        f"`torchrun --nproc_per_node 4`, with `{name}=True`": trainer(counts("world_size", 4), _argv)
        for name in ("auto_find_batch_size", "enable_jit_checkpoint", "save_on_each_node")
    },
    "`L2LTrainer(..., optimizers=(sgd, None))`, with `l2l_optimizer='lamb'`": lambda scene: partial(
        L2LTrainer,
        scene.model(),
        scene.arguments(use_cpu=True),
        optimizers=(torch.optim.SGD(scene.models[0].parameters(), lr=0.1), None),
    ),
    "`L2LTrainer(model, L2LConfig())`": lambda scene: partial(L2LTrainer, scene.model(), L2LConfig()),
    "`L2LTrainer('bert-base-uncased')`": lambda scene: partial(L2LTrainer, "bert-base-uncased", scene.arguments()),
    "`L2LTrainer(model, ubatch_size=2)`, while another one trains the model": late(_trained_by_another),
    "`class Mine(Trainer, L2LTrainerMixin)`": call(type, "Mine", (hf.Trainer, L2LTrainerMixin), {}),
    "`class Mine(TrainingArguments, L2LArgumentsMixin)`": call(
        type, "Mine", (hf.TrainingArguments, ArgumentsMixin), {}
    ),
    "`make_l2l_trainer(trainer)`, of an object": call(make_trainer, "trainer"),
    "`make_l2l_arguments(Theirs)`, which has a field `stash`": call(make_l2l_arguments, _Theirs),
}


# ---- trainers of other libraries


def _called_back(*changes: Callable[[Scene, Any], Any], **options: Any) -> Case:
    """A Trainer moves the model before it calls its callbacks."""

    def prepare(scene: Scene) -> Act:
        passed = {"callbacks": [L2LCallback(L2LConfig(**options))]}
        scene.typed = {}
        return trainer(*changes, _argv, kind=hf.Trainer, passed=passed, use_cpu=False)(scene)

    return late(prepare)


CALLBACKS: Rows = {
    "`Trainer(..., callbacks=[L2LCallback()])`, with two visible devices": _called_back(counts("n_gpu", 2)),
    "`Trainer(..., callbacks=[L2LCallback()])`, with `torchrun --nproc_per_node 4`": _called_back(
        counts("world_size", 4)
    ),
    "`L2LCallback(L2LConfig(nonfinite='skip'))`": call(L2LCallback, L2LConfig(nonfinite="skip")),
    "`L2LCallback(L2LConfig(device_memory_budget='1GiB'))`": _called_back(device="sim", device_memory_budget="1GiB"),
}


# ---- the noise scale, and batches that grow with it


def _measured(*changes: Callable[[Scene, Any], Any], **options: Any) -> Prepare:
    return trainer(*changes, **{"runs": True, "ubatch_size": 4, **options})


class _Own(L2LTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def _coupled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits @ outputs.logits.T, torch.arange(len(labels)))


def _growing(*sizes: int, **options: Any) -> Prepare:
    passed = {"callbacks": [L2LBatchGrowth(size) for size in sizes]}
    return _measured(passed=passed, **{"l2l_noise_scale": True, **options})


NOISE: Rows = {
    "`l2l_noise_scale=True`, with one micro-batch in a step": _measured(ubatch_size=None),
    "`l2l_noise_scale=True`, with batch norm over the rows of a batch": _measured(
        lambda scene, model: setattr(model, "classifier", nn.Sequential(nn.BatchNorm1d(16), model.classifier))
    ),
    "`l2l_noise_scale=True`, with a `training_step` of the trainer's own": _measured(kind=_Own),
    "`l2l_noise_scale=True`, with a loss that couples rows, such as a contrastive one": late(
        _measured(passed={"compute_loss_func": _coupled}), varies=r"[\d.]+(?= for a batch| as a)"
    ),
    "`l2l_noise_scale=True`, with layers that run several times, as those of ALBERT": late(
        _measured(lambda scene, model: albert())
    ),
    "`L2LBatchGrowth(0)`": call(L2LBatchGrowth, 0),
    "`L2LBatchGrowth(32, 'half')`": call(L2LBatchGrowth, 32, "half"),
    "`L2LBatchGrowth(32)`, without `l2l_noise_scale=True`": late(_growing(32, l2l_noise_scale=False)),
    "`L2LBatchGrowth(32)`, with 32 rows in a step": late(_growing(32, gradient_accumulation_steps=4)),
    "two of `L2LBatchGrowth`": _growing(32, 64),
}
NOISE_WARNINGS: Rows = {
    "`l2l_noise_scale=True`, and batches that have fewer rows than `ubatch_size`": late(_measured(count=4)),
}
