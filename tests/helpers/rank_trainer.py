"""A training of a Trainer in each rank of a launcher, or in one process."""

from __future__ import annotations

import errno
import logging
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import distributed, nn
from torch.utils.data import Dataset
from torch.utils.serialization import config as serialization

from hf_l2l import L2LBatchGrowth, L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import CheckpointSaveError
from hf_l2l.hf import checkpoints, preparation
from hf_l2l.hf.preparation import devices_of
from hf_l2l.noise import growth
from hf_l2l.noise import trainer_part as noise_part
from hf_l2l.noise.estimate import NoiseScale
from hf_l2l.rank_saves import background
from hf_l2l.realtime import trainer_part
from models import TOKENS, VOCAB, bert, llama
from rank_cases import large
from rank_pool import digest
from training import left_in

SAVED: dict[str, Any] = {"eps_update": "deferred", "save_strategy": "steps", "save_steps": 2}
SAME = ("weights", "state", "step")
"""What is the same of a training that was resumed."""
REALTIME: dict[str, Any] = {"eps_update": "deferred", "save_strategy": "no", "lr_scheduler_type": "constant"}
REALTIME["l2l_realtime_every"] = 1


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens."""

    def __init__(self, count: int, labels: str) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(5, VOCAB, (count, TOKENS), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator) if labels == "classes" else self.ids.clone()
        if labels == "tokens":
            self.labels[::3, 3:] = -100  # rows with fewer tokens, so that batches of ranks have unequal numbers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[place], "labels": self.labels[place]}


class Drawing(Rows):
    """Rows of which some tokens are drawn when they are read."""

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(place)
        return {**row, "input_ids": torch.where(torch.rand(TOKENS) < 0.2, 7, row["input_ids"])}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


MODELS: dict[str, tuple[Any, str]] = {
    "bert": (bert, "classes"),
    "dropout": (lambda: bert(0.2), "classes"),
    "drawing": (lambda: bert(0.2), "classes"),
    "llama": (llama, "tokens"),
    "large": (large, "tokens"),
}


class OnSimulatedDevices(L2LTrainingArguments):
    """Accelerate knows no launcher of simulated devices: each rank has all of the data, and its own devices."""

    world_size = property(lambda self: distributed.get_world_size())
    process_index = property(lambda self: distributed.get_rank())
    device = property(lambda self: torch.device("sim", distributed.get_rank()))


def arguments(folder: str, options: dict[str, Any], *, layered: bool) -> Any:
    """Training arguments for a few steps on the CPU."""
    usual = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4, "logging_steps": 1}
    usual |= {"learning_rate": 1e-2, "max_grad_norm": 0.5, "save_strategy": "no"}
    usual |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    kind = L2LTrainingArguments if layered else hf.TrainingArguments
    kind = kind if options.get("use_cpu", True) else OnSimulatedDevices
    return kind(output_dir=folder, **{**usual, **options})


def fresh() -> None:
    """Forget what accelerate has kept of an earlier function, and seed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)


def trained(
    name: str,
    kind: str,
    folder: str,
    options: dict[str, Any],
    rows: int = 70,
    checkpoint: str | bool | None = None,
    evaluates: bool = False,
) -> dict[str, Any]:
    """Train, and perhaps evaluate and predict; losses, norms and metrics as numbers, weights and state as digests. The
    kind is "l2l", or "hf" for transformers' Trainer."""
    fresh()
    make, labels = MODELS[name]
    model: nn.Module = make()
    args = arguments(folder, options, layered=kind == "l2l")
    trainer_type = L2LTrainer if kind == "l2l" else hf.Trainer
    data = (Drawing if name == "drawing" else Rows)(rows, labels)
    trainer = trainer_type(model=model, args=args, train_dataset=data, eval_dataset=Rows(13, labels))
    places: set[str] = set()
    mapped: set[bool] = set()
    load, load_file = torch.load, Mock(wraps=safetensors.torch.load_file)

    def noted(file: Any, map_location: Any = None, **more: Any) -> Any:
        if str(file).endswith("optimizer.pt"):
            places.add(str(map_location))
            mapped.add(more.get("mmap") or serialization.load.mmap)
        if kind == "hf" and str(map_location) == "cpu:0":
            map_location = "cpu"  # with several ranks, transformers 5.17 names a device that torch cannot load to
        return load(file, map_location=map_location, **more)

    lines = Lines()
    with warnings.catch_warnings(record=True) as warned, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", noted)
        # As on an accelerator: where layers run on the CPU, nobody is warned of accumulation.
        patch.setattr(preparation, "weights_travel", lambda config: config.resident != "all")
        patch.setattr(safetensors.torch, "load_file", load_file)
        logging.getLogger("hf_l2l").addHandler(lines)
        trainer.train(resume_from_checkpoint=checkpoint)
        logging.getLogger("hf_l2l").removeHandler(lines)
    history, callbacks = trainer.state.log_history, trainer.callback_handler.callbacks
    state = trainer.optimizer.state_dict()["state"]
    found = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "weights": digest(*model.parameters()),
        "named": digest(*(p for _, p in sorted(model.named_parameters()))),
        "values": [p.detach().double().sum().item() for p in model.parameters()],
        "state": digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each))),
        "step": trainer.state.global_step,
        "loaded_to": sorted(places),
        "loaded_weights": load_file.call_count,
        "mapped": sorted(mapped),
        "logged": " ".join(lines.lines),
        "devices": [] if kind == "hf" else [str(each) for each in devices_of(args, None)],
        "warned": " ".join(str(each.message) for each in warned),
        "best": trainer.state.best_model_checkpoint,
        "noise": next((each.averages for each in callbacks if isinstance(each, noise_part.L2LNoiseScale)), None),
        "wrapped": type(trainer.model_wrapped).__name__,
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
    }
    if evaluates:
        predictions = trainer.predict(Rows(13, labels)).predictions
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        found |= {"eval_loss": trainer.evaluate()["eval_loss"], "predictions": digest(torch.from_numpy(predictions))}
    if kind == "l2l":
        detach_l2l(model)
    PartialState._reset_state()
    return found


def trained_with_other_lengths(*args: Any) -> dict[str, Any]:
    """`trained`, by ranks whose first batches would have them measure the noise scale at other steps."""
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() > 0:
            patch.setattr(noise_part, "ENOUGH_TOKENS", 1)
        return trained(*args)


class _Alone(hf.TrainerCallback):
    """Logs in rank 0 alone."""

    trainer: Any = None

    def on_step_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        if args.process_index == 0:
            self.trainer.log({"loss": 1.0})


def trained_and_growing(*args: Any) -> dict[str, Any]:
    """`trained`, with batches that grow to 16 rows of all ranks after two steps, and a rank that logs alone."""
    init = L2LTrainer.__init__

    def with_callbacks(self: L2LTrainer, *given: Any, **named: Any) -> None:
        alone = _Alone()
        init(self, *given, **named, callbacks=[L2LBatchGrowth(16), alone])
        alone.trainer = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_part, "LOOKS_EVERY", 1)
        patch.setattr(growth, "FEWEST_MEASURED", 0)
        patch.setattr(NoiseScale, "critical_batch", property(lambda self: 100.0 if self.steps > 1 else 1.0))
        patch.setattr(L2LTrainer, "__init__", with_callbacks)
        return trained(*args)


class HeadLoss(nn.Module):
    """A loss with parameters of its own, which calls the model, as those of sentence-transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(2, 3)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(self.head(self.model(**inputs).logits), labels)


class WithLoss(L2LTrainer):
    """Trains that loss, too."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=1e-2)  # those of the model among them
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.loss(dict(inputs))


def trained_with_loss(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a model and a loss; the gradients of the model alone are clipped."""
    fresh()
    model = bert()
    made = WithLoss(model=model, args=arguments(folder, options, layered=True), train_dataset=Rows(70, "classes"))
    made.loss = HeadLoss(model)
    made.model_accepts_loss_kwargs = False
    made.train()
    found = {
        "norms": [float(entry["grad_norm"]) for entry in made.state.log_history if "grad_norm" in entry],
        "weights": digest(*made.loss.parameters()),
        "summary": made.l2l_summary(),
    }
    detach_l2l(model)
    PartialState._reset_state()
    return found


class Failing(L2LTrainer):
    """Cannot write a checkpoint at a step: `where` says in which rank, and at what of it."""

    where: tuple[int, str] = (0, "")

    def fail(self, what: str) -> None:
        if (distributed.get_rank(), what) == self.where and (
            self.state.global_step == 4 or what in ("values", "folder")
        ):
            raise OSError(errno.ENOSPC, "No space left on device", str(self._get_output_dir(None)))

    def _save_rng_state(self, output_dir: str) -> None:
        self.fail("generators")
        super()._save_rng_state(output_dir)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.fail("weights")
        super().save_model(*args, **kwargs)


def _failing_before(original: Any, made: Failing, what: str) -> Any:
    """A function, before which the trainer cannot save."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        made.fail(what)
        return original(*args, **kwargs)

    return broken


def failed_to_save(folder: str, rank: int, what: str) -> dict[str, Any]:
    """A training that cannot write its second checkpoint, which is the best one: its error, and what is left."""
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    fresh()
    args = arguments(folder, {**options, "load_best_model_at_end": True}, layered=True)
    made = Failing(model=bert(), args=args, train_dataset=Rows(70, "classes"), eval_dataset=Rows(13, "classes"))
    made.where = rank, what
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointSaveError) as error:
        for name, of in (("check_room", "room"), ("write_manifest", "commit")):
            patch.setattr(checkpoints, name, _failing_before(getattr(checkpoints, name), made, of))
        made.train()
    found = {"error": str(error.value), "left": left_in(Path(folder))}
    made.where = -1, ""
    made.train(resume_from_checkpoint=True)  # the ranks are still there
    found |= {"step": made.state.global_step, "then": left_in(Path(folder))}
    detach_l2l(made.model)
    PartialState._reset_state()
    return found


def failed_generation(folder: str, options: dict[str, Any], what: str = "generators") -> dict[str, Any]:
    """A training in which rank 1 cannot write or read its part of the fourth generation, or rank 0 its folder."""
    fresh()
    made = Failing(model=bert(), args=arguments(folder, options, layered=True), train_dataset=Rows(70, "classes"))
    made.where = 0 if what == "folder" else 1, what
    write, checkpoints_in = Region.write, trainer_part.checkpoints_in

    def written(region: Region, descriptor: int) -> None:
        if "checkpoint-4" in str(region.file):
            made.fail("values")
        write(region, descriptor)

    def folders_in(run: Path) -> list[Path]:
        found = checkpoints_in(run)
        if any(each.name == "checkpoint-4" for each in found):
            made.fail("folder")
        return found

    class Waits(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            made.eps.synchronize()  # for what all ranks write

    made.add_callback(Waits())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "write", written)
        patch.setattr(background, "read_regions", _failing_before(background.read_regions, made, "part"))
        patch.setattr(trainer_part, "checkpoints_in", folders_in)
        text = ""
        try:
            made.train()
        except CheckpointSaveError as error:
            text = str(error)
    distributed.barrier()  # rank 0 has let go of the folder
    left = sorted(path.name for path in Path(options["l2l_realtime_checkpoint"]).iterdir())
    detach_l2l(made.model)
    PartialState._reset_state()
    return {"error": text, "step": made.state.global_step, "left": left}
