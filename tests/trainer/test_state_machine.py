"""A state machine (hypothesis) over what a program may do to a model that trains layer to layer, in any order.

Each rule does the same to a model under L2L and to its twin, the same model in plain torch with activation
checkpointing; after it, losses, weights, gradients, optimizer state, buffers and random numbers are equal, to the bit,
and there are no more threads than before; at the end, no more open files, tensors and spill files. The plain twin runs
each layer by micro-batches, too, and in the order of the relay, so that sums are added in the same order.
"""

from __future__ import annotations

import copy
import gc
import io
import shutil
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import left_over
from devices import DEVICE
from hf_l2l import EngineFailedError, L2LConfig, NonFiniteError, attach_l2l, detach_l2l
from hf_l2l.runtime.worker import usable_cores
from late_updates import Gate, late_updates
from memory_switches import forced_copies, poisoned_releases
from models import SMALL, VOCAB
from plain import DROPOUT, is_attached
from runs import OPTIMIZERS as MADE
from runs import assert_same_tensors, groups_of
from tiers import ALL, cpu_suffices, not_on_cuda, times

OPTIMIZERS = MADE | {"fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True)}

VOCABULARIES = (60, 52, 64)
which = st.integers(0, 1)
rows = st.integers(1, 5)
seeds = st.integers(0, 99)
rarely = st.sampled_from([False, False, False, True])


@st.composite
def options_of_l2l(draw: Any) -> dict[str, Any]:
    """Options under which the bits are those of the plain twin."""
    stash = draw(st.sampled_from(["device", "host", "disk"]))
    mode = draw(st.sampled_from(["serial", "deferred", "deferred", "eager"]))
    return {
        "ubatch_size": draw(st.sampled_from([None, 1, 2, 3])),
        "stash": stash,
        "boundary": "auto" if stash == "device" else draw(st.sampled_from(["auto", "device"])),
        "eps_update": mode,
        "prefetch": draw(st.booleans()),
        "gradient_slots": draw(st.sampled_from([2, 1])),
        "num_threads": draw(st.sampled_from([None, 1, min(2, usable_cores())])),
        "kept_graphs": draw(st.sampled_from([0, 0, 1, 2])),
        "nonfinite": "raise" if mode == "eager" else draw(st.sampled_from(["raise", "skip"])),
    }


class Counting(nn.Dropout):
    """Writes into buffers of its own whenever it trains."""

    def __init__(self, p: float, width: int) -> None:
        super().__init__(p)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 0.25)
        return super().forward(x)


class CountingBert(hf.BertForMaskedLM):
    """Its head is tied to the embeddings."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        for layer in self.bert.encoder.layer:
            layer.output.dropout = Counting(config.hidden_dropout_prob, config.hidden_size)


def bert(vocab: int) -> nn.Module:
    sizes = {**SMALL, "vocab_size": vocab, "hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    return CountingBert(hf.BertConfig(**sizes))


def llama(vocab: int) -> nn.Module:
    sizes = {**SMALL, "vocab_size": vocab, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attention_dropout=DROPOUT, use_cache=False))


KINDS: dict[str, Callable[[int], nn.Module]] = {"bert": bert, "llama": llama}


def batch_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB - 8, (rows, 6), generator=generator)  # known after any change of the vocabulary
    return {"input_ids": ids, "labels": ids.flip(1).contiguous()}


class Relayed:
    """Replaces the forward of a layer of the plain twin: micro-batches, checkpointed, in the order of the relay."""

    def __init__(self, layer: nn.Module, ubatch_size: int | None) -> None:
        self.layer, self.ubatch_size = layer, ubatch_size
        self.run = partial(type(layer).forward, layer)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = hidden.shape[0]
        chunks = [
            pytree.tree_map(partial(self._rows, rows, start), ((hidden, *args), kwargs))
            for start in range(0, rows, self.ubatch_size or rows)
        ]
        # Random numbers and buffers are those of one forward of each micro-batch, from the first to the last.
        states, outputs = [], []
        with torch.no_grad():
            for given, named in chunks:
                states.append(torch.get_rng_state())
                outputs.append(self.run(*given, **named))
        if torch.is_grad_enabled():
            after = torch.get_rng_state()
            # Autograd runs first what was made last: the backward of the micro-batches is from the first to the last.
            for number in reversed(range(len(chunks))):
                given, named = chunks[number]
                torch.set_rng_state(states[number])
                outputs[number] = checkpoint(self._once_more, *given, **named, use_reentrant=False)
            torch.set_rng_state(after)
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def _rows(self, rows: int, start: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows > 1:
            return value[start : start + (self.ubatch_size or rows)]
        return value

    def _once_more(self, *args: Any, **kwargs: Any) -> Any:
        buffers = [(buffer, buffer.clone()) for buffer in self.layer.buffers()]
        try:
            return self.run(*args, **kwargs)
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


class Saved(NamedTuple):
    """What a program keeps of one of the twins."""

    vocab: int
    optimizer: str
    trained: set[str]
    """Names of the parameters that are not frozen."""
    weights: Path
    """The folder of `save_pretrained`."""
    rest: bytes
    """State of optimizer, scheduler and scaler."""


class Side:
    """One of the twins: in plain torch, unless `options` of `L2LConfig` are given."""

    def __init__(self, model: nn.Module, optimizer: str, options: dict[str, Any]) -> None:
        self.model, self.options, self.skipped = model.train(), options, 0
        self.place(**options)
        self.optimize(optimizer)

    @property
    def layers(self) -> nn.ModuleList:
        return next(each for each in self.model.modules() if isinstance(each, nn.ModuleList))

    def place(self, **options: Any) -> None:
        """Run with other options from now on."""
        for layer in self.layers:
            layer.forward = Relayed(layer, options["ubatch_size"])

    def optimize(self, name: str) -> None:
        """A new optimizer of all parameters, and a new scheduler."""
        self.name = name
        self.optimizer = self.wrapped(OPTIMIZERS[name](groups_of(self.model)))
        self.scheduler: LRScheduler = StepLR(self.optimizer, 2, 0.75)

    def wrapped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    # ---- training

    def backward(self, batch: dict[str, torch.Tensor], factor: float, *, is_last: bool) -> str:
        """One forward and backward; returns the loss, in which one that is no number equals none."""
        loss = self.model(**batch).loss * factor
        loss.backward()
        return repr(loss.item())

    def clip(self, max_norm: float, *, by_torch: bool) -> str:
        return repr(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item())

    def step(self, *, skips: bool) -> None:
        """A step, which a gradient that is not finite makes an error or `skips`."""
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters()):
            self.optimizer.step()
        elif not skips:
            raise NonFiniteError(0, "the plain twin")
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        self.scheduler.step()

    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            logits = self.model(**batch).logits
        self.model.train()
        return logits.detach().cpu()

    # ---- what is kept

    def save(self, folder: Path) -> Saved:
        self.model.save_pretrained(folder)
        rest = io.BytesIO()
        torch.save((self.optimizer.state_dict(), self.scheduler.state_dict(), self.scaler_state()), rest)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return Saved(self.model.config.vocab_size, self.name, trained, folder, rest.getvalue())

    def load(self, saved: Saved) -> None:
        """Go on from what was saved, with the same objects."""
        if saved.optimizer != self.name:
            self.optimize(saved.optimizer)
        self.model.load_state_dict(type(self.model).from_pretrained(saved.weights).state_dict())
        optimizer, scheduler, scaler = torch.load(io.BytesIO(saved.rest), weights_only=True)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)
        self.load_scaler(scaler)
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in saved.trained)

    def scaler_state(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_scaler(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]


class Layered(Side):
    """The twin that runs layer to layer."""

    def place(self, **options: Any) -> None:
        was_attached = is_attached(self.model)
        detach_l2l(self.model)
        self.options = options
        self.eps = attach_l2l(self.model, L2LConfig(**options))
        if was_attached:
            self.eps.wrap(self.optimizer)

    def wrapped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.eps.wrap(optimizer)

    def backward(self, batch: dict[str, torch.Tensor], factor: float, *, is_last: bool) -> str:
        with nullcontext() if is_last else self.eps.accumulate():
            return super().backward(batch, factor, is_last=is_last)

    def clip(self, max_norm: float, *, by_torch: bool) -> str:
        return super().clip(max_norm, by_torch=True) if by_torch else repr(self.eps.clip_grad_norm_(max_norm).item())

    def step(self, *, skips: bool) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def scaler_state(self) -> dict[str, Any]:
        return {"skipped": 0} if self.eps.scaler is None else self.eps.scaler.state_dict()

    def load_scaler(self, state: dict[str, Any]) -> None:
        if self.eps.scaler is not None:
            self.eps.scaler.load_state_dict(state)


class Twins:
    """A model under L2L, its plain twin, and the last checkpoint of each."""

    def __init__(self, kind: str, ours: Layered, plain: Side) -> None:
        self.kind, self.ours, self.plain, self.sides = kind, ours, plain, (ours, plain)
        self.saved: tuple[Saved, Saved]

    def both(self, act: Any) -> tuple[Any, Any]:
        """What `act` returns for each; they draw the same random numbers."""
        before = torch.get_rng_state()
        found = act(self.ours)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        expected = act(self.plain)
        assert torch.equal(torch.get_rng_state(), after), "another number of random numbers was drawn"
        return found, expected

    def alike(self, act: Any) -> Any:
        """The same for numbers that must be equal."""
        found, expected = self.both(act)
        assert found == expected, f"{found} under L2L, {expected} in plain torch"
        return found

    def same_weights(self) -> None:
        """Weights, buffers, and gradients that wait for a step are equal, to the bit."""
        ours, plain = self.ours.model, self.plain.model
        assert_same_tensors(ours.state_dict(), plain.state_dict())
        found, expected = (dict(model.named_parameters()) for model in (ours, plain))
        assert [p.requires_grad for p in found.values()] == [p.requires_grad for p in expected.values()]
        assert_same_tensors(*({name: p.grad for name, p in each.items()} for each in (found, expected)))

    def same_state(self) -> None:
        """What the optimizer, the scheduler and the scaler keep is equal, to the bit."""
        found, expected = (side.optimizer.state_dict() for side in (self.ours, self.plain))
        assert found["param_groups"] == expected["param_groups"]
        # In another order if eager updates have made the state of a parameter that was frozen before.
        assert found["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert_same_tensors(found["state"][index], state)
        assert self.ours.scheduler.state_dict() == self.plain.scheduler.state_dict()
        if self.ours.eps.scaler is not None:
            assert self.ours.eps.scaler.skipped == self.plain.skipped


class Machine(RuleBasedStateMachine):
    """What may be done, and what must be true after it."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = ExitStack()
        self.folder = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(3):
            gc.collect()
        self.threads_before, self.files_before = left_over.own_threads(), left_over.files()
        self.tensors_before = left_over.live_tensors()
        self.twins: list[Twins] = []
        self.compares = "weights"
        self.gate: Gate | None = None

    # ---- what there is

    def threads(self) -> set[threading.Thread]:
        """Those that were not there before."""
        return left_over.own_threads() - self.threads_before

    def of(self, which: int) -> Twins:
        return self.twins[which % len(self.twins)]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        spills = {"spill_dir": str(self.folder)} if options["stash"] == "disk" else {"spill_dir": None}
        return {**options, **spills, "device": DEVICE}

    # ---- rules

    @initialize(
        kind=st.sampled_from(list(KINDS)),
        options=options_of_l2l(),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        copies=st.booleans(),
        late=st.booleans(),
        seed=seeds,
    )
    def begin(self, kind: str, options: dict[str, Any], optimizer: str, copies: bool, late: bool, seed: int) -> None:
        torch.manual_seed(seed)
        if late:
            self.gate = self.exits.enter_context(late_updates())
        if DEVICE == "cpu" and copies:
            self.exits.enter_context(forced_copies())
        self.exits.enter_context(poisoned_releases())
        self.exits.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # it loads, or skips a step
        self.add(kind, options, optimizer)

    @precondition(lambda self: len(self.twins) == 1)
    @rule(kind=st.sampled_from(list(KINDS)), options=options_of_l2l(), optimizer=st.sampled_from(list(OPTIMIZERS)))
    def add(self, kind: str, options: dict[str, Any], optimizer: str) -> None:
        """A model, or a second one, which trains in turns with the first."""
        model, options = KINDS[kind](VOCABULARIES[0]), self.options(options)
        plain = Side(copy.deepcopy(model), optimizer, options)
        self.twins.append(Twins(kind, Layered(model, optimizer, options), plain))
        self.save(len(self.twins) - 1)

    @rule(which=which, rows=rows, seed=seeds)
    def backward(self, which: int, rows: int, seed: int) -> None:
        """One that is followed by others before the step."""
        self.of(which).alike(lambda side: side.backward(batch_of(rows, seed), 0.5, is_last=False))
        self.compares = "weights"

    @rule(
        which=which,
        rows=rows,
        seed=seeds,
        clip=st.sampled_from([None, 0.05, 1.0, 100.0]),
        by_torch=rarely,
        attaches=rarely,
        compares=st.sampled_from(["weights", "state", ""]),
    )
    def step(
        self, which: int, rows: int, seed: int, clip: float | None, by_torch: bool, attaches: bool, compares: str
    ) -> None:
        """The last backward of a step, and the step, perhaps of a model that is attached again just before.

        Unless it `compares` weights or the optimizer's state first, the updates go on in the background."""
        twins = self.of(which)
        eager = twins.ours.options["eps_update"] == "eager"
        twins.alike(lambda side: side.backward(batch_of(rows, seed), 0.5, is_last=True))
        if clip is not None and not eager:
            twins.alike(lambda side: side.clip(clip, by_torch=by_torch))
        if attaches and not eager:
            twins.both(lambda side: side.place(**twins.ours.options))
            twins.ours.load_scaler({"scale": 1.0, "_growth_tracker": 0, "skipped": twins.plain.skipped})
        twins.both(lambda side: side.step(skips=False))
        self.compares = compares

    step_again = step_once_more = step_at_last = step  # steps are drawn more often than others

    @rule(which=which, rows=rows, seed=seeds, at=st.sampled_from(["loss", "gradient"]), clips=st.booleans())
    def step_with_inf(self, which: int, rows: int, seed: int, at: str, clips: bool) -> None:
        """A gradient that is not finite; with eager updates, that stops the engine."""
        twins = self.of(which)
        skips, eager = twins.ours.options["nonfinite"] == "skip", twins.ours.options["eps_update"] == "eager"
        batch, factor = batch_of(rows, seed), float("inf") if at == "loss" or eager else 1.0

        def tried(side: Side) -> bool:
            try:
                side.backward(batch, factor, is_last=True)
                if factor == 1.0:
                    given = [p for p in side.model.parameters() if p.grad is not None]
                    given[seed % len(given)].grad.view(-1)[0] = float("inf")
                if clips and not eager:
                    side.clip(1.0, by_torch=False)
                side.step(skips=skips)
                if eager and side is twins.ours:
                    twins.ours.eps.synchronize()
            except NonFiniteError:
                if not eager:
                    side.optimizer.zero_grad()
                return True
            return False

        assert twins.alike(tried) is not skips
        if eager:
            self.stays_broken(twins, batch)
            options = twins.ours.options
            del twins, tried
            self.begin_again(which, cross=False, options=options)
        self.compares = "weights"

    def stays_broken(self, twins: Twins, batch: dict[str, torch.Tensor]) -> None:
        """In a frame of its own, which the error refers to."""
        with pytest.raises(EngineFailedError):
            twins.ours.backward(batch, 1.0, is_last=False)

    @rule(which=which, rows=rows, seed=seeds)
    def evaluate(self, which: int, rows: int, seed: int) -> None:
        found, expected = self.of(which).both(lambda side: side.evaluate(batch_of(rows, seed)))
        assert torch.equal(found, expected)

    @rule(which=which, rate=st.sampled_from([1e-3, 5e-3, 0.0]))
    def change_rate(self, which: int, rate: float) -> None:
        for side in self.of(which).sides:
            side.optimizer.param_groups[0]["lr"] = rate

    @rule(which=which, number=st.integers(0, 30), trains=st.booleans(), whole=st.booleans())
    def freeze(self, which: int, number: int, trains: bool, whole: bool) -> None:
        """Freeze a layer or one of its parameters, or let it train again; gradients so far stay."""

        for side in self.of(which).sides:
            parameters = list(side.layers[number % len(side.layers)].parameters())
            for p in parameters if whole else [parameters[number % len(parameters)]]:
                p.requires_grad_(trains)
        self.compares = "weights"

    @rule(which=which, optimizer=st.sampled_from(list(OPTIMIZERS)))
    def swap_optimizer(self, which: int, optimizer: str) -> None:
        self.of(which).both(lambda side: side.optimize(optimizer))

    @rule(which=which, size=st.sampled_from(VOCABULARIES), optimizer=st.sampled_from(list(OPTIMIZERS)))
    def resize(self, which: int, size: int, optimizer: str) -> None:
        """Other token embeddings, which need a new optimizer."""

        def change(side: Side) -> None:
            side.model.resize_token_embeddings(size, mean_resizing=False)
            side.optimizer.zero_grad()
            side.optimize(optimizer)

        self.of(which).both(change)
        self.compares = "weights"

    @rule(which=which)
    def save(self, which: int) -> None:
        twins = self.of(which)
        twins.saved = twins.both(lambda side: side.save(Path(tempfile.mkdtemp(dir=self.folder))))

    @rule(which=which, cross=st.booleans())
    def load(self, which: int, cross: bool) -> None:
        """Go back to the last checkpoint, or to that of the twin, with the same objects."""
        twins = self.of(which)
        found, expected = reversed(twins.saved) if cross else twins.saved
        if found.vocab != twins.ours.model.config.vocab_size:
            return
        twins.both(lambda side: side.load(found if side is twins.ours else expected))
        self.compares = "weights"

    @rule(which=which, cross=st.booleans(), options=options_of_l2l())
    def resume(self, which: int, cross: bool, options: dict[str, Any]) -> None:
        """Drop everything, as if the program had been killed, and go on from the last checkpoint in a new model."""
        self.begin_again(which, cross, self.options(options))
        self.compares = "weights"

    def begin_again(self, which: int, cross: bool, options: dict[str, Any]) -> None:
        if self.gate is not None:
            self.gate.open_all()
        number = which % len(self.twins)
        saved = self.twins[number].saved
        found, expected = reversed(saved) if cross else saved
        kind, ours = self.twins[number].kind, self.twins[number].ours
        left = [weakref.ref(each) for each in (ours.model, ours.optimizer, ours.eps, *ours.model.parameters())]
        self.twins[number] = None  # type: ignore[call-overload]
        del ours
        assert left_over.gone(lambda: all(each() is None for each in left)), "what was dropped is still there"
        made: list[Any] = []
        for each, make in ((found, Layered), (expected, Side)):
            torch.manual_seed(number)
            made.append(make(KINDS[kind](each.vocab), each.optimizer, options))
            made[-1].load(each)
        self.twins[number] = Twins(kind, *made)
        self.twins[number].saved = saved

    @rule(which=which, options=options_of_l2l())
    def attach_again(self, which: int, options: dict[str, Any]) -> None:
        """Other options from now on; gradients that wait for the step stay."""
        twins = self.of(which)
        options = self.options(options)
        twins.both(lambda side: side.place(**options))
        if twins.ours.eps.scaler is None:
            twins.plain.skipped = 0  # nothing counts them, and a checkpoint has no number
        twins.ours.load_scaler({"scale": 1.0, "_growth_tracker": 0, "skipped": twins.plain.skipped})

    @rule(which=which, number=st.integers(0, 30), factor=st.sampled_from([0.5, 1.5]))
    def write(self, which: int, number: int, factor: float) -> None:
        """The program changes a parameter between steps, and reads it."""

        for side in self.of(which).sides:
            parameters = list(side.model.parameters())
            with torch.no_grad():
                parameters[number % len(parameters)].mul_(factor)

    # ---- after every rule

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        """Overridden, since comparing waits for the updates: rules choose when (`compares`)."""
        for twins in self.twins if self.compares else ():
            compares = twins.same_weights, twins.same_state
            for compare in compares if self.compares == "weights" else reversed(compares):
                compare()
        self.compares = "weights"
        # Two for updates, with two that help. A thread that has been told to end may take a moment.
        most = 4 * len(self.twins)
        assert len(self.threads()) <= most or left_over.gone(lambda: len(self.threads()) <= most), self.threads()

    def teardown(self) -> None:
        if self.gate is not None:
            self.gate.open_all()
        while self.twins:
            twins = self.twins.pop()
            if twins is not None:  # it is None after a failure
                detach_l2l(twins.ours.model)
            del twins
        assert not list(self.folder.glob("hf_l2l-spill-*"))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.exits.close()
        if sys.exception() is not None:  # it refers to tensors
            return
        assert left_over.gone(lambda: not self.threads()), self.threads()
        assert left_over.gone(lambda: left_over.files() <= self.files_before), "files are still open"
        assert left_over.gone(lambda: left_over.live_tensors() <= self.tensors_before), "tensors are still there"


@cpu_suffices
@not_on_cuda
def test_any_program_trains_as_in_plain_torch():
    """`make test-all` draws others at each time."""
    count, steps = times(4, 150) if DEVICE == "cpu" else times(3, 60), times(15, 20)
    drawn = settings(
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        max_examples=count,
        stateful_step_count=steps,
        derandomize=not ALL,
    )
    run_state_machine_as_test(Machine, settings=drawn)
