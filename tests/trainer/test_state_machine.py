"""A state machine (hypothesis) over what a program may do to a model that trains layer to layer, in any order.

Each rule does the same to a model under L2L and to its plain twin (`twins`); after it, losses, weights, gradients,
optimizer state, buffers and random numbers are equal, to the bit, and there are no more threads than before; at the
end, no more open files, tensors and spill files.
"""

from __future__ import annotations

import copy
import gc
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import left_over
from devices import DEVICE
from hf_l2l import EngineFailedError, NonFiniteError, detach_l2l
from hf_l2l.runtime.worker import usable_cores
from late_updates import Gate, late_updates
from memory_switches import forced_copies, poisoned_releases
from plain import DROPOUT
from tiers import ALL, cpu_suffices, not_on_cuda, times
from twins import KINDS, OPTIMIZERS, Layered, Saved, Side, batch_of

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


def gone(is_over: Callable[[], bool]) -> bool:
    """Whether what nobody refers to any more is gone, once it has been collected: graphs of autograd hide what they
    refer to until they are gone themselves, and its thread for a device lets go a moment later."""
    for _ in range(50):
        gc.collect()
        if is_over():
            return True
        time.sleep(0.01)
    return False


class Twins:
    """A model under L2L, its plain twin, and the last checkpoint of each."""

    def __init__(self, ours: Layered, plain: Side) -> None:
        self.ours, self.plain = ours, plain
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
        self.count = 0
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

    def new_folder(self) -> Path:
        self.count += 1
        return self.folder / f"saved-{self.count}"

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
        model = KINDS[kind](VOCABULARIES[0], DROPOUT)
        options = self.options(options)
        plain = Side(copy.deepcopy(model), optimizer, options["ubatch_size"])
        self.twins.append(Twins(Layered(model, optimizer, options), plain))
        self.save(len(self.twins) - 1, in_folder=False)

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
        """A gradient that is not finite."""
        if self.breaks_by_inf(which, rows, seed, at, clips):
            self.begin_again(which, cross=False, options=self.of(which).ours.options)
        self.compares = "weights"

    def breaks_by_inf(self, which: int, rows: int, seed: int, at: str, clips: bool) -> bool:
        """Whether that stops the engine, as it does with eager updates."""
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
            self.refuses_to_go_on(twins, batch)
        return eager

    def refuses_to_go_on(self, twins: Twins, batch: dict[str, torch.Tensor]) -> None:
        with pytest.raises(EngineFailedError):
            twins.ours.backward(batch, 1.0, is_last=False)

    @rule(which=which, rows=rows, seed=seeds)
    def evaluate(self, which: int, rows: int, seed: int) -> None:
        found, expected = self.of(which).both(lambda side: side.evaluate(batch_of(rows, seed)))
        assert torch.equal(found, expected)

    @rule(which=which, rate=st.sampled_from([1e-3, 5e-3, 0.0]))
    def change_rate(self, which: int, rate: float) -> None:
        def change(side: Side) -> None:
            side.optimizer.param_groups[0]["lr"] = rate

        self.of(which).both(change)

    @rule(which=which, number=st.integers(0, 30), trains=st.booleans(), whole=st.booleans())
    def freeze(self, which: int, number: int, trains: bool, whole: bool) -> None:
        """Freeze a layer or one of its parameters, or let it train again; gradients so far stay."""

        def change(side: Side) -> None:
            layer = side.layers[number % len(side.layers)]
            parameters = list(layer.parameters())
            for p in parameters if whole else [parameters[number % len(parameters)]]:
                p.requires_grad_(trains)

        self.of(which).both(change)
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

    @rule(which=which, in_folder=st.booleans())
    def save(self, which: int, in_folder: bool) -> None:
        twins = self.of(which)
        # The folder of each is another one.
        found, expected = twins.both(lambda side: side.save(self.new_folder() if in_folder else None))
        twins.saved = found, expected

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
        ours, plain = self.twins[number].ours, self.twins[number].plain
        kind = ours.kind
        left = [weakref.ref(each) for each in (ours.model, ours.optimizer, ours.eps, *ours.model.parameters())]
        self.twins[number] = None  # type: ignore[call-overload]
        del ours, plain
        assert gone(lambda: all(each() is None for each in left)), "what was dropped is still there"
        made = []
        for each, make in ((found, Layered), (expected, Side)):
            torch.manual_seed(number)
            model = KINDS[kind](each.vocab, DROPOUT)
            made.append(make(model, each.optimizer, options if make is Layered else options["ubatch_size"]))
            made[-1].load(each)
        self.twins[number] = Twins(*made)
        self.twins[number].saved = saved

    @rule(which=which, options=options_of_l2l())
    def attach_again(self, which: int, options: dict[str, Any]) -> None:
        """Other options from now on; gradients that wait for the step stay."""
        twins = self.of(which)
        options = self.options(options)
        twins.both(lambda side: side.place(**options))
        twins.ours.load_scaler({"scale": 1.0, "_growth_tracker": 0, "skipped": twins.plain.skipped})

    @rule(which=which, number=st.integers(0, 30), factor=st.sampled_from([0.5, 1.5]))
    def write(self, which: int, number: int, factor: float) -> None:
        """The program changes a parameter between steps, and reads it."""

        def change(side: Side) -> None:
            parameters = list(side.model.parameters())
            with torch.no_grad():
                parameters[number % len(parameters)].mul_(factor)

        self.of(which).both(change)

    # ---- after every rule

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        """Overridden, since comparing waits for the updates: rules choose when (`compares`)."""
        for twins in self.twins if self.compares else ():
            for compare in (same_weights, same_state) if self.compares == "weights" else (same_state, same_weights):
                compare(twins.ours, twins.plain)
        self.compares = "weights"
        most = 2 * len(self.twins)  # a thread that has been told to end may take a moment
        assert len(self.threads()) <= most or gone(lambda: len(self.threads()) <= most), self.threads()

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
        assert gone(lambda: not self.threads()), self.threads()
        assert gone(lambda: left_over.files() <= self.files_before), "files are still open"
        assert gone(lambda: left_over.live_tensors() <= self.tensors_before), "tensors are still there"


def same_weights(ours: Layered, plain: Side) -> None:
    """Weights, buffers, and gradients that wait for a step are equal, to the bit."""
    weights = plain.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for (name, p), other in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert p.requires_grad == other.requires_grad
        assert (p.grad is None) == (other.grad is None), f"the gradient of {name}"
        assert p.grad is None or torch.equal(p.grad, other.grad), f"the gradient of {name}"


def same_state(ours: Layered, plain: Side) -> None:
    """What the optimizer, the scheduler and the scaler keep is equal, to the bit."""
    found, expected = ours.optimizer.state_dict(), plain.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    # In another order if eager updates have made the state of a parameter that was frozen before.
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)), (index, key)
    assert ours.scheduler.state_dict() == plain.scheduler.state_dict()
    if ours.eps.scaler is not None:
        assert ours.eps.scaler.skipped == plain.skipped


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
