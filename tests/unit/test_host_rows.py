"""Rows in host memory that say they are on the device: read a part at a time, real as soon as a model computes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_l2l.compat import without_interception
from hf_l2l.eps import masters as masters_module
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import Pending, hold, let_go, pending_of, settle
from hf_l2l.model.precision import Precision
from hf_l2l.rows.functions import BY_ROWS
from hf_l2l.rows.host_rows import HostRows, Passing, host_of
from hf_l2l.rows.row_modules import input_embeddings
from models import bert


class Uploads:
    """Keeps rows, and counts what is uploaded of them."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.times_real = 0

    def rows(self, host: torch.Tensor, step: int = 2) -> HostRows:
        """What a model would see."""
        passing = Passing(0, self.made_real, lambda func, args, kwargs: NotImplemented)
        return HostRows.of(host, torch.device("cpu"), self, step, passing)

    def gradient(self, host: torch.Tensor) -> HostRows:
        return HostRows.of(host, torch.device("cpu"), self, 2)

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(rows.shape))
        return rows.clone()

    def fetch_ahead(self, kept: list[torch.Tensor]) -> None:
        """Nothing travels ahead."""

    def send(self, part: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(part)

    def rows_like(self, part: torch.Tensor, rows: int, passing: Passing | None = None) -> HostRows:
        return HostRows.of(part.new_empty(rows, *part.shape[1:]), part.device, self, len(part), passing)

    def made_real(self, num_bytes: int) -> None:
        self.times_real += 1


def test_any_operation_uploads_all_rows_once(tmp_path):
    uploads, host = Uploads(), torch.randn(4, 3)
    rows = uploads.rows(host)
    assert (rows.shape, rows.dtype, rows.device, rows.ndim) == ((4, 3), torch.float32, torch.device("cpu"), 2)
    assert rows.is_waiting and isinstance(rows.detach(), HostRows) and uploads.shapes == [], "facts need none"
    assert torch.equal(rows + 1, host + 1) and torch.equal(torch.cat([host, rows]), torch.cat([host, host]))
    assert torch.equal(rows.detach(), host) and rows.clone().tolist() == host.tolist()
    assert uploads.shapes == [(4, 3)] and uploads.times_real == 1
    assert not rows.is_waiting and host_of(rows) is rows
    # What reads memory reads the values.
    assert uploads.rows(host).tolist() == host.tolist() and (uploads.rows(host).numpy() == host.numpy()).all()
    torch.save(uploads.rows(host), tmp_path / "rows.pt")
    assert torch.equal(torch.load(tmp_path / "rows.pt", weights_only=True), host)
    assert type(copy.deepcopy(uploads.rows(host))) is torch.Tensor


def test_writes_to_some_rows_are_seen():
    rows = Uploads().rows(torch.ones(4, 3))
    view, alias = rows[3], rows.detach()
    with torch.no_grad():
        rows[0] = 7
        rows[1:3].zero_()
        rows.add_(1)
    assert rows[:, 0].tolist() == [8.0, 1.0, 1.0, 2.0] and view.tolist() == [2.0] * 3
    assert torch.equal(alias, rows)


def test_views_wait_too():
    uploads, host = Uploads(), torch.randn(4, 3, 2)
    rows = uploads.rows(host)
    flat, shifted, turned = rows.reshape(12, 2), rows[:, 1:], rows.transpose(1, 2)
    assert all(isinstance(each, HostRows) and each.is_waiting for each in (flat, shifted, turned))
    assert flat.rows.step == 6 and shifted.rows.step == 2 and shifted.stride() == host[:, 1:].stride()
    assert torch.equal(host_of(flat), host.reshape(12, 2)) and uploads.shapes == []
    assert torch.equal(shifted.transpose(0, 1) * 1, host[:, 1:].transpose(0, 1)) and uploads.times_real == 1
    with torch.no_grad():
        flat.zero_()
    assert not any(map(torch.any, (rows, shifted, turned))) and host.any()
    for name, args in {"unsqueeze_": (1,), "transpose_": (1, 2), "squeeze_": (1,)}.items():
        with pytest.raises(RuntimeError, match=rf"got {name}"):
            getattr(uploads.rows(torch.randn(4, 1, 3)), name)(*args)


def test_a_part_is_copied_a_few_rows_at_a_time():
    uploads, host = Uploads(), torch.randn(5, 3, 2)
    found = uploads.rows(host)[:, 1:].reshape(10, 2)
    assert isinstance(found, HostRows) and torch.equal(host_of(found), host[:, 1:].reshape(10, 2))
    assert set(uploads.shapes) == {(2, 2, 2), (1, 2, 2)} and uploads.times_real == 0


def test_the_gradient_of_a_slice_is_made_a_few_rows_at_a_time():
    uploads, host, sizes = Uploads(), torch.randn(5, 2, 3), [5, 4, 3]
    found = torch.ops.aten.slice_backward(uploads.gradient(host), sizes, 1, 1, 3, 1)
    expected = torch.zeros(sizes)
    expected[:, 1:3] = host
    assert isinstance(found, HostRows) and torch.equal(host_of(found), expected)
    whole = torch.ops.aten.slice_backward(uploads.gradient(host), [6, 2, 3], 0, 1, 6, 1)
    assert type(whole) is torch.Tensor and torch.equal(whole[1:], host)


def test_which_functions_of_rows_are_computed_row_by_row():
    x = torch.randn(4, 3, 2)
    for function, args, is_by_rows in (
        (functional.dropout, (x, 0.5, True), True),
        (functional.dropout, (x, 0.5, True, True), False),  # in place
        (torch.Tensor.add, (x, 1.0), True),
        (torch.Tensor.to, (x, torch.float64), True),
        (torch.Tensor.to, (x, "cpu"), False),
        (torch.Tensor.__getitem__, (x, (slice(None), 0)), True),
        (torch.Tensor.__getitem__, (x, (slice(None), slice(0, 2))), False),  # most of it
        (torch.Tensor.__getitem__, (x, (0, slice(None))), False),  # a row
        (torch.Tensor.__getitem__, (x, (..., slice(0, 1), 0)), True),
    ):
        assert BY_ROWS[function](args, {}) == is_by_rows, (function, args[1:])


# ---- tensors whose values are still to come, and in which order those of parameters come


class Counting(Pending):
    def __init__(self, *, lets_go: bool = False) -> None:
        self.values = self.grads = 0
        self.lets_go = lets_go

    def before_values(self, tensor: torch.Tensor) -> None:
        self.values += 1
        if self.lets_go:
            let_go(tensor, self)

    def before_grad(self, tensor: torch.Tensor) -> None:
        self.grads += 1


def made(kind: type[torch.Tensor] = nn.Parameter) -> torch.Tensor:
    values = torch.arange(6.0).reshape(2, 3)
    return nn.Parameter(values) if kind is nn.Parameter else values


KINDS = pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
USES = {
    "arithmetic": lambda t: t + 1,
    "as second argument": lambda t: torch.ones(2, 3).add(t),
    "in a list": lambda t: torch.cat([torch.ones(2, 3), t]),
    "in place": lambda t: t.detach().mul_(2),
    "view": lambda t: t.view(6),
    "index": lambda t: t[0],
    "item": lambda t: t[0, 0].item(),
    "numpy": lambda t: t.detach().numpy(),
    "to": lambda t: t.to(torch.float64),
    "data": lambda t: t.data,
    "text": repr,
    "deepcopy": copy.deepcopy,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "copy": lambda t: torch.empty(2, 3).copy_(t.detach()),
    "address": lambda t: t.data_ptr(),
    "module": lambda t: nn.functional.linear(torch.ones(1, 3), t),
}

NO_USES = {
    "shape": lambda t: (t.shape, t.size(), t.dim(), t.numel(), len(t), t.stride()),
    "kind": lambda t: (t.dtype, t.device, t.layout, t.is_floating_point(), t.is_leaf, t.itemsize),
    "requires_grad": lambda t: t.requires_grad,
    "hash": hash,
    "class": lambda t: isinstance(t, torch.Tensor),
}


@KINDS
def test_a_use_is_announced(kind):
    for name, use in USES.items():
        tensor, pending = made(kind), Counting(lets_go=True)
        hold(tensor, pending)
        assert isinstance(tensor, kind)
        use(tensor)
        assert pending.values == 1 and pending.grads == 0, name
        assert type(tensor) is kind and pending_of(tensor) is None, "ordinary again"


@KINDS
def test_what_reads_no_values_is_not(kind):
    tensor, pending = made(kind), Counting()
    hold(tensor, pending)
    for name, read in NO_USES.items():
        read(tensor)
        assert pending.values == pending.grads == 0, name
    assert pending_of(tensor) is pending
    with without_interception():
        tensor.sum()
    assert pending.values == 0
    settle(tensor)
    assert pending.values == 1


def test_the_gradient_is_announced_by_itself_and_only_its_own_is_let_go_of():
    p, first, second = made(), Counting(), Counting()
    hold(p, first)
    assert p.grad is None
    p.grad = torch.ones(2, 3)
    del p.grad
    assert (first.grads, first.values) == (3, 0)
    hold(p, second)
    let_go(p, first)
    assert pending_of(p) is second
    let_go(p)
    assert pending_of(p) is None


def test_other_threads_wait_for_an_update_until_its_parameters_are_ordinary(monkeypatch):
    parameter = nn.Parameter(torch.zeros(2))
    master = Master(parameter, Precision(nn.Linear(1, 1)))
    master.update, seen = object(), []
    hold(parameter, master)
    let_go_all = masters_module.let_go_all

    def watched(pairs):
        let_go_all(pairs)
        seen.append((master.update is not None, pending_of(parameter)))

    monkeypatch.setattr(masters_module, "let_go_all", watched)
    Master.end_update([master])
    assert seen == [(True, None)] and master.update is None and type(parameter) is nn.Parameter


def test_embeddings_and_the_module_around_them_are_computed_row_by_row():
    model = bert()
    modules, layers = list(model.modules()), list(model.bert.encoder.layer)
    assert input_embeddings(modules, layers) == {model.bert.embeddings.word_embeddings, model.bert.embeddings}


def test_updates_are_in_the_order_in_which_the_next_forward_needs_them():
    """Small parameters of non-layer modules first; a large one before the layer that follows its first use."""
    model = nn.Module()
    model.head = nn.Linear(1024, 1024, bias=False)
    model.bias, model.norm = nn.Parameter(torch.ones(2)), nn.LayerNorm(2)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.embed = nn.Embedding(1024, 1024)
    masters = Masters(model, list(model.layers))
    masters.of(model.head.weight).first_use = 2
    assert [(name, [m.name for m in group]) for name, group in masters.parts(masters.all())] == [
        ("non-layer modules", ["bias", "norm.weight", "norm.bias"]),
        ("embed.weight", ["embed.weight"]),
        ("layers.0", ["layers.0.weight", "layers.0.bias"]),
        ("layers.1", ["layers.1.weight", "layers.1.bias"]),
        ("head.weight", ["head.weight"]),
        ("layers.2", ["layers.2.weight", "layers.2.bias"]),
    ]
