"""One rank of a host loads a model, and the others get its values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, load_once
from hf_l2l.hf.preparation import make_masters_fp32
from models import SMALL, batch_for, bert, llama
from rank_pool import digest

KINDS = {"bert": hf.AutoModelForSequenceClassification, "llama": hf.AutoModelForCausalLM}


def loaded(name: str, folder: str) -> tuple[bool, str, str, list[str]]:
    """In a rank: whether the model had values before it was attached; digests of its values then, and of a step."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    with load_once():
        model = KINDS[name].from_pretrained(folder)
    had_values = not any(p.is_meta for p in model.parameters())
    eps = attach_l2l(model, L2LConfig())
    values = digest(*model.parameters(), *model.buffers())
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.eval()(**batch_for(model, seed=rank)).loss.backward()
    optimizer.step()
    eps.synchronize()
    after = digest(*model.parameters())
    detach_l2l(model)
    assert model(**batch_for(model)).loss.isfinite()
    if rank:
        with load_once(), pytest.raises(ValueError, match="without a device_map"):
            KINDS[name].from_pretrained(folder, device_map="cpu")
    return had_values, values, after, [n for n, b in model.named_buffers() if b.is_meta]


@pytest.mark.parametrize("name", KINDS)
def test_others_get_the_values_of_the_first(pool, tmp_path, name):
    torch.manual_seed(1)
    model = bert() if name == "bert" else llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = pool(2).run(loaded, name, str(tmp_path))
    assert [each[0] for each in found] == [True, False]
    assert found[0][1] == found[1][1] == digest(*model.parameters(), *model.buffers())
    assert found[0][2] == found[1][2] != found[0][1]
    assert [each[3] for each in found] == [[], []]


def own_bytes() -> int:
    """Memory of this process alone that has been written."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def made_wide() -> tuple[int, bool]:
    """What it takes a rank to make masters in fp32 of a model in 16 bits; and whether they have its values."""
    model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16)
    values = model.weight.detach().clone()
    before = own_bytes()
    make_masters_fp32(model)
    assert model.weight.dtype == torch.float32
    taken = own_bytes() - before  # before its values are looked at, which takes memory
    return taken, torch.equal(model.weight, values.float())


def test_masters_in_fp32_are_made_by_the_first_alone(pool):
    """The others would drop theirs when the model is attached."""
    (first, has_values), (second, _) = pool(2).run(made_wide)
    num_bytes = 4 * 4096 * 4096
    assert first > 0.4 * num_bytes and has_values  # the 16-bit weights are gone
    assert second < 0.1 * num_bytes


def test_one_process_loads_as_ever(tmp_path):
    bert().save_pretrained(tmp_path)
    with load_once():
        model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert not any(p.is_meta for p in model.parameters())
    assert SMALL["hidden_size"] == model.config.hidden_size
