"""A layer call is cut where its rows are known to be independent, and runs whole, said once, where they are not; a
batch that was merged of several is cut between them, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hf_l2l.engine import splitting
from hf_l2l.hf.attach import attachment_of
from hf_l2l.model.batch_dims import NotCut, RowCuts
from memory_switches import forced_copies
from models import (
    EXACT,
    FAMILIES,
    ROWS,
    TOKENS,
    VOCAB,
    assert_bits_of_plain,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gradients,
    llama,
    reference,
    relative_error,
    train_once,
)
from tiers import cpu_suffices, more, nightly

FLOAT64 = torch.float64
INFLUENCE = "its rows give different results in ubatches than all at once"


def rows_seen(module: nn.Module) -> list[int]:
    """Collects with how many rows `module`, which is inside a layer, is called."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


# ---- calls that are laid out in other ways, or have other shapes than those that was learned from


def bloom() -> nn.Module:
    sizes = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB}
    return hf.BloomForCausalLM(hf.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


def of_other_sizes(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    batches = [(2 + seed, batch_for(model, rows=rows, seed=seed)) for seed, rows in enumerate((ROWS, 5, 3, 1, 7), 1)]
    return [{k: v[:, :tokens] if v.dim() == 2 else v for k, v in batch.items()} for tokens, batch in batches]


def with_positions(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """They are the first argument, and do not hide how many rows there are."""
    for_all = torch.arange(TOKENS)[None]
    per_sample = torch.arange(TOKENS) * (1 + torch.arange(ROWS) % 5)[:, None]
    return [{"position_ids": positions, **batch_for(model)} for positions in (for_all, per_sample, for_all)]


CALLS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[nn.Module], list[Any]]]] = {
    "BLOOM's ALiBi, which is rows x heads": (bloom, "transformer.h.0.mlp.dense_h_to_4h", lambda m: [batch_for(m)]),
    "other rows and tokens": (bert, "bert.encoder.layer.0.output.dense", of_other_sizes),
    "positions for all rows, and then per sample": (llama, "model.layers.0.mlp", with_positions),
}


@cpu_suffices
@pytest.mark.parametrize("name", [*list(CALLS)[:2], *more(*list(CALLS)[2:])])
def test_calls_are_cut_and_have_the_gradients_of_plain_ones(name):
    make, inside, batches = CALLS[name]
    model = make().to(FLOAT64)
    plain = copy.deepcopy(model)
    attached(model, ubatch_size=3)
    seen = rows_seen(model.get_submodule(inside))
    for batch in batches(plain):
        _, expected = reference(plain, batch)
        model.zero_grad()
        train_once(model, batch)
        assert relative_error(gradients(model), expected) <= EXACT
        sizes = [len(part) for part in batch["input_ids"].split(3)]
        assert seen[-len(sizes) :] == sizes


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


# ---- layers that must not be cut


class Block(nn.Module):
    """A layer that computes in a way of its own, which may use `rows`: that keeps rows apart."""

    def __init__(self, compute: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear, self.dropout, self.compute = nn.Linear(4, 4), nn.Dropout(0.0), compute

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x).tanh())

    def forward(self, x: torch.Tensor, **extras: Any) -> Any:
        return self.rows(x) if self.compute is None else self.compute(self, x, **extras)


class Routed(Block):
    """A new adapter: what it adds is zero, so that its rows influence each other in gradients alone."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.down, self.router = nn.Linear(4, 2), nn.Linear(2, 3)
        self.up = nn.Parameter(torch.zeros(3, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x)
        share = self.router(low).softmax(-1).mean(0)
        return self.rows(x) + low @ torch.einsum("e,erd->rd", share, self.up)


class Normalized(Block):
    def __init__(self, *_: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(self.norm(x))


def centered(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.rows(x - x.mean(0))


def mixing(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Rows influence each other in training only, and random numbers are drawn."""
    x = block.rows(x)
    if block.training:
        x = x - x.mean(0)
    each = x[:, None]
    return F.dropout(F.scaled_dot_product_attention(each, each, each, None, 0.0)[:, 0], 0.0, block.training)


@dataclass
class Info:
    scale: float = 2.0


class Stacked(nn.Module):
    """Embeds, runs its blocks, and counts its calls in buffers of the shell."""

    def __init__(self, compute: Callable[..., Any] | None = None, kind: type[Block] = Block, **extras: object) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(kind(compute) for _ in range(3))
        self.extras = extras
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, x: torch.Tensor, **extras: Any) -> torch.Tensor:
        x = self.embed(x)
        self.calls += 1
        self.assigned = self.assigned + torch.rand(len(x)).mean()
        for block in self.blocks:
            out = block(x, **self.extras, **extras)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


def both(model: nn.Module, ubatch_size: int | None = 2) -> tuple[nn.Module, nn.Module]:
    """A plain model in float64, and the same one layer to layer."""
    plain = model.to(FLOAT64)
    return plain, attached(copy.deepcopy(plain), layer_classes=("Block",), ubatch_size=ubatch_size)


def compare(plain: nn.Module, ours: nn.Module, seed: int = 1, rows: int = 7, **inputs: object) -> None:
    for model in (plain, ours):
        model.zero_grad()
        torch.manual_seed(seed)
        model(torch.randn(rows, 3, dtype=FLOAT64), **inputs).backward()
    assert relative_error(gradients(ours), gradients(plain)) <= EXACT


@cpu_suffices
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Stacked(centered), INFLUENCE),
        (lambda: Stacked(kind=Routed), INFLUENCE),
        (lambda: Stacked(mixing), INFLUENCE),
        (lambda: Stacked(kind=Normalized), "it normalizes over the rows of the batch (a BatchNorm1d)"),
        (
            lambda: Stacked(lambda block, x, info: block.rows(x), info=Info()),
            "it is given a Info, whose rows are unknown",
        ),
    ],
    ids=["influence", "influence in gradients", "influence in training", "batch norm", "object"],
)
def test_what_cannot_be_cut_runs_whole_and_says_so_once(make, reason):
    plain, ours = both(make())
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
        f"ubatch_size=2 has no effect on calls of {type(ours.blocks[0]).__name__}: {reason}. They run with the whole "
        "device batch at once; lower the device batch if that does not fit"
    ]


def listed(block: Block, x: torch.Tensor, factors: list[float]) -> torch.Tensor:
    """With a number for each row."""
    return block.rows(x) * torch.tensor(factors[: len(x)], dtype=x.dtype, device=x.device)[:, None]


class OfFewRows(Stacked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


FACTORS = [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
"""Those of the first micro-batches are equal."""


@pytest.mark.parametrize(
    ("make", "inputs", "reason"),
    [
        (lambda: Stacked(listed), {"factors": FACTORS}, "has no effect on calls of Block"),
        (OfFewRows, {}, r"does not run with its batch doubled \(at most 8 rows\)"),
        (OfATable, {}, "none of its arguments has the 7 rows"),
    ],
    ids=["a number for each row", "no doubled batch", "other rows"],
)
def test_models_whose_rows_are_not_found_run_whole(make, inputs, reason):
    with pytest.warns(UserWarning, match=reason):
        compare(*both(make()), **inputs)


def test_layers_of_one_class_and_other_modules_are_cut_each_in_its_way():
    model = Stacked()
    model.blocks[1].compute, model.blocks[1].inner = lambda block, x: (block.rows(x), x.mean(1)), nn.Identity()
    plain, ours = both(model)
    seen = rows_seen(ours.blocks[1].linear)
    compare(plain, ours)
    assert seen[-4:] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("returns_more", "check"),
    [(lambda model, block: block is model.blocks[2], "raise"), (lambda *_: torch.is_grad_enabled(), "off")],
    ids=["one of the layers", "the recompute"],
)
def test_a_layer_that_returns_more_than_it_did_is_told_of(returns_more, check):
    model = Stacked(lambda block, x: (block.rows(x), x.mean(1)) if returns_more(model, block) else block.rows(x))
    attached(model, layer_classes=("Block",), ubatch_size=2, check_recompute=check)
    with pytest.raises(RuntimeError, match="a Block returned 2 after 1.*with and without gradients"):
        model(torch.randn(6, 3)).backward()


def test_rows_with_infinite_numbers_are_cut_and_a_probe_does_not_write_into_the_batch():
    """Where both ways give no finite number they agree; the finite ones are compared."""
    plain, ours = both(Stacked(lambda block, x: block.rows(x.add_(1.0)).masked_fill(x > 1.0, float("-inf"))))
    seen = rows_seen(ours.blocks[0].linear)
    x = torch.randn(6, 3, dtype=FLOAT64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x).cpu(), plain(x), equal_nan=True)
    assert seen[-3:] == [2, 2, 2]


# ---- what probing leaves behind: nothing


class Drawing(Block):
    """Draws also when it is not training, and counts its calls."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.dropout.p = 0.5
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.rows(x) if torch.rand(()) < 1 else x


@pytest.mark.parametrize("memory", [nullcontext, forced_copies])
def test_probing_moves_no_generator_and_no_buffer(memory):
    with memory():
        _, ours = both(Stacked(kind=Drawing))
        ours.blocks[1].dropout.eval()
        ours.blocks[2].linear.eval()
        flags = {name: m.training for name, m in ours.named_modules()}
        x = torch.randn(7, 3, dtype=FLOAT64)
        results = []
        for count in (1, 2):  # the first call probes, the second has nothing to learn
            torch.manual_seed(3)
            loss = ours(x)
            loss.backward()
            results.append({"loss": loss, "drawn": torch.get_rng_state(), "assigned": ours.assigned / count})
            results[-1] |= gradients(ours)
            assert ours.calls == count
            assert [int(block.calls) for block in ours.blocks] == [4 * count] * 3  # once per micro-batch
            assert {name: m.training for name, m in ours.named_modules()} == flags
            ours.zero_grad()
    assert_same_bits(*results)


def test_training_flags_are_back_after_a_probe_that_failed():
    def picky(block: Block, x: torch.Tensor) -> torch.Tensor:
        if not block.training:
            raise RuntimeError("training only")
        return block.rows(x + 0 * torch.rand(()))  # as dropout: the probe turns to evaluation mode

    _, ours = both(Stacked(picky))
    with pytest.raises(RuntimeError, match="training only"):
        ours(torch.randn(6, 3, dtype=FLOAT64))
    assert all(m.training for m in ours.modules())


@nightly
@cpu_suffices
def test_each_kind_of_call_is_probed_once(monkeypatch):
    probes, double = [], splitting.doubled
    monkeypatch.setattr(splitting, "doubled", lambda *args, **kwargs: probes.append(args) or double(*args, **kwargs))
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
    _, ours = both(Stacked(centered))  # which cannot be cut
    with pytest.warns(UserWarning, match="no effect"):
        for _ in range(2):
            ours(torch.randn(6, 3, dtype=FLOAT64)).backward()
    assert len(probes) == 4


class Skipping(Stacked):
    """Skips layers at random, as models with LayerDrop do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        self.ran = [block for block in range(3) if torch.rand(()) >= 0.5]
        for block in self.ran:
            x = self.blocks[block](x)
        return x.square().mean()


@cpu_suffices
@pytest.mark.parametrize("ubatch_size", [None, 3])
def test_layers_skipped_at_random(ubatch_size):
    found = set()
    with forced_copies():
        plain, ours = both(Skipping(), ubatch_size)
        for seed in range(100, 106):
            compare(plain, ours, seed)
            assert ours.ran == plain.ran
            found.add(tuple(ours.ran))
    assert len(found) > 2


# ---- rows that are not those of the model's own inputs, but of a call inside of the model's


class Part(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(compute), Block(compute)])

    def forward(self, x: torch.Tensor, **extras: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **extras)
        return x


def placed(block: Block, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By positions that have the rows in their second dimension."""
    return block.rows(x + positions.to(x.dtype).mean(0)[:, :, None])


class TextAndImages(nn.Module):
    """Puts packed images into rows of text; it does not run with more text than images."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = Part(lambda block, x, cu_seqlens: block.rows(x)), Part(placed)
        self.embed = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, sizes: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        images = self.vision(patches, cu_seqlens=sizes.cumsum(0))
        x = self.embed(ids).masked_scatter(ids[:, :, None] == 0, images)
        if int((ids == 0).sum()) != len(images):
            raise ValueError("the images do not fit the text")
        return self.language(x, positions=torch.arange(5).expand(3, len(ids), 5)).square().mean()


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

    def __init__(self) -> None:
        super().__init__()
        self.model = Stacked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.model(part) for part in x.split(4)]).mean()


def test_a_model_that_is_called_in_parts():
    plain, ours = both(InParts())
    seen = rows_seen(ours.model.blocks[1].linear)
    compare(plain, ours, rows=12)
    assert seen[-12:] == [2] * 12


# ---- batches that were merged


@cpu_suffices
@given(st.lists(st.integers(1, 9), max_size=6), st.none() | st.integers(1, 4), st.integers(1, 20))
def test_cuts_are_at_the_borders_and_after_so_many_rows(merged, size, rows):
    cuts = RowCuts(size)
    rows = sum(merged) or rows
    with cuts.between(merged):
        parts = cuts.of(rows)
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(rows))
    borders = {sum(merged[:i]) for i in range(len(merged) + 1)} | {0, rows}
    assert borders <= {0} | {stop for _, stop in parts}
    assert all(stop - start <= (size or rows) for start, stop in parts)
    assert len(parts) == sum(-(-count // (size or count)) for count in merged or [rows])
    assert len(RowCuts(None).of(rows)) == 1


@cpu_suffices
def test_without_a_size_there_are_as_many_ubatches_as_asked_for():
    for rows, sizes in ((9, [2, 1, 1, 1, 1, 1, 1, 1]), (3, [1] * 3), (20, [3] * 4 + [2] * 4)):
        cuts = RowCuts(None, RowCuts.parts_for(4)).of(rows)
        assert [stop - start for start, stop in cuts] == sizes and (cuts[0][0], cuts[-1][1]) == (0, rows)


@cpu_suffices
def test_a_call_with_other_rows_is_not_cut_and_nothing_is_merged_after_the_block():
    cuts = RowCuts(None)
    with pytest.raises(NotCut, match="called with 6 rows for a batch of 5"), cuts.between((2, 3)):
        cuts.of(6)
    assert cuts.of(5) == [(0, 5)]


@cpu_suffices
@pytest.mark.parametrize(
    ("family", "options", "merged", "inside", "sizes"),
    [
        # The last layers of T5 get several tensors.
        ("t5", {"stash": "host", "boundary": "host"}, (1, 3, 2, 2), "decoder.block.1.layer.2", [1, 3, 2, 2]),
        ("llama", {"ubatch_size": 2, "stash": "host"}, (3, 5), "model.layers.1.mlp", [2, 1, 2, 2, 1]),
        *more(
            ("bert", {}, (5, 3), "bert.encoder.layer.1.output.dense", [5, 3]),
            ("gpt2", {"stash": "host"}, (2, 6), "transformer.h.1.mlp.c_fc", [2, 6]),
        ),
    ],
)
def test_gradients_are_those_of_the_whole_batch(family, options, merged, inside, sizes):
    """A size cuts the batches, too."""
    model = FAMILIES[family]().double()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attached(model, **options)
    seen = rows_seen(model.get_submodule(inside))
    for _ in range(2):  # with what was just learned, and with what is known
        model.zero_grad()
        seen.clear()
        with attachment_of(model).cuts.between(merged):
            assert abs(train_once(model, batch) - loss) <= EXACT * abs(loss)
        assert relative_error(gradients(model), expected) <= EXACT
    assert seen == 2 * sizes


@nightly
@cpu_suffices
def test_merged_batches_have_the_bits_of_ubatches_of_that_size():
    runs = []
    for merged, size in (((), 2), ((2, 2, 2, 2), None), ((4, 4), 2)):
        torch.manual_seed(1)
        model = attached(FAMILIES["llama"](), ubatch_size=size)
        with attachment_of(model).cuts.between(merged):
            train_once(model, batch_for(model))
        runs.append(gradients(model))
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Stacked(centered), INFLUENCE),
        (lambda: Stacked(kind=Normalized), r"it normalizes over the rows of the batch \(a BatchNorm1d\)"),
    ],
    ids=["influence", "batch norm"],
)
def test_what_cannot_be_cut_is_refused_each_time_and_leaves_no_gradient(make, reason):
    model = make()
    expected, x, kind = copy.deepcopy(model), torch.randn(6, 3), type(model.blocks[0]).__name__
    attached(model, layer_classes=("Block",))
    with attachment_of(model).cuts.between((2, 4)):
        for _ in range(2):  # the second time, it is known
            with pytest.raises(NotCut, match=f"calls of {kind} cannot be cut into micro-batches: {reason}"):
                model(x)
    assert all(p.grad is None for p in model.parameters())
    for each in (model, expected):  # and afterwards it runs whole, without a warning, since nobody has asked for cuts
        each(x).backward()
    assert_bits_of_plain(gradients(model), gradients(expected))
