"""`L2LTrainer` trains as `Trainer` does, to the bit, through the Trainer's own code."""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.optimization import AdafactorSchedule

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.hf import preparation
from memory_switches import forced_copies
from training import (
    CHECKPOINTING,
    arguments,
    assert_same_run,
    check_average,
    inner_optimizer,
    l2l_trainer,
    logs,
    plain_trainer,
    rows,
    tiny_bert,
    trainer,
)

pytestmark = pytest.mark.filterwarnings(
    # torch warns when a scheduler was made before an optimizer was loaded; plain Trainer does the same.
    "ignore:.*lr_scheduler.step.*:UserWarning",
)


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: where layers run on the CPU, nobody is warned."""
    monkeypatch.setattr(preparation, "weights_travel", lambda config: config.resident != "all")


def accumulating(steps: int):
    return pytest.warns(UserWarning, match="moves the weights") if steps > 1 else nullcontext()


def check_same_run(folder, steps: int, accumulation: int, **options):
    options |= {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    expected = plain_trainer(folder / "plain", **options)
    expected.train()
    found = l2l_trainer(folder / "l2l", **options)
    with accumulating(accumulation):
        found.train()
    assert len(logs(found)) == steps + 1
    assert all(entry["grad_norm"] > 0 for entry in logs(found)[:-1])
    assert_same_run(found, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_same_bits_as_trainer(tmp_path, accumulation, copies):
    check_same_run(tmp_path, 5, accumulation)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_same_bits_as_trainer_over_50_steps(tmp_path, accumulation, copies):
    check_same_run(tmp_path, 50, accumulation)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.01},
        {"optim": "sgd"},
        {"optim": "adafactor"},
        {"optim": "adamw_torch"},
        {"bf16": True, "use_cpu": True},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"stash": "host"},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=str,
)
def test_same_bits_with_options_of_the_trainer(tmp_path, options):
    ours = dict(options)
    theirs = {k: v for k, v in options.items() if k != "stash"}
    expected = plain_trainer(tmp_path / "plain", **theirs)
    expected.train()
    found = l2l_trainer(tmp_path / "l2l", **ours)
    found.train()
    assert_same_run(found, expected)


def test_plain_training_arguments_are_accepted(tmp_path):
    expected = plain_trainer(tmp_path / "plain")
    expected.train()
    found = L2LTrainer(tiny_bert(), arguments(hf.TrainingArguments, tmp_path / "l2l"), train_dataset=rows())
    found.train()
    assert_same_run(found, expected)


def test_ubatches_train_as_the_whole_batch_but_for_rounding(tmp_path):
    expected = trainer(hf.Trainer, tmp_path / "plain", model=tiny_bert(dropout=0.0))
    expected.train()
    found = l2l_trainer(tmp_path / "l2l", model=tiny_bert(dropout=0.0), ubatch_size=3, stash="host")
    found.train()
    for ours, theirs in zip(logs(found), logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_evaluate_and_predict_without_training(tmp_path):
    plain = trainer(hf.Trainer, tmp_path / "plain")
    ours = l2l_trainer(tmp_path / "l2l", ubatch_size=3)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    found, expected = ours.predict(rows(11)), plain.predict(rows(11))
    assert found.predictions == pytest.approx(expected.predictions, rel=1e-5, abs=1e-6)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


def test_early_stopping_and_the_best_model(tmp_path):
    def run(make, name):
        made = make(
            tmp_path / name,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            learning_rate=3e-2,
            callbacks=[hf.EarlyStoppingCallback(early_stopping_patience=2)],
        )
        made.train()
        return made

    expected, found = run(plain_trainer, "plain"), run(l2l_trainer, "l2l")
    assert found.state.global_step == expected.state.global_step < 8
    assert found.state.best_metric == expected.state.best_metric
    assert_same_run(found, expected)
    assert found.evaluate()["eval_loss"] == found.state.best_metric


def test_a_second_train_goes_on_from_the_first(tmp_path):
    def trained_twice(make, name):
        made = make(tmp_path / name)
        made.train()
        made.train()
        return made

    expected, found = trained_twice(plain_trainer, "plain"), trained_twice(l2l_trainer, "l2l")
    assert_same_run(found, expected)


OTHER_OPTIONS = [
    ({}, {"ubatch_size": 2}),
    ({"ubatch_size": 3, "l2l_resident_layers": 1}, {"eps_update": "deferred"}),
    ({"eps_update": "deferred"}, {"eps_update": "eager", "max_grad_norm": 0.0}),
    ({"eps_update": "eager", "max_grad_norm": 0.0}, {"cmp": "bf16", "ubatch_size": 4}),
    ({"cmp": "bf16"}, {"stash": "host"}),
]


@pytest.mark.parametrize(("first", "second"), OTHER_OPTIONS)
def test_a_second_trainer_with_other_options_trains_as_with_a_new_model(tmp_path, first, second):
    model, new = tiny_bert(), tiny_bert()
    l2l_trainer(tmp_path / "first", model=model, **first).train()
    new.load_state_dict(model.state_dict())
    found = l2l_trainer(tmp_path / "second", model=model, **second)
    found.train()
    expected = l2l_trainer(tmp_path / "expected", model=new, **second)
    expected.train()
    assert_same_run(found, expected)


def test_two_trainers_with_other_options_take_turns(tmp_path):
    def turns(folder, other: str) -> hf.Trainer:
        model = tiny_bert()
        one = l2l_trainer(folder / "one", model=model, eps_update="serial")
        two = l2l_trainer(folder / "two", model=model, eps_update=other)
        losses = []
        for each in (one, two, one):
            each.train()
            losses += [one.evaluate()["eval_loss"], two.evaluate()["eval_loss"]]
        return one, losses

    (found, found_losses), (expected, losses) = (turns(tmp_path / other, other) for other in ("deferred", "serial"))
    assert_same_run(found, expected)
    assert found_losses == losses


@pytest.mark.parametrize("what", ["evaluate", "train"])
def test_while_a_model_is_trained_no_trainer_runs_it_with_other_options(tmp_path, what):
    class Other(hf.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            same.evaluate()
            with pytest.raises(
                ValueError, match=r"while a trainer trains .* \(got ubatch_size=2, where it has None\)"
            ):
                getattr(other, what)()

    model = tiny_bert(dropout=0.0)  # each evaluation draws a number
    trained = l2l_trainer(tmp_path / "trained", model=model, callbacks=[Other()])
    same, other = (l2l_trainer(tmp_path / str(size), model=model, ubatch_size=size) for size in (None, 2))
    trained.train()
    expected = plain_trainer(tmp_path / "plain", model=tiny_bert(dropout=0.0))
    expected.train()
    assert_same_run(trained, expected)
    assert other.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"])


def test_a_model_that_the_program_has_attached_keeps_its_options(tmp_path):
    model = tiny_bert()
    attach_l2l(model, L2LConfig(ubatch_size=2))
    with pytest.raises(ValueError, match=r"one config at a time \(got ubatch_size=3, where it has 2\).*detach_l2l"):
        l2l_trainer(tmp_path, model=model, ubatch_size=3).train()


def test_model_init_makes_a_new_model_for_each_training(tmp_path):
    def trained_twice(make, name):
        made = make(tmp_path / name, model_init=lambda: tiny_bert())
        first = made.model
        made.train()
        made.train()
        assert made.model is not first
        return made

    expected, found = trained_twice(plain_trainer, "plain"), trained_twice(l2l_trainer, "l2l")
    assert_same_run(found, expected)


def test_optimizer_and_scheduler_of_the_user(tmp_path):
    def made(make, name):
        model = tiny_bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer = make(tmp_path / name, model=model, optimizers=(optimizer, scheduler))
        trainer.train()
        return trainer

    expected, found = made(plain_trainer, "plain"), made(l2l_trainer, "l2l")
    assert_same_run(found, expected)


def test_gradients_are_cleared_by_the_step(tmp_path):
    seen = []

    class Watch(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(all(p.grad is not None for p in model.parameters()))

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(all(p.grad is None for p in model.parameters()))

    l2l_trainer(tmp_path, callbacks=[Watch()]).train()
    assert seen == [True] * 8


class Flat(nn.Module):
    """A model without layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def flat():
    torch.manual_seed(0)
    return Flat()


@pytest.mark.filterwarnings("ignore:no stack of layers:UserWarning")
def test_a_model_without_layers_trains_as_with_trainer(tmp_path):
    expected = trainer(hf.Trainer, tmp_path / "plain", model=flat())
    expected.train()
    with pytest.warns(UserWarning, match="no stack of layers was found in a Flat") as said:
        found = l2l_trainer(tmp_path / "l2l", model=flat())
        found.train()
        found.evaluate()
    assert len([w for w in said if "no stack" in str(w.message)]) == 1
    assert_same_run_without_evaluation(found, expected)


def test_the_warning_of_a_missing_stack_names_the_line_that_makes_the_trainer(tmp_path):
    args = arguments(hf.TrainingArguments, tmp_path)
    with pytest.warns(UserWarning, match="no stack of layers") as said:
        line = inspect.currentframe().f_lineno + 1
        L2LTrainer(flat(), args, train_dataset=rows())
    [warning] = [w for w in said if "no stack" in str(w.message)]
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_with_eager_updates_a_callback_cannot_read_gradients(tmp_path):
    refused = []

    class Look(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                with pytest.raises(RuntimeError, match="has used this gradient during backward"):
                    _ = p.grad
                refused.append(p)

    made = l2l_trainer(tmp_path, eps_update="eager", max_grad_norm=0.0, callbacks=[Look()])
    made.train()
    assert len(refused) == 4 * len(list(made.model.parameters()))


@pytest.mark.filterwarnings("ignore:no stack of layers:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"fp16_full_eval": True},
        {"bf16_full_eval": True},
        pytest.param({"torch_compile_backend": "eager"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_without_layers_takes_what_trainer_takes(tmp_path, options):
    def trained(kind, name):
        made = trainer(kind, tmp_path / name, model=flat(), use_cpu=True, **options)
        made.train()
        made.evaluate()
        return made

    expected, found = trained(hf.Trainer, "plain"), trained(L2LTrainer, "l2l")
    assert found.accelerator.state.dynamo_plugin.backend == expected.accelerator.state.dynamo_plugin.backend
    assert logs(found) == logs(expected)
    assert {p.dtype for p in found.model.parameters()} == {p.dtype for p in expected.model.parameters()}


@pytest.mark.filterwarnings("ignore:no stack of layers:UserWarning")
def test_a_model_without_layers_may_have_a_device_map_and_several_devices(tmp_path):
    model = flat()
    model.hf_device_map = {"embedding": "cpu", "head": "disk"}
    args = arguments(hf.TrainingArguments, tmp_path, fp16=True)
    args.mixed_precision = "no"  # which accelerate has for accelerators only
    args._n_gpu = 2
    assert L2LTrainer(model, args, train_dataset=rows()).model is model


def assert_same_run_without_evaluation(found, expected):
    assert logs(found)[: len(logs(expected))] == logs(expected)
    for ours, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_accumulation_warns_once_with_the_numbers(tmp_path):
    made = l2l_trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=16, max_steps=1)
    with pytest.warns(UserWarning) as said:
        made.train()
    assert [str(w.message) for w in said] == [
        "batch 1 x accumulation 16 moves the weights 32 times per step: loss_is_scaled_for_ga=False says that the "
        "loss is a mean over each batch. per_device_train_batch_size=16, ubatch_size=1, "
        "gradient_accumulation_steps=1 moves them twice, and trains with the loss of all rows at once"
    ]


def test_accumulation_is_no_matter_where_nothing_travels(tmp_path, monkeypatch):
    monkeypatch.undo()
    made = l2l_trainer(tmp_path, gradient_accumulation_steps=4, max_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train()


def checkpointing(model: nn.Module) -> list[nn.Module]:
    """The modules in which it is on."""
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


def test_activation_checkpointing_is_turned_off_with_a_warning(tmp_path):
    expected = plain_trainer(tmp_path / "plain")
    expected.train()
    found = l2l_trainer(tmp_path / "l2l", **{CHECKPOINTING: True})
    with pytest.warns(UserWarning, match="activation checkpointing is part of L2L"):
        found.train()
    assert checkpointing(found.model) == []
    assert_same_run(found, expected)


def test_activation_checkpointing_is_on_again_when_the_model_is_detached(tmp_path):
    model = tiny_bert()
    getattr(model, f"{CHECKPOINTING}_enable")()
    enabled = checkpointing(model)
    with pytest.warns(UserWarning, match="turned off until the model is detached") as warned:
        for size in (2, 4):  # attached anew by the second one
            l2l_trainer(tmp_path / str(size), model=model, ubatch_size=size).train()
    assert len(warned) == 1
    assert checkpointing(model) == [] != enabled
    assert checkpointing(detach_l2l(model)) == enabled
    getattr(model, f"{CHECKPOINTING}_disable")()
    attach_l2l(model)
    assert checkpointing(detach_l2l(model)) == []


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 3}, {"stash": "host", "l2l_boundary": "host"}])
def test_noise_in_the_embeddings_is_that_of_trainer(tmp_path, options):
    noisy = {"neftune_noise_alpha": 5.0}

    def losses(make, **options) -> list[float]:
        made = make(tmp_path / f"{make.__name__} {len(options)}", model=tiny_bert(dropout=0.0), **options)
        made.train()
        assert not hasattr(made.model.get_input_embeddings(), "neftune_noise_alpha")  # it ends with the training
        return [entry["loss"] for entry in logs(made) if "loss" in entry] + [made.evaluate()["eval_loss"]]

    found = losses(l2l_trainer, **noisy, **options)
    assert found == pytest.approx(losses(plain_trainer, **noisy), rel=1e-5)
    assert found != pytest.approx(losses(l2l_trainer, **options), rel=1e-5)


@pytest.mark.parametrize(
    ("eps_update", "data"),
    [("serial", "kept"), ("eager", "read again"), ("deferred", "read again"), ("deferred", "synchronized")],
)
def test_an_average_of_weights_is_that_of_trainer(tmp_path, eps_update, data):
    check_average(tmp_path, eps_update, data)


def test_the_summary_is_logged_at_info_level(tmp_path, caplog):
    made = l2l_trainer(tmp_path, ubatch_size=4, stash="host")
    summary = made.l2l_summary()
    for part in ("4 x BertLayer at bert.encoder.layer", "Shell = 9", "Tied = none", "Frozen = 0", "Device = cpu"):
        assert part in summary
    for part in ("ubatch_size=4", "in host memory", "serial", "moments"):
        assert part in summary
    hf.utils.logging.set_verbosity_info()
    # transformers' loggers need not propagate to the root logger, where pytest listens.
    logger = logging.getLogger("hf_l2l")
    logger.addHandler(caplog.handler)
    try:
        made.train()
    finally:
        logger.removeHandler(caplog.handler)
        hf.utils.logging.set_verbosity_warning()
    told = {id(r): r for r in caplog.records if "Layer-to-layer execution" in r.getMessage()}.values()
    assert [r.levelno for r in told] == [logging.INFO]


def test_optimizer_state_stays_on_the_host(tmp_path):
    made = l2l_trainer(tmp_path)
    made.train()
    state = inner_optimizer(made).state
    assert len(state) == len(list(made.model.parameters()))
    assert all(t.device.type == "cpu" for s in state.values() for t in s.values() if isinstance(t, torch.Tensor))


def test_arguments_are_left_as_they_are(tmp_path):
    made = l2l_trainer(tmp_path, ubatch_size=3)
    before = made.args.to_dict()
    made.train()
    assert made.args.to_dict() == before


class Mine(L2LTrainer):
    """Makes its optimizer itself, and does not ask its base class."""

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_the_optimizer_of_a_subclass_is_updated_in_the_background_too(tmp_path):
    made = trainer(Mine, tmp_path, eps_update="deferred", max_steps=2)
    made.train()
    assert made.eps.updates.optimizers == [inner_optimizer(made)]
    assert made.eps.updates.worker.lives


# ---- loaders


class Streamed(torch.utils.data.IterableDataset):
    """Rows of which only the next is known."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dispatched", [None, True], ids=["default", "dispatch_batches"])
@pytest.mark.parametrize("layers", [4, 0])
@pytest.mark.filterwarnings("ignore:no stack of layers:UserWarning")
def test_streamed_evaluation_with_a_short_last_batch(tmp_path, layers, dispatched):
    def evaluated(kind, name):
        model = tiny_bert(layers=layers)
        made = trainer(kind, tmp_path / name, model=model, accelerator_config={"dispatch_batches": dispatched})
        return made.evaluate(Streamed(66))["eval_loss"], made.predict(Streamed(66)).predictions

    (loss, predictions), (expected, theirs) = evaluated(L2LTrainer, "l2l"), evaluated(hf.Trainer, "plain")
    assert loss == expected
    assert predictions.tolist() == theirs.tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dispatched", [None, True], ids=["default", "dispatch_batches"])
def test_same_bits_from_a_streamed_training_set(tmp_path, dispatched):
    def trained(make, name):
        made = make(tmp_path / name, accelerator_config={"dispatch_batches": dispatched})
        made.train_dataset = Streamed(30)
        made.train()
        return made

    expected, found = trained(plain_trainer, "plain"), trained(l2l_trainer, "l2l")
    assert_same_run(found, expected)


# ---- with trainers of other signatures


class Preferring(hf.Trainer):
    """Takes its arguments in another order, as TRL's DPOTrainer does."""

    def __init__(self, model=None, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        self.ref_model, self.beta = ref_model, beta
        super().__init__(model=model, args=args, train_dataset=train_dataset)


class Loading(hf.Trainer):
    """Loads the model itself, as TRL's SFTTrainer does."""

    def __init__(self, model, args=None, **kwargs):
        if isinstance(model, str):
            model = hf.AutoModelForSequenceClassification.from_pretrained(model)
        super().__init__(model, args, **kwargs)


class Collecting(hf.Trainer):
    """Makes a batch of a list of rows, as TRL's GRPOTrainer does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, data_collator=list, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(inputs, list)
        return super().training_step(model, hf.default_data_collator(inputs), num_items_in_batch)


def mixed(kind, first=True):
    return type("Mixed", (L2LTrainer, kind) if first else (kind, L2LTrainer), {})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("positional", [True, False])
def test_a_mixin_with_a_trainer_of_another_order(tmp_path, first, positional):
    def trained(kind, folder):
        model, args = tiny_bert(), arguments(hf.TrainingArguments, tmp_path / folder)
        if positional:
            made = kind(model, None, args, rows(), beta=0.5)
        else:
            made = kind(model, args=args, beta=0.5, train_dataset=rows())
        made.train()
        assert (made.args, made.ref_model, made.beta) == (args, None, 0.5)
        return made

    expected, found = trained(Preferring, "plain"), trained(mixed(Preferring, first), "l2l")
    assert found.eps is not None
    assert_same_run(found, expected)


@pytest.mark.parametrize("first", [True, False])
def test_a_mixin_with_a_trainer_that_loads_the_model(tmp_path, first):
    tiny_bert().save_pretrained(tmp_path / "model")
    args = arguments(hf.TrainingArguments, tmp_path)
    made = mixed(Loading, first)(str(tmp_path / "model"), args, train_dataset=rows())
    assert made.eps is None  # reading it attaches nothing
    made.create_optimizer()
    assert made.eps is not None
    with pytest.raises(ValueError, match="fp16_full_eval cannot be used with L2L"):
        args = arguments(hf.TrainingArguments, tmp_path, fp16_full_eval=True)
        mixed(Loading, first)(str(tmp_path / "model"), args)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [True, False])
def test_a_mixin_with_a_trainer_whose_batches_are_lists(tmp_path, first):
    def trained(kind, folder):
        args = arguments(hf.TrainingArguments, tmp_path / folder)
        made = kind(tiny_bert(), args, train_dataset=rows())
        made.train()
        return made

    expected, found = trained(Collecting, "plain"), trained(mixed(Collecting, first), "l2l")
    assert_same_run(found, expected)


def test_the_signature_is_that_of_trainer():
    assert inspect.signature(L2LTrainer) == inspect.signature(hf.Trainer)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(L2LTrainer, hf.Trainer), (L2LTrainingArguments, hf.TrainingArguments)],
    ids=["trainer", "args"],
)
def test_attributes_are_what_they_are_of_trainer(ours, theirs):
    """Programs call static methods of the class, and a property is no method."""
    kinds = {name: type(value) for base in reversed(theirs.__mro__[:-1]) for name, value in vars(base).items()}
    found = {name: type(inspect.getattr_static(ours, name)) for name in kinds}
    assert {name for name in kinds if found[name] is not kinds[name]} <= {"__doc__"}


def test_programs_ask_the_class_for_the_optimizer(tmp_path):
    """As overrides of `create_optimizer` do."""
    plain, ours = (arguments(kind, tmp_path) for kind in (hf.TrainingArguments, L2LTrainingArguments))
    assert L2LTrainer.get_optimizer_cls_and_kwargs(ours) == hf.Trainer.get_optimizer_cls_and_kwargs(plain)


# ---- schedules


@pytest.mark.one_in(4)
@pytest.mark.parametrize("eps_update", ["serial", "deferred"])
@pytest.mark.parametrize("relative", [True, False])
def test_adafactors_own_learning_rates_are_reported(tmp_path, eps_update, relative):
    def trained(make, name, **options):
        model = tiny_bert()
        rate = {"relative_step": True, "warmup_init": True} if relative else {"lr": 1e-2, "relative_step": False}
        optimizer = hf.Adafactor(model.parameters(), scale_parameter=True, **rate)
        scheduler = AdafactorSchedule(optimizer, initial_lr=1e-3)
        made = make(tmp_path / name, model=model, optimizers=(optimizer, scheduler), max_steps=5, **options)
        made.train()
        assert scheduler is made.lr_scheduler
        return made

    expected = trained(plain_trainer, "plain")
    found = trained(l2l_trainer, "l2l", eps_update=eps_update)
    rates = [entry["learning_rate"] for entry in logs(found)[:-1]]
    assert len(set(rates)) == 5 and all(rates)
    assert_same_run(found, expected)
    assert set(found.lr_scheduler.state_dict()) == set(expected.lr_scheduler.state_dict())


def test_a_trainer_is_freed_with_its_last_reference(tmp_path):
    """Its data loaders' processes end then, too."""
    trainer = l2l_trainer(tmp_path, max_steps=2)
    trainer.train()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(trainer)
        del trainer
        assert gone() is None
    finally:
        gc.enable()
