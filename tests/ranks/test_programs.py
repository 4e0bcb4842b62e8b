"""What programs do with a model of several ranks: the results are those of one process that plays all ranks."""

from __future__ import annotations

import copy
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import distributed, nn

from hf_l2l import L2LConfig, NonFiniteError, RankFailedError, attach_l2l, detach_l2l
from hf_l2l.eps.masters import Master
from hf_l2l.shared_eps.remote import RemoteTask
from rank_cases import OPTIMIZERS, Layers, Ranked, rank_here, same
from rank_pool import digest
from rank_trainer import fresh
from tiers import more
from training import tiny_bert

DEFERRED = {"eps_update": "deferred"}


def read_after_clipping() -> Any:
    """Every rank reads the gradients after clipping, and before the step; and drops some before the first one."""
    run, found = Ranked(**DEFERRED), []
    run.backward(7)
    run.model.zero_grad()
    for step in range(3):
        run.backward(step)
        run.eps.clip_grad_norm_(0.05)
        norms = [float(p.grad.norm()) ** 2 for p in run.model.parameters() if p.grad is not None]
        assert sum(norms) ** 0.5 == pytest.approx(0.05, rel=1e-4)
        found.append(run.gradients())
        run.step()
        run.optimizer.zero_grad()
    return found, run.ended()


def unfreezing(what: str) -> Any:
    """Half of the layers and the head are trained later; ranks call other layers, or have another order of them."""
    run = Ranked("large head", **DEFERRED)
    if what == "reversed" and run.numbers == [1]:
        run.wrap("lamb", list(run.model.parameters())[::-1])
    else:
        run.wrap("adamw" if what == "called" else "lamb")
    for step in range(5):
        for module in (*run.model.layers[4:], run.model.head):
            module.requires_grad_(what != "unfrozen" or step > 1)
        for number in run.numbers:
            (run.loss(step, number, range((8, 4)[number])) / run.share).backward()
        run.step()
    run.optimizer.state_dict()
    states = [run.optimizer.state.get(p, {}) for p in run.model.parameters()]
    state = digest(*(torch.as_tensor(each[key]) for each in states for key in sorted(each)))
    detach_l2l(run.model)
    return digest(*run.model.parameters()), state


def resized() -> Any:
    run = Ranked(eps_update="serial")
    run.steps([0], 0.5)
    torch.manual_seed(3)
    run.model.resize_token_embeddings(70)
    run.wrap()
    run.steps([1, 2], 0.5)
    return run.ended()


def alone_between_steps() -> Any:
    """Rank 0 evaluates more than the others."""
    run = Ranked(**DEFERRED)
    for step in range(3):
        run.steps([step], 0.5)
        for _ in range(3 if run.rank == 0 else 0):
            with torch.no_grad():
                assert run.loss(50, 0).isfinite()
    return run.ended()


def forwards_before_backwards() -> Any:
    """Two forwards, and then their backwards: no update begins after the first one."""
    run = Ranked("layers", eps_update="eager")
    for step in range(2):
        losses = [run.loss(10 * step + seed, number) / run.share for seed in range(2) for number in run.numbers]
        for loss in losses:
            loss.backward()
        run.step()
    return run.ended()


def overflowing(options: dict[str, Any]) -> Any:
    """A rank has gradients that are not finite in the second step."""
    run = Ranked(**options)
    for step in range(3):
        for number in run.numbers:
            factor = float("inf") if step == 1 and number == 1 else 1.0
            (run.loss(step, number) * factor / run.share).backward()
        run.step(0.5)
    assert run.eps.loss_scale.skipped == 1
    return run.eps.loss_scale.value, run.ended()


def steps_of(name: str, count: int) -> Any:
    run = Ranked(name, **DEFERRED)
    run.steps(range(count))
    return run.ended()


def loaded_after_a_step() -> Any:
    """A state is loaded once more, where the ranks have shared one already."""
    run = Ranked("layers", **DEFERRED)
    run.steps([0])
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.steps([1, 2])
    run.optimizer.load_state_dict(saved)
    run.steps([4])
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return run.ended()


def changed(what: str) -> Any:
    """Rows that all ranks update, and others, are frozen or lose their state; or are frozen when a state is loaded."""
    run = Ranked("large", **DEFERRED)
    model, eps, parameters = run.model, run.eps, list(run.model.parameters())
    for step in range(4 if what == "frozen" else 8):
        eps.synchronize()  # else updates that are under way write to what is changed
        if what == "frozen":
            for number, p in enumerate(parameters):
                p.requires_grad_((number + step) % 3 != 0)
        if what == "later" and step == 3:
            state = copy.deepcopy(run.optimizer.state_dict())
            detach_l2l(model)
            for p in parameters[::2]:
                p.requires_grad_(False)
            eps = run.eps = attach_l2l(model, L2LConfig(**run.options))
            run.wrap("adamw", parameters)
            run.optimizer.load_state_dict(state)
        if what == "later" and step == 5:
            model.requires_grad_(True)
        if what == "cleared" and step in (2, 5):
            run.optimizer.state.clear()
        run.steps([step])
    return run.ended()


def rows_of_steps(kind: str, cmp: str | None, size: int) -> Any:
    """Steps before and after a state was loaded, with rows that each rank updates, if the optimizer can."""
    run = Ranked("large", size, optimizer=kind, **DEFERRED, cmp=cmp)
    run.steps(range(2), 0.1)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.steps([2], 0.1)
    run.optimizer.load_state_dict(state)
    run.steps([3], 0.1)
    return run.ended()


PROGRAMS: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    "gradients are read after clipping": (read_after_clipping,),
    "layers are unfrozen": (unfreezing, "unfrozen"),
    "embeddings are resized": (resized,),
    "one rank evaluates alone": (alone_between_steps,),
    "forwards come before backwards": (forwards_before_backwards,),
    "a state is loaded after the first step": (loaded_after_a_step,),
    "rows by AdamW, fused": (rows_of_steps, "fused", "bf16", 2),
    # What is told of their state is longer than a message.
    "a layer of many weights": (steps_of, "many", 1),
    "on devices, one rank's fp16 gradients overflow": (overflowing, {"cmp": "fp16", **DEFERRED}),
}
MORE: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    "the optimizer of a rank has another order": (unfreezing, "reversed"),
    "one rank's step is skipped": (overflowing, {"nonfinite": "skip"}),
    "rows by Adafactor": (rows_of_steps, "adafactor", None, 2),
    **{f"parameters are {what}": (changed, what) for what in ("frozen", "cleared", "later")},
    # What is frozen keeps its owner, which has its state.
    **{f"on two hosts, parameters are {what}": (changed, what) for what in ("cleared", "later")},
    "on devices, ranks call other layers": (unfreezing, "called"),
    # Gradients come in the order of a layer and not of the model.
    "on devices, a layer with two weights": (steps_of, "two", 3),
}


@pytest.mark.parametrize("program", [*PROGRAMS, *more(*MORE)])
def test_ranks_return_what_one_process_does(pool, program):
    function, *args = {**PROGRAMS, **MORE}[program]
    same(pool, function, *args, sim="on devices" in program, hosts=2 if "on two hosts" in program else 1)


def with_penalty() -> Any:
    """A loss that uses masters directly, in two micro-steps."""
    run = Ranked(**DEFERRED)
    weight = run.model.classifier.weight
    for step in range(2):
        for seed in (step, 10 + step):
            run.backward(seed, lambda loss: loss + weight.square().sum())
        run.step(0.5)
    run.ended()
    return [p.detach().double().sum().item() for p in run.model.parameters()]


def test_a_loss_that_uses_masters_directly(pool):
    """Autograd adds its gradient at another time than the layers': the same to rounding."""
    alone = pool(1).run(with_penalty)[0]
    for found in pool(2).run(with_penalty):
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)


def not_finite() -> tuple[str, int, float]:
    """One rank is against a step, though its gradients are finite; then it has some that are not."""
    run = Ranked(nonfinite="skip")
    before = [p.detach().clone() for p in run.model.parameters()]
    run.backward(0)
    if run.rank == 1:
        run.eps.vote.veto()  # as the Trainer does, for a loss that is not finite
    run.step()
    run.eps.synchronize()
    change = max((p - old).abs().max().item() for p, old in zip(run.model.parameters(), before, strict=True))
    skipped = run.eps.loss_scale.skipped
    run.ended()
    run = Ranked()
    run.backward(0, lambda loss: loss * (float("nan") if run.rank == 1 else 1.0))
    with pytest.raises(NonFiniteError) as error:
        run.step()
    run.optimizer.zero_grad()
    run.steps([1])
    run.ended()
    return str(error.value), skipped, change


def test_one_rank_is_enough_to_be_against_a_step(pool):
    for text, skipped, change in pool(2).run(not_finite):
        assert (skipped, change) == (1, 0.0)
        assert "step 1" in text and "not finite" in text


def ended_and_expected() -> tuple[list[bool], list[str]]:
    """Whether tasks of other ranks are over when masters are ordinary again; and the gradients that are expected."""
    ends: list[bool] = []
    end = Master.end_update

    def noted(masters: Iterable[Master]) -> None:
        tasks = [m.update.task for m in masters if m.update is not None]
        ends.extend(task.done for task in tasks if isinstance(task, RemoteTask))
        end(masters)

    run = Ranked("layers", rank_timeout=10.0, **DEFERRED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Master, "end_update", staticmethod(noted))
        for step, named in enumerate([None, [2, 3], [0, 3], [3], [1, 2], None]):
            run.backward(step, named=named)
            run.step()
        order = [item.name for item in run.eps.gradients.items.order]
        run.ended()
    return ends, order


def test_updates_of_other_ranks_are_not_over_too_late_and_layers_keep_their_place(pool):
    """Else the next update could begin before, and be taken for the one that has ended."""
    for ends, order in pool(2).run(ended_and_expected):
        assert ends and not any(ends)
        assert order == [f"layers.{n}" for n in (3, 2, 1, 0)] + ["small parameters in no layer"]


def owners_of_adapters() -> list[int]:
    """Of those that are there when the model is attached, over a frozen model, and of those that come later."""
    torch.manual_seed(0)
    model = Layers(4, width=256, outputs=4200, adapters=4)
    for module in (model.layers, model.head, model.unused):
        module.requires_grad_(False)
    eps = attach_l2l(model, L2LConfig(layer_classes=("Block",)))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.adapters.parameters()))
    for step in range(2):
        if step == 1:
            model.adapters.extend(nn.Linear(256, 256, bias=False) for _ in range(4))
            optimizer.add_param_group({"params": list(model.adapters[4:].parameters())})
        model(torch.randn(4, 256))[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [eps.masters.of(p).owner for p in model.adapters.parameters()]
    detach_l2l(model)
    return found


def test_work_is_shared_among_what_is_trained(pool):
    """Frozen parameters, which have owners, too, are no work."""
    for owners in pool(2).run(owners_of_adapters):
        assert sorted(owners[:4]) == sorted(owners[4:]) == [0, 0, 1, 1]


def under_accelerate(engine: bool, alone: bool = False) -> tuple[str, list[torch.Tensor]]:
    """The error, and weights, of a step of all ranks (`accumulate`), or of two steps of each rank (`LocalSGD`)."""
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if alone else 2)
    model = tiny_bert(dropout=0.0, layers=2)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    if engine:
        optimizer = attach_l2l(model, L2LConfig(device="cpu")).wrap(optimizer)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    batches = torch.randint(0, 50, (2, 4, 8), generator=torch.Generator().manual_seed(distributed.get_rank()))
    error = ""
    with LocalSGD(accelerator, wrapped, local_sgd_steps=100) if alone else nullcontext():
        for ids in batches:
            with accelerator.accumulate(wrapped) if not alone else nullcontext():
                accelerator.backward(wrapped(input_ids=ids, labels=ids[:, 0] % 2).loss)
                try:
                    optimizer.step()
                except ValueError as refused:
                    error = str(refused)
                optimizer.zero_grad()
        found = [weight.detach().clone() for weight in weights]
        detach_l2l(model)
    return error, found


def test_batches_that_ranks_accumulate_under_accelerate(pool):
    """A step of a rank alone is refused, as LocalSGD makes it."""
    ours, theirs = (pool(2).run(under_accelerate, engine) for engine in (True, False))
    for (error, mine), (_, plain) in zip(ours, theirs, strict=True):
        assert error == ""
        torch.testing.assert_close(mine, plain)
    assert all("leave out LocalSGD" in error for error, _ in pool(2).run(under_accelerate, True, True))


class Failing(torch.optim.AdamW):
    """Raises in the second rank, once it is told to: in an update, not in the program's own call of `step`."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and rank_here() == 1 and threading.current_thread() is not threading.main_thread():
            raise ValueError("no such step")
        return super().step(closure)


def goes_on_after_a_failed_update() -> str:
    """The error that the program gets."""
    run = Ranked("layers", **DEFERRED, rank_timeout=3)
    run.optimizer = run.eps.wrap(Failing(run.model.parameters(), lr=1e-2))
    with warnings.catch_warnings(), pytest.raises((ValueError, RankFailedError)) as caught:
        warnings.simplefilter("ignore")
        for step in range(4):
            Failing.fails = step >= 2
            run.steps([step])
    time.sleep(2)  # as a program that saves what it has; ranks that wait for another one are ended earlier
    kind = type(caught.value).__name__
    del caught
    detach_l2l(run.model)
    return kind


def test_a_rank_whose_update_has_failed_handles_the_error(pool):
    """It is not ended as one that waits for another rank."""
    assert pool(2).run(goes_on_after_a_failed_update) == ["RankFailedError", "ValueError"]


SCRIPT = """
import time
import torch
from torch import distributed
from hf_l2l.optim import layer_optimizers
from rank_cases import Ranked

run_part = layer_optimizers.Part.run
def slow(*args, **kwargs):  # so that many updates have not begun when the script is at its end
    time.sleep(0.02)
    run_part(*args, **kwargs)
layer_optimizers.Part.run = slow
distributed.init_process_group("gloo", init_method="file://" + FILE, rank=NUMBER, world_size=2)
run = Ranked("24 layers", eps_update="deferred", num_threads=1)
run.steps([0])
if NUMBER == 0:
    torch.save([p.detach().clone() for p in run.model.parameters()], FILE + ".saved")
distributed.destroy_process_group()  # else its own threads may abort the process while Python ends
"""


def test_a_script_that_ends_makes_its_updates_first(pool, programs, tmp_path):
    """Else those that another rank waits for, to save the model, are never made."""
    file = str(tmp_path / "store")
    ranks = [programs.start(f"FILE, NUMBER = {file!r}, {number}\n{SCRIPT}") for number in range(2)]
    assert [rank.ended(60) for rank in ranks] == [(0, "", "")] * 2
    alone = pool(1).run(steps_of, "24 layers", 1)[0][0]
    assert digest(*torch.load(f"{file}.saved", weights_only=True)) == alone


ENDLESS = """
import os, signal, time
import torch
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.optim import layer_optimizers
from models import Toy, batch_for

def update(*args, **kwargs):
    os.write(1, b"updating\\n")
    time.sleep(1000)
layer_optimizers.Part.run = update
signal.signal(signal.SIGINT, signal.default_int_handler)
model = Toy()
eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred", layer_classes=("Block",)))
optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
while True:
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, *more(signal.SIGTERM)])
def test_a_signal_ends_a_program_whose_update_takes_for_ever(programs, sent):
    program = programs.start(ENDLESS)
    assert program.stdout.readline() == "updating\n"
    program.kill(sent)
    status, _, said = program.ended(60)
    assert status == -sent and ("KeyboardInterrupt" in said) == (sent == signal.SIGINT) and "Error" not in said
