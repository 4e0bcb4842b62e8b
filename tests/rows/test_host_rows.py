"""Rows in host memory that say they are on the device: read a part at a time, real as soon as a model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l
from hf_l2l.rows.host_rows import HostRows, Passing, host_of, uploaded_rows
from memory_switches import forced_copies
from models import FAMILIES, TOLERANCE, batch_for, bert, gradients, llama, relative_error, train_once

ON_HOST = {"stash": "host", "boundary": "host"}


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


def test_facts_need_no_upload(uploads):
    rows = uploads.rows(torch.randn(4, 3))
    assert (rows.shape, rows.dtype, rows.device, rows.ndim) == ((4, 3), torch.float32, torch.device("cpu"), 2)
    assert rows.is_waiting and isinstance(rows.detach(), HostRows) and uploads.shapes == []
    assert host_of(rows) is rows.rows.host


def test_any_operation_uploads_all_rows_once(uploads):
    host = torch.randn(4, 3)
    rows = uploads.rows(host)
    assert torch.equal(rows + 1, host + 1) and torch.equal(torch.cat([host, rows]), torch.cat([host, host]))
    assert torch.equal(rows.detach(), host) and rows.clone().tolist() == host.tolist()
    assert uploads.shapes == [(4, 3)] and uploads.times_real == 1
    assert not rows.is_waiting and host_of(rows) is rows


def test_some_rows_are_uploaded_alone(uploads):
    host = torch.randn(4, 3)
    rows = uploads.rows(host)
    assert torch.equal(uploaded_rows(host_of(rows)[1:3], rows), host[1:3]) and rows.is_waiting
    assert torch.equal(rows[1:3] * 1, host[1:3]) and uploads.shapes == [(2, 3), (4, 3)]
    part = host_of(rows)[:1]
    assert uploaded_rows(part, rows) is part


def test_writes_to_some_rows_are_seen(uploads):
    rows = uploads.rows(torch.ones(4, 3))
    view = rows[3]
    with torch.no_grad():
        rows[0] = 7
        rows[1:3].zero_()
        rows.add_(1)
    assert rows[:, 0].tolist() == [8.0, 1.0, 1.0, 2.0] and view.tolist() == [2.0] * 3


def test_writes_in_place_are_seen_by_all_aliases(uploads):
    host = torch.randn(4, 3)
    rows = uploads.rows(host)
    alias = rows.detach()
    with torch.no_grad():
        assert rows.mul_(2) is rows
        rows[0] = 7
    assert torch.equal(alias[1:], host[1:] * 2) and alias[0].tolist() == [7.0] * 3 and host[0].tolist() != [7.0] * 3


def test_gradients_pass_through(uploads):
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return uploads.rows(x.detach() * 2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.randn(4, 3, requires_grad=True)
    out = Node.apply(x)
    assert isinstance(out, HostRows) and out.requires_grad and out.grad_fn is not None
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


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


@pytest.mark.parametrize("name", ["unsqueeze_", "transpose_", "squeeze_"])
def test_a_shape_does_not_change_in_place(name, uploads):
    args = {"unsqueeze_": (1,), "transpose_": (1, 2), "squeeze_": (1,)}[name]
    rows = uploads.rows(torch.randn(4, 1, 3))
    with pytest.raises(
        RuntimeError, match=rf"must keep its shape \(got {name}, which changes it in place\); use {name[:-1]}"
    ):
        getattr(rows, name)(*args)


def test_an_index_without_entries(uploads):
    host = torch.randn(4, 3)
    assert torch.equal(uploads.rows(host)[()] * 1, host)


def test_new_tensors_like_them_are_on_the_device(uploads):
    rows = uploads.rows(torch.randn(4, 3))
    assert torch.equal(torch.zeros_like(rows), torch.zeros(4, 3)) and rows.new_empty(0, 5).shape == (0, 5)
    assert rows.is_waiting


def test_what_reads_memory_reads_the_values(uploads, tmp_path):
    host = torch.randn(4, 3)
    assert uploads.rows(host).tolist() == host.tolist() and (uploads.rows(host).numpy() == host.numpy()).all()
    torch.save(uploads.rows(host), tmp_path / "rows.pt")
    assert torch.equal(torch.load(tmp_path / "rows.pt", weights_only=True), host)
    assert type(copy.deepcopy(uploads.rows(host))) is torch.Tensor


def test_sums_of_gradients_are_made_a_few_rows_at_a_time(uploads):
    one, other = torch.randn(5, 3), torch.randn(5, 3)
    for found in (
        uploads.gradient(one) + uploads.gradient(other),
        uploads.gradient(one) + other,
        one + uploads.gradient(other),
    ):
        assert isinstance(found, HostRows) and torch.equal(host_of(found), one + other)
    assert set(uploads.shapes) == {(2, 3), (1, 3)}


def test_the_gradient_of_a_slice_is_made_a_few_rows_at_a_time(uploads):
    host, sizes = torch.randn(5, 2, 3), [5, 4, 3]
    found = torch.ops.aten.slice_backward(uploads.gradient(host), sizes, 1, 1, 3, 1)
    expected = torch.zeros(sizes)
    expected[:, 1:3] = host
    assert isinstance(found, HostRows) and torch.equal(host_of(found), expected)
    whole = torch.ops.aten.slice_backward(uploads.gradient(host), [6, 2, 3], 0, 1, 6, 1)
    assert type(whole) is torch.Tensor and torch.equal(whole[1:], host)


# ---- models


@pytest.mark.one_in(12)
@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"gradient_slots": 1}], ids=str)
@pytest.mark.parametrize("ubatch_size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_model(family, ubatch_size, options):
    torch.manual_seed(0)
    model = FAMILIES[family]().double()
    plain, batch = copy.deepcopy(model), batch_for(model)
    expected = train_once(plain, batch)
    with forced_copies():
        attach_l2l(model, L2LConfig(ubatch_size=ubatch_size, **ON_HOST, **options))
        for _ in range(2):  # the first forward does not know which outputs the model computes with
            model.zero_grad()
            assert train_once(model, batch).item() == pytest.approx(expected.item(), rel=1e-10)
            assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def hidden_states(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(model(**batch, output_hidden_states=True).hidden_states)


def test_hidden_states_are_read_by_the_program():
    torch.manual_seed(0)
    model = bert(num_hidden_layers=4).double()
    plain, batch = copy.deepcopy(model), batch_for(model)

    def loss(each: nn.Module) -> torch.Tensor:
        return sum(state[:, 0].square().mean() * (i + 1) for i, state in enumerate(hidden_states(each, batch)))

    expected = loss(plain)
    expected.backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(ubatch_size=3, **ON_HOST))
        for turn in range(2):
            model.zero_grad()
            states = hidden_states(model, batch)
            # From the second turn on, the last one is on the device: it is what programs read.
            assert [isinstance(state, HostRows) for state in states] == [True, True, True, True, turn == 0]
            assert all(state.is_waiting for state in states if isinstance(state, HostRows))
            found = loss(model)
            found.backward()
            assert found.item() == pytest.approx(expected.item(), rel=1e-10)
            assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


class _Between(nn.Module):
    """Computes with the outputs of its layers before the next one gets them."""

    def __init__(self, model: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.model, self.in_place = model, in_place

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(input_ids)
        places = inner.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in inner.layers:
            hidden = layer(hidden, position_embeddings=places)
            hidden = hidden.mul_(1.5) if self.in_place else hidden * 1.5
        return nn.functional.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_computes_between_layers(in_place):
    torch.manual_seed(0)
    model = _Between(llama().double(), in_place)
    plain = copy.deepcopy(model)
    ids = batch_for(model.model, masked=False)["input_ids"]
    plain(ids, ids).backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(ubatch_size=3, layer_classes=("LlamaDecoderLayer",), **ON_HOST))
        for _ in range(2):
            model.zero_grad()
            model(ids, ids).backward()
            found, expected = gradients(model), gradients(plain)
            found.pop("model.model.norm.weight"), expected.pop("model.model.norm.weight")
            assert relative_error(found, expected) < TOLERANCE[torch.float64]


def test_a_second_backward_and_one_that_is_dropped():
    torch.manual_seed(0)
    model = bert(num_hidden_layers=3).double()
    plain, batch = copy.deepcopy(model), batch_for(model)
    train_once(plain, batch)
    with forced_copies():
        attach_l2l(model, L2LConfig(ubatch_size=3, **ON_HOST))
        model(**batch)  # dropped
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]
        model.zero_grad()
        loss.backward()
        assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def test_what_is_not_cut_stays_on_the_device():
    model = bert(num_hidden_layers=3)
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        assert not any(isinstance(state, HostRows) for state in hidden_states(model, batch_for(model)))
    with torch.no_grad(), forced_copies():
        assert not any(isinstance(state, HostRows) for state in hidden_states(model, batch_for(model)))


def test_where_memory_is_shared_nothing_changes():
    model = bert(num_hidden_layers=3)
    attach_l2l(model, L2LConfig(ubatch_size=2, **ON_HOST))
    assert not any(isinstance(state, HostRows) for state in hidden_states(model, batch_for(model)))


def test_bad_input():
    with pytest.raises(ValueError, match="boundary must be one of 'auto', 'device', 'host' .got 'disk'.; use 'host'"):
        L2LConfig(boundary="disk")
    with pytest.raises(ValueError, match="boundary='host' passes what is in the stash .*got stash='device'.; set"):
        L2LConfig(boundary="host")
    with pytest.raises(ValueError, match="l2l_boundary='host' .* needs stash='host'"):
        L2LTrainingArguments("x", l2l_boundary="host")
