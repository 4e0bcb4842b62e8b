"""A training that is resumed at any step ends with the bits of the one that was never interrupted."""

from __future__ import annotations

import gc
import json
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import safe_globals

from accumulated import tiny_llama
from devices import DEVICE
from hf_l2l import L2LTrainer
from models import VOCAB
from plain import Streamed
from runs import assert_same_run, assert_same_tensors
from saving import At
from tiers import ALL, cpu_suffices, more, nightly, not_on_cuda, on_a_device, on_the_host
from training import (
    SAVING,
    StopAt,
    inner_optimizer,
    l2l_trainer,
    on,
    plain_trainer,
    rows,
    stopped_at_two,
    tiny_bert,
    trained_batches,
    trainer,
)

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
    pytest.mark.filterwarnings("ignore:the master weights are torch.bfloat16:UserWarning"),
]

STEPS = 8
COUNT = 44
"""Rows: of the last of six batches of an epoch, some are missing."""
RUN: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
RUN |= {"lr_scheduler_type": "cosine", "l2l_log_times": False}
TIMED = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
"""What is no part of a run."""


def drawn() -> int:
    """A number of all three generators that programs share."""
    return int(torch.randint(1000, ()).item()) + int(np.random.randint(1000)) + random.randrange(1000)


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with another token in a random place."""
    ids = list(row["input_ids"])
    ids[drawn() % len(ids)] = 5 + drawn() % (VOCAB - 5)
    return {**row, "input_ids": ids}


class Augmented(Dataset):  # type: ignore[type-arg]
    """Rows that are changed at random whenever they are read; of a language model, every token is a label."""

    def __init__(self, causal: bool = False) -> None:
        self.rows = [{**row, "labels": row["input_ids"]} if causal else row for row in rows(COUNT)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return changed(self.rows[index])


def streamed() -> Streamed:
    """Rows without a length, changed at random."""
    return Streamed(Augmented())  # type: ignore[arg-type]


class MaskingCollator(hf.DefaultDataCollator):
    """Changes a token of each batch at random."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        return super().__call__([changed(features[0]), *features[1:]], return_tensors)


TWO_LAYERS = partial(tiny_bert, layers=2)


class Recorded:
    """A trainer whose batches are noted: over random changes of rows, by default with dropout."""

    def __init__(
        self,
        folder: Path,
        kind: type[hf.Trainer] = L2LTrainer,
        *,
        data: Any = Augmented,
        model: Any = TWO_LAYERS,
        collator: Any = MaskingCollator,
        **options: Any,
    ) -> None:
        options = {**RUN, **options}
        if not issubclass(kind, L2LTrainer):
            options = {name: value for name, value in options.items() if not name.startswith("l2l_")}
        self.made = made = trainer(kind, folder, model=model(), **options)
        made.train_dataset, made.data_collator = data(), collator()
        if not isinstance(made.model, hf.BertForSequenceClassification):
            made.loss_is_scaled_for_ga = None  # of a language model it is; that of the classifier is a mean
        self.seen = trained_batches(made)

    @property
    def batches(self) -> list[list[list[int]]]:
        return [batch["input_ids"].tolist() for batch in self.seen]

    def train(self, resumes: Any = None) -> Recorded:
        self.made.train(resume_from_checkpoint=str(resumes) if isinstance(resumes, Path) else resumes)
        return self


def state_of(checkpoint: Path) -> dict[str, Any]:
    """`trainer_state.json` without the seconds that evaluations took, and without what the resuming was asked for."""
    written = json.loads((checkpoint / "trainer_state.json").read_text())
    history = [{k: str(v) for k, v in e.items() if k not in TIMED} for e in written["log_history"]]
    without = ("best_model_checkpoint", "save_steps")
    return {k: v for k, v in written.items() if k not in without} | {"log_history": history}


def assert_same_files(found: Path, expected: Path) -> None:
    """All that `expected` has is the same: weights, moments, scheduler, loss scale, generators; keys have their order,
    numbers their types."""
    assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    for path in (path for path in expected.iterdir() if path.suffix in (".pt", ".pth")):
        with safe_globals():
            both = [torch.load(file, weights_only=True, map_location="cpu") for file in (found / path.name, path)]
        (ours, form), (theirs, form_expected) = map(torch.utils._pytree.tree_flatten, both)
        assert form == form_expected, path
        for one, other in zip(ours, theirs, strict=True):
            assert type(one) is type(other), path
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype and torch.equal(one, other), path
            else:
                assert np.array_equal(one, other), path


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """And the state of the training, and no other file."""
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    assert_same_files(found, expected)
    assert state_of(found) == state_of(expected)


def assert_resumes_at(whole: Recorded, at: int, folder: Path, **options: Any) -> None:
    """A training that is resumed at a step of `whole`, which is over, ends as that did."""
    source = Path(whole.made.args.output_dir)
    again = Recorded(folder, **{"save_steps": STEPS, **options})
    drawn()  # what a program draws before it trains is something else each time
    again.train(source / f"checkpoint-{at}")
    assert again.made.state.global_step == STEPS
    assert again.batches == whole.batches[len(whole.batches) - len(again.batches) :]
    assert_same_checkpoint(folder / f"checkpoint-{STEPS}", source / f"checkpoint-{STEPS}")


class _OwnLoader(L2LTrainer):
    """Has a data loader that Accelerate has not prepared."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=8, shuffle=True, collate_fn=self.data_collator)


def end_epochs_of_four(args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_epoch_stop = state.global_step % 4 == 0


SHORT: dict[str, Any] = {"l2l_grad_dtype": "16bit", "l2l_moment_dtype": "bf16", "l2l_host_copies": "per_sweep"}
ACCUMULATED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
LLAMA = {"model": partial(tiny_llama, attention_dropout=0.1), "data": partial(Augmented, causal=True)}
CASES: dict[str, dict[str, Any]] = {
    "merged": {**ACCUMULATED, **LLAMA},
    "plateau": {
        **{"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}},
        **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
    },
    "epochs that are cut": {
        **{"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"},
        "callbacks": [on("on_step_end", end_epochs_of_four)],
    },
    "bf16": {"cmp": "bf16", "ubatch_size": 3, "eps_update": "deferred"},
    # The first scales are so large that steps are skipped, and growth begins anew.
    "fp16": {"cmp": "fp16", "l2l_loss_scale_init": 2.0**24, "l2l_loss_scale_interval": 2, "ubatch_size": 3, **SHORT},
    "workers": {"dataloader_num_workers": 2},
    "rows from a stream": {"data": streamed},
    "rows from a stream by workers": {"data": streamed, "dataloader_num_workers": 1},
    "an order drawn of the program's generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "own loader": {"kind": _OwnLoader},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "a model in 16 bits": {"model": lambda: tiny_bert(layers=2).bfloat16()},
    "moments of 8 bits": {"l2l_moment_dtype": "8bit", "eps_update": "deferred"},
    "saved while training goes on": {"l2l_async_save": True, "eps_update": "deferred"},
}
FAST = {
    "cpu": ("merged", "epochs that are cut", "workers", "own loader", "fp16", "moments of 8 bits"),
    "sim": ("rows from a stream",),
}
NOT_HERE = {"own loader", "plateau"} if DEVICE == "sim" else set()
# One within the first epoch, and its last one.
SOME = {"epochs that are cut": (4, 6), "merged": (5, 6)}


@not_on_cuda
@pytest.mark.parametrize("case", sorted(CASES.keys() - NOT_HERE) if ALL else FAST.get(DEVICE, ()))
def test_a_resumed_training_is_the_unbroken_one(tmp_path, caplog, case):
    """With dropout, an order that is drawn, and random changes of rows and batches, in two epochs."""
    whole = Recorded(tmp_path / "whole", **CASES[case]).train()
    generator = tmp_path / "whole" / "checkpoint-1" / f"rng_state_{DEVICE}.pth"
    assert generator.is_file() is (DEVICE == "sim"), "transformers saves those of other devices"
    assert case != "fp16" or 1 < whole.made.eps.loss_scale.skipped < STEPS
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        for at in range(1, STEPS) if ALL else SOME.get(case, (5,)):
            assert_resumes_at(whole, at, tmp_path / f"at {at}", **CASES[case])
    assert DEVICE == "cpu" or case != "rows from a stream" or "an order of rows" not in caplog.text


@nightly
@on_the_host
@pytest.mark.parametrize(
    ("options", "begun", "steps"),
    [
        ({}, {"save_strategy": "epoch"}, [STEPS]),  # which is not at its end
        ({**ACCUMULATED, "eval_strategy": "epoch"}, {"save_steps": 4}, [4, STEPS]),  # and the last step is shorter
    ],
    ids=["of which batches are left", "after its last step"],
)
def test_a_callback_ends_the_training_in_an_epoch(tmp_path, options, begun, steps):
    """Where the ends of epochs are saved."""
    whole = Recorded(tmp_path / "whole", **options, save_strategy="epoch").train()
    parts = Recorded(tmp_path / "parts", **options, **begun, callbacks=[StopAt(4)]).train()
    again = Recorded(tmp_path / "parts", **options, save_strategy="epoch")
    drawn()
    again.train(True)
    assert parts.batches + again.batches == whole.batches
    for step in steps:
        assert_same_checkpoint(*(tmp_path / name / f"checkpoint-{step}" for name in ("parts", "whole")))


OTHERS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "serial": {"eps_update": "serial"},
    "eager": {"eps_update": "eager", "l2l_num_threads": 1, "l2l_prefetch": False},
    "stash on the host": {"eps_update": "deferred", "l2l_num_threads": 2, "stash": "host"},
    "some stash on the device": {"ubatch_size": 8, "stash": "host", "l2l_device_stash": 2},
    "stash on disk": {"stash": "disk", "l2l_boundary": "host"},
    "state on disk": {"l2l_state_tier": "disk", "l2l_state_window": 3, "eps_update": "deferred"},
    "shell": {"l2l_resident": "shell"},
    "first layer": {"l2l_resident_layers": 1},
    "all resident": {"l2l_resident": "all"},
}
"""Options under which the arithmetic is the same, so that the bits are."""
PAIRS = [("serial", "state on disk"), ("all resident", "streamed")]
MORE = [("stash on the host", "eager"), ("some stash on the device", "stash on disk"), ("shell", "first layer")]


@on_a_device
@pytest.mark.parametrize(("first", "then"), [*PAIRS, *more(*MORE)])
def test_with_other_options(tmp_path, first, then):
    same = {"max_grad_norm": 0.0}
    whole = Recorded(tmp_path / "whole", **OTHERS[first], **same).train()
    assert_resumes_at(whole, 5, tmp_path / "again", **OTHERS[then], **same)


# ---- other numbers, and other places


@cpu_suffices
@pytest.mark.parametrize(("before", "after"), [({"cmp": "fp16"}, {}), ({}, {"cmp": "fp16"})], ids=str)
def test_a_run_goes_on_in_other_numbers(tmp_path, before, after):
    checkpoint = stopped_at_two(l2l_trainer, tmp_path, **before)
    resumed = l2l_trainer(tmp_path, **SAVING, **after)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == SAVING["max_steps"]
    assert (resumed.eps.loss_scale is None) == (not after)


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_saved_model_has_the_dtype_that_is_asked_for_and_checkpoints_the_masters(tmp_path, asked, dtype):
    """Masters of a model that was loaded in 16 bits are fp32, too."""
    model = tiny_bert(layers=2).bfloat16()
    made = l2l_trainer(tmp_path, model=model, cmp="bf16", l2l_save_dtype=asked, **{**SAVING, "max_steps": 2})
    made.train()
    made.save_model(str(tmp_path / "final"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in inner_optimizer(made).state.values()} == {torch.float32}
    saved, checkpoint = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "checkpoint-2"))
    assert_same_tensors(saved, {name: value.to(dtype) for name, value in model.state_dict().items()})
    assert {value.dtype for value in saved.values()} == {dtype}
    assert_same_tensors(checkpoint, model.state_dict())
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == dtype
    assert made.model is model


@on_a_device
def test_bf16_moments_of_a_streamed_run_are_resumed_by_a_resident_one(tmp_path):
    options = {**SAVING, "l2l_moment_dtype": "bf16"}
    l2l_trainer(tmp_path / "begun", **options).train()
    checkpoint = tmp_path / "begun" / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert {state["exp_avg"].dtype for state in saved.values()} == {torch.bfloat16}
    resumed = l2l_trainer(tmp_path / "resumed", **options, l2l_resident="shell")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    optimizer = inner_optimizer(resumed)
    for p in resumed.model.parameters():
        average = optimizer.state[p]["exp_avg"]
        short = torch.bfloat16 if p.device.type == "cpu" else torch.float32
        assert (average.device, average.dtype) == (p.device, short)


# ---- the other Trainer


PLACES = [{}, *more({"l2l_resident": "all"}, {"l2l_resident": "all", "l2l_resident_update": "host"})]


@pytest.mark.parametrize("placed", PLACES, ids=str)
def test_a_checkpoint_goes_to_the_other_trainer_and_back(tmp_path, placed):
    """Of a model with tied weights: names, dtypes and bits of all that both save are the same. With dropout, where the
    device's generator is that of the host."""
    runs, host = {}, {"use_cpu": True} if DEVICE != "cpu" else {}
    for name, kinds in {"plain": [plain_trainer], "three": [plain_trainer, l2l_trainer, plain_trainer]}.items():
        for number, make in enumerate(kinds, start=1):
            model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1 if DEVICE == "cpu" else 0.0)
            options = {**SAVING, **(host if make is plain_trainer else placed), "max_steps": 6, "save_steps": 2}
            made = make(tmp_path / name, model=model, **options)
            made.train_dataset = [{**row, "labels": row["input_ids"]} for row in rows()]
            if number < len(kinds):
                made.add_callback(StopAt(2 * number))
            made.train(resume_from_checkpoint=number > 1)
            runs[name] = made
    if DEVICE == "cpu":
        assert_same_run(runs["three"], runs["plain"])
    for step in (2, 4, 6):  # of ours, and of theirs after ours
        theirs, found = (tmp_path / name / f"checkpoint-{step}" for name in ("plain", "three"))
        added = {p.name for p in found.iterdir()} - {p.name for p in theirs.iterdir()}
        assert all(name.startswith(("l2l_", "rng_state_")) for name in added)
        assert "lm_head.weight" not in load_file(found / "model.safetensors")
        if DEVICE == "cpu":
            assert_same_files(found, theirs)
    assert runs["three"].model.lm_head.weight is runs["three"].model.model.embed_tokens.weight


# ---- what is not the same is told


def said_at(folder: Path, caplog: Any, at: int, *, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the warnings of a resumed training say."""
    Recorded(folder / "whole", **{"save_steps": at, "max_steps": at, **before}).train()
    again = Recorded(folder / "again", **{"save_strategy": "no", **after})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again.train(folder / "whole" / f"checkpoint-{at}")
    assert again.made.state.global_step == STEPS
    return [each.message for each in caplog.records if each.name == "hf_l2l" and each.levelno >= logging.WARNING]


class _OwnGenerator(MaskingCollator):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)


@on_the_host
def test_what_is_another_training_is_told(tmp_path, caplog):
    after: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 3}
    (said,) = said_at(tmp_path / "batches", caplog, 4, before={}, after=after)
    assert all(f"{name} (got {value!r}, and the checkpoint has" in said for name, value in after.items())
    plain = {"kind": hf.Trainer}
    said = "".join(said_at(tmp_path / "plain", caplog, 4, before=plain, after={}))
    assert "has no rng_state_data.pth: what is drawn for the rest of this epoch's batches" in said
    assert "drawn" not in "".join(said_at(tmp_path / "an epoch is over", caplog, 6, before=plain, after={}))
    (said,) = said_at(tmp_path / "stream", caplog, 4, before={"data": streamed}, after={"data": streamed})
    assert "so does the training (torch)" in said


@on_the_host
def test_generators_and_workers_that_begin_anew_are_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # so long it waits for their end
    options: dict[str, Any] = {"collator": _OwnGenerator}
    (said,) = said_at(tmp_path / "collator", caplog, 4, before=options, after=options)
    assert "begin anew (_OwnGenerator.generator)" in said
    options["dataloader_num_workers"] = 1  # each begins an epoch with a copy of the one here
    (said,) = said_at(tmp_path / "workers", caplog, 4, before=options, after=options)
    assert said.startswith("the workers of the data loader make the first 4 batches of the epoch again")
    if ALL:
        options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
        said, *_ = said_at(tmp_path / "persistent", caplog, 7, before=options, after=options)
        assert said.startswith("dataloader_persistent_workers=True")
    gc.collect()


@on_the_host
def test_a_checkpoint_of_a_step_that_is_not_made_yet_makes_it(tmp_path, caplog):
    """Saved between backward and step, as transformers does when a machine is about to be taken away."""
    first = Recorded(tmp_path, save_strategy="no")
    save = At("on_pre_optimizer_step", 4, lambda: first.made._save_checkpoint(first.made.model, None))
    first.made.add_callback(save)
    first.train()
    again = Recorded(tmp_path, save_strategy="no")
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again.train(tmp_path / "checkpoint-4")
    assert len(again.batches) == STEPS - 4 and "has no rng_state_data.pth" in caplog.text
