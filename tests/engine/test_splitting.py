"""A layer call is cut where its rows are known to be independent, and runs whole, said once, where they are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine import splitting
from hf_l2l.model.batch_dims import ubatches
from memory_switches import forced_copies
from models import (
    EXACT,
    ROWS,
    TOKENS,
    VOCAB,
    Gradients,
    attached,
    batch_for,
    bert,
    gpt2,
    gradients,
    llama,
    reference,
    relative_error,
    t5,
    train_once,
)
from tiers import cpu_suffices

FLOAT64 = torch.float64


@given(st.integers(0, 200), st.integers(1, 60))
def test_ubatches_partition_the_rows(rows, size):
    parts = ubatches(rows, size)
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(rows))
    assert all(stop - start == size for start, stop in parts[:-1])
    assert all(0 < stop - start <= size for start, stop in parts[-1:])


def rows_seen(module: nn.Module) -> list[int]:
    """Collects with how many rows `module`, which is inside a layer, is called."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


def check_exact(model: nn.Module, batch: dict[str, torch.Tensor], inside: nn.Module, ubatch_size: int = 3) -> None:
    """Loss and gradients are those of the plain model, and the module inside a layer never sees all rows in a "
    "sweep."""
    loss, expected = reference(model, batch)
    attached(model, ubatch_size=ubatch_size)
    seen = rows_seen(inside)
    for _ in range(2):  # with what was just learned, and with what is known
        model.zero_grad()
        seen.clear()
        assert abs(train_once(model, batch) - loss) <= EXACT * abs(loss)
        assert relative_error(gradients(model), expected) <= EXACT
    assert seen == 2 * [stop - start for start, stop in ubatches(len(batch["input_ids"]), ubatch_size)]


# ---- models whose arguments are laid out in other ways


def bloom() -> nn.Module:
    """Its ALiBi is (rows x heads), so that a row has several entries."""
    config = hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    return hf.BloomForCausalLM(config)


@cpu_suffices
@pytest.mark.parametrize("masked", [True, False], ids=["ragged", "unmasked"])
def test_several_entries_per_row(masked):
    model = bloom().to(FLOAT64)
    check_exact(model, batch_for(model, masked=masked), model.transformer.h[0].mlp.dense_h_to_4h)


@cpu_suffices
def test_positions_per_sample():
    model = gpt2().to(FLOAT64)
    positions = (torch.arange(TOKENS) + torch.arange(ROWS)[:, None]) % 16
    check_exact(model, {**batch_for(model), "position_ids": positions}, model.transformer.h[1].mlp)


@cpu_suffices
def test_positions_for_all_rows_and_then_per_sample():
    model = llama().to(FLOAT64)
    for_all = torch.arange(TOKENS)[None]
    per_sample = torch.arange(TOKENS) * (1 + torch.arange(ROWS) % 5)[:, None]
    plain, batch = copy.deepcopy(model), batch_for(model)
    attached(model, ubatch_size=3)
    seen = rows_seen(model.model.layers[0].mlp)
    found: list[Gradients] = []
    for positions in (for_all, per_sample, for_all):
        model.zero_grad()
        loss, expected = reference(plain, {**batch, "position_ids": positions})
        assert abs(train_once(model, {**batch, "position_ids": positions}) - loss) <= EXACT * abs(loss)
        found.append(gradients(model))
        assert relative_error(found[-1], expected) <= EXACT
    assert relative_error(found[0], found[1]) > 1e-3  # the positions did matter
    assert max(seen[-6:]) == 3


@cpu_suffices
def test_other_rows_and_tokens_than_those_learned_from():
    model = bert().to(FLOAT64)
    plain = copy.deepcopy(model)
    attached(model, ubatch_size=3)
    for rows, seed in ((ROWS, 1), (5, 2), (3, 3), (1, 4), (7, 5)):
        batch = batch_for(model, rows=rows, seed=seed)
        batch = {k: v[:, : 2 + seed] if v.dim() == 2 else v for k, v in batch.items()}
        _, expected = reference(plain, batch)
        model.zero_grad()
        train_once(model, batch)
        assert relative_error(gradients(model), expected) <= EXACT


# ---- layers that must not be cut


class Block(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x, **extras):
        return x + self.dropout(self.linear(x).tanh())


class Centered(Block):
    """Its rows influence each other."""

    def forward(self, x, **extras):
        return super().forward(x - x.mean(0))


class Routed(Block):
    """A new adapter: what it adds is zero, so that its rows influence each other in gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.router = nn.Linear(4, 2), nn.Linear(2, 3)
        self.up = nn.Parameter(torch.zeros(3, 2, 4))

    def forward(self, x, **extras):
        low = self.down(x)
        share = self.router(low).softmax(-1).mean(0)
        return super().forward(x) + low @ torch.einsum("e,erd->rd", share, self.up)


@dataclass
class Info:
    scale: float = 2.0


class Stacked(nn.Module):
    """Embeds, runs its blocks, and counts its calls in buffers of the shell."""

    def __init__(self, block: Callable[[], nn.Module] = Block, **extras: object):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.extras = extras
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, x):
        x = self.embed(x)
        self.calls += 1
        self.assigned = self.assigned + torch.rand(len(x)).mean()
        for block in self.blocks:
            x = block(x, **self.extras)
        return x.square().mean()


def stacked(block: Callable[[], nn.Module] = Block, **extras: object) -> tuple[nn.Module, nn.Module]:
    """A plain model and one to attach to."""
    plain = Stacked(block, **extras).to(FLOAT64)
    return plain, copy.deepcopy(plain)


def compare(plain: nn.Module, ours: nn.Module, seed: int, rows: int = 7) -> None:
    for model in (plain, ours):
        model.zero_grad()
        torch.manual_seed(seed)
        model(torch.randn(rows, 3, dtype=FLOAT64)).backward()
    assert relative_error(gradients(ours), gradients(plain)) <= EXACT


@pytest.mark.parametrize(
    ("block", "extras", "reason"),
    [
        (Centered, {}, "its rows give different results in ubatches than all at once"),
        (Routed, {}, "its rows give different results in ubatches than all at once"),
        (Block, {"info": Info()}, "it is given a Info, whose rows are unknown"),
    ],
    ids=["influence", "influence in gradients", "object"],
)
def test_what_cannot_be_cut_runs_whole_and_says_so_once(block, extras, reason):
    plain, ours = stacked(block, **extras)
    attach_l2l(ours, L2LConfig(layer_classes=(block.__name__,), ubatch_size=2))
    seen = rows_seen(ours.blocks[1].linear)
    with pytest.warns(UserWarning) as said:
        for seed, rows in ((1, 7), (2, 7), (3, 5), (4, 2)):
            seen.clear()
            compare(plain, ours, seed, rows)
            assert seen[-2:] == [rows, rows]
        ours.eval(), plain.eval()
        with torch.no_grad():
            x = torch.randn(7, 3, dtype=FLOAT64)
            assert torch.equal(ours(x).cpu(), plain(x))
    assert [str(w.message) for w in said] == [
        f"ubatch_size=2 has no effect on calls of {block.__name__}: {reason}. They run with the whole device batch at "
        "once; lower the device batch if that does not fit"
    ]


def test_each_class_that_cannot_be_cut_is_named():
    class Other(Centered):
        pass

    _, ours = stacked(Centered)
    ours.blocks[1] = Other().to(FLOAT64)
    attach_l2l(ours, L2LConfig(layer_classes=("Centered",), ubatch_size=2))
    with pytest.warns(UserWarning) as said:
        ours(torch.randn(7, 3, dtype=FLOAT64)).backward()
    assert [str(w.message).split(":")[0].split()[-1] for w in said] == ["Centered", "Other"]


class Counting(Block):
    """Returns one more output in some of its calls."""

    def __init__(self, more: Callable[[], bool] = lambda: False):
        super().__init__()
        self.more = more

    def forward(self, x, **extras):
        out = super().forward(x)
        return (out, x.mean(1)) if self.more() else out


class Unpacking(Stacked):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


def test_layers_of_one_class_and_other_modules_are_cut_each_in_its_way():
    plain = Unpacking(Counting)
    plain.blocks[1].more, plain.blocks[1].inner = lambda: True, nn.Identity()
    plain = plain.to(FLOAT64)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Counting",), ubatch_size=2))
    seen = rows_seen(ours.blocks[1].linear)
    compare(plain, ours, 1)
    assert seen[-4:] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "more",
    [lambda index: index == 2, lambda _: torch.is_grad_enabled()],
    ids=["one of the layers", "the recompute"],
)
@pytest.mark.parametrize("check", ["raise", "off"])
def test_a_layer_that_returns_more_than_it_did_is_told_of(more, check):
    model = Unpacking(Counting)
    for index, block in enumerate(model.blocks):
        block.more = lambda index=index: more(index)
    attach_l2l(model, L2LConfig(layer_classes=("Counting",), ubatch_size=2, check_recompute=check))
    with pytest.raises(RuntimeError, match="a Counting returned 2 after 1.*with and without gradients"):
        model(torch.randn(6, 3)).backward()


class Weighted(nn.Module):
    """Gives its layers a list that it is given, with a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(OfLists() for _ in range(3))

    def forward(self, x, factors):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, factors)
        return x.square().mean()


class OfLists(Block):
    def forward(self, x, factors):
        return super().forward(x) * torch.tensor(factors[: len(x)], dtype=x.dtype, device=x.device)[:, None]


def test_a_list_with_a_number_for_each_row_is_not_cut():
    """Also if the first micro-batches have equal ones."""
    plain = Weighted().to(FLOAT64)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("OfLists",), ubatch_size=2))
    x, factors = torch.randn(7, 3, dtype=FLOAT64), [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.warns(UserWarning, match="ubatch_size=2 has no effect on calls of OfLists"):
        losses = [model(x, factors) for model in (plain, ours)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=EXACT)
    for loss in losses:
        loss.backward()
    assert relative_error(gradients(ours), gradients(plain)) <= EXACT


class Failing(Stacked):
    def forward(self, x):
        if len(x) > 8:
            raise ValueError("at most 8 rows")
        return super().forward(x)


def test_a_model_that_takes_no_doubled_batch_runs_whole():
    plain = Failing().to(FLOAT64)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), ubatch_size=2))
    with pytest.warns(UserWarning, match=r"does not run with its batch doubled \(at most 8 rows\)"):
        compare(plain, ours, 1)


def test_padding_that_is_nan_does_not_keep_rows_together():
    """Where both ways give no finite number they agree; the finite ones are compared."""

    class Masked(Block):
        def forward(self, x, **extras):
            return super().forward(x).masked_fill(x > 0, float("-inf"))

    _, ours = stacked(Masked)
    attach_l2l(ours, L2LConfig(layer_classes=("Masked",), ubatch_size=2))
    seen = rows_seen(ours.blocks[0].linear)
    ours(torch.randn(6, 3, dtype=FLOAT64))
    assert seen[-3:] == [2, 2, 2]


@pytest.mark.parametrize("make", [llama, t5], ids=lambda make: make.__name__)
def test_generation_with_a_cache(make):
    """A call with a cache runs whole, and no warning is due: there is nothing that the user could do."""
    plain = make().eval()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(ubatch_size=1))
    prompt = torch.randint(5, VOCAB, (3, 4))
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    tokens = [
        m.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        for m in (plain, ours)
    ]
    assert torch.equal(*tokens)


# ---- what probing leaves behind: nothing


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


class Drawing(Block):
    """Draws also when it is not training."""

    def __init__(self):
        super().__init__(dropout=0.5)

    def forward(self, x, **extras):
        return super().forward(x) if torch.rand(()) < 1 else x


def test_probing_moves_no_generator_and_no_buffer(copies):
    _, ours = stacked(Drawing)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), ubatch_size=2))
    ours.blocks[1].dropout.eval()
    ours.blocks[2].linear.eval()
    flags = {name: m.training for name, m in ours.named_modules()}
    x = torch.randn(7, 3, dtype=FLOAT64)
    results = []
    for count in (1, 2):  # the first call probes, the second has nothing to learn
        torch.manual_seed(3)
        loss = ours(x)
        loss.backward()
        results.append((loss, torch.get_rng_state(), gradients(ours), ours.assigned / count))
        assert ours.calls == count
        assert {name: m.training for name, m in ours.named_modules()} == flags
        ours.zero_grad()
    for first, second in zip(results[0], results[1], strict=True):
        if isinstance(first, dict):
            assert relative_error(second, first) == 0
        else:
            assert torch.equal(first, second)


def test_probing_writes_no_buffer_of_a_layer(copies):
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, **extras):
            self.calls += 1
            return super().forward(x)

    _, ours = stacked(Counting)
    attach_l2l(ours, L2LConfig(layer_classes=("Counting",), ubatch_size=2))
    ours(torch.randn(6, 3, dtype=FLOAT64)).backward()
    assert [block.calls.item() for block in ours.blocks] == [3, 3, 3]  # once per ubatch, not again at the recompute


def test_training_flags_are_back_after_a_probe_that_failed():
    class Picky(Block):
        def forward(self, x, **extras):
            if not self.training:
                raise RuntimeError("training only")
            return super().forward(x + 0 * torch.rand(()))  # as dropout: the probe turns to evaluation mode

    _, ours = stacked(Picky)
    attach_l2l(ours, L2LConfig(layer_classes=("Picky",), ubatch_size=2))
    with pytest.raises(RuntimeError, match="training only"):
        ours(torch.randn(6, 3, dtype=FLOAT64))
    assert all(m.training for m in ours.modules())


@pytest.fixture
def probes(monkeypatch):
    """The batches that were doubled for a layer."""
    found = []
    double = splitting.doubled

    def counted(given, *args, **kwargs):
        found.append(given)
        return double(given, *args, **kwargs)

    monkeypatch.setattr(splitting, "doubled", counted)
    return found


@cpu_suffices
def test_each_kind_of_call_is_probed_once(probes):
    model = attached(bert(), ubatch_size=3)
    for seed in (1, 2):
        train_once(model, batch_for(model, seed=seed))
        assert len(probes) == 1  # two layers of one class
    train_once(model, batch_for(model, rows=5))
    assert len(probes) == 1
    train_once(model, batch_for(model, masked=False))
    assert len(probes) == 2  # a mask of None
    model.eval()
    model(**batch_for(model))
    assert len(probes) == 3


def test_a_batch_within_one_ubatch_is_not_probed(probes):
    plain, ours = stacked(Centered)
    attach_l2l(ours, L2LConfig(layer_classes=("Centered",), ubatch_size=7))
    compare(plain, ours, 1)
    assert not probes


def test_a_kind_that_cannot_be_cut_is_probed_once(probes):
    _, ours = stacked(Centered)
    attach_l2l(ours, L2LConfig(layer_classes=("Centered",), ubatch_size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            ours(torch.randn(6, 3, dtype=FLOAT64)).backward()
    assert len(probes) == 1


class Skipping(Stacked):
    """Skips layers at random, as models with LayerDrop do."""

    def __init__(self):
        super().__init__()
        self.ran: list[list[int]] = []

    def forward(self, x):
        x = self.embed(x)
        self.ran.append([])
        for index, block in enumerate(self.blocks):
            if torch.rand(()) < 0.5:
                continue
            self.ran[-1].append(index)
            x = block(x)
        return x.square().mean()


@cpu_suffices
@pytest.mark.parametrize("ubatch_size", [None, 3])
def test_layers_skipped_at_random(ubatch_size, copies):
    plain = Skipping().to(FLOAT64)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), ubatch_size=ubatch_size))
    for seed in range(100, 110):
        compare(plain, ours, seed)
        assert ours.ran[-1] == plain.ran[-1]
    assert len({tuple(ran) for ran in plain.ran}) > 2
