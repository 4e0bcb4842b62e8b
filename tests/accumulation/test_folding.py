"""Accumulated batches that run as one train as batch by batch, but for rounding."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import accumulated
from accumulated import forwards, ragged, tiny_llama, train
from hf_l2l import L2LTrainer
from hf_l2l.accumulation.folding import Folding
from hf_l2l.hf import preparation
from hf_l2l.model.batch_dims import NotCut
from training import SAVING, logs, stopped_at_two


@pytest.fixture(autouse=True)
def _weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: where layers run on the CPU, nobody is warned."""
    monkeypatch.setattr(preparation, "weights_travel", lambda config: config.resident != "all")


CLOSE = 1e-6
"""Relative difference of what is equal but for the order of fp32 sums."""


def pair(folder, **options):
    """A training whose batches are folded, after one whose batches run one by one."""
    apart = accumulated.made(folder, l2l_merge_accumulation="off", **options)
    train(apart)
    folded = accumulated.made(folder, **options)
    return folded, apart


def assert_same(found, expected, rel=CLOSE, weights=1e-6):
    assert len(logs(found)) == len(logs(expected))
    for ours, theirs in zip(logs(found), logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=rel, nan_ok=True)
    assert found.state.log_history[-1]["train_loss"] == pytest.approx(
        expected.state.log_history[-1]["train_loss"], rel=rel
    )
    others = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        assert (value - others[name]).abs().max() <= weights, name


def assert_equal(found, expected):
    assert logs(found) == logs(expected)
    others = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, others[name]), name


OPTIONS = [
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 32, "per_device_train_batch_size": 1, "data": ragged(96)},
    {"per_device_train_batch_size": 3, "ubatch_size": 2},
    {"max_grad_norm": 0.05},
    {"eps_update": "serial"},
    {"eps_update": "deferred"},
    {"eps_update": "eager", "max_grad_norm": 0.0},
    {"stash": "host"},
    {"stash": "host", "l2l_boundary": "host"},
    {"optim": "sgd", "learning_rate": 0.1},
    {"l2l_nonfinite": "skip"},
]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: str({k: v for k, v in o.items() if k != "data"}))
def test_a_step_is_that_of_its_batches(tmp_path, options):
    folded, apart = pair(tmp_path, **options)
    seen = forwards(folded)
    assert train(folded) == []
    size = folded.args.per_device_train_batch_size * folded.args.gradient_accumulation_steps
    assert seen[-3:] == [size] * 3
    assert_same(folded, apart)
    known = {"data", *hf.TrainingArguments.__dataclass_fields__}
    plain = accumulated.made(tmp_path, kind=hf.Trainer, **{k: v for k, v in options.items() if k in known})
    train(plain)
    assert_same(folded, plain)


def test_a_model_in_float64(tmp_path):
    """Only what its loss casts to fp32 rounds; plain Trainer does so, too."""
    trained = [
        accumulated.made(tmp_path, kind=kind, model=accumulated.tiny_llama().double())
        for kind in (L2LTrainer, hf.Trainer)
    ]
    assert [train(each) for each in trained] == [[], []]
    assert trained[0].model.dtype is torch.float64
    assert_same(*trained)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("options", "rel", "weights"),
    [
        ({"cmp": "bf16"}, 1e-2, 4e-3),
        ({"cmp": "fp16"}, 2e-3, 1e-3),
        ({"cmp": "fp16", "l2l_loss_scale_init": 2.0**40}, 2e-3, 1e-2),
        ({"l2l_grad_dtype": "16bit"}, 1e-2, 4e-3),
        ({"bf16": True, "use_cpu": True}, 1e-2, 4e-3),
    ],
    ids=str,
)
def test_it_is_so_in_16_bits(tmp_path, options, rel, weights):
    """Adam makes of the sign of a small gradient a whole learning rate, hence the tolerance of the weights."""
    folded, apart = pair(tmp_path, max_steps=30 if "l2l_loss_scale_init" in options else 3, **options)
    seen = forwards(folded)
    assert train(folded) == []
    assert seen[-1] == 8
    assert_same(folded, apart, rel=rel, weights=weights)
    for name in ("loss_scale", "skipped_steps"):
        ours, theirs = ([entry.get(name) for entry in t.state.log_history] for t in (folded, apart))
        assert ours == theirs
    if "l2l_loss_scale_init" in options:
        assert folded.state.log_history[-2]["skipped_steps"] > 3


@pytest.mark.parametrize(("size", "seen_by_layers"), [(None, [3, 3, 3, 1]), (2, [2, 1, 2, 1, 2, 1, 1])])
def test_layers_see_one_batch_at_a_time(tmp_path, size, seen_by_layers):
    """Also where the last batch of an epoch has fewer rows."""
    made = accumulated.made(
        tmp_path, data=ragged(10), per_device_train_batch_size=3, ubatch_size=size, max_steps=3, num_train_epochs=3
    )
    seen: list[int] = []
    made.model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert train(made) == []
    count = len(seen_by_layers)
    assert seen[-2 * count :] == 2 * seen_by_layers, "a forward, and the recompute"


def test_rows_of_one_length_are_merged_without_padding(tmp_path):
    data = ragged(longest=5, shortest=5)
    folded, apart = pair(tmp_path, data=data)
    assert train(folded) == []
    assert_same(folded, apart)


def test_the_first_step_that_is_padded_is_compared_as_well(tmp_path):
    data = [*ragged(8, longest=5, shortest=5), *ragged(16)]
    folded, apart = pair(tmp_path, data=data, train_sampling_strategy="sequential", max_steps=3)
    seen = forwards(folded)
    assert train(folded) == []
    assert seen == [2, 2, 2, 2, 8, 8] + [2, 2, 2, 2, 8, 8] + [8]
    assert_same(folded, apart)


def test_batches_padded_on_the_left(tmp_path):
    left = {"data_collator": lambda rows: accumulated.padded(rows, "left")}
    folded, apart = pair(tmp_path, of_trainer=left)
    seen = forwards(folded)
    assert train(folded) == []
    assert seen[-1] == 8
    assert_same(folded, apart)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2 * 11, 2 * 12 + 1, 2 * 9])
def test_the_last_step_of_an_epoch_may_have_fewer_batches_and_rows(tmp_path, count):
    folded, apart = pair(tmp_path, data=ragged(count), max_steps=-1, num_train_epochs=2)
    seen = forwards(folded)
    assert train(folded) == []
    assert sum(seen) == 2 * count + 16, "every row in both epochs, and the first step twice more"
    assert folded.state.global_step == apart.state.global_step == 2 * -(-count // 8)
    assert_same(folded, apart)


def test_what_callbacks_and_logs_see(tmp_path):
    class Counting(hf.TrainerCallback):
        def __init__(self):
            self.events = []

        def on_step_begin(self, args, state, control, **kwargs):
            self.events.append("step")

        def on_substep_end(self, args, state, control, **kwargs):
            self.events.append("substep")

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            assert all(p.grad is not None for p in model.parameters())
            self.events.append("gradients")

    runs = []
    for value in ("auto", "off"):
        callback = Counting()
        made = accumulated.made(
            tmp_path,
            l2l_merge_accumulation=value,
            include_num_input_tokens_seen=True,
            logging_steps=2,
            of_trainer={"callbacks": [callback]},
        )
        train(made)
        entries = [{k: v for k, v in e.items() if "_s" not in k and "per_second" not in k} for e in logs(made)]
        runs.append((callback.events, entries, made.state.num_input_tokens_seen, made.state.total_flos))
    (events, entries, *counts), (others, expected, *known) = runs
    assert events == others == 3 * ["step", "substep", "substep", "substep", "gradients"]
    assert counts == known
    for ours, theirs in zip(entries, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=CLOSE)


def test_it_resumes_in_the_midst_of_an_epoch_with_the_same_bits(tmp_path):
    """Also with dropout, since the comparison of the first step leaves no trace."""

    def make(folder, **options):
        return accumulated.made(folder, model=tiny_llama(attention_dropout=0.2), **options)

    whole = make(tmp_path / "whole", **SAVING)
    train(whole)
    checkpoint = stopped_at_two(make, tmp_path / "cut")
    resumed = make(tmp_path / "cut", **SAVING)
    train(resumed, checkpoint)
    assert_equal(resumed, whole)


class StopInStep(hf.TrainerCallback):
    """Ends a step early, after two of its batches."""

    def __init__(self, what: str, step: int = 1) -> None:
        self.what, self.step, self.batches = what, step, 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.batches += 1
        if state.global_step == self.step and self.batches % 3 == 2:
            self.step = -1
            if self.what == "raise":
                raise KeyError("stop")
            setattr(control, f"should_{self.what}_stop", True)


def stopping(folder, what, value, **options):
    return accumulated.made(
        folder, l2l_merge_accumulation=value, of_trainer={"callbacks": [StopInStep(what)]}, **options
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", [{}, {"eps_update": "eager", "max_grad_norm": 0.0}], ids=str)
@pytest.mark.parametrize(("what", "step"), [("training", 0), ("training", 1), ("epoch", 1)])
def test_a_step_that_a_callback_ends_early_is_that_of_the_trainer(tmp_path, what, step, mode):
    """transformers leaves its gradients: to nobody, or to the next epoch."""
    runs = []
    for value in ("auto", "off"):
        made = stopping(tmp_path, what, value, max_steps=-1, num_train_epochs=2, data=ragged(24), **mode)
        made.callback_handler.callbacks[-1].step = step
        train(made)
        runs.append(made)
    folded, apart = runs
    assert folded.state.global_step == apart.state.global_step
    assert_same(folded, apart, rel=1e-5, weights=1e-6)
    left = [{n: p.grad for n, p in t.model.named_parameters()} for t in runs]
    assert (what == "training") == any(g is not None for g in left[1].values())
    for name, gradient in left[1].items():
        assert (left[0][name] is None) == (gradient is None)
        assert gradient is None or torch.allclose(left[0][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["training", "raise"])
def test_nothing_of_an_interrupted_training_is_in_the_next(tmp_path, what):
    made = stopping(tmp_path, what, "auto")
    if what == "raise":
        with pytest.raises(KeyError):
            made.train()
    else:
        made.train()
    made.model.load_state_dict(tiny_llama().state_dict())
    made.optimizer = made.lr_scheduler = None
    hf.set_seed(made.args.seed)
    assert train(made) == []
    fresh = accumulated.made(tmp_path)
    train(fresh)
    assert_equal(made, fresh)


def test_gradients_of_a_step_that_was_given_up_outlive_the_comparison_of_a_later_one(tmp_path):
    """The next epoch begins with them, and with the first step whose batches have different lengths."""
    runs = []
    for value in ("auto", "off"):
        calls = []

        def collate(rows, calls=calls):
            calls.append(1)
            longer = len(calls) > 8 and len(calls) % 2 == 1
            filler = {"input_ids": accumulated.PAD, "attention_mask": 0, "labels": -100}
            batch = accumulated.padded(rows)
            return {k: torch.nn.functional.pad(v, (0, longer), value=filler[k]) for k, v in batch.items()}

        of_trainer = {"callbacks": [StopInStep("epoch")], "data_collator": collate}
        data = ragged(24, longest=5, shortest=5)
        made = accumulated.made(
            tmp_path, l2l_merge_accumulation=value, max_steps=-1, num_train_epochs=2, data=data, of_trainer=of_trainer
        )
        runs.append(made)
        seen = forwards(made)
        train(made)
        if value == "auto":
            # Compared, one step, two batches that are given up; a step that is not compared, compared, two steps.
            assert seen == [2, 2, 2, 2, 8, 8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 8, 8, 8]
    assert_same(*runs, rel=1e-5)


def test_a_training_begins_without_batches_of_another():
    """transformers begins anew by itself with `auto_find_batch_size`."""
    folding, step = Folding(), SimpleNamespace(device=torch.device("cpu"))
    for _ in range(2):
        folding.start(None, lambda reason: None)
        assert folding.finish(step) is None
        assert folding.step({"input_ids": torch.ones(1, 1)}, torch.tensor(1), 2, step) == 0


def test_steps_that_cannot_be_compared_are_followed_by_some_that_can(tmp_path):
    """Without labels that count, the loss is not a number."""

    def run(**options):
        data = [{**row, "labels": [-100] * len(row["labels"])} for row in ragged(8)] + ragged(24)
        made = accumulated.made(
            tmp_path, data=data, train_sampling_strategy="sequential", l2l_nonfinite="skip", max_steps=4, **options
        )
        return made, forwards(made), train(made)

    folded, seen, said = run()
    assert said == []
    assert seen == [2, 2, 2, 2, 8] + [2, 2, 2, 2] + [2, 2, 2, 2, 8] + [8, 8, 8]
    apart, _, _ = run(l2l_merge_accumulation="off")
    assert [e.get("skipped_steps") for e in folded.state.log_history[:-1]] == [1, 1, 1, 1]
    assert_same(folded, apart)


def test_data_that_ends_within_a_step_leave_their_gradients_to_the_next_epoch(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(ragged(2 * 6))

    folded, apart = pair(tmp_path, data=Stream(), max_steps=3)
    train(folded)
    assert folded.state.global_step == apart.state.global_step
    assert_same(folded, apart, rel=1e-5, weights=1e-6)


def test_dropout_draws_in_another_order_and_is_compared_without(tmp_path):
    made = accumulated.made(tmp_path, model=tiny_llama(attention_dropout=0.3))
    seen = forwards(made)
    assert train(made) == []
    # The first batch shows that there is dropout; the comparison runs in evaluation mode.
    assert seen == [2] + 3 * [8]


def test_the_comparison_leaves_no_trace(tmp_path, monkeypatch):
    def run():
        made = accumulated.made(tmp_path, model=tiny_llama(attention_dropout=0.3))
        train(made)
        return made

    compared = run()
    monkeypatch.setattr("hf_l2l.accumulation.folding.disagreement", lambda *_: "")
    assert_equal(compared, run())


class Counting(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        return out


def test_the_comparison_leaves_buffers_as_they_were(tmp_path):
    model = tiny_llama()
    model.model.embed_tokens = Counting(model.model.embed_tokens)
    made = accumulated.made(tmp_path, model=model)
    assert train(made) == []
    assert model.model.embed_tokens.calls == 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", [{}, {"eps_update": "eager", "max_grad_norm": 0.0}], ids=str)
def test_where_it_disagrees_batches_run_one_by_one_with_their_bits(tmp_path, mode):
    """transformers' loss of this model does not use num_items_in_batch, though its forward takes it."""

    def run(**options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
            model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=60, **config))
        data = [{**row, "labels": sum(row["input_ids"]) % 2} for row in ragged()]
        of_trainer = {"data_collator": classified}
        made = accumulated.made(tmp_path, model=model, data=data, of_trainer=of_trainer, **mode, **options)
        return made, forwards(made), train(made)

    tried, seen, [said] = run()
    assert (
        "moves the weights 8 times per step: the loss of all rows at once is " in said
        and "adds losses that are means" in said
    )
    assert seen == [2] + 12 * [2]
    apart, _, _ = run(l2l_merge_accumulation="off")
    assert_equal(tried, apart)


def classified(rows):
    labels = torch.tensor([row["labels"] for row in rows])
    return {**accumulated.padded([{**row, "labels": row["input_ids"]} for row in rows]), "labels": labels}


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
        extra = self.lm_head.weight.sum()
        outputs.loss = outputs.loss + extra - extra.detach()
        return outputs


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WithAuxiliaryLoss, r"the model adds an auxiliary loss (aux_loss of its outputs), a mean over each batch"),
        (WithBatchMean, "the gradient of lm_head.weight would differ by "),
    ],
)
def test_what_the_first_step_finds(tmp_path, kind, reason):
    made = accumulated.made(tmp_path, model=kind(tiny_llama().config), remove_unused_columns=False)
    [said] = train(made)
    assert reason in said


class OutOfRoom:
    """Lets the device run out of memory for many rows, in the forward or in the backward, after `steps`."""

    def __init__(self, made: hf.Trainer, where: str, steps: int) -> None:
        self.is_on = lambda rows: rows > 4 and made.state.global_step >= steps
        self.where = where
        made.model.model.layers[0].register_forward_hook(self.after_first_layer)

    def after_first_layer(self, module, args, out):
        def fail(gradient):
            torch.rand(1)
            raise torch.OutOfMemoryError("too much")

        if torch.is_grad_enabled() and self.is_on(len(out)):
            if self.where == "forward":
                fail(None)
            out.register_hook(fail)  # after the gradients of the layers above have arrived


@pytest.mark.one_in(8)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_a_device_without_room_for_all_rows(tmp_path, where, steps, mode):
    """In the first step, or later, when rows are longer: that step and those after it run batch by batch."""
    made = accumulated.made(tmp_path, eps_update=mode, max_steps=4)
    seen = forwards(made)
    OutOfRoom(made, where, steps)
    [said] = train(made)
    assert "the device has no room for the rows of all batches at once" in said
    assert seen == [2, 2, 2, 2, 8] + steps * [8] + ([8] if steps else []) + (4 - steps) * [2, 2, 2, 2]
    apart = accumulated.made(tmp_path, l2l_merge_accumulation="off", eps_update=mode, max_steps=4)
    train(apart)
    if steps:
        assert_same(made, apart)
    else:
        assert_equal(made, apart)


@pytest.mark.parametrize("case", ["eager", "gradients of a step that was given up"])
def test_a_lack_of_room_that_costs_gradients_names_the_remedy(tmp_path, case):
    if case == "eager":
        made = accumulated.made(tmp_path, eps_update="eager", max_grad_norm=0.0)
    else:
        made = stopping(tmp_path, "epoch", "auto", max_steps=-1, num_train_epochs=2, data=ragged(24))
    OutOfRoom(made, "backward", 1)
    with pytest.raises(torch.OutOfMemoryError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train()
    assert "l2l_merge_accumulation='off' runs accumulated batches one by one" in error.value.__notes__


def test_what_fails_with_all_rows_at_once_runs_batch_by_batch(tmp_path):
    made = accumulated.made(tmp_path)

    def refuse(module, args, kwargs):
        if len(kwargs["input_ids"]) > 4:
            raise ValueError("an attention mask of these rows has 80 GiB")

    made.model.register_forward_pre_hook(refuse, with_kwargs=True)
    [said] = train(made)
    assert "all rows at once cannot be run (an attention mask of these rows has 80 GiB)" in said
    apart = accumulated.made(tmp_path, l2l_merge_accumulation="off")
    train(apart)
    assert_equal(made, apart)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("late", ["different inputs", "cannot be cut"])
def test_batches_that_later_cannot_be_merged_run_one_by_one(tmp_path, late, monkeypatch):
    """And so do all after them; nothing is lost."""

    def run(**options):
        calls = []

        def collate(rows):
            calls.append(1)
            extra = {"return_loss": True} if late == "different inputs" and len(calls) == 11 else {}
            return {**accumulated.padded(rows), **extra}

        made = accumulated.made(tmp_path, max_steps=4, of_trainer={"data_collator": collate}, **options)
        return made

    tried = run()
    seen = forwards(tried)
    if late == "cannot be cut":

        def refuse(module, args, kwargs):
            if len(kwargs["input_ids"]) > 4 and tried.state.global_step == 2:
                torch.rand(1)
                raise NotCut("calls of LlamaDecoderLayer cannot be cut into micro-batches")

        tried.model.register_forward_pre_hook(refuse, with_kwargs=True)
    [said] = train(tried)
    assert late in said
    assert seen == [2, 2, 2, 2, 8] + [8, 8] + ([8] if late == "cannot be cut" else []) + 8 * [2]
    apart = run(l2l_merge_accumulation="off")
    train(apart)
    assert_same(tried, apart)


def test_random_numbers_that_a_failed_attempt_drew_are_drawn_again(tmp_path):
    def run(draws: int) -> hf.Trainer:
        made = accumulated.made(tmp_path, model=tiny_llama(attention_dropout=0.3))

        def refuse(module, args, kwargs):
            if len(kwargs["input_ids"]) > 4 and made.state.global_step == 1:
                torch.rand(draws)
                raise NotCut("so")

        made.model.register_forward_pre_hook(refuse, with_kwargs=True)
        assert len(train(made)) == 1
        return made

    assert_equal(run(0), run(3))


def test_without_labels_the_losses_are_means(tmp_path):
    class Own(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            return super().forward(input_ids, attention_mask, labels=input_ids, **kwargs)

    def collate(rows):
        return {name: value for name, value in accumulated.padded(rows).items() if name != "labels"}

    made = accumulated.made(tmp_path, model=Own(tiny_llama().config), of_trainer={"data_collator": collate})
    [said] = train(made)
    assert "without labels there is no num_items_in_batch" in said


def test_a_step_called_by_the_program_is_run_at_once(tmp_path):
    made = accumulated.made(tmp_path)
    train(made)
    batch = accumulated.padded(ragged(2))
    assert float(made.training_step(made.model, batch)) > 0
    assert all(p.grad is not None for p in made.model.parameters())


@pytest.mark.filterwarnings("ignore:no stack of layers was found:UserWarning")
def test_a_model_without_layers_trains_as_with_the_trainer(tmp_path):
    class Flat(hf.PreTrainedModel):
        config_class = hf.LlamaConfig
        _supports_sdpa = True

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Embedding(config.vocab_size, config.vocab_size)

        def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
            loss = torch.nn.functional.cross_entropy(
                self.embed(input_ids).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            return {"loss": loss / num_items_in_batch}

    runs = []
    for kind in (hf.Trainer, L2LTrainer):
        torch.manual_seed(1)
        made = accumulated.made(tmp_path, kind=kind, model=Flat(tiny_llama().config))
        assert [w for w in train(made) if "weights" in w] == []
        runs.append(made)
    assert_equal(runs[1], runs[0])
