"""The noise scale in trainings: against plain torch, with the bits of a training without it, resumed, refused. Batches
that grow with the critical batch: the same rows, in the same order, in fewer steps; resumed exactly."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from accumulated import forwards, made, tiny_llama, train
from devices import DEVICE
from hf_l2l import L2LBatchGrowth, L2LTrainer
from hf_l2l.noise import growth as growth_of
from hf_l2l.noise import trainer_part
from hf_l2l.noise.estimate import DECAY, Measured, NoiseScale
from hf_l2l.noise.items import items_of_rows, measured
from models import SMALL, vit
from plain import Streamed
from runs import assert_same_run, assert_same_tensors
from saving import At
from tiers import ALL, cpu_suffices, more, nightly
from training import l2l_trainer, on, rows, tiny_bert, trained_batches, trainer

ON: dict[str, Any] = {"l2l_noise_scale": True, "l2l_noise_scale_every": "1"}
STILL = {"learning_rate": 0.0, "max_steps": 2, **ON}


def callback_of(trained: hf.Trainer) -> Any:
    """The one that saves the averages of a training."""
    [noise] = [each for each in trained.callback_handler.callbacks if type(each).__name__ == "L2LNoiseScale"]
    return noise


def found_by(trained: hf.Trainer) -> NoiseScale:
    found: NoiseScale = callback_of(trained).found
    return found


def noise_logs(of: hf.Trainer) -> list[tuple[Any, ...]]:
    names = ("l2l_noise_scale", "l2l_critical_batch")
    return [tuple(entry.get(name) for name in names) for entry in of.state.log_history if "loss" in entry]


def assert_as_in_plain_torch(
    mine: hf.Trainer, model: nn.Module, accumulated: int, ubatch: int, *, is_sum: bool = False, rel: float = 1e-3
) -> None:
    """What two steps measure of a copy of the model is found in plain torch from the same batches."""
    seen = trained_batches(mine)
    train(mine)
    batches = [{name: value.cpu() for name, value in batch.items()} for batch in seen]
    steps = [batches[n : n + accumulated] for n in (0, accumulated)]
    assert_measured(mine, in_plain_torch(model, steps, ubatch, is_sum=is_sum), rel)


def in_plain_torch(
    model: nn.Module, steps: list[list[dict[str, torch.Tensor]]], ubatch: int, *, is_sum: bool
) -> list[NoiseScale]:
    """The averages after each step, of a model whose weights do not change. A mean is what transformers before 5.23
    does not divide by the accumulated batches, since it takes it for a sum over all of them."""
    model.train()
    layers = [p for name, p in model.named_parameters() if ".layer" in name]
    scale, found = NoiseScale(), []
    factor = 1 if is_sum or hasattr(hf.Trainer, "loss_is_scaled_for_ga") else len(steps[0]) ** 2
    for batches in steps:
        whole = sum(sum(items_of_rows(batch, shifts=is_sum)) for batch in batches)
        parts: list[torch.Tensor] = []
        about = Measured()
        for batch in batches:
            items = items_of_rows(batch, shifts=is_sum)
            cuts = [(start, min(start + ubatch, len(items))) for start in range(0, len(items), ubatch)]
            about = about + measured(items, cuts, is_sum=is_sum)
            for start, stop in cuts:
                some = {name: value[start:stop] for name, value in batch.items()}
                loss = model(**some).loss * sum(items[start:stop])
                loss = loss / (whole if is_sum else sum(items) * len(batches))
                parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, layers)]))
        squares = sum(float(part.square().sum()) for part in parts)
        scale.observe(about + Measured(squares=squares), float(sum(parts).norm()))
        found.append(dataclasses.replace(scale, signal=factor * scale.signal, noise=factor * scale.noise))
    return found


def assert_measured(trained: hf.Trainer, expected: list[NoiseScale], rel: float = 1e-3) -> None:
    """What was measured after the last step, and what was logged after each."""
    found, last, logged = found_by(trained), expected[-1], noise_logs(trained)
    assert found.steps == len(logged) == len(expected) and (found.items, found.rows) == (last.items, last.rows)
    assert found.noise == pytest.approx(last.noise, rel=rel)
    assert found.signal == pytest.approx(last.signal, rel=rel, abs=rel * last.noise / last.items)
    for one, at_step in zip(logged, expected, strict=True):
        for mine, theirs in zip(one, (at_step.scale, at_step.critical_batch), strict=True):
            assert rel > 1e-3 or mine == (None if theirs is None else pytest.approx(theirs, rel=1e-2))


ON_DEVICES: dict[str, dict[str, Any]] = {
    "without L2L": {"ubatch_size": None, "l2l_resident": "all", "l2l_kept_graphs": 2, "accumulated": 2},
    "host stash": {"stash": "host", "l2l_resident_layers": 1, "l2l_kept_graphs": 1},
    "fp16": {"cmp": "fp16", "max_grad_norm": 0.0},
}
CASES: dict[str, dict[str, Any]] = {
    "serial": {"eps_update": "serial"},
    "deferred, accumulated": {"eps_update": "deferred", "accumulated": 2},
    "state on disk, bf16": {"l2l_state_tier": "disk", "cmp": "bf16"},
    **({} if DEVICE == "cpu" else ON_DEVICES),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_mean_loss_against_plain_torch(tmp_path, options):
    """BERT's loss is a mean over each batch: its batches run one by one."""
    model, accumulated = tiny_bert(dropout=0.0, layers=2), options.get("accumulated", 1)
    given = {"ubatch_size": 3, **{name: value for name, value in options.items() if name != "accumulated"}}
    same = {"gradient_accumulation_steps": accumulated, **STILL}
    mine = l2l_trainer(tmp_path, model=copy.deepcopy(model), **same, **given)
    rel = 0.05 if "cmp" in options else 1e-3
    assert_as_in_plain_torch(mine, model, accumulated, given["ubatch_size"] or 8, rel=rel)


@nightly
@cpu_suffices
@pytest.mark.parametrize(("merge", "ubatch"), [("auto", None), ("off", 1)])
def test_a_sum_over_tokens_against_plain_torch(tmp_path, merge, ubatch):
    """With one micro-batch in each batch, those of a step are compared with each other."""
    model, options = tiny_llama(), {"ubatch_size": ubatch, "l2l_merge_accumulation": merge}
    mine = made(tmp_path, model=copy.deepcopy(model), **options, **STILL)
    assert_as_in_plain_torch(mine, model, 4, ubatch or 2, is_sum=True)


@cpu_suffices
def test_batches_of_one_row_with_a_mean_over_tokens(tmp_path):
    """What the loss is, is told by a batch of one row, too: its weight is that of its batch."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = hf.BertForTokenClassification(hf.BertConfig(**SMALL, **dropout))
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    mine = l2l_trainer(tmp_path, model=copy.deepcopy(model), **options, **STILL)
    mine.train_dataset = [
        {**row, "labels": [-100] * (n % 5) + [token % 2 for token in row["input_ids"][n % 5 :]]}
        for n, row in enumerate(rows())
    ]
    assert_as_in_plain_torch(mine, model, 4, 1)


# ---- no bit changes

TWO_LAYERS: dict[str, Any] = {"ubatch_size": 3, "max_steps": 4, "model": partial(tiny_bert, layers=2)}
SHORT = {"l2l_noise_scale_every": "3", "cmp": "bf16", "l2l_grad_dtype": "16bit"}
KEPT = {"l2l_kept_graphs": 2, "eps_update": "eager", "max_grad_norm": 0.0}
RUNS: dict[str, Any] = {
    "sampled, of bf16": (l2l_trainer, TWO_LAYERS | SHORT, 2),
    "kept graphs, eager": (l2l_trainer, TWO_LAYERS | KEPT, 4),
    **({"merged batches": (made, {"model": tiny_llama}, 3)} if ALL else {}),
}
"""Trainer, options, and how many steps are measured."""


@cpu_suffices
@pytest.mark.parametrize(("make", "options", "steps"), RUNS.values(), ids=RUNS)
def test_measuring_changes_no_bit(tmp_path, make, options, steps):
    """Of weights, state, logs and random numbers: dropout draws in each step; nor does it run a forward more."""
    plain = {name: value for name, value in options.items() if not name.startswith("l2l_noise")}
    runs, seen = [], []
    for given in (plain, ON | options):
        runs.append(make(tmp_path, **{**given, "model": options["model"]()}))
        seen.append(forwards(runs[-1]))
        train(runs[-1])
    without, measuring = runs
    assert seen[0] == seen[1]
    assert_same_run(measuring, without)
    assert found_by(measuring).steps == steps


# ---- which steps are measured


@cpu_suffices
def test_how_often_is_by_the_tokens_of_a_micro_batch(tmp_path):
    """8 tokens in a row, and 3 rows in a batch: 3,072 tokens take so many. Of inputs that are no tokens, each step is
    measured."""
    for ubatch, every in ((None, 128), (2, 192), (1, 384)):
        options = {**ON, "l2l_noise_scale_every": "auto", "gradient_accumulation_steps": 2, "max_steps": 1}
        mine = l2l_trainer(tmp_path, ubatch_size=ubatch, per_device_train_batch_size=3, **options)
        train(mine)
        assert (callback_of(mine).every, found_by(mine).steps) == (every, 1)
    mine = l2l_trainer(tmp_path, model=vit(), ubatch_size=2, max_steps=2, l2l_noise_scale=True)
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    mine.train_dataset = [{"pixel_values": each, "labels": n % 2} for n, each in enumerate(images)]
    mine.train()
    assert found_by(mine).steps == 2


@cpu_suffices
def test_steps_whose_gradients_are_not_finite_are_left_out(tmp_path):
    """A first loss that is not finite is not taken for one that couples rows: the next batch tells what it is."""
    mine = l2l_trainer(tmp_path, ubatch_size=2, l2l_nonfinite="skip", max_steps=4, **ON)
    weight = mine.model.classifier.weight.requires_grad_(False)
    before = weight.detach().clone()

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * float("inf") if mine.state.global_step == 2 and module.training else None

    weight.fill_(float("inf"))
    mine.model.bert.encoder.layer[0].output.dense.register_forward_hook(spoil)
    mine.add_callback(on("on_step_end", lambda *_, **__: weight.copy_(before)))
    mine.train()
    assert found_by(mine).steps == 2


@nightly
@cpu_suffices
def test_a_step_that_is_given_up_is_measured_with_the_next(tmp_path):
    """Its gradients are added to those of the next one, as without L2L."""
    given_up = []

    def give_up(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 1 and not given_up
        given_up.extend([1] * control.should_epoch_stop)

    options = {"ubatch_size": 2, "gradient_accumulation_steps": 2, **STILL, "max_steps": 4}
    mine = l2l_trainer(tmp_path, callbacks=[on("on_substep_end", give_up)], **options)
    train(mine)
    average = 0.0
    for rows_of_step in (16, 24, 16, 16):
        average = DECAY * average + (1 - DECAY) * rows_of_step
    assert found_by(mine).steps == 4 and found_by(mine).rows == pytest.approx(average)


@nightly
@cpu_suffices
def test_a_log_of_the_program_reads_nothing(tmp_path):
    """Of several ranks, one alone may log: nothing waits for the others. Each training begins without averages."""

    def log(*_: Any, **__: Any) -> None:
        mine.log({"loss": 1.0})
        assert found_by(mine).steps == 0

    options = {"ubatch_size": 2, "logging_steps": 10, "max_steps": 2, "callbacks": [on("on_step_end", log)]}
    mine = l2l_trainer(tmp_path, **options, **ON)
    for _ in range(2):
        mine.train()
        assert found_by(mine).steps == 2


# ---- resumed


SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "ubatch_size": 2, "max_steps": 4}


@nightly
@cpu_suffices
def test_it_is_resumed(tmp_path):
    """Whatever becomes of other callbacks; how often may change. One without it is resumed with it, and back."""

    def resumed(folder: Path, at: int, **options: Any) -> L2LTrainer:
        again = l2l_trainer(folder, **SAVED, **options)
        again.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
        return again

    every_2 = {**ON, "l2l_noise_scale_every": "2"}
    whole = l2l_trainer(tmp_path, **SAVED, **every_2)
    whole.train()
    for restores in (True, False):
        again = resumed(tmp_path, 2, restore_callback_states_from_checkpoint=restores, **every_2)
        assert found_by(again) == found_by(whole) and found_by(again).steps == 2
        assert noise_logs(again) == noise_logs(whole)
    assert found_by(resumed(tmp_path, 2, **ON)).steps == 1 + 2
    l2l_trainer(tmp_path / "without", **SAVED).train()
    mine = resumed(tmp_path / "without", 2, **ON)
    assert found_by(mine).steps == 2
    back = resumed(tmp_path / "without", 3)
    assert_same_run(back, mine)
    assert all(value is None for entry in noise_logs(back)[-1:] for value in entry)


# ---- losses and models


def doubled(folder: Path) -> hf.Trainer:
    class Mine(L2LTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            return super().compute_loss(model, {k: torch.cat([v, v]) for k, v in inputs.items()}, *args, **more)

    return trainer(Mine, folder, ubatch_size=2, **ON)


def routers(folder: Path) -> hf.Trainer:
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2, output_router_logits=True)
    return made(folder, model=hf.MixtralForCausalLM(config), ubatch_size=1, **ON)


def shared(folder: Path) -> hf.Trainer:
    model = tiny_bert(layers=2)
    first, second = model.bert.encoder.layer
    second.output.dense.weight = first.output.dense.weight
    return l2l_trainer(folder, model=model, ubatch_size=2, **ON)


REFUSED = {
    "got 16 rows in a layer for a batch of 8": doubled,
    "routers": routers,
    "a weight of several layers": shared,
}


@cpu_suffices
@pytest.mark.parametrize("said", REFUSED)
def test_losses_and_models_that_do_not_tell_it_are_refused(said, tmp_path):
    """Before a weight has changed."""
    mine = REFUSED[said](tmp_path)
    before = {name: value.to("cpu", copy=True) for name, value in mine.model.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        train(mine)
    assert_same_tensors(mine.model.state_dict(), before)


# ---- batches that grow

ROWS = 44
"""In an epoch: 11 batches of 4."""
RUN: dict[str, Any] = {"per_device_train_batch_size": 4, "ubatch_size": 2, "max_steps": -1, "num_train_epochs": 2}
RUN |= {"lr_scheduler_type": "linear", "l2l_log_times": False, **ON}


@pytest.fixture
def critical(monkeypatch):
    """The critical batch after so many measured steps, in the place of the measured one; it is looked at in each."""
    found: dict[int, float] = {}

    def at(self: NoiseScale) -> float:
        return max((value for step, value in found.items() if step <= self.steps), default=1.0)

    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 1)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 0)
    monkeypatch.setattr(NoiseScale, "critical_batch", property(at))
    return found


MEASURED = NoiseScale.critical_batch


def save_at(*steps: int) -> hf.TrainerCallback:
    """Asks for a checkpoint after each of these steps."""

    def ask(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= state.global_step in steps

    return on("on_step_end", ask)


class Grown:
    """A trainer, the batches and the learning rate of each of its steps, and the rows that it trains on."""

    def __init__(
        self, folder: Path, growth: L2LBatchGrowth | None, *others: hf.TrainerCallback, **options: Any
    ) -> None:
        self.steps: list[int] = []
        self.rates = rates = []
        callbacks = [
            *([] if growth is None else [growth]),
            on("on_step_begin", lambda args, *_, **__: self.steps.append(args.gradient_accumulation_steps)),
            on("on_pre_optimizer_step", lambda *_, optimizer, **__: rates.append(optimizer.param_groups[0]["lr"])),
            *others,
        ]
        self.made = l2l_trainer(folder, model=tiny_bert(layers=2), callbacks=callbacks, **{**RUN, **options})
        self.made.train_dataset = rows(ROWS)
        self.batches = trained_batches(self.made)

    def train(self, resumes: Any = None) -> Grown:
        train(self.made, str(resumes) if isinstance(resumes, Path) else resumes)
        return self

    @property
    def rows(self) -> list[Any]:
        return [batch["input_ids"].tolist() for batch in self.batches]

    @property
    def state(self) -> hf.TrainerState:
        return self.made.state


@nightly
@cpu_suffices
def test_the_same_rows_in_fewer_steps(tmp_path, critical):
    critical.update({3: 8.0, 5: 100.0})
    plain, grown = Grown(tmp_path, None).train(), Grown(tmp_path, L2LBatchGrowth(16)).train()
    assert grown.rows == plain.rows and plain.steps == [1] * 22
    # 8 rows from the fourth batch on, where the batches of the epoch are even; 16 from the eighth on.
    assert grown.steps == [1, 1, 1, 1, 2, 2, 4, *[4] * 3]
    assert grown.state.global_step == grown.state.max_steps == 10 and grown.state.epoch == 2.0
    assert grown.made.args.gradient_accumulation_steps == 1
    # The learning rate of each batch is that of the step with which it was used before.
    assert grown.rates == [plain.rates[start] for start in (0, 1, 2, 3, 4, 6, 8, 11, 15, 19)]
    assert grown.made.lr_scheduler.get_last_lr() == plain.made.lr_scheduler.get_last_lr() == [0.0, 0.0]
    # After a step that has doubled the batch, the log has the rows of the next one.
    logged = [entry["l2l_step_rows"] for entry in grown.state.log_history if "loss" in entry]
    assert logged == [4 * each for each in (*grown.steps[1:], grown.steps[-1])]


BOUNDS = [
    (16, "sqrt", math.sqrt(2), [1, 1, 1, 1, 2, 2, 4]),
    (16, "linear", 2.0, [1, 1, 1, 1, 2, 2, 4]),
    (15, "keep", 1.0, [1, 1, 1, 1, 2, 2, 2, 2]),
]


@cpu_suffices
@pytest.mark.parametrize(("most", "rule", "factor", "steps"), BOUNDS)
def test_a_bound_holds_and_the_learning_rate_is_scaled_by_a_rule(tmp_path, critical, most, rule, factor, steps):
    critical.update({2: 100.0})
    options = {"lr_scheduler_type": "constant", "num_train_epochs": 1}
    grown = Grown(tmp_path, L2LBatchGrowth(most, rule), **options).train()
    assert grown.steps == steps
    assert grown.rates == pytest.approx([1e-3 * factor ** math.log2(each) for each in steps])


@nightly
@cpu_suffices
def test_batches_grow_with_what_is_measured(tmp_path, critical, monkeypatch):
    """And that is what is logged."""
    monkeypatch.setattr(NoiseScale, "critical_batch", MEASURED)
    grown = Grown(tmp_path, L2LBatchGrowth(32), learning_rate=3e-3, num_train_epochs=4).train()
    logged = [entry.get("l2l_critical_batch") for entry in grown.state.log_history if "loss" in entry]
    for step, (before, after) in enumerate(itertools.pairwise(grown.steps)):
        assert after == before or any(each and each >= 8 * before for each in logged[: step + 1])
    assert len(logged) == len(grown.steps) and grown.steps[-1] > grown.steps[0]


@nightly
@cpu_suffices
def test_it_looks_once_enough_steps_are_measured(tmp_path, critical, monkeypatch):
    """At every 4th step, and after each doubling anew."""
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 4)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 6)
    critical.update({1: 1000.0})
    grown = Grown(tmp_path, L2LBatchGrowth(16), num_train_epochs=3, logging_strategy="no").train()
    assert grown.steps.index(2) == 10  # the look after step 8, and then an even batch of the epoch
    assert grown.steps.index(4) >= 16  # 6 more after the 8 that had been measured: the look at step 16


@cpu_suffices
@pytest.mark.parametrize(("saves", "restores"), [("trainer", True), ("callback", False)])
def test_it_is_resumed_exactly(tmp_path, critical, saves, restores):
    """Also where a callback saves, as transformers does when a job is about to end (`enable_jit_checkpoint`)."""
    critical.update({3: 8.0, 5: 100.0})
    options: dict[str, Any] = {"restore_callback_states_from_checkpoint": restores}
    resumed = (5, *(() if saves == "callback" else (2,)), *more(1, 3, 4, 6, 7, 8, 9))
    asked = [save_at(*resumed)] if saves == "trainer" else []
    whole = Grown(tmp_path, L2LBatchGrowth(16, "sqrt"), *asked, **options)
    if saves == "callback":
        save = At("on_step_end", None, lambda: whole.made._save_checkpoint(whole.made.model, None))
        whole.made.callback_handler.callbacks.insert(0, save)
    assert whole.train().state.global_step == 10
    for at in resumed:
        again = Grown(tmp_path, L2LBatchGrowth(16, "sqrt"), **options).train(tmp_path / f"checkpoint-{at}")
        assert again.steps == whole.steps[at:] and again.rates == whole.rates[at:]
        assert again.rows == whole.rows[len(whole.rows) - len(again.rows) :]
        if saves == "trainer":
            assert again.state.max_steps == 10
            assert_same_run(again.made, whole.made)
        assert_same_tensors(again.made.model.state_dict(), whole.made.model.state_dict())


@cpu_suffices
def test_one_that_has_ended_is_not_trained_on(tmp_path, critical, caplog):
    critical.update({3: 8.0, 5: 100.0})
    whole = Grown(tmp_path, L2LBatchGrowth(16), save_at(10), max_steps=20).train()
    assert whole.state.global_step == 10  # 7, and 3 for the other 9 of 20 batches
    again = Grown(tmp_path, L2LBatchGrowth(16), max_steps=20).train(True)
    assert again.steps == [] and "the training is finished" in caplog.text
    longer = Grown(tmp_path, L2LBatchGrowth(16), max_steps=33).train(True)
    assert longer.steps and longer.state.epoch == 3.0
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1, with which it began"):
        Grown(tmp_path, L2LBatchGrowth(16), gradient_accumulation_steps=2, max_steps=33).train(True)


@cpu_suffices
def test_it_is_added_to_a_training_that_began_without_it(tmp_path, critical):
    """In an epoch and at the end of one; and what an earlier training of the same trainer left is forgotten."""
    Grown(tmp_path, None, save_at(11, 14)).train()
    grown = Grown(tmp_path, L2LBatchGrowth(8)).train(tmp_path / "checkpoint-11")
    assert grown.state.epoch == 2.0 and grown.steps == [1] * 11
    critical.update({2: 8.0})
    grown = Grown(tmp_path / "other", L2LBatchGrowth(8)).train(tmp_path / "checkpoint-14")
    assert grown.steps == [1, 2, 2, 2, 2] and grown.state.epoch == 2.0
    grown.train()
    assert grown.steps[5] == 1 and grown.state.epoch == 2.0


@cpu_suffices
def test_data_that_are_not_skipped_begin_an_epoch(tmp_path, critical):
    critical.update({3: 8.0})
    Grown(tmp_path, L2LBatchGrowth(8), save_at(5), ignore_data_skip=True).train()
    again = Grown(tmp_path, L2LBatchGrowth(8), ignore_data_skip=True).train(tmp_path / "checkpoint-5")
    assert again.steps == [2] * 12  # two epochs, the first of them anew


def fails(batches: int, error: BaseException) -> hf.TrainerCallback:
    """Raises once, in the first step of so many batches."""
    errors = [error]

    def at_begin(args: Any, *_: Any, **__: Any) -> None:
        if args.gradient_accumulation_steps == batches and errors:
            raise errors.pop()

    return on("on_step_begin", at_begin)


@nightly
@cpu_suffices
def test_arguments_are_given_back_after_an_error(tmp_path, critical):
    """And a search for a batch size begins with the first batch, of fewer rows."""
    critical.update({1: 1000.0})
    grown = Grown(tmp_path, L2LBatchGrowth(8), fails(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        grown.train()
    assert grown.made.args.gradient_accumulation_steps == 1
    search = {"auto_find_batch_size": True, "num_train_epochs": 1}
    grown = Grown(tmp_path, L2LBatchGrowth(16), fails(4, RuntimeError("CUDA out of memory.")), **search).train()
    assert grown.steps[grown.steps.index(4) + 1] == 1
    assert grown.state.epoch == 1.0 and grown.made.args.gradient_accumulation_steps == 1


@cpu_suffices
def test_data_of_unknown_length_are_refused(tmp_path):
    grown = Grown(tmp_path, L2LBatchGrowth(8), max_steps=2)
    grown.made.train_dataset = Streamed(rows(ROWS))
    with pytest.raises(ValueError, match="a length"):
        grown.train()
