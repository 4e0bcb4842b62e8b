"""Rows of large matrices in no layer, which all ranks update together."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
import transformers as hf
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.optim.lamb import Lamb
from hf_l2l.optim.layerwise_check import can_step_rows
from hf_l2l.optim.layerwise_step import places_of
from hf_l2l.optim.rows_step import RowsStep
from hf_l2l.ranks import far_ranks
from hf_l2l.ranks.messages import LANDED
from hf_l2l.ranks.owners import dealt, shares_of_rows
from hf_l2l.shared_eps import remote
from host_cases import on_hosts
from models import batch_for
from rank_cases import MODELS, assert_same, trained
from rank_pool import RankPool, digest

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "without state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adafactor": lambda p: hf.Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
    "lamb": lambda p: Lamb(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}
ELEMENTWISE = ("adamw", "foreach", "fused", "sgd", "nadam")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_tells_whether_rows_can_be_updated_apart(name):
    parameters = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))]
    assert can_step_rows(OPTIMIZERS[name](parameters), parameters[:1]) == (name in ELEMENTWISE)


@pytest.mark.parametrize("first", [[(4, 4, 3), (4,)], [(4,), (1, 1, 8)], [(1, 1, 8), (8, 3, 4, 4)]])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb"])
def test_the_trial_is_one_of_matrices(name, first):
    """Whatever comes before them in their group."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in (*first, (64, 64))]
    assert can_step_rows(OPTIMIZERS[name](parameters), parameters[-1:]) == (name in ELEMENTWISE)


class Orthogonal(torch.optim.AdamW):
    """As one whose groups with `orthogonal` update a matrix as a whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if group.get("orthogonal") and p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


def test_only_groups_with_such_matrices_are_tried():
    embedding, other, trial = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(8, 8)), []
    optimizer = Orthogonal([{"params": [embedding]}, {"params": [other], "orthogonal": True}])
    for matrices in ([embedding], [embedding, other], [other], []):
        trial.append(can_step_rows(optimizer, matrices))
    assert trial == [True, False, False, False]
    assert can_step_rows(optimizer, [embedding.requires_grad_(False)])  # it may be trained later


class Growing(torch.optim.SGD):
    """Keeps one more tensor from its fourth step on."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 3:
                state["slow"] = torch.zeros_like(state["momentum_buffer"])
        return found


def test_a_state_that_gets_another_key_is_refused():
    p = nn.Parameter(torch.randn(8, 16))
    optimizer = Growing([p], lr=0.1, momentum=0.9)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    step = RowsStep(optimizer, p, torch.ones_like(p), places_of(optimizer), slice(0, 4))
    with pytest.raises(RuntimeError, match="got Growing, which has made or dropped 'slow'"):
        step.run()


@pytest.mark.parametrize(
    ("rows", "width", "count", "starts"),
    [(1000, 64, 4, [0, 250, 500, 750]), (1000, 33, 2, [0, 448]), (1001, 48, 2, [0, 500]), (64, 1, 2, None)],
)
def test_shares_begin_at_a_multiple_of_what_kernels_compute_at_once(rows, width, count, starts):
    shares = shares_of_rows(rows, width, count)
    assert (None if shares is None else [share.start for share in shares]) == starts
    if shares is not None:
        assert shares[-1].stop == rows
        assert all(share.start * width % 64 == 0 for share in shares)


def test_divided_tensors_are_work_of_all_ranks():
    assert dealt([100, 10, 10, 10], [0, 0]) == [0, 1, 1, 1]
    assert dealt([100, 10, 10, 10], [0, 0], [0]) == [0, 0, 1, 0]


def rows_of_steps(size: int, kind: str, cmp: str | None) -> dict[str, Any]:
    """How many rows this rank, or one process that plays all, has stepped apart, in steps before and after a state was
    loaded; digests of weights and state."""
    numbers = [distributed.get_rank()] if distributed.is_initialized() else list(range(size))
    share = 1 if distributed.is_initialized() else size
    torch.manual_seed(0)
    model = MODELS["large"]()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred", cmp=cmp))
    optimizer = eps.wrap(OPTIMIZERS[kind](model.parameters()))
    stepped: list[int] = []
    make = RowsStep.run

    def noted(step: RowsStep, *args: Any) -> None:
        stepped.append(step._own.shape[0])
        make(step, *args)

    def steps(of: range) -> None:
        for step in of:
            for number in numbers:
                batch = batch_for(model, rows=2, seed=10 * step + number)
                (model(**batch).loss / share).backward()
            eps.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowsStep, "run", noted)
        steps(range(3))
        state = copy.deepcopy(optimizer.state_dict())
        steps(range(3, 4))
        optimizer.load_state_dict(state)
        steps(range(4, 6))
        state = optimizer.state_dict()["state"]
    entries = [each[key] for _, each in sorted(state.items()) for key in sorted(each)]
    values = [torch.as_tensor(each) for each in entries if each is not None]
    found = {
        "stepped": stepped,
        "state": digest(*values),
        "steps": sorted({float(each["step"]) for each in state.values() if "step" in each}),
    }
    detach_l2l(model)
    return found | {"weights": digest(*model.parameters())}


@pytest.mark.parametrize(
    ("size", "kind", "cmp"),
    [
        pytest.param(3, "adamw", None, marks=pytest.mark.slow),
        (2, "fused", "bf16"),
        pytest.param(2, "adafactor", None, marks=pytest.mark.slow),
        pytest.param(4, "fused", None, marks=pytest.mark.slow),
        pytest.param(3, "foreach", "bf16", marks=pytest.mark.slow),
        pytest.param(3, "sgd", None, marks=pytest.mark.slow),
        pytest.param(2, "nadam", None, marks=pytest.mark.slow),
    ],
)
def test_rows_that_ranks_update_have_the_bits_of_one_process(pool, size, kind, cmp):
    alone = pool(1).run(rows_of_steps, size, kind, cmp)[0]
    for each in pool(size).run(rows_of_steps, size, kind, cmp):
        assert {what: each[what] for what in ("state", "weights", "steps")} == {
            what: alone[what] for what in ("state", "weights", "steps")
        }
        # An embedding and a head, in all steps but the first.
        assert len(each["stepped"]) == (2 * 5 if kind in ELEMENTWISE else 0)
        assert all(0 < rows < 20000 for rows in each["stepped"])


def changed(what: str) -> tuple[str, str]:
    """Steps, of which some parameters are frozen, or have another size, or lose their state, in between; "later" is
    for some that are frozen when a state of all is loaded, and are trained again after it."""
    numbers = [distributed.get_rank()] if distributed.is_initialized() else [0, 1]
    share = 1 if distributed.is_initialized() else 2
    torch.manual_seed(0)
    model = MODELS["large"]()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5))
    parameters = list(model.parameters())
    for step in range(8):
        if what == "frozen":
            for number, p in enumerate(parameters):
                p.requires_grad_((number + step) % 3 != 0)
        if what == "later" and step == 3:
            state = copy.deepcopy(optimizer.state_dict())
            detach_l2l(model)
            for p in parameters[::2]:
                p.requires_grad_(False)
            eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
            optimizer = eps.wrap(torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5))
            optimizer.load_state_dict(state)
        if what == "later" and step == 5:
            model.requires_grad_(True)
        if what == "cleared" and step in (2, 5):
            eps.synchronize()  # else updates that are under way write to it
            optimizer.state.clear()
        if what == "replaced" and step == 3:
            eps.synchronize()
            for state in optimizer.state.values():
                state["exp_avg"] = torch.ones_like(state["exp_avg"])
        if what == "resized" and step == 3:
            eps.synchronize()
            old = model.model.embed_tokens.weight.detach().clone()
            model.model.embed_tokens.weight.data = torch.cat([old, old[:512]])
            optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5))
        for number in numbers:
            (model(**batch_for(model, rows=2, seed=10 * step + number)).loss / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    found = digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each)))
    detach_l2l(model)
    return digest(*model.parameters()), found


@pytest.mark.parametrize(
    "what", ["replaced", "resized", *(pytest.param(w, marks=pytest.mark.slow) for w in ("frozen", "cleared", "later"))]
)
def test_parameters_and_state_that_a_program_changes(pool, what):
    alone = pool(1).run(changed, what)[0]
    assert pool(2).run(changed, what) == [alone, alone]


@pytest.mark.parametrize("what", ["frozen", *(pytest.param(w, marks=pytest.mark.slow) for w in ("later", "cleared"))])
def test_parameters_and_state_that_a_program_changes_on_two_hosts(pool, what):
    """What is frozen keeps its owner, which has its state."""
    alone = pool(1).run(changed, what)[0]
    assert pool(2).run(on_hosts, 2, changed, what) == [alone, alone]


def head_alone() -> int:
    """How many steps are made, of which the last ones train the head alone, while the other host hears late of what
    has landed."""
    send = far_ranks._Last.__call__

    def late(last: Any, message: bytes, until: float) -> None:
        if message[0] == LANDED:
            threading.Timer(0.05, send, (last, message, 0.0)).start()
        else:
            send(last, message, until)

    torch.manual_seed(0)
    model = MODELS["bert"]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_ranks._Last, "__call__", late)
        eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(6):
            for name, p in model.named_parameters():
                p.requires_grad_(step < 4 or name.startswith("classifier"))
            model(**batch_for(model, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        detach_l2l(model)
    return step + 1


def test_a_backward_of_fewer_layers_is_not_taken_for_another_one(pool):
    """What hosts count goes on when what is trained changes."""
    assert pool(2).run(on_hosts, 2, head_alone) == [6, 6]


def frozen_in_accumulation() -> tuple[str, list[float], list[tuple[int, int]]]:
    """Steps of two micro-batches, in the second of which the embeddings are frozen: digest of the weights, norms of
    the gradients, and, after each backward, how many calls wait for the end of this rank and the bytes of its sums."""
    is_rank = distributed.is_initialized()
    numbers = [distributed.get_rank()] if is_rank else [0, 1]
    torch.manual_seed(0)
    model, norms, waiting = MODELS["bert"](), [], []
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(3):
        for micro in range(2):
            model.bert.embeddings.requires_grad_(micro == 0)
            for number in numbers:
                batch = batch_for(model, seed=100 * step + 10 * micro + number)
                (model(**batch).loss / (1 if is_rank else 2)).backward()
            if is_rank:
                waiting.append((len(eps.team.peers.state.far_calls), eps._gradient_bytes()))
        norms.append(float(eps.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    detach_l2l(model)
    return digest(*model.parameters()), norms, waiting


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_frozen_within_an_accumulation_keeps_its_sum(pool, hosts):
    alone = pool(1).run(frozen_in_accumulation)[0]
    for *found, waiting in pool(2).run(on_hosts, hosts, frozen_in_accumulation):
        assert found == [*alone[:2]]
        assert waiting == waiting[:1] * 6


def one_leaves(late: int) -> str:
    """Rank 1 ends as soon as it has updated its rows, before rank `late` has updated its own."""
    torch.manual_seed(0)
    model, rank = MODELS["large"](), distributed.get_rank()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    run = RowsStep.run

    def after_it(step: RowsStep, *args: Any) -> None:
        while rank == late and 1 not in eps.team.peers.state.left:
            time.sleep(0.01)
        time.sleep(2 * remote._POLL_S)
        run(step, *args)

    with pytest.MonkeyPatch.context() as patch:
        for step in range(3):
            if step == 2 and rank == late:
                eps.synchronize()
                patch.setattr(RowsStep, "run", after_it)
            model(**batch_for(model, rows=2, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 1:
            for task in (t for t in eps.updates._begun if not isinstance(t, remote.RemoteTask)):
                task.wait("test")
            eps.team.peers.close()
            return ""
        eps.synchronize()
    return digest(*model.parameters())


@pytest.mark.parametrize(
    ("size", "late"), [(2, 0), pytest.param(3, 0, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_a_rank_that_has_updated_its_rows_may_end(size, late):
    """Others wait for those that have not."""
    pool = RankPool(size, within_s=60)
    found = pool.run(one_leaves, late)
    assert len({each for each in found if each}) == 1
    pool.close()


def state_of_one_rank() -> str:
    """The first rank alone drops the state of the embedding."""
    torch.manual_seed(0)
    model = MODELS["large"]()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred", rank_timeout=4))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(RuntimeError) as error:
        for step in range(6):
            if step == 3 and distributed.get_rank() == 0:
                eps.synchronize()
                optimizer.state[model.model.embed_tokens.weight] = {}
            model(**batch_for(model, rows=2, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(error.value)


def test_a_state_that_one_rank_has_dropped_ends_the_training():
    pool = RankPool(2, within_s=60)
    texts = pool.run(state_of_one_rank)
    pool.close()
    assert any("ranks must have the same optimizer state" in text for text in texts)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", [{"eps_update": "serial"}, {"cmp": "fp16"}, {"cmp": "bf16", "grad_dtype": "16bit"}])
@pytest.mark.parametrize("sim", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_other_modes(pool, mode, sim):
    given = "large", mode, 2
    assert_same(pool(2, sim=sim).run(trained, *given), pool(1, sim=sim).run(trained, *given)[0])
