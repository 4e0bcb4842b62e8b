"""The noise scale in trainings: against plain torch, with the bits of a training without it, resumed, refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from accumulated import forwards, made, padded, tiny_llama, train
from hf_l2l import L2LTrainer
from hf_l2l.noise.estimate import Measured, NoiseScale
from hf_l2l.noise.items import items_of_rows, measured
from training import assert_same_run, l2l_trainer, rows, tiny_bert, trainer

ON = {"l2l_noise_scale": True, "l2l_noise_scale_every": "1"}
NAMES = ("l2l_noise_scale", "l2l_critical_batch")


def noise_logs(of: hf.Trainer) -> list[tuple[Any, ...]]:
    return [tuple(entry.get(name) for name in NAMES) for entry in of.state.log_history if "loss" in entry]


def of_undivided(scales: list[NoiseScale], accumulated: int) -> list[NoiseScale]:
    """What is expected of a mean that transformers before 5.23 does not divide by the accumulated batches, which it
    takes for a sum over all of them."""
    factor = 1 if hasattr(hf.Trainer, "loss_is_scaled_for_ga") else accumulated**2
    return [dataclasses.replace(s, signal=factor * s.signal, noise=factor * s.noise) for s in scales]


class Recorded:
    """A data collator that keeps the batches it makes."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.batches = collate, []

    def __call__(self, given: Any) -> Any:
        self.batches.append(self.collate(given))
        return self.batches[-1]


def in_plain_torch(
    model: nn.Module, steps: list[list[dict[str, torch.Tensor]]], ubatch: int, *, is_sum: bool, shifts: bool
) -> list[NoiseScale]:
    """The averages after each step, of a model whose weights do not change."""
    layers = [p for name, p in model.named_parameters() if ".layer" in name]
    scale, found = NoiseScale(), []
    for batches in steps:
        whole = sum(sum(items_of_rows(batch, shifts=shifts)) for batch in batches)
        parts: list[torch.Tensor] = []
        about = Measured()
        for batch in batches:
            items = items_of_rows(batch, shifts=shifts)
            cuts = [(start, min(start + ubatch, len(items))) for start in range(0, len(items), ubatch)]
            about = about + measured(items, cuts, is_sum=is_sum)
            for start, stop in cuts:
                some = {name: value[start:stop] for name, value in batch.items()}
                loss = model(**some).loss * sum(items[start:stop])
                loss = loss / (whole if is_sum else sum(items) * len(batches))
                parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, layers)]))
        squares = sum(float(part.square().sum()) for part in parts)
        scale.observe(about + Measured(squares=squares), float(sum(parts).norm()))
        found.append(copy.copy(scale))
    return found


def assert_measured(found: hf.Trainer, expected: list[NoiseScale]) -> None:
    """What was measured after the last step, and what was logged after each."""
    averages, last = found._l2l_noise.found, expected[-1]
    assert averages.steps == len(expected) and (averages.items, averages.rows) == (last.items, last.rows)
    assert averages.noise == pytest.approx(last.noise, rel=1e-4)
    assert averages.signal == pytest.approx(last.signal, rel=1e-4, abs=1e-4 * last.noise / last.items)
    logged = noise_logs(found)
    assert len(logged) == len(expected)
    for one, at_step in zip(logged, expected, strict=True):
        for mine, theirs in zip(one, (at_step.scale, at_step.critical_batch), strict=True):
            assert mine == (None if theirs is None else pytest.approx(theirs, rel=1e-2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("update", ["serial", "deferred", "eager"])
def test_a_mean_loss_against_plain_torch(tmp_path, accumulated, update):
    """BERT's loss is a mean over each batch: its batches run one by one."""
    model = tiny_bert(dropout=0.0)
    collate = Recorded(hf.default_data_collator)
    options: dict[str, Any] = {} if update != "eager" else {"max_grad_norm": 0.0}
    mine = l2l_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        learning_rate=0.0,
        ubatch_size=3,
        eps_update=update,
        gradient_accumulation_steps=accumulated,
        max_steps=3,
        **ON,
        **options,
    )
    mine.data_collator = collate
    train(mine)
    batches = collate.batches
    steps = [batches[n : n + accumulated] for n in range(0, 3 * accumulated, accumulated)]
    scales = in_plain_torch(model.train(), steps, 3, is_sum=False, shifts=False)
    assert_measured(mine, of_undivided(scales, accumulated))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("merge", ["auto", "off"])
@pytest.mark.parametrize("ubatch", [None, 1], ids=["batches", "rows"])
def test_a_sum_over_tokens_against_plain_torch(tmp_path, merge, ubatch):
    """With one micro-batch in each batch, those of a step are compared with each other."""
    model = tiny_llama()
    collate = Recorded(padded)
    options = {"learning_rate": 0.0, "ubatch_size": ubatch, "l2l_merge_accumulation": merge, **ON}
    mine = made(tmp_path, model=copy.deepcopy(model), of_trainer={"data_collator": collate}, **options)
    train(mine)
    steps = [collate.batches[n : n + 4] for n in range(0, 12, 4)]
    scales = in_plain_torch(model.train(), steps, ubatch or 2, is_sum=True, shifts=True)
    assert_measured(mine, scales)


RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "stash on the host": {"stash": "host"},
    "bf16": {"cmp": "bf16"},
    "16-bit gradients": {"cmp": "bf16", "l2l_grad_dtype": "16bit"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "kept graphs": {"l2l_kept_graphs": 2},
    "sampled": {"l2l_noise_scale_every": "3"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_measuring_changes_no_bit(tmp_path, options):
    """Of weights, state, logs and random numbers: dropout draws in each step."""
    known = {"ubatch_size": 3, "max_steps": 6}
    plain = {name: value for name, value in options.items() if not name.startswith("l2l_noise")}
    without = l2l_trainer(tmp_path, **known, **plain)
    without.train()
    measuring = l2l_trainer(tmp_path, **{**known, **ON, **options})
    measuring.train()
    assert_same_run(measuring, without)
    assert measuring._l2l_noise.found.steps == (2 if "l2l_noise_scale_every" in options else 6)


def test_merged_batches_keep_their_bits(tmp_path):
    without, measuring = made(tmp_path), made(tmp_path, **ON)
    seen = [forwards(each) for each in (without, measuring)]
    for each in (without, measuring):
        train(each)
    assert [each.count(8) for each in seen] == [4, 4]  # the three steps, and the comparison with batch by batch
    assert_same_run(measuring, without)
    assert all(value is not None for entry in noise_logs(measuring) for value in entry)


@pytest.mark.parametrize(("ubatch", "every"), [(None, 128), (2, 256), (1, 384)])
def test_how_often_is_by_the_tokens_of_a_micro_batch(tmp_path, ubatch, every):
    """8 tokens in a row, and 3 rows in a batch: 3,072 tokens take so many."""
    options = {**ON, "l2l_noise_scale_every": "auto", "gradient_accumulation_steps": 2}
    mine = l2l_trainer(tmp_path, ubatch_size=ubatch, per_device_train_batch_size=3, max_steps=1, **options)
    train(mine)
    assert mine._l2l_noise.every == (every if ubatch != 2 else 192)
    assert mine._l2l_noise.found.steps == 1


def test_of_inputs_that_are_no_tokens_each_step_is_measured(tmp_path):
    mine = l2l_trainer(tmp_path, ubatch_size=2, max_steps=1, l2l_noise_scale=True)
    assert mine._every_of({"input_ids": torch.rand(8, 3)}, 8) == mine._every_of({"ids": torch.ones(8, 3)}, 8) == 1
    assert mine._every_of({"input_ids": torch.ones(8, 3, dtype=torch.long)}, 8) == 512


def test_a_first_loss_that_is_not_finite_is_not_taken_for_one_that_couples_rows(tmp_path):
    """The next batch tells what it is."""
    mine = l2l_trainer(tmp_path, ubatch_size=2, l2l_nonfinite="skip", max_steps=3, **ON)
    weight = mine.model.classifier.weight
    before = weight.detach().clone()

    class Mend(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                weight.copy_(before)

    with torch.no_grad():
        weight.fill_(float("inf"))
    mine.add_callback(Mend())
    mine.train()
    assert mine._l2l_is_sum is False and mine._l2l_noise.found.steps == 2


SAVED = {"save_strategy": "steps", "save_steps": 2, "ubatch_size": 2, "max_steps": 6, "l2l_log_times": False, **ON}


@pytest.mark.parametrize("restores", [False, True])
def test_it_is_resumed(tmp_path, restores):
    options = {**SAVED, "restore_callback_states_from_checkpoint": restores, "l2l_noise_scale_every": "2"}
    whole = l2l_trainer(tmp_path, **options)
    whole.train()
    again = l2l_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again._l2l_noise.averages == whole._l2l_noise.averages and again._l2l_noise.found.steps == 3
    assert noise_logs(again) == noise_logs(whole)
    kept = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert kept["L2LNoiseScale"]["attributes"]["averages"] == whole._l2l_noise.averages


def test_a_training_without_it_is_resumed_with_it_and_back(tmp_path):
    without = {name: value for name, value in SAVED.items() if name not in ON}
    l2l_trainer(tmp_path, **without).train()
    mine = l2l_trainer(tmp_path, **SAVED)
    mine.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert mine._l2l_noise.found.steps == 4
    back = l2l_trainer(tmp_path, **without)
    back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_run(back, mine)
    assert all(value is None for entry in noise_logs(back)[-2:] for value in entry)


def test_each_training_begins_without_averages(tmp_path):
    mine = l2l_trainer(tmp_path, ubatch_size=2, max_steps=2, **ON)
    mine.train()
    mine.train()
    assert mine._l2l_noise.found.steps == 2
    assert sum(type(each).__name__ == "L2LNoiseScale" for each in mine.callback_handler.callbacks) == 1


def test_what_is_measured_nothing_of_is_told(tmp_path, caplog):
    """Each batch has fewer rows than a micro-batch may have."""
    mine = l2l_trainer(tmp_path, ubatch_size=4, **ON)
    mine.train_dataset = rows(4)
    with caplog.at_level(logging.WARNING):
        mine.train()
    assert caplog.text.count("l2l_noise_scale=True measures nothing so far") == 1
    assert mine._l2l_noise.found.steps == 0


def test_a_step_whose_gradients_are_not_finite_is_left_out(tmp_path):
    mine = l2l_trainer(tmp_path, ubatch_size=2, l2l_nonfinite="skip", max_steps=3, **ON)
    layer = mine.model.bert.encoder.layer[0].output.dense
    calls = []

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(mine.state.global_step)
        return output * float("inf") if calls[-1] == 1 and module.training else None

    layer.register_forward_hook(spoil)
    mine.train()
    assert mine._l2l_noise.found.steps == 2


# ---- what is refused


def test_a_loss_that_couples_rows_is_refused(tmp_path):
    def contrastive(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits @ outputs.logits.T, torch.arange(len(labels)))

    mine = l2l_trainer(tmp_path, ubatch_size=2, **ON)
    mine.compute_loss_func = contrastive
    before = copy.deepcopy(mine.model.state_dict())
    with pytest.raises(ValueError, match=r"a sum or a mean over rows or tokens \(got .* for a batch.*; leave it out"):
        mine.train()
    assert all(torch.equal(value, before[name]) for name, value in mine.model.state_dict().items())


def test_a_trainer_may_have_a_loss_of_its_own(tmp_path):
    class Mine(L2LTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    found = []
    for kind in (Mine, L2LTrainer):
        each = trainer(kind, tmp_path, ubatch_size=2, **ON)
        each.train()
        found.append(each._l2l_noise.averages)
    assert found[0] == found[1]


def test_a_loss_of_its_own_that_couples_rows_is_refused(tmp_path):
    class Mine(L2LTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss + 1000 * outputs.logits.var(0).sum()
            return (loss, outputs) if return_outputs else loss

    mine = trainer(Mine, tmp_path, ubatch_size=2, **ON)
    with pytest.raises(
        ValueError, match=r"needs a loss that is a sum or a mean over rows or tokens \(got .*; leave it"
    ):
        mine.train()


def test_a_loss_that_calls_the_model_with_other_rows_is_refused(tmp_path):
    class Mine(L2LTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**{name: torch.cat([value, value]) for name, value in inputs.items()})
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    mine = trainer(Mine, tmp_path, ubatch_size=2, **ON)
    with pytest.raises(ValueError, match=r"got 16 rows in a layer for a batch of 8\); leave it out"):
        mine.train()


def test_a_training_step_of_its_own_is_refused(tmp_path):
    class Mine(L2LTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with pytest.raises(
        ValueError, match=r"got a trainer of which Mine has a training_step of its own\); leave it out"
    ):
        trainer(Mine, tmp_path, ubatch_size=2, **ON).train()


def test_a_loss_of_routers_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.MixtralConfig(
        vocab_size=60, num_key_value_heads=1, num_local_experts=2, output_router_logits=True, **sizes
    )
    mine = made(tmp_path, model=hf.MixtralForCausalLM(config), ubatch_size=1, **ON)
    with pytest.raises(
        ValueError, match=r"got a model that adds a loss of its routers, which couples them\); leave it"
    ):
        train(mine)


def test_batches_of_one_row_with_a_mean_over_tokens(tmp_path):
    """What the loss is, is told by a batch of one row, too: its weight is that of its batch."""
    config = hf.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=60
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = hf.BertForTokenClassification(config)
    data = [
        {**row, "labels": [-100] * (n % 5) + [token % 2 for token in row["input_ids"][n % 5 :]]}
        for n, row in enumerate(rows())
    ]
    collate = Recorded(hf.default_data_collator)
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "learning_rate": 0.0,
        "max_steps": 2,
    }
    mine = l2l_trainer(tmp_path, model=copy.deepcopy(model), **options, **ON)
    mine.train_dataset, mine.data_collator = data, collate
    train(mine)
    assert mine._l2l_is_sum is False
    steps = [collate.batches[n : n + 4] for n in (0, 4)]
    expected = of_undivided(in_plain_torch(model.train(), steps, 1, is_sum=False, shifts=False), 4)[-1]
    assert mine._l2l_noise.found.noise == pytest.approx(expected.noise, rel=1e-3)


def test_a_step_that_is_given_up_is_measured_with_the_next(tmp_path):
    """Its gradients are added to those of the next one, as without L2L."""

    class GiveUp(hf.TrainerCallback):
        has_given_up = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step == 1 and not self.has_given_up
            self.has_given_up = state.global_step == 1
            return control

    mine = l2l_trainer(
        tmp_path,
        ubatch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        callbacks=[GiveUp()],
        learning_rate=0.0,
        **ON,
    )
    seen: list[tuple[Measured, float]] = []
    observe = NoiseScale.observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseScale, "observe", lambda self, *step: seen.append(step) or observe(self, *step))
        train(mine)
    assert [step.rows for step, _ in seen] == [16, 24, 16, 16] and all(norm > 0 for _, norm in seen)


def test_how_often_may_change_when_a_training_is_resumed(tmp_path):
    first = {**SAVED, "l2l_noise_scale_every": "auto", "max_steps": 2}
    l2l_trainer(tmp_path, **first).train()
    again = l2l_trainer(tmp_path, **SAVED)
    again.train(resume_from_checkpoint=True)
    assert again._l2l_noise.found.steps == 1 + 4


def test_a_log_of_the_program_reads_nothing(tmp_path):
    """Of several ranks, one alone may log: nothing waits for the others."""

    class Log(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before = len(mine._l2l_measured)
            mine.log({"loss": 1.0})
            assert len(mine._l2l_measured) == before > 0

    mine = l2l_trainer(tmp_path, ubatch_size=2, logging_steps=10, callbacks=[Log()], **ON)
    mine.train()
    assert mine._l2l_noise.found.steps == 4


def test_a_norm_over_rows_is_refused(tmp_path):
    model = tiny_bert()
    model.classifier = nn.Sequential(nn.BatchNorm1d(16), model.classifier)
    with pytest.raises(ValueError, match=r"got classifier\.0, which normalizes over the rows of a batch"):
        l2l_trainer(tmp_path, model=model, ubatch_size=2, **ON).train()


def test_a_single_micro_batch_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"at least two micro-batches in a step \(got one of 8 rows\); give ubatch_size"
    ):
        l2l_trainer(tmp_path, **ON).train()


def test_a_layer_that_runs_several_times_is_refused(tmp_path):
    config = hf.AlbertConfig(
        vocab_size=60,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
    )
    model = hf.AlbertForSequenceClassification(config)
    with pytest.raises(
        ValueError, match=r"got AlbertLayer\w*, which runs several times before a backward\); leave it"
    ):
        l2l_trainer(tmp_path, model=model, ubatch_size=2, **ON).train()


def test_a_weight_of_several_layers_is_refused(tmp_path):
    model = tiny_bert()
    first, second = model.bert.encoder.layer[:2]
    second.output.dense.weight = first.output.dense.weight
    with pytest.raises(ValueError, match=r"output\.dense\.weight, a weight of several layers\); leave it out"):
        l2l_trainer(tmp_path, model=model, ubatch_size=2, **ON).train()


def test_a_model_without_layers_is_told(tmp_path, caplog):
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> dict[str, torch.Tensor]:
            logits = self.linear(input_ids.float())
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="no stack of layers"):
        mine = l2l_trainer(tmp_path, model=Linear(), **ON)
        mine.train()
    assert "l2l_noise_scale=True is for layers that are streamed: none is" in caplog.text
    assert not any(name in entry for entry in mine.state.log_history for name in NAMES)
