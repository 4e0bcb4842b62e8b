"""Accumulated batches that run as one train as batch by batch, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import forwards, padded, ragged, tiny_llama, train
from devices import DEVICE
from folded import CLOSE, EAGER, ONE_STEP, OutOfRoom, assert_folded, pair, told
from hf_l2l import L2LTrainer
from hf_l2l.model.batch_dims import NotCut
from models import SMALL
from plain import DROPOUT, small_bert
from runs import assert_same_run
from tiers import cpu_suffices
from training import logs, on

# ---- the steps of a training


OPTIONS: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 3, "ubatch_size": 2, "stash": "host", "max_grad_norm": 0.05},
    {"eps_update": "deferred", "l2l_nonfinite": "skip", "model": lambda: tiny_llama().double()},
    {"optim": "sgd", "learning_rate": 0.1, **EAGER},
    {"l2l_resident": "shell", "model": lambda: mixtral()},
]


@cpu_suffices
@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
def test_a_step_is_that_of_its_batches(tmp_path, options):
    """Of transformers' Trainer; in float64, only what the loss casts to fp32 rounds."""
    make = options.get("model", tiny_llama)
    options = {"max_steps": 2, **options}
    folded = accumulated.made(tmp_path, **{**options, "model": make()})
    seen = forwards(folded)
    assert told(folded)
    size = folded.args.per_device_train_batch_size * folded.args.gradient_accumulation_steps
    assert seen[-2:] == [size] * 2
    theirs = {name: value for name, value in options.items() if name in hf.TrainingArguments.__dataclass_fields__}
    plain = accumulated.made(tmp_path, kind=hf.Trainer, **theirs, model=make())
    train(plain)
    assert_folded(folded, plain, weights=1e-3 if "l2l_resident" in options else CLOSE)


SIXTEEN = [
    ({"cmp": "fp16", "l2l_loss_scale_init": 2.0**32, "l2l_loss_scale_backoff": 2.0**-16}, 2e-3, 1e-2),
    ({"bf16": True, "use_cpu": DEVICE == "cpu"}, 1e-2, 4e-3),
]


@cpu_suffices
@pytest.mark.parametrize(("options", "rel", "weights"), SIXTEEN, ids=lambda value: str(value))
def test_it_is_so_in_16_bits(tmp_path, options, rel, weights):
    """Adam makes of the sign of a small gradient a whole learning rate, hence the tolerance of the weights."""
    folded, apart = pair(tmp_path, max_steps=2, **options)
    seen = forwards(folded)
    assert told(folded)
    assert seen[-1] == 8
    assert_folded(folded, apart, rel=rel, weights=weights)
    for name in ("loss_scale", "skipped_steps"):
        ours, theirs = ([entry.get(name) for entry in t.state.log_history] for t in (folded, apart))
        assert ours == theirs
    if "l2l_loss_scale_init" in options:
        assert folded.state.log_history[-2]["skipped_steps"] == 1


@cpu_suffices
def test_what_callbacks_and_logs_see(tmp_path):
    def gradients(events, model):
        assert all(p.grad is not None for p in model.parameters())
        events.append("gradients")

    runs = []
    for value in ("auto", "off"):
        events: list[str] = []
        callbacks = [
            on("on_step_begin", lambda *_, events=events, **__: events.append("step")),
            on("on_substep_end", lambda *_, events=events, **__: events.append("substep")),
            on("on_pre_optimizer_step", lambda *_, model, events=events, **__: gradients(events, model)),
        ]
        options = {"include_num_input_tokens_seen": True, "logging_steps": 2, "of_trainer": {"callbacks": callbacks}}
        made = accumulated.made(tmp_path, l2l_merge_accumulation=value, **options)
        train(made)
        runs.append((events, logs(made), made.state.num_input_tokens_seen, made.state.total_flos))
    (events, entries, *counts), (others, expected, *known) = runs
    assert events == others == 3 * ["step", "substep", "substep", "substep", "gradients"]
    assert counts == known
    for ours, theirs in zip(entries, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=CLOSE)


@cpu_suffices
def test_where_it_disagrees_batches_run_one_by_one_with_their_bits(tmp_path):
    """transformers' loss of this model does not use num_items_in_batch, though its forward takes it."""

    def classified(rows):
        labels = torch.tensor([sum(row["input_ids"]) % 2 for row in rows])
        return {**padded([{**row, "labels": row["input_ids"]} for row in rows]), "labels": labels}

    def run(reason: str, **options):
        made = accumulated.made(
            tmp_path, model=small_bert(), of_trainer={"data_collator": classified}, **EAGER, **options
        )
        seen = forwards(made)
        assert told(made, reason)
        return made, seen

    tried, seen = run("the loss of all rows at once is ")
    # A first batch that draws random numbers is compared without them, out of sight.
    assert seen == ([2] if DROPOUT else [*ONE_STEP, 8]) + 3 * ONE_STEP
    assert_same_run(tried, run("l2l_merge_accumulation='off'", l2l_merge_accumulation="off")[0])


class WithAuxiliaryLoss(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.aux_loss = outputs.logits.square().mean()
        outputs.loss = outputs.loss + 1e-9 * outputs.aux_loss
        return outputs


class WithBatchMean(hf.LlamaForCausalLM):
    """Its gradients depend on the batch, though its loss does not."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        extra = self.model.norm.weight.sum()
        outputs.loss = outputs.loss + extra - extra.detach()
        return outputs


@cpu_suffices
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(WithAuxiliaryLoss, "an auxiliary loss (aux_loss"), (WithBatchMean, "the gradient of model.norm.weight would")],
)
def test_what_the_first_step_finds(tmp_path, kind, reason):
    made = accumulated.made(tmp_path, model=kind(tiny_llama().config), remove_unused_columns=False, max_steps=2)
    seen = forwards(made)
    assert told(made, reason)
    assert seen[-8:] == 2 * ONE_STEP


# ---- steps that fail


@pytest.mark.parametrize(("where", "steps", "mode"), [("forward", 1, "deferred"), ("backward", 0, "serial")])
def test_a_device_without_room_for_all_rows(tmp_path, where, steps, mode):
    """In the first step, or later, when rows are longer: that step and those after it run batch by batch."""
    made, apart = pair(tmp_path, eps_update=mode, max_steps=steps + 2)
    seen = forwards(made)
    OutOfRoom(made, where, steps)
    assert told(made, "the device has no room for the rows of all batches at once")
    assert seen == [*ONE_STEP, 8] + steps * [8] + ([8] if steps else []) + 2 * ONE_STEP
    if steps:
        assert_folded(made, apart)
    else:
        assert_same_run(made, apart)


@cpu_suffices
@pytest.mark.parametrize("late", ["fails at once", "cannot be cut", "different inputs", "random numbers"])
def test_what_fails_with_all_rows_at_once_runs_batch_by_batch(tmp_path, late):
    """And so do all steps after that; nothing is lost, and random numbers are drawn again."""
    begins = 0 if late == "fails at once" else 1

    def run(draws: int = 1, **options):
        calls = []

        def collate(rows):
            calls.append(1)
            return padded(rows) | ({"return_loss": True} if late == "different inputs" and len(calls) == 7 else {})

        def refuse(module, args, kwargs):
            if len(kwargs["input_ids"]) > 4 and made.state.global_step == begins and late != "different inputs":
                torch.rand(draws)
                raise ValueError("these rows cannot be run") if begins == 0 else NotCut("so it is")

        model = tiny_llama(attention_dropout=0.3 if late == "random numbers" else 0.0)
        made = accumulated.made(tmp_path, model=model, max_steps=2, of_trainer={"data_collator": collate}, **options)
        made.model.register_forward_pre_hook(refuse, with_kwargs=True)
        return made

    tried = run()
    seen = forwards(tried)
    reasons = {"fails at once": "these rows cannot be run", "different inputs": late}
    assert told(tried, reasons.get(late, "so it is"))
    assert seen[-4:] == ONE_STEP
    other = run(draws=3) if late == "random numbers" else run(l2l_merge_accumulation="off")
    train(other)
    (assert_same_run if late == "random numbers" else assert_folded)(tried, other)


# ---- what speaks against it before the first step


def own(method: str) -> type[L2LTrainer]:
    """A trainer with such a method of its own, which calls that of the base class."""
    inherited = getattr(L2LTrainer, method)
    return type("Own", (L2LTrainer,), {method: lambda self, *args, **kwargs: inherited(self, *args, **kwargs)})


def mixtral(**config: Any) -> nn.Module:
    known = {"num_key_value_heads": 1, "num_local_experts": 4, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **known, **config))


class Transposed(nn.BatchNorm1d):
    """Of the features of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def with_batch_norm() -> nn.Module:
    model = tiny_llama()
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, Transposed(16))
    return model


def with_longer_rows() -> nn.Module:
    """Says so in a part of its configuration, as models with positions per kind of layer do."""
    model = mixtral()
    model.config.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    return model


class OwnLabels(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels=input_ids, **kwargs)


def without_labels(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in padded(rows).items() if name != "labels"}


def mean_logits(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    return outputs.logits.mean()


UNLABELLED = {"model": lambda: OwnLabels(tiny_llama().config), "of_trainer": {"data_collator": without_labels}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Own has a compute_loss of its own", {"kind": own("compute_loss")}),
    ("Own has a training_step of its own", {"kind": own("training_step")}),
    ("this trainer has a compute_loss", {"set": {"compute_loss": None}}),
    ("compute_loss_func", {"of_trainer": {"compute_loss_func": mean_logits}}),
    ("loss_is_scaled_for_ga=False", {"set": {"loss_is_scaled_for_ga": False}}),
    ("it takes no num_items_in_batch", {"set": {"model_accepts_loss_kwargs": False}}),
    ("label_smoothing_factor", {"label_smoothing_factor": 0.1}),
    ("neftune_noise_alpha", {"neftune_noise_alpha": 5.0}),
    ("output_router_logits", {"model": lambda: mixtral(output_router_logits=True)}),
    ("l2l_kept_graphs", {"l2l_kept_graphs": 1}),
    ("rotary positions", {"model": with_longer_rows}),
    ("model.embed_tokens.1 normalizes", {"model": with_batch_norm}),
    ("without labels there is no num_items_in_batch", UNLABELLED),
    ("", {"l2l_resident": "all"}),
]
"""What a warning says, and why; all on the device is no reason to warn."""


@cpu_suffices
def test_batches_run_one_by_one_and_a_warning_says_why(tmp_path):
    for reason, given in CASES:
        options = {"model": tiny_llama, **given}
        model, replaced = options.pop("model")(), options.pop("set", {})
        made = accumulated.made(tmp_path, **options, model=model, gradient_accumulation_steps=2, max_steps=1)
        for attribute, value in replaced.items():
            setattr(made, attribute, getattr(made, attribute) if value is None else value)
        seen = forwards(made)
        assert told(made, reason), reason
        assert seen == [2, 2], reason


@cpu_suffices
def test_a_step_called_by_the_program_is_run_at_once(tmp_path):
    made = accumulated.made(tmp_path, max_steps=1)
    train(made)
    assert float(made.training_step(made.model, padded(ragged(2)))) > 0
    assert all(p.grad is not None for p in made.model.parameters())
