"""A layer call is cut where its rows are known to be independent, and runs whole, said once, where they are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine import splitting
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
    gradients,
    llama,
    reference,
    relative_error,
    train_once,
)
from tiers import cpu_suffices, nightly

FLOAT64 = torch.float64


def rows_seen(module: nn.Module) -> list[int]:
    """Collects with how many rows `module`, which is inside a layer, is called."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


# ---- models whose arguments are laid out in other ways


@cpu_suffices
def test_several_entries_per_row():
    """BLOOM's ALiBi is (rows x heads)."""
    config = hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    model = hf.BloomForCausalLM(config).to(FLOAT64)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, ubatch_size=3)
    seen = rows_seen(model.transformer.h[0].mlp.dense_h_to_4h)
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= EXACT
    assert seen[-6:] == [3, 3, 2, 3, 3, 2]


@nightly
@cpu_suffices
def test_positions_for_all_rows_and_then_per_sample():
    """Which are the first argument, and do not hide how many rows there are."""
    model = llama().to(FLOAT64)
    for_all = torch.arange(TOKENS)[None]
    per_sample = torch.arange(TOKENS) * (1 + torch.arange(ROWS) % 5)[:, None]
    plain, batch = copy.deepcopy(model), batch_for(model)
    attached(model, ubatch_size=3)
    seen = rows_seen(model.model.layers[0].mlp)
    found: list[Gradients] = []
    for positions in (for_all, per_sample, for_all):
        model.zero_grad()
        _, expected = reference(plain, {"position_ids": positions, **batch})
        train_once(model, {"position_ids": positions, **batch})
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


class Mixing(Block):
    """Its rows influence each other in training only, and it draws random numbers."""

    def forward(self, x, **extras):
        x = super().forward(x)
        if self.training:
            x = x - x.mean(0)
        each = x[:, None]
        return F.dropout(F.scaled_dot_product_attention(each, each, each, None, 0.0)[:, 0], 0.0, self.training)


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


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, **extras):
        return super().forward(self.norm(x))


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
            out = block(x, **self.extras)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


def both(model: nn.Module, ubatch_size: int | None = 2) -> tuple[nn.Module, nn.Module]:
    """A plain model in float64, and the same one layer to layer."""
    plain = model.to(FLOAT64)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), ubatch_size=ubatch_size))
    return plain, ours


def compare(plain: nn.Module, ours: nn.Module, seed: int = 1, rows: int = 7, **inputs: object) -> None:
    for model in (plain, ours):
        model.zero_grad()
        torch.manual_seed(seed)
        model(torch.randn(rows, 3, dtype=FLOAT64), **inputs).backward()
    assert relative_error(gradients(ours), gradients(plain)) <= EXACT


@cpu_suffices
@pytest.mark.parametrize(
    ("block", "extras", "reason"),
    [
        (Centered, {}, "its rows give different results in ubatches than all at once"),
        (Routed, {}, "its rows give different results in ubatches than all at once"),
        (Mixing, {}, "its rows give different results in ubatches than all at once"),
        (Normalized, {}, "it normalizes over the rows of the batch (a BatchNorm1d)"),
        (Block, {"info": Info()}, "it is given a Info, whose rows are unknown"),
    ],
    ids=["influence", "influence in gradients", "influence in training", "batch norm", "object"],
)
def test_what_cannot_be_cut_runs_whole_and_says_so_once(block, extras, reason):
    plain, ours = both(Stacked(block, **extras))
    seen = rows_seen(ours.blocks[1].linear)
    with pytest.warns(UserWarning) as said:
        for seed, rows in ((1, 7), (2, 7), (3, 5), (4, 2)):
            seen.clear()
            compare(plain, ours, seed, rows)
            assert seen[-2:] == [rows, rows]
        ours.eval(), plain.eval()
        with torch.no_grad():
            x = torch.randn(7, 3, dtype=FLOAT64)
            torch.testing.assert_close(ours(x).cpu(), plain(x))
    assert [str(w.message) for w in said] == [
        f"ubatch_size=2 has no effect on calls of {block.__name__}: {reason}. They run with the whole device batch at "
        "once; lower the device batch if that does not fit"
    ]


class Listed(Block):
    """Is given a list with a number for each row."""

    def forward(self, x, **extras):
        return super().forward(x) * torch.tensor(extras["factors"][: len(x)], dtype=x.dtype, device=x.device)[:, None]


class Weighted(Stacked):
    """Gives its layers a list that it is given."""

    def forward(self, x, factors):
        self.extras = {"factors": factors}
        return super().forward(x)


class OfFewRows(Stacked):
    def forward(self, x):
        if len(x) > 8:
            raise ValueError("at most 8 rows")
        return super().forward(x)


class OfATable(nn.Module):
    """Its layer has rows of its own, which are not those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.blocks[0](self.table).T[:3]).square().mean()


@pytest.mark.parametrize(
    ("make", "inputs", "reason"),
    [
        # The first micro-batches have equal numbers.
        (
            lambda: Weighted(Listed),
            {"factors": [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]},
            "has no effect on calls of Listed",
        ),
        (OfFewRows, {}, r"does not run with its batch doubled \(at most 8 rows\)"),
        (OfATable, {}, "none of its arguments has the 7 rows"),
    ],
    ids=["a number for each row", "no doubled batch", "other rows"],
)
def test_models_whose_rows_are_not_found_run_whole(make, inputs, reason):
    with pytest.warns(UserWarning, match=reason):
        compare(*both(make()), **inputs)


class Counting(Block):
    """Returns one more output in some of its calls."""

    def __init__(self, more: Callable[[], bool] = lambda: False):
        super().__init__()
        self.more = more

    def forward(self, x, **extras):
        out = super().forward(x)
        return (out, x.mean(1)) if self.more() else out


def test_layers_of_one_class_and_other_modules_are_cut_each_in_its_way():
    model = Stacked(Counting)
    model.blocks[1].more, model.blocks[1].inner = lambda: True, nn.Identity()
    plain, ours = both(model)
    seen = rows_seen(ours.blocks[1].linear)
    compare(plain, ours)
    assert seen[-4:] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("more", "check"),
    [(lambda index: index == 2, "raise"), (lambda _: torch.is_grad_enabled(), "off")],
    ids=["one of the layers", "the recompute"],
)
def test_a_layer_that_returns_more_than_it_did_is_told_of(more, check):
    model = Stacked(Counting)
    for index, block in enumerate(model.blocks):
        block.more = lambda index=index: more(index)
    attach_l2l(model, L2LConfig(layer_classes=("Counting",), ubatch_size=2, check_recompute=check))
    with pytest.raises(RuntimeError, match="a Counting returned 2 after 1.*with and without gradients"):
        model(torch.randn(6, 3)).backward()


class Filling(Block):
    """Its rows are padded by numbers that are not finite, and it writes into what it is given."""

    def forward(self, x, **extras):
        return super().forward(x.add_(1.0)).masked_fill(x > 1.0, float("-inf"))


def test_rows_with_infinite_numbers_are_cut_and_a_probe_does_not_write_into_the_batch():
    """Where both ways give no finite number they agree; the finite ones are compared."""
    plain, ours = both(Stacked(Filling))
    seen = rows_seen(ours.blocks[0].linear)
    x = torch.randn(6, 3, dtype=FLOAT64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x).cpu(), plain(x), equal_nan=True)
    assert seen[-3:] == [2, 2, 2]


@cpu_suffices
def test_generation_with_a_cache():
    """A call with a cache runs whole, and no warning is due: there is nothing that the user could do."""
    plain = llama().eval()
    ours = attached(copy.deepcopy(plain), ubatch_size=1)
    prompt = torch.randint(5, VOCAB, (3, 4))
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    how = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(prompt, **how), plain.generate(prompt, **how))


# ---- what probing leaves behind: nothing


class Drawing(Block):
    """Draws also when it is not training, and counts its calls."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, **extras):
        self.calls += 1
        return super().forward(x) if torch.rand(()) < 1 else x


@pytest.mark.parametrize("memory", [nullcontext, forced_copies])
def test_probing_moves_no_generator_and_no_buffer(memory):
    with memory():
        _, ours = both(Stacked(Drawing))
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
            assert [int(block.calls) for block in ours.blocks] == [4 * count] * 3  # once per micro-batch
            assert {name: m.training for name, m in ours.named_modules()} == flags
            ours.zero_grad()
    for first, second in zip(results[0], results[1], strict=True):
        if isinstance(first, dict):
            assert relative_error(second, first) == 0
        else:
            assert torch.equal(first, second)


class Picky(Block):
    def forward(self, x, **extras):
        if not self.training:
            raise RuntimeError("training only")
        return super().forward(x + 0 * torch.rand(()))  # as dropout: the probe turns to evaluation mode


def test_training_flags_are_back_after_a_probe_that_failed():
    _, ours = both(Stacked(Picky))
    with pytest.raises(RuntimeError, match="training only"):
        ours(torch.randn(6, 3, dtype=FLOAT64))
    assert all(m.training for m in ours.modules())


@nightly
@cpu_suffices
def test_each_kind_of_call_is_probed_once(monkeypatch):
    probes, double = [], splitting.doubled

    def counted(given, *args, **kwargs):
        probes.append(given)
        return double(given, *args, **kwargs)

    monkeypatch.setattr(splitting, "doubled", counted)
    model = attached(bert(), ubatch_size=3)
    train_once(model, batch_for(model, rows=3))
    assert not probes  # it is one micro-batch
    for batch in (batch_for(model), batch_for(model, seed=2), batch_for(model, rows=5)):
        train_once(model, batch)
        assert len(probes) == 1  # two layers of one class
    train_once(model, batch_for(model, masked=False))
    assert len(probes) == 2  # a mask of None
    model.eval()
    model(**batch_for(model))
    assert len(probes) == 3
    _, ours = both(Stacked(Centered))  # which cannot be cut
    with pytest.warns(UserWarning, match="no effect"):
        for _ in range(2):
            ours(torch.randn(6, 3, dtype=FLOAT64)).backward()
    assert len(probes) == 4


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
def test_layers_skipped_at_random(ubatch_size):
    with forced_copies():
        plain, ours = both(Skipping(), ubatch_size)
        for seed in range(100, 106):
            compare(plain, ours, seed)
            assert ours.ran[-1] == plain.ran[-1]
    assert len({tuple(ran) for ran in plain.ran}) > 2


# ---- rows that are not those of the model's own inputs, but of a call inside of the model's


class Turned(Block):
    """Its positions have the rows in their second dimension."""

    def forward(self, x, positions):
        return super().forward(x + positions.to(x.dtype).mean(0)[:, :, None])


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Turned(), Turned()])

    def forward(self, x, positions):
        for block in self.blocks:
            x = block(x, positions)
        return x


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, patches, sizes):
        for block in self.blocks:
            patches = block(patches, cu_seqlens=sizes.cumsum(0))
        return patches


class TextAndImages(nn.Module):
    """Puts packed images into rows of text; it does not run with more text than images."""

    def __init__(self):
        super().__init__()
        self.vision, self.language = Vision(), Language()
        self.embed = nn.Embedding(10, 4)

    def forward(self, ids, sizes, patches):
        images = self.vision(patches, sizes)
        x = self.embed(ids).masked_scatter(ids[:, :, None] == 0, images)
        if int((ids == 0).sum()) != len(images):
            raise ValueError("the images do not fit the text")
        positions = torch.arange(5).expand(3, len(ids), 5)
        return self.language(x, positions).square().mean()


def test_rows_of_the_nearest_enclosing_call():
    plain, ours = both(TextAndImages())
    ids = torch.randint(1, 10, (6, 5))
    ids[:, :2] = 0
    inputs = ids, torch.full((6,), 2), torch.randn(12, 4, dtype=FLOAT64)
    text, images = rows_seen(ours.language.blocks[1].linear), rows_seen(ours.vision.blocks[1].linear)
    with pytest.warns(UserWarning) as said:
        for model in (plain, ours, ours):
            model.zero_grad()
            model(*inputs).backward()
    assert relative_error(gradients(ours), gradients(plain)) <= EXACT
    assert text[-6:] == [2] * 6 and images[-2:] == [12] * 2
    [only] = said
    assert "calls of Block: it is given sequences packed into one (cu_seqlens)" in str(only.message)


class InParts(nn.Module):
    """A loss that calls its model for a few rows at a time, as losses with cached gradients do."""

    def __init__(self):
        super().__init__()
        self.model = Stacked()

    def forward(self, x):
        return torch.stack([self.model(part) for part in x.split(4)]).mean()


def test_a_model_that_is_called_in_parts():
    plain, ours = both(InParts())
    seen = rows_seen(ours.model.blocks[1].linear)
    compare(plain, ours, rows=12)
    assert seen[-12:] == [2] * 12
