"""Rows in host memory that say they are on the device: read a part at a time, real as soon as a model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

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


@pytest.fixture
def uploads() -> Uploads:
    return Uploads()


def test_any_operation_uploads_all_rows_once(uploads, tmp_path):
    host = torch.randn(4, 3)
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


def test_writes_to_some_rows_are_seen(uploads):
    rows = uploads.rows(torch.ones(4, 3))
    view, alias = rows[3], rows.detach()
    with torch.no_grad():
        rows[0] = 7
        rows[1:3].zero_()
        rows.add_(1)
    assert rows[:, 0].tolist() == [8.0, 1.0, 1.0, 2.0] and view.tolist() == [2.0] * 3
    assert torch.equal(alias, rows)


def test_views_wait_too(uploads):
    host = torch.randn(4, 3, 2)
    rows = uploads.rows(host)
    flat, shifted, turned = rows.reshape(12, 2), rows[:, 1:], rows.transpose(1, 2)
    assert all(isinstance(each, HostRows) and each.is_waiting for each in (flat, shifted, turned))
    assert flat.rows.step == 6 and shifted.rows.step == 2 and shifted.stride() == host[:, 1:].stride()
    assert torch.equal(host_of(flat), host.reshape(12, 2)) and uploads.shapes == []
    assert torch.equal(shifted.transpose(0, 1) * 1, host[:, 1:].transpose(0, 1)) and uploads.times_real == 1
    with torch.no_grad():
        flat.zero_()
    assert not any(map(torch.any, (rows, shifted, turned))) and host.any()


def test_a_part_is_copied_a_few_rows_at_a_time(uploads):
    host = torch.randn(5, 3, 2)
    found = uploads.rows(host)[:, 1:].reshape(10, 2)
    assert isinstance(found, HostRows) and torch.equal(host_of(found), host[:, 1:].reshape(10, 2))
    assert set(uploads.shapes) == {(2, 2, 2), (1, 2, 2)} and uploads.times_real == 0


def test_a_shape_does_not_change_in_place(uploads):
    for name, args in {"unsqueeze_": (1,), "transpose_": (1, 2), "squeeze_": (1,)}.items():
        with pytest.raises(RuntimeError, match=rf"got {name}"):
            getattr(uploads.rows(torch.randn(4, 1, 3)), name)(*args)


def test_the_gradient_of_a_slice_is_made_a_few_rows_at_a_time(uploads):
    host, sizes = torch.randn(5, 2, 3), [5, 4, 3]
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


def test_which_modules_are_computed_row_by_row():
    model = bert()
    layers = list(model.bert.encoder.layer)
    found = input_embeddings(list(model.modules()), layers)
    assert found == {model.bert.embeddings.word_embeddings, model.bert.embeddings}
