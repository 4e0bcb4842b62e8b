"""What a program may do with a model that several ranks train, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps.nonfinite import NonFiniteError
from hf_l2l.eps.server import EagerParamServer
from models import batch_for, bert
from rank_pool import digest

SERIAL, DEFERRED = {"eps_update": "serial"}, {"eps_update": "deferred"}


class Run:
    """A model of this rank, or of one process that plays all ranks one after the other."""

    def __init__(self, size: int, **options: Any) -> None:
        self.is_rank = distributed.is_initialized()
        self.rank = distributed.get_rank() if self.is_rank else 0
        self.numbers = [self.rank] if self.is_rank else list(range(size))
        torch.manual_seed(0)
        self.model = bert()
        self.share = 1 if self.is_rank else size
        self.eps: EagerParamServer = attach_l2l(self.model, L2LConfig(**options))
        self.optimizer = self.eps.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def loss(self, step: int, number: int) -> torch.Tensor:
        found: torch.Tensor = self.model(**batch_for(self.model, rows=4, seed=100 * step + number)).loss
        return found

    def backward(self, step: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
        for number in self.numbers:
            (change(self.loss(step, number)) / self.share).backward()

    def step(self, max_norm: float | None = 0.5) -> None:
        if max_norm is not None:
            self.eps.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ended(self) -> tuple[str, str]:
        """Digests of weights and state; the model is detached."""
        state = self.optimizer.state_dict()["state"]
        found = digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each)))
        detach_l2l(self.model)
        return digest(*self.model.parameters()), found


def same(pool: Any, function: Callable[..., Any], *args: Any, sim: bool = False) -> None:
    """Two ranks return what one process returns."""
    alone = pool(1, sim=sim).run(function, *args)[0]
    assert pool(2, sim=sim).run(function, *args) == [alone, alone]


def read_after_clipping(options: dict[str, Any]) -> Any:
    """Every rank reads the gradients after clipping, and before the step."""
    run, found = Run(2, **options), []
    for step in range(2):
        run.backward(step)
        run.eps.clip_grad_norm_(0.1)
        found.append(digest(*(p.grad for p in run.model.parameters() if p.grad is not None)))
        run.step(None)
    return found, run.ended()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_gradients_can_be_read_after_clipping(pool, sim):
    same(pool, read_after_clipping, DEFERRED, sim=sim)


def dropped() -> Any:
    run = Run(2, **DEFERRED)
    run.backward(7)
    run.model.zero_grad()
    run.backward(0)
    run.step()
    return run.ended()


def test_dropped_gradients_leave_nothing(pool):
    same(pool, dropped)


def with_penalty() -> Any:
    """A loss that uses masters directly, in two micro-steps."""
    run = Run(2, **DEFERRED)
    weight = run.model.classifier.weight
    for step in range(2):
        run.backward(step, lambda loss: loss + weight.square().sum())
        run.backward(10 + step, lambda loss: loss + weight.square().sum())
        run.step()
    parameters = [p.detach().clone() for p in run.model.parameters()]
    run.ended()
    return [p.double().sum().item() for p in parameters]


def test_a_loss_that_uses_masters_directly(pool):
    """Autograd adds its gradient at another time than the layers': the same to rounding."""
    alone = pool(1).run(with_penalty)[0]
    for found in pool(2).run(with_penalty):
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)


def unfreezing(options: dict[str, Any]) -> Any:
    run = Run(2, **options)
    for step in range(4):
        for p in run.model.bert.encoder.layer[1].parameters():
            p.requires_grad_(step >= 2)
        run.backward(step)
        run.step()
    return run.ended()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_layers_may_be_frozen_and_unfrozen(pool, sim):
    same(pool, unfreezing, DEFERRED, sim=sim)


def resized() -> Any:
    run = Run(2, **SERIAL)
    run.backward(0)
    run.step()
    torch.manual_seed(3)
    run.model.resize_token_embeddings(70)
    run.optimizer = run.eps.wrap(torch.optim.AdamW(run.model.parameters(), lr=1e-2))
    for step in range(1, 3):
        run.backward(step)
        run.step()
    return run.ended()


def test_embeddings_may_be_resized(pool):
    same(pool, resized)


def resumed(size_before: int, steps: int, state: Any = None) -> Any:
    """Train some steps, from a state dict of weights and optimizer if given; return digests, and the state."""
    run = Run(2, **DEFERRED)
    if state is not None:
        weights, moments = torch.load(state, weights_only=True)
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(moments)
    for step in range(size_before, steps):
        run.backward(step)
        run.step()
    path = f"{state or ''}.saved" if state else None
    saved = run.model.state_dict(), run.optimizer.state_dict()
    if run.rank == 0 and path is not None:
        torch.save(saved, path)
    return run.ended()


def save_after(steps: int, path: str) -> None:
    run = Run(2, **DEFERRED)
    for step in range(steps):
        run.backward(step)
        run.step()
    saved = run.model.state_dict(), run.optimizer.state_dict()
    if run.rank == 0:
        torch.save(saved, path)
    run.ended()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_a_training_goes_on_with_another_number_of_ranks(pool, tmp_path, before, after):
    path = str(tmp_path / "state")
    pool(before).run(save_after, 2, path)
    whole = pool(1).run(resumed, 0, 4)[0]
    assert pool(after).run(resumed, 2, 4, path) == [whole] * after


def alone_between_steps() -> Any:
    """Rank 0 evaluates more than the others, and reads weights."""
    run, found = Run(2, **DEFERRED), 0.0
    for step in range(3):
        run.backward(step)
        run.step()
        for _ in range(3 if run.rank == 0 else 0):
            with torch.no_grad():
                found += run.loss(50, 0).item()
    return run.ended()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_one_rank_may_evaluate_alone(pool, sim):
    same(pool, alone_between_steps, sim=sim)


def overflowing(options: dict[str, Any]) -> Any:
    """A rank has gradients that are not finite in the second step."""
    run = Run(2, **options)
    for step in range(3):
        for number in run.numbers:
            factor = float("inf") if step == 1 and number == 1 else 1.0
            (run.loss(step, number) * factor / run.share).backward()
        run.step()
    scale = run.eps.loss_scale
    assert scale is not None
    return scale.skipped, scale.value, run.ended()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{"cmp": "fp16", "eps_update": "deferred"}, {"nonfinite": "skip"}], ids=str)
@pytest.mark.parametrize("sim", [False, True])
def test_an_overflow_of_one_rank_skips_the_step_of_all(pool, options, sim):
    same(pool, overflowing, options, sim=sim)
    assert pool(2, sim=sim).run(overflowing, options)[0][0] == 1


def vetoing() -> tuple[int, float]:
    """As the Trainer does: a loss is not finite, and its gradients happen to be."""
    run = Run(2, nonfinite="skip")
    before = [p.detach().clone() for p in run.model.parameters()]
    run.backward(0)
    if run.rank == 1:
        run.eps.vote.veto()
    run.step()
    run.eps.synchronize()
    change = max((p - old).abs().max().item() for p, old in zip(run.model.parameters(), before, strict=True))
    assert run.eps.loss_scale is not None
    skipped = run.eps.loss_scale.skipped
    run.ended()
    return skipped, change


def test_one_rank_is_enough_to_be_against_a_step(pool):
    assert pool(2).run(vetoing) == [(1, 0.0), (1, 0.0)]


def nonfinite() -> str:
    run = Run(2)
    (run.loss(0, 0) * (float("nan") if run.rank == 1 else 1.0)).backward()
    with pytest.raises(NonFiniteError) as error:
        run.step()
    run.optimizer.zero_grad()
    run.backward(1)
    run.step()
    run.ended()
    return str(error.value)


def test_gradients_that_are_not_finite_raise_in_all_ranks(pool):
    assert all(text.startswith("step 1: gradients are not finite") for text in pool(2).run(nonfinite))


class Coupled(torch.optim.SGD):
    """Uses the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= norm
        super().step()


def refused() -> dict[str, str]:
    """What raises, each by name."""
    run, found = Run(2), {}
    parameters = list(run.model.parameters())
    run.backward(0)

    def told(name: str, call: Callable[[], Any], kind: type[Exception]) -> None:
        with pytest.raises(kind) as error:
            call()
        found[name] = str(error.value)

    told("clip", lambda: nn.utils.clip_grad_norm_(parameters, 1.0), RuntimeError)
    told("write", lambda: parameters[0].grad.mul_(2), RuntimeError)
    told("zero", lambda: run.optimizer.zero_grad(set_to_none=False), RuntimeError)
    told("optimizer", lambda: run.eps.wrap(Coupled(parameters, lr=1.0)), ValueError)
    told("closure", lambda: run.optimizer.step(lambda: 0.0), ValueError)
    run.step()
    run.backward(1)
    handle = run.optimizer.register_step_pre_hook(lambda *_: None)
    told("hook", run.step, ValueError)
    handle.remove()
    run.step(None)
    run.backward(2)
    run.step()
    run.ended()
    return found


RULES = {
    "clip": "eps.clip_grad_norm_(max_norm)",
    "write": "one tensor in shared memory",
    "zero": "zero_grad(set_to_none=True)",
    "optimizer": "Coupled cannot update one without the others",
    "closure": "several ranks step without a closure",
    "hook": "register it before",
}


def test_what_would_be_done_once_per_rank_is_refused(pool):
    for found in pool(2).run(refused):
        for name, rule in RULES.items():
            assert rule in found[name]


def read_when_clipped() -> list[float]:
    """The norm of p.grad in each step, after clipping."""
    run, found = Run(2), []
    for step in range(3):
        run.backward(step)
        run.eps.clip_grad_norm_(0.05)
        found.append(sum(float(p.grad.norm()) ** 2 for p in run.model.parameters() if p.grad is not None) ** 0.5)
        run.step()
        run.optimizer.zero_grad()
    run.ended()
    return found


def test_gradients_that_are_read_when_they_are_clipped_are_those_of_all_ranks(pool):
    """In each step, and not only in the first one."""
    for norms in pool(2).run(read_when_clipped):
        assert norms == pytest.approx([0.05] * 3, rel=1e-4)


def resident() -> str:
    with pytest.raises(ValueError) as error:
        attach_l2l(bert(), L2LConfig(resident="shell"))
    return str(error.value)


def test_weights_of_ranks_are_updated_on_the_host(pool):
    assert all("set resident_update='host'" in text for text in pool(2, sim=True).run(resident))


def other_batches() -> str:
    """Rank 1 leaves out a batch."""
    run = Run(2, rank_timeout=4.0)
    run.backward(0)
    try:
        if run.rank == 0:
            run.backward(1)
        run.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_leaves_out_a_batch_is_told(pool):
    found = pool(2).run(other_batches)
    pool(2).close()  # their models have stopped in the middle of a step
    # Whoever sees it first tells the other: rank 1 has come to its step, and rank 0 to another backward.
    assert any("rank 1 has gone on" in text or "rank 0 has gone on" in text for text in found), found
    assert all("give each rank as many batches" in text for text in found), found
